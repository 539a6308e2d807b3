//! Places the media of a sample between its texts.

use super::content::{UnplacedPart, UnplacedTurn};
use super::names::field_named;
use super::{MediaFault, SampleMedia, are_numbered, content, documents, in_order, is_text, modality_of};
use crate::media::{Media, Modality};
use crate::sample::decoded::Field;
use crate::sample::text;

/// Piece of content in its final order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentPart<'a> {
    /// Text between media, never empty.
    Text(&'a str),
    /// A medium, by its modality and its index in [`SampleMedia::by_modality`].
    Medium(Modality, usize),
}

/// Turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTurn<'a> {
    /// Role as written in the document: `human`, `gpt`, `user`, `assistant`; empty if missing.
    pub role: &'a str,
    /// Texts and media of the turn, in order.
    pub parts: Vec<ContentPart<'a>>,
}

impl<'a> SampleMedia<'a> {
    /// Returns the turns of the sample, or `None` if it is not a conversation.
    ///
    /// They are the turns of the document; without those, and without text fields, a question and its answer
    /// in the first JSON field that has text. Content is either a string, in which `<image>`, `<audio>` and
    /// `<video>` represent the next medium and absorb one line break on either side, or a list of parts:
    /// `{"type": "text", "text": …}`, `{"type": "image"}` for the next image that no part names,
    /// `{"type": "image", "image": "0.jpg"}` or `{"type": "image_url", "image_url": {"url": "0.jpg"}}` for a
    /// named one, and likewise for audio and video. Media of a modality without placeholders are not among
    /// the parts.
    ///
    /// # Errors
    /// [`MediaFault`] if the number of placeholders of a modality differs from the number of its media, if a
    /// name has no field, if content cannot be read, or if a second document has turns.
    pub fn turns(&self) -> Result<Option<Vec<ChatTurn<'a>>>, MediaFault> {
        self.check_one_document()?;
        let (field, turns_read) = match (self.json.and_then(text::turns), self.document_text()) {
            (Some(turns), _) => {
                (self.json_name, content::turns(turns).map_err(|reason| self.fault(self.json_name, reason))?)
            }
            (None, Some((field, DocumentText::Pair(turns_read)))) => (field, turns_read),
            (None, _) => return Ok(None),
        };
        let (roles, contents): (Vec<_>, Vec<_>) =
            turns_read.into_iter().map(|UnplacedTurn { role, content }| (role, content)).unzip();
        let parts = self.place_media(field, &contents)?;
        Ok(Some(roles.into_iter().zip(parts).map(|(role, parts)| ChatTurn { role, parts }).collect()))
    }

    /// Returns the content of a sample that is not a conversation, in order.
    ///
    /// It comes from the first of these sources: a list of parts under `content` in the document; its lists
    /// `texts` and `images` where exactly one is filled at each index; text fields and media fields by
    /// number, where all are numbered in the same way (`0.txt 1.jpg 2.txt`); text fields, or a caption in a
    /// JSON field, after all media whose modality has no placeholder in them.
    ///
    /// # Errors
    /// See [`turns`](Self::turns).
    pub fn parts(&self) -> Result<Vec<ContentPart<'a>>, MediaFault> {
        self.check_one_document()?;
        let in_document = |reason| self.fault(self.json_name, reason);
        if let Some(value) = self.json.and_then(text::content) {
            let content = content::parse_content(value).map_err(in_document)?;
            return self.place_in_one(self.json_name, content);
        }
        if let Some((texts, images)) = self.json.and_then(text::interleaved) {
            let content = content::interleaved(texts, images).map_err(in_document)?;
            return self.place_in_one(self.json_name, content);
        }
        let fields = in_order(self.sample, |field| is_text(field) || self.has(field));
        if are_numbered(&fields) && !self.texts.is_empty() {
            return self.place_in_one(
                &fields[0].extension,
                fields.iter().flat_map(|field| content_of_field(field)).collect(),
            );
        }
        let (field, document_text) = match (self.texts.first(), self.document_text()) {
            (Some(first), _) => {
                (&*first.extension, self.texts.iter().flat_map(|text| content_of_field(text)).collect())
            }
            (None, Some((field, DocumentText::Caption(document_text)))) => (field, document_text),
            (None, _) => ("", Vec::new()),
        };
        let in_front = |&modality: &Modality| {
            !document_text.iter().any(|part| matches!(part, UnplacedPart::Media(of, _) if *of == modality))
        };
        let modalities = Modality::ALL.into_iter().filter(in_front);
        let media = modalities.flat_map(|modality| {
            self.by_modality(modality).iter().map(move |_| UnplacedPart::Media(modality, None))
        });
        let content = media.chain(document_text.iter().copied()).collect();
        self.place_in_one(field, content)
    }

    /// Returns the text of the first JSON field that has any, in a sample without text fields.
    fn document_text(&self) -> Option<(&'a str, DocumentText<'a>)> {
        if !self.texts.is_empty() {
            return None;
        }
        documents(self.sample).find_map(|(name, json)| {
            let document_text = content::pair(json).map(DocumentText::Pair);
            document_text
                .or_else(|| content::caption(json).map(DocumentText::Caption))
                .map(|document_text| (name, document_text))
        })
    }

    fn check_one_document(&self) -> Result<(), MediaFault> {
        let mut contents = documents(self.sample).filter(|(_, json)| text::has_content(json));
        match (contents.next(), contents.next()) {
            (Some((first, _)), Some((second, _))) => Err(self.fault(
                second,
                format!("only one document may describe a sample, and `{first}` already does"),
            )),
            _ => Ok(()),
        }
    }

    /// Returns whether the field is one of the sample's media.
    fn has(&self, field: &Field) -> bool {
        let modality = modality_of(field);
        modality.is_some_and(|modality| {
            self.by_modality(modality).iter().any(|known| known.extension == field.extension)
        })
    }

    fn fault(&self, field: &str, reason: impl Into<String>) -> MediaFault {
        MediaFault::new(self.sample, field, reason)
    }

    fn place_in_one(
        &self,
        field: &str,
        content: Vec<UnplacedPart<'a>>,
    ) -> Result<Vec<ContentPart<'a>>, MediaFault> {
        Ok(self.place_media(field, &[content])?.concat())
    }

    /// Replaces every placeholder by its medium.
    ///
    /// - `field`: field that the content comes from, for errors
    fn place_media(
        &self,
        field: &str,
        contents: &[Vec<UnplacedPart<'a>>],
    ) -> Result<Vec<Vec<ContentPart<'a>>>, MediaFault> {
        let orders = Modality::ALL.map(|modality| {
            let placeholders = contents.iter().flatten().filter_map(|part| match part {
                UnplacedPart::Media(of, name) if *of == modality => Some(*name),
                _ => None,
            });
            self.order(field, modality, &placeholders.collect::<Vec<_>>())
        });
        let [images, audio, videos] = orders;
        let mut orders = [images?.into_iter(), audio?.into_iter(), videos?.into_iter()];
        let mut part = |part: &UnplacedPart<'a>| match part {
            UnplacedPart::Text(text) => Some(ContentPart::Text(text)),
            UnplacedPart::Media(modality, _) => {
                orders[*modality as usize].next().map(|at| ContentPart::Medium(*modality, at))
            }
        };
        Ok(contents.iter().map(|content| content.iter().filter_map(&mut part).collect()).collect())
    }

    /// Returns the index of the medium of each placeholder: the one it names, else the next one that is not
    /// named.
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
        // If no path is a field, the paths are those of the files that the fields were imported from.
        let mut wrong =
            placeholders.iter().zip(&named).filter(|(_, at)| at.is_none()).filter_map(|(name, _)| *name);
        if let Some(name) = wrong.next().filter(|_| named.iter().any(Option::is_some)) {
            return Err(self.fault(name, "the sample has no field of this name"));
        }
        let is_named =
            |field: &Field| named.iter().flatten().any(|&at| media[at].extension == field.extension);
        let free: Vec<usize> = (0..media.len()).filter(|&at| !is_named(media[at])).collect();
        let unnamed = named.iter().filter(|at| at.is_none()).count();
        if !placeholders.is_empty() && unnamed != free.len() {
            let (placeholders, media) = (placeholders.len(), media.len());
            let (name, plural) = (modality.name(), modality.plural());
            return Err(self.fault(field, format!("{placeholders} {name} placeholders for {media} {plural}")));
        }
        let mut free = free.into_iter();
        Ok(named.into_iter().filter_map(|at| at.or_else(|| free.next())).collect())
    }
}

/// Text of a JSON field without turns.
enum DocumentText<'a> {
    Pair(Vec<UnplacedTurn<'a>>),
    Caption(Vec<UnplacedPart<'a>>),
}

/// Returns the content of a field: text split at its placeholders, or one medium.
fn content_of_field(field: &Field) -> Vec<UnplacedPart<'_>> {
    match (&field.media, modality_of(field)) {
        (Media::Text(text), _) => content::split_text(text),
        (_, Some(modality)) => vec![UnplacedPart::Media(modality, Some(&field.extension))],
        _ => Vec::new(),
    }
}
