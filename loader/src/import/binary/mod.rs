//! Packs datasets of `MosaicML` Streaming (MDS) and of litdata: rows in a binary layout of their own.

mod items;
mod litdata;
mod mds;
mod values;

use std::io::{self, BufReader, Read};
use std::path::Path;

use crate::store::file;
use serde_json::Value;

pub(super) use self::litdata::pack_litdata;
pub(super) use self::mds::pack_mds;
use crate::error::{Error, OutputError, Result, excerpt};
use crate::files::lies_inside;

/// Bytes that are read from a file at a time.
const BUFFER_BYTES: usize = 1 << 18;
/// Longest list of shards that is read.
const INDEX_BYTES_MAX: u64 = 1 << 30;
/// Most characters of a foreign value in a message.
const SHOWN_MAX: usize = 80;

/// Format of a directory with an `index.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Mds,
    Litdata,
}

impl Binary {
    /// Recognizes the format of a directory by its `index.json`; `None` for another directory.
    pub(super) fn of(directory: &Path) -> Option<Self> {
        let index = read_index(directory).ok()?;
        if index.get("chunks").is_some_and(Value::is_array) && index.get("config").is_some() {
            return Some(Self::Litdata);
        }
        let shard = index.get("shards")?.get(0)?;
        (shard.get("format").and_then(Value::as_str) == Some("mds")).then_some(Self::Mds)
    }
}

fn read_index(directory: &Path) -> Result<Value> {
    let path = directory.join("index.json");
    let file = file::open(&path).map_err(|source| Error::file(&path, source))?;
    serde_json::from_reader(BufReader::new(file.take(INDEX_BYTES_MAX)))
        .map_err(|error| fail(&path, &format!("expected JSON: {error}")))
}

/// Returns the path of a file that an index names, which must lie in the directory.
fn inside(directory: &Path, name: &str) -> Result<std::path::PathBuf> {
    let path = directory.join(name);
    let is_plain = !name.split(['/', '\\']).any(|part| part == "..") && !Path::new(name).is_absolute();
    if is_plain && lies_inside(directory, &path) {
        return Ok(path);
    }
    let shown = excerpt(name, SHOWN_MAX);
    Err(fail(&directory.join("index.json"), &format!("it names `{shown}`, outside of its directory")))
}

/// Opens a file that may be compressed, by the name of the compression.
fn open(path: &Path, compression: Option<&str>) -> Result<Box<dyn Read>> {
    let file = file::open(path).map_err(|source| Error::file(path, source))?;
    let file = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(match compression.map(|name| name.split(':').next().unwrap_or_default()) {
        None => Box::new(file),
        Some("zstd") => {
            let decoder = zstd::Decoder::with_buffer(file).map_err(|source| Error::file(path, source))?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
        Some("gz") => Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))),
        Some(other) => {
            let shown = excerpt(other, SHOWN_MAX);
            return Err(fail(path, &format!("its compression is `{shown}`; expected zstd or gz")));
        }
    })
}

/// Names the file in a failure to read it.
fn damaged(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => fail(path, "the file ends early"),
        io::ErrorKind::InvalidData => fail(path, &format!("the file is damaged: {error}")),
        _ => Error::file(path, error),
    }
}

fn fail(path: &Path, reason: &str) -> Error {
    Error::Output(OutputError::Pack { path: path.display().to_string(), reason: reason.to_owned() })
}

#[cfg(test)]
mod tests;
