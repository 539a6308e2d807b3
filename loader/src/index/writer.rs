//! Indexes shards while they are written.
//!
//! Entries pass through the rules for reading shards ([`Assembler`]) and through the code that indexes them
//! ([`Builder`]), so the file equals an index of the written shards, byte for byte.

use std::path::PathBuf;

use bytes::Bytes;

use super::build::{Builder, BuiltShard, build_shard, indexed};
use super::cache::{IndexOptions, stats, store};
use super::foreign::ForeignIndexes;
use super::merge::encode_part;
use crate::error::Result;
use crate::media::{FieldKind, VideoSampling, kind_of_extension};
use crate::shard::tar::Entry;
use crate::shard::{Assembler, Compression, FIELD_BYTES_MAX, Shard};
use crate::store::Identity;

/// Rows of finished shards, and of the shard under construction.
#[derive(Debug, Default)]
pub(crate) struct WrittenIndex {
    finished: Vec<(Shard, BuiltShard)>,
    open: Option<OpenShard>,
}

#[derive(Debug)]
struct OpenShard {
    shard: Shard,
    assembler: Assembler,
    builder: Builder,
}

impl WrittenIndex {
    /// Adds an existing shard by reading its headers.
    ///
    /// # Errors
    /// The errors of indexing a shard.
    pub(crate) fn add_existing(&mut self, shard: Shard) -> Result<()> {
        let options = IndexOptions { foreign: ForeignIndexes::Ignore, ..IndexOptions::default() };
        let built = build_shard(&shard, &identity(&shard)?, &options)?;
        self.finished.push((shard, built));
        Ok(())
    }

    /// Starts a shard that does not exist yet.
    pub(crate) fn begin_shard(&mut self, shard: Shard, compression: Compression) {
        let nothing = Identity { bytes: 0, modified_ns: 0, etag: None };
        let indexed = indexed(&shard, &nothing, compression);
        let assembler = Assembler::new(shard.url.clone(), FIELD_BYTES_MAX);
        let builder = Builder::new(indexed, false, VideoSampling::default());
        self.open = Some(OpenShard { shard, assembler, builder });
    }

    /// Adds an entry of the shard under construction; a payload that has a shape is copied.
    pub(crate) fn push(&mut self, entry: &Entry, payload: &[u8]) {
        let Some(open) = &mut self.open else { return };
        let payload = if has_shape(&entry.name) { Bytes::copy_from_slice(payload) } else { Bytes::new() };
        if let Some(item) = open.assembler.push(entry, Some(payload)) {
            open.builder.push(item);
        }
    }

    /// Completes the shard under construction, which must have its final name.
    ///
    /// # Errors
    /// [`crate::Error::Read`] if its size cannot be determined.
    pub(crate) fn end_shard(&mut self) -> Result<()> {
        let Some(OpenShard { shard, mut assembler, mut builder }) = self.open.take() else { return Ok(()) };
        assembler.finish().into_iter().for_each(|item| builder.push(item));
        let Identity { bytes, modified_ns, etag } = identity(&shard)?;
        let rows_end = builder.rows_end();
        let indexed = builder.shard_mut();
        let is_plain = indexed.compression == Compression::None;
        (indexed.bytes, indexed.modified_ns, indexed.etag) = (bytes, modified_ns, etag);
        indexed.unpacked_bytes = if is_plain { bytes } else { rows_end };
        self.finished.push((shard, builder.finish()));
        Ok(())
    }

    /// Writes the index of all finished shards to its usual location; `None` without shards.
    ///
    /// # Errors
    /// [`crate::Error::File`] if it cannot be written, [`crate::Error::Index`] if it cannot be encoded; the
    /// shards are kept, and indexed on first use.
    pub(crate) fn finish(mut self) -> Result<Option<PathBuf>> {
        if self.finished.is_empty() {
            return Ok(None);
        }
        // The order in which a directory lists them.
        self.finished.sort_by(|(first, _), (second, _)| first.url.cmp(&second.url));
        let (shards, built): (Vec<_>, Vec<_>) = self.finished.into_iter().unzip();
        store(&shards, built).map(Some)
    }
}

impl WrittenIndex {
    /// Returns the rows of all finished shards, if any, as a part of an index.
    ///
    /// # Errors
    /// [`crate::error::Error::Index`] if they cannot be encoded.
    pub(crate) fn finish_part(self) -> Result<Vec<u8>> {
        encode_part(self.finished, VideoSampling::default())
    }
}

/// Returns whether the shape of a field depends on its payload, judged by its name.
fn has_shape(name: &str) -> bool {
    match kind_of_extension(name) {
        FieldKind::Npy => false,
        FieldKind::Opaque => name.to_ascii_lowercase().ends_with("opus"),
        _ => true,
    }
}

fn identity(shard: &Shard) -> Result<Identity> {
    let mut one = stats(std::slice::from_ref(shard))?;
    Ok(one.remove(0))
}
