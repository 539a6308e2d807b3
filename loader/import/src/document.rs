//! Packs documents: JSON, JSON Lines and CSV.
//!
//! A quoted value must start with the quote: after a space, a quote is an ordinary character.

use super::packer::Packer;
use super::record::{KNOWN_COLUMNS, SHOWN_MAX, is_known_column};
use csv::{ReaderBuilder, StringRecord, Trim};
use dflop_loader::error::{Error, OutputError, Result, StorageError, excerpt};
use dflop_loader::store::file;
use dflop_samples::error_reason;
use dflop_samples::media::repair_json;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

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

/// Longest line: 64 MiB.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// Packs every line; skips lines that are not JSON objects.
pub(super) fn pack_lines(path: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let shown = path.display();
    let unreadable = |source| Error::Storage(StorageError::File { path: shown.to_string(), source });
    let mut reader = open_text(path).map_err(unreadable)?;
    packer.begin(0);
    let mut line = Vec::new();
    for number in 1u64.. {
        if packer.is_done() {
            break;
        }
        match read_line(&mut reader, &mut line).map_err(unreadable)? {
            None => break,
            // The rest of an oversized line could pass for an entry, so nothing after it is read.
            Some(false) => {
                let reason = format!("line {number} has more than {LINE_BYTES_MAX} bytes");
                return Err(Error::Output(OutputError::Pack { path: shown.to_string(), reason }));
            }
            Some(true) if line.trim_ascii().is_empty() => {}
            Some(true) => packer.add_entry(&format!("{shown}:{number}"), None, line.trim_ascii())?,
        }
    }
    Ok(())
}

/// Reads the next line into `line`: `None` after the last line, `Some(false)` if it is too long and was cut.
pub(super) fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<Option<bool>> {
    line.clear();
    let read = reader.take(LINE_BYTES_MAX).read_until(b'\n', line)? as u64;
    Ok((read > 0).then_some(read < LINE_BYTES_MAX || line.ends_with(b"\n")))
}

/// Opens a text file after the byte order mark, if there is one.
pub(super) fn open_text(path: &Path) -> std::io::Result<BufReader<File>> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let mut reader = BufReader::with_capacity(1 << 18, file::open(path)?);
    if reader.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    Ok(reader)
}

/// Packs every row; skips a row if the number of values differs from the header.
pub(super) fn pack_table(path: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let shown = path.display();
    let reader = open_text(path)
        .map_err(|source| Error::Storage(StorageError::File { path: shown.to_string(), source }))?;
    let mut table = ReaderBuilder::new().trim(Trim::All).from_reader(reader);
    let fail = |reason: String| Error::Output(OutputError::Pack { path: shown.to_string(), reason });
    let header = table.headers().map_err(|error| fail(error_reason(&error)))?.clone();
    if packer.column_map().is_empty() && !header.iter().any(is_known_column) {
        let found: Vec<&str> = header.iter().collect();
        let reason = format!(
            "the header must have a column for {KNOWN_COLUMNS}, found {}",
            excerpt(&found.join(", "), SHOWN_MAX)
        );
        return Err(fail(reason));
    }
    packer.begin(0);
    let mut row = StringRecord::new();
    loop {
        if packer.is_done() {
            return Ok(());
        }
        let line = table.position().line();
        let origin = || format!("{shown}:{line}");
        match table.read_record(&mut row) {
            Ok(false) => return Ok(()),
            Ok(true) => packer.add_entry(&origin(), None, &row_json(&header, &row))?,
            Err(error) if error.is_io_error() => return Err(fail(error_reason(&error))),
            Err(error) => packer.skip_entry(origin(), error_reason(&error)),
        }
    }
}

/// Returns the row as a JSON object of strings; columns without a name are left out.
fn row_json(header: &StringRecord, row: &StringRecord) -> Vec<u8> {
    let named = header.iter().zip(row).filter(|(column, _)| !column.is_empty());
    let object: Map<String, Value> = named.map(|(column, value)| (column.to_owned(), value.into())).collect();
    Value::Object(object).to_string().into_bytes()
}
