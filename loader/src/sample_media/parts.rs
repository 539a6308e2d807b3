//! Content in order: texts, and between them the numbers of pictures, clips and videos.

use serde_json::Value;

use super::names::{KINDS, field_named};
use super::{Kind, MediaFault, SampleMedia, in_order};
use crate::batch::Field;
use crate::decode::Media;
use crate::probe::{MediumKind, kind_of_extension};

/// A piece of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// Words, never empty.
    Text(&'a str),
    /// A picture, by its number in [`SampleMedia::images`].
    Image(usize),
    /// A clip, by its number in [`SampleMedia::audio`].
    Audio(usize),
    /// A video, by its number in [`SampleMedia::videos`].
    Video(usize),
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn<'a> {
    /// Who speaks, as the document says: `human`, `gpt`, `user`, `assistant`; empty if it does not say.
    pub role: &'a str,
    /// What is said.
    pub parts: Vec<Part<'a>>,
}

/// Names of turns, of who speaks, and of what is said.
const TURNS: [&str; 2] = ["conversations", "messages"];
const ROLES: [&str; 2] = ["from", "role"];
const CONTENTS: [&str; 2] = ["value", "content"];
/// Marks in texts that stand for the next medium.
const MARKS: [(&str, Kind); 3] =
    [("<image>", Kind::Image), ("<audio>", Kind::Audio), ("<video>", Kind::Video)];

impl<'a> SampleMedia<'a> {
    /// Returns the turns of the document, `None` if it has none.
    ///
    /// Content is a string, in which `<image>`, `<audio>` and `<video>` stand for the next medium, or a list of parts:
    /// `{"type": "text", "text": …}`, `{"type": "image"}` for the next picture, `{"type": "image", "image": "0.jpg"}`
    /// or `{"type": "image_url", "image_url": {"url": "0.jpg"}}` for a named one, and so for audio and video.
    ///
    /// # Errors
    /// [`MediaFault`] if more media are asked for than there are, or one that is not there.
    pub fn turns(&self) -> Result<Option<Vec<Turn<'a>>>, MediaFault> {
        let Some(turns) = self.json.and_then(turns) else { return Ok(None) };
        let mut walk = Walk::new(self);
        let turn = |turn: &'a Value| {
            let role = ROLES.iter().find_map(|name| turn.get(name)?.as_str()).unwrap_or_default();
            let content = CONTENTS.iter().find_map(|name| turn.get(name));
            Ok(Turn { role, parts: walk.content(content.unwrap_or(&Value::Null))? })
        };
        turns.iter().map(turn).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the content of a sample that is no conversation, in order.
    ///
    /// That of the document if it has a list of parts under `content`, or lists `texts` and `images` of one length
    /// that fill each other's gaps; else the text fields and media fields, by number where all are numbered alike
    /// (`0.txt 1.jpg 2.txt`), else as stored in the shard.
    ///
    /// # Errors
    /// As [`turns`](Self::turns).
    pub fn parts(&self) -> Result<Vec<Part<'a>>, MediaFault> {
        let mut walk = Walk::new(self);
        if let Some(content @ Value::Array(_)) = self.json.and_then(|json| json.get("content")) {
            return walk.content(content);
        }
        if let Some((texts, images)) = self.json.and_then(interleaved) {
            return walk.interleaved(texts, images);
        }
        let is_content = |field: &Field| self.number(field).is_some() || is_text(field);
        let fields = in_order(self.sample, is_content).into_iter();
        Ok(fields.filter_map(|field| self.number(field).or_else(|| text_of(field))).collect())
    }

    fn of_kind(&self, kind: Kind) -> &[&'a Field] {
        match kind {
            Kind::Image => &self.images,
            Kind::Audio => &self.audio,
            Kind::Video => &self.videos,
        }
    }

    /// The number of a medium's field.
    fn number(&self, field: &Field) -> Option<Part<'a>> {
        let kind = Kind::of_extension(&field.extension)?;
        let at = self.of_kind(kind).iter().position(|known| known.extension == field.extension)?;
        Some(part(kind, at))
    }
}

/// Hands out media in order while content is walked.
struct Walk<'m, 'a> {
    media: &'m SampleMedia<'a>,
    given: [usize; KINDS.len()],
}

impl<'m, 'a> Walk<'m, 'a> {
    fn new(media: &'m SampleMedia<'a>) -> Self {
        Self { media, given: [0; KINDS.len()] }
    }

    fn content(&mut self, content: &'a Value) -> Result<Vec<Part<'a>>, MediaFault> {
        let mut parts = Vec::new();
        match content {
            Value::String(text) => self.text(text, &mut parts)?,
            Value::Array(values) => {
                for value in values {
                    self.part(value, &mut parts)?;
                }
            }
            _ => {}
        }
        Ok(parts)
    }

    fn interleaved(&mut self, texts: &'a [Value], images: &'a [Value]) -> Result<Vec<Part<'a>>, MediaFault> {
        let mut parts = Vec::new();
        for (text, image) in texts.iter().zip(images) {
            match text.as_str() {
                Some(text) => push_text(text, &mut parts),
                None if image.is_null() => {}
                None => parts.push(self.next(Kind::Image)?),
            }
        }
        Ok(parts)
    }

    fn part(&mut self, value: &'a Value, parts: &mut Vec<Part<'a>>) -> Result<(), MediaFault> {
        if let Some(text) = value.as_str().or_else(|| value.get("text")?.as_str()) {
            push_text(text, parts);
        } else if let Some((kind, name)) = medium_of_part(value) {
            parts.push(match name {
                Some(name) => self.named(kind, name)?,
                None => self.next(kind)?,
            });
        }
        Ok(())
    }

    /// Cuts a text at its marks.
    fn text(&mut self, text: &'a str, parts: &mut Vec<Part<'a>>) -> Result<(), MediaFault> {
        let mut rest = text;
        while let Some((at, mark, kind)) = next_mark(rest) {
            push_text(&rest[..at], parts);
            parts.push(self.next(kind)?);
            rest = &rest[at + mark.len()..];
        }
        push_text(rest, parts);
        Ok(())
    }

    fn next(&mut self, kind: Kind) -> Result<Part<'a>, MediaFault> {
        let given = &mut self.given[kind as usize];
        let there = self.media.of_kind(kind).len();
        if *given == there {
            let reason = format!("asked for {} times, but the sample has {there}", there + 1);
            return Err(MediaFault::new(self.media.sample, kind.name(), reason));
        }
        *given += 1;
        Ok(part(kind, *given - 1))
    }

    /// A named medium; a path that is no field is the next one, as the packer numbers them.
    fn named(&mut self, kind: Kind, name: &str) -> Result<Part<'a>, MediaFault> {
        let media = self.media.of_kind(kind);
        let found = field_named(&self.media.sample.key, media, name);
        let at = found.and_then(|field| media.iter().position(|known| known.extension == field.extension));
        match at {
            Some(at) => Ok(part(kind, at)),
            None => self.next(kind).map_err(|fault| MediaFault { field: name.to_owned(), ..fault }),
        }
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Video => "video",
        }
    }
}

/// The names of all media parts of one kind in a document; `None` for a part that has no name.
pub(super) fn media_parts(json: &Value, kind: Kind) -> impl Iterator<Item = Option<&str>> {
    let contents = turns(json).into_iter().flatten().filter_map(|turn| turn.get("content"));
    let parts = contents.chain(json.get("content")).filter_map(Value::as_array).flatten();
    parts.filter_map(medium_of_part).filter(move |(of, _)| *of == kind).map(|(_, name)| name)
}

/// Whether a document has content of its own.
pub(super) fn has_parts(json: &Value) -> bool {
    turns(json).is_some() || json.get("content").is_some_and(Value::is_array) || interleaved(json).is_some()
}

fn turns(json: &Value) -> Option<&Vec<Value>> {
    TURNS.iter().find_map(|name| json.get(name)?.as_array())
}

/// Texts and pictures in lists of one length, each with gaps where the other has something.
fn interleaved(json: &Value) -> Option<(&[Value], &[Value])> {
    let [texts, images] = ["texts", "images"].map(|name| json.get(name).and_then(Value::as_array));
    let (texts, images) = (texts?, images?);
    let is_filled = texts.len() == images.len()
        && texts.iter().zip(images).all(|(text, image)| text.is_null() != image.is_null());
    is_filled.then_some((texts, images))
}

/// Kind and name of a part that stands for a medium.
fn medium_of_part(part: &Value) -> Option<(Kind, Option<&str>)> {
    let stated = part.get("type")?.as_str()?;
    let plain = stated.trim_start_matches("input_").trim_end_matches("_url");
    let kind = KINDS.into_iter().find(|kind| kind.name() == plain)?;
    let value = [stated, plain, "path", "url"].iter().find_map(|name| part.get(name));
    Some((kind, value.and_then(|value| url_of(value).unwrap_or(value).as_str())))
}

fn url_of(object: &Value) -> Option<&Value> {
    ["url", "path", "file"].iter().find_map(|name| object.get(name))
}

fn next_mark(text: &str) -> Option<(usize, &'static str, Kind)> {
    let found = MARKS.iter().filter_map(|&(mark, kind)| Some((text.find(mark)?, mark, kind)));
    found.min_by_key(|(at, ..)| *at)
}

fn push_text<'a>(text: &'a str, parts: &mut Vec<Part<'a>>) {
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
}

fn part<'a>(kind: Kind, at: usize) -> Part<'a> {
    match kind {
        Kind::Image => Part::Image(at),
        Kind::Audio => Part::Audio(at),
        Kind::Video => Part::Video(at),
    }
}

fn is_text(field: &Field) -> bool {
    kind_of_extension(&field.extension) == MediumKind::Text
}

fn text_of(field: &Field) -> Option<Part<'_>> {
    match &field.media {
        Media::Text(text) if !text.is_empty() => Some(Part::Text(text)),
        _ => None,
    }
}
