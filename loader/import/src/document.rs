//! Packs a JSON document, an array of objects or an object of id → object, entry by entry.

use std::borrow::Cow;
use std::fmt;
use std::io::Read;
use std::path::Path;

use dflop_samples::media::repair_json;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::lines::open_text;
use super::packer::Packer;
use dflop_loader::error::{Error, OutputError, Result, StorageError};

/// Packs every entry; a syntax error ends packing, because nothing after it can be read.
pub(super) fn pack_document(path: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let unreadable = |source| Error::Storage(StorageError::File { path: path.display().to_string(), source });
    packer.begin(0);
    if let Some(text) = repaired(path).map_err(unreadable)? {
        pack_entries(path, packer, &mut serde_json::Deserializer::from_str(&text))
    } else {
        let reader = open_text(path).map_err(unreadable)?;
        pack_entries(path, packer, &mut serde_json::Deserializer::from_reader(reader))
    }
}

/// Returns a document that only the Python reader accepts, in a form that the strict parser accepts; `None`
/// if no repair is needed. Only repaired documents are held in memory.
fn repaired(path: &Path) -> std::io::Result<Option<String>> {
    let mut strict = serde_json::Deserializer::from_reader(open_text(path)?);
    if IgnoredAny::deserialize(&mut strict).is_ok() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    open_text(path)?.read_to_end(&mut bytes)?;
    let text = String::from_utf8(bytes).ok();
    let repaired = text.as_deref().map(repair_json);
    Ok(match repaired {
        Some(Cow::Owned(repaired)) => Some(repaired),
        _ => None,
    })
}

fn pack_entries<'de, R: serde_json::de::Read<'de>>(
    path: &Path,
    packer: &mut Packer<'_>,
    deserializer: &mut serde_json::Deserializer<R>,
) -> Result<()> {
    let mut failure = None;
    let entries = Entries { path, packer, failure: &mut failure };
    let parsed = deserializer.deserialize_any(entries).and_then(|()| deserializer.end());
    match (failure, parsed) {
        (Some(error), _) => Err(error),
        (None, Err(error)) => {
            let path = path.display().to_string();
            Err(Error::Output(OutputError::Pack { path, reason: error.to_string() }))
        }
        (None, Ok(())) => Ok(()),
    }
}

/// Visits the entries as they are parsed. Serde only passes on Serde errors, so ours is kept in `failure`.
struct Entries<'a, 'b> {
    path: &'a Path,
    packer: &'a mut Packer<'b>,
    failure: &'a mut Option<Error>,
}

impl Entries<'_, '_> {
    fn add<E: serde::de::Error>(&mut self, number: u64, id: Option<&str>, entry: &RawValue) -> Result<(), E> {
        let origin = format!("{}:{number}", self.path.display());
        self.packer.add_entry(&origin, id, entry.get().as_bytes()).map_err(|error| {
            *self.failure = Some(error);
            E::custom("packing ended")
        })
    }
}

impl<'de> Visitor<'de> for Entries<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects or an object of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<(), A::Error> {
        for number in 1.. {
            let Some(entry) = array.next_element::<Box<RawValue>>()? else { break };
            self.add::<A::Error>(number, None, &entry)?;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut object: A) -> Result<(), A::Error> {
        for number in 1.. {
            let Some((id, entry)) = object.next_entry::<String, Box<RawValue>>()? else { break };
            self.add::<A::Error>(number, Some(&id), &entry)?;
        }
        Ok(())
    }
}
