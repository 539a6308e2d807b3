//! Indexes shards while they are written.
//!
//! Entries pass through the shard reading rules ([`Assembler`]) and the indexing code ([`Builder`]), so the
//! file equals an index built from the written shards, byte for byte.

use std::path::PathBuf;

use bytes::Bytes;
use dflop_samples::media::{Payload, VideoSampling, extension_codec};

use super::build::{build_shard, indexed};
use super::builder::{Builder, BuiltShard};
use super::cache::{stats, store};
use super::encode::SpilledShard;
use super::location::{IndexOptions, directories, index_error};
use super::merge::PartBuilder;
use super::spill::Spill;
use crate::error::Result;
use crate::shard::tar::Entry;
use crate::shard::{Assembler, Compression, FIELD_BYTES_MAX, Shard};
use crate::store::Identity;

/// Rows from finished shards and from the shard under construction.
#[derive(Debug, Default)]
pub(crate) struct WrittenIndex {
    finished: Vec<(Shard, SpilledShard)>,
    /// Rows from finished shards; `None` before the first.
    spill: Option<Spill>,
    open: Option<OpenShard>,
}

#[derive(Debug)]
struct OpenShard {
    shard: Shard,
    assembler: Assembler,
    builder: Builder,
}

impl WrittenIndex {
    /// Adds an existing shard by reading the headers.
    ///
    /// # Errors
    /// The shard indexing errors.
    pub(crate) fn add_existing(&mut self, shard: Shard) -> Result<()> {
        let built = build_shard(&shard, &identity(&shard)?, &IndexOptions::default())?;
        self.add(shard, built)
    }

    /// Starts a shard that does not exist yet.
    pub(crate) fn begin_shard(&mut self, shard: Shard, compression: Compression) {
        let nothing = Identity { bytes: 0, modified_ns: 0, etag: None };
        let indexed = indexed(&shard, &nothing, compression);
        let assembler = Assembler::new(shard.url.clone(), FIELD_BYTES_MAX);
        let builder = Builder::new(indexed, false, VideoSampling::default());
        self.open = Some(OpenShard { shard, assembler, builder });
    }

    /// Adds an entry to the shard under construction; a payload with a shape is copied.
    pub(crate) fn push(&mut self, entry: &Entry, payload: &[u8]) {
        let Some(open) = &mut self.open else { return };
        let payload = if has_shape(&entry.name) { Bytes::copy_from_slice(payload) } else { Bytes::new() };
        if let Some(item) = open.assembler.push(entry, Some(payload)) {
            open.builder.push(item);
        }
    }

    /// Completes the shard under construction, which must have the final name.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] if the shard size cannot be determined or the rows cannot be encoded.
    pub(crate) fn end_shard(&mut self) -> Result<()> {
        let Some(OpenShard { shard, mut assembler, mut builder }) = self.open.take() else { return Ok(()) };
        assembler.finish().into_iter().for_each(|item| builder.push(item));
        let Identity { bytes, modified_ns, etag } = identity(&shard)?;
        let rows_end = builder.rows_end();
        let indexed = builder.shard_mut();
        let is_plain = indexed.compression == Compression::None;
        (indexed.bytes, indexed.modified_ns, indexed.etag) = (bytes, modified_ns, etag);
        indexed.unpacked_bytes = if is_plain { bytes } else { rows_end };
        self.add(shard, builder.finish())
    }

    /// Moves a shard's rows out of memory, next to the future index file.
    fn add(&mut self, shard: Shard, built: BuiltShard) -> Result<()> {
        let built = built.encode().map_err(|error| index_error(None, &error))?;
        let new = || Spill::new(directories(std::slice::from_ref(&shard), &IndexOptions::default()));
        let built =
            built.spill(self.spill.get_or_insert_with(new)).map_err(|error| index_error(None, &error))?;
        self.finished.push((shard, built));
        Ok(())
    }

    /// Writes the index for all finished shards to the usual location; `None` without shards.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] if the index cannot be written or encoded; the shards are kept, and indexed
    /// on first use.
    pub(crate) fn finish(mut self) -> Result<Option<PathBuf>> {
        let Some(spill) = self.spill else { return Ok(None) };
        // The order in which a directory lists the shards.
        self.finished.sort_by(|(first, _), (second, _)| first.url.cmp(&second.url));
        let (shards, built): (Vec<_>, Vec<_>) = self.finished.into_iter().unzip();
        store(&shards, built, spill).map(Some)
    }
}

impl WrittenIndex {
    /// Returns the rows from all finished shards, if any, as an index part.
    ///
    /// # Errors
    /// [`crate::Error::Storage`] if the rows cannot be encoded or read back.
    pub(crate) fn finish_part(self) -> Result<Vec<u8>> {
        let mut part = PartBuilder::new(self.finished.len(), VideoSampling::default());
        if let Some(spill) = self.spill {
            for (shard, built) in self.finished {
                part.push(&shard.url, built, &spill)?;
            }
        }
        Ok(part.finish())
    }
}

/// Returns whether the shape of a field depends on the payload, judged by the field name.
fn has_shape(name: &str) -> bool {
    extension_codec(name).is_some_and(|codec| codec.payload() != Payload::Unused)
}

fn identity(shard: &Shard) -> Result<Identity> {
    let mut one = stats(std::slice::from_ref(shard))?;
    Ok(one.remove(0))
}
