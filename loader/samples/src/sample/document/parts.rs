//! Places sample media between the texts.

use serde_json::Value;

use super::content::{UnplacedPart, split_text};
use super::names::{field_named, is_inline, is_url, no_field};
use super::{MediaFault, SampleMedia, SampleText, field_modality};
use crate::media::{Media, Modality};
use crate::sample::Field;

/// Content piece in the final order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentPart<'a> {
    /// Text between media, never empty.
    Text(&'a str),
    /// A medium, by modality and index in [`SampleMedia::by_modality`].
    Medium(Modality, usize),
}

/// Conversation turn, as chat templates accept it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTurn<'a> {
    /// Role: `user`, `assistant`, `system`, `tool`, or any other role in lower case.
    pub role: &'a str,
    /// Texts and media in the turn, in order.
    pub parts: Vec<ContentPart<'a>>,
    /// Whether the content is a string in the document, rather than a list of parts.
    pub is_string: bool,
    /// Whether the turn is a training target: an assistant turn that no flag excludes.
    pub is_target: bool,
    /// Message keys other than role and content, such as `tool_calls`, in order.
    pub keys: Vec<(&'a str, &'a Value)>,
    /// Text of a tool call turn; `tool_calls` has the call parsed.
    pub call_text: Option<&'a str>,
}

impl SampleMedia<'_> {
    /// Returns the sample's turns, or `None` if the sample is not a conversation.
    ///
    /// Turns come from a document; without such a document, and without text fields, from a question and an
    /// answer in the first JSON field that has text. Content is either a string, in which `<image>`,
    /// `<audio>` and `<video>` represent the next medium and absorb one line break on either side, or a list
    /// of parts: `{"type": "text", "text": …}`, `{"type": "image"}` for the next image that no part names,
    /// `{"type": "image", "image": "0.jpg"}` or `{"type": "image_url", "image_url": {"url": "0.jpg"}}` for a
    /// named image, and likewise for audio and video. Media whose modality has no placeholders are not among
    /// the parts.
    ///
    /// # Errors
    /// [`MediaFault`] if the number of placeholders for a modality differs from the number of media, if a
    /// name has no field, if the conversation cannot be read, or if a second document has turns.
    pub fn turns(&self) -> Result<Option<Vec<ChatTurn<'_>>>, MediaFault> {
        let SampleText::Dialogue(field, dialogue) = self.text.as_ref().map_err(MediaFault::clone)? else {
            return Ok(None);
        };
        let contents: Vec<&[UnplacedPart<'_>]> =
            dialogue.turns.iter().map(|turn| &turn.content[..]).collect();
        let placed = self.place_media(field, &contents)?;
        let turns = dialogue.turns.iter().zip(placed).map(|(turn, parts)| ChatTurn {
            role: &turn.role,
            parts,
            is_string: turn.is_string,
            is_target: turn.is_target,
            keys: turn.keys().map(|(key, value)| (key.as_str(), value)).collect(),
            call_text: turn.call_text.as_deref(),
        });
        Ok(Some(turns.collect()))
    }

    /// Returns the chat template variables that a document defines in addition to turns: `tools`,
    /// `documents`.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &Value)> {
        let variables = match &self.text {
            Ok(SampleText::Dialogue(_, dialogue)) => &dialogue.variables[..],
            _ => &[],
        };
        variables.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns the extension of the field that the text was read from; `None` without a document with text.
    #[must_use]
    pub fn text_name(&self) -> Option<&str> {
        match self.text.as_ref().ok()? {
            SampleText::Dialogue(field, _)
            | SampleText::Content(field, _)
            | SampleText::Caption(field, _) => Some(field),
            SampleText::Fields(..) => None,
        }
    }

    /// Returns the content of a sample that is not a conversation, in order.
    ///
    /// Content comes from the first of these sources: a part list under `content` in the document; the
    /// document's lists `texts` and `images` where exactly one entry is filled at each index; text fields and
    /// media fields by number, if all are numbered in the same way (`0.txt 1.jpg 2.txt`); text fields, or a
    /// caption in a JSON field, after all media whose modality has no placeholder in the text.
    ///
    /// # Errors
    /// See [`turns`](Self::turns).
    pub fn parts(&self) -> Result<Vec<ContentPart<'_>>, MediaFault> {
        let (field, words): (&str, &[UnplacedPart<'_>]) =
            match self.text.as_ref().map_err(MediaFault::clone)? {
                SampleText::Dialogue(..) => ("", &[]),
                SampleText::Content(field, parts) => return self.place_in_one(field, parts),
                SampleText::Caption(field, parts) | SampleText::Fields(field, parts) => (field, parts),
            };
        self.place_behind_media(field, words)
    }

    /// Places the text, preceded by all media whose modality has no placeholder in the text.
    fn place_behind_media<'s>(
        &'s self,
        field: &str,
        words: &'s [UnplacedPart<'_>],
    ) -> Result<Vec<ContentPart<'s>>, MediaFault> {
        let in_front = |&modality: &Modality| {
            !words.iter().any(|part| matches!(part, UnplacedPart::Media(of, _) if *of == modality))
        };
        let modalities = Modality::ALL.into_iter().filter(in_front);
        let mut content: Vec<ContentPart<'s>> = modalities
            .flat_map(|modality| {
                (0..self.by_modality(modality).len()).map(move |at| ContentPart::Medium(modality, at))
            })
            .collect();
        content.extend(self.place_in_one(field, words)?);
        Ok(content)
    }

    fn fault(&self, field: &str, reason: impl Into<String>) -> MediaFault {
        MediaFault::new(self.sample, field, reason)
    }

    fn place_in_one<'s>(
        &'s self,
        field: &str,
        content: &'s [UnplacedPart<'_>],
    ) -> Result<Vec<ContentPart<'s>>, MediaFault> {
        Ok(self.place_media(field, &[content])?.concat())
    }

    /// Replaces every placeholder by a medium.
    ///
    /// - `field`: field that the content comes from, for errors
    fn place_media<'s>(
        &self,
        field: &str,
        contents: &[&'s [UnplacedPart<'_>]],
    ) -> Result<Vec<Vec<ContentPart<'s>>>, MediaFault> {
        let orders = Modality::ALL.map(|modality| {
            let placeholders = contents.iter().copied().flatten().filter_map(|part| match part {
                UnplacedPart::Media(of, name) if *of == modality => Some(name.as_deref()),
                _ => None,
            });
            self.order(field, modality, &placeholders.collect::<Vec<_>>())
        });
        let [images, audio, videos] = orders;
        let mut orders = [images?.into_iter(), audio?.into_iter(), videos?.into_iter()];
        let mut part = |part: &'s UnplacedPart<'_>| match part {
            UnplacedPart::Text(text) => Some(ContentPart::Text(text)),
            UnplacedPart::Media(modality, _) => {
                orders[*modality as usize].next().map(|at| ContentPart::Medium(*modality, at))
            }
        };
        Ok(contents.iter().map(|content| content.iter().filter_map(&mut part).collect()).collect())
    }

    /// Returns the medium index for each placeholder: the named medium, else the next unnamed medium.
    fn order(
        &self,
        field: &str,
        modality: Modality,
        placeholders: &[Option<&str>],
    ) -> Result<Vec<usize>, MediaFault> {
        let media = self.by_modality(modality);
        let number = |name: &str| {
            let named = field_named(&self.sample.key, media, name)?;
            media.iter().position(|known| known.extension == named.extension)
        };
        let named: Vec<Option<usize>> = placeholders.iter().map(|name| name.and_then(number)).collect();
        if let Some(inline) = placeholders.iter().flatten().find(|name| is_inline(name)) {
            return Err(self.fault(inline, no_field(inline)));
        }
        // If no path is a field, the paths name the files that the fields were imported from.
        let mut wrong =
            placeholders.iter().zip(&named).filter(|(_, at)| at.is_none()).filter_map(|(name, _)| *name);
        if let Some(name) = wrong.next().filter(|_| named.iter().any(Option::is_some)) {
            return Err(self.fault(name, no_field(name)));
        }
        let is_named =
            |field: &Field| named.iter().flatten().any(|&at| media[at].extension == field.extension);
        let free: Vec<usize> = (0..media.len()).filter(|&at| !is_named(media[at])).collect();
        let unnamed = named.iter().filter(|at| at.is_none()).count();
        if !placeholders.is_empty() && unnamed != free.len() {
            if let Some(url) = placeholders.iter().flatten().find(|name| is_url(name)) {
                return Err(self.fault(url, no_field(url)));
            }
            let (placeholders, media) = (placeholders.len(), media.len());
            let (name, plural) = (modality.name(), modality.plural());
            return Err(self.fault(field, format!("{placeholders} {name} placeholders for {media} {plural}")));
        }
        let mut free = free.into_iter();
        Ok(named.into_iter().filter_map(|at| at.or_else(|| free.next())).collect())
    }
}

/// Returns a field's content: text split at placeholders, or a medium.
pub(super) fn content_of_field(field: &Field) -> Result<Vec<UnplacedPart<'_>>, String> {
    match (&field.media, field_modality(field)) {
        (Media::Text(text), _) => split_text(text),
        (_, Some(modality)) => Ok(vec![UnplacedPart::Media(modality, Some((&*field.extension).into()))]),
        _ => Ok(Vec::new()),
    }
}
