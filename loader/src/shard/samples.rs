//! Reads samples from one shard, and reports the entries that do not form a sample.
//!
//! [`MappedSamples`] walks a shard in memory without touching payloads; [`StreamedSamples`] walks bytes as
//! they arrive; `RangedSamples` walks a remote shard and skips long payloads. All deliver the good samples
//! from a damaged shard and then report the fault.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use dflop_samples::RawSample;
use tokio::io::AsyncRead;

use super::field_selection::FieldSelection;
use super::group_entries::{DuplicateField, Grouper, RawPayload, SampleGroup, split_key};
use super::tar::entries::{Archive, RangedEntries, Wanted};
use super::tar::stream::{StreamEntries, StreamFault};
use super::tar::{Entry, SliceEntries};
use crate::error::{ArchiveFault, Skipped};

/// Default field size limit: 1 GiB. A longer field makes the sample bad.
pub const FIELD_BYTES_MAX: u64 = 1 << 30;

/// Shard item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShardItem {
    /// Undecoded sample.
    Sample(RawSample),
    /// Sample, or rest of the shard, that cannot be delivered.
    Skipped(Skipped),
}

/// Rules shared by all readers and by the indexing writer: grouping, limits, and how a fault affects the
/// sample before it.
#[derive(Debug)]
pub(crate) struct Assembler {
    shard: Arc<str>,
    grouper: Grouper,
    field_bytes_max: u64,
    fields: FieldSelection,
    /// Whether payloads are read later, by offset.
    is_by_range: bool,
    /// Payload offsets of undeliverable fields in the current sample, with reasons.
    refused: Vec<(u64, String)>,
}

impl Assembler {
    pub(crate) fn new(shard: Arc<str>, field_bytes_max: u64) -> Self {
        let (grouper, fields) = (Grouper::new(shard.clone()), FieldSelection::ALL);
        Self { grouper, shard, field_bytes_max, fields, is_by_range: false, refused: Vec::new() }
    }

    /// Rejects members that cannot be read later by offset and length.
    pub(crate) fn by_range(self) -> Self {
        Self { is_by_range: true, ..self }
    }

    /// Returns whether the entry's payload must be read.
    fn is_read(&self, entry: &Entry) -> bool {
        let extension = || split_key(&entry.name).map(|(_, extension)| extension);
        self.fields.is_all() || extension().is_some_and(|extension| self.fields.wants(&extension))
    }

    /// Adds the next entry; returns the completed item, if any.
    pub(crate) fn push(&mut self, entry: &Entry, payload: RawPayload) -> Option<ShardItem> {
        let refusal = self.refusal(entry);
        let payload = payload.filter(|_| entry.bytes <= self.field_bytes_max && refusal.is_none());
        let grouped = self.grouper.push(entry, payload);
        let item = grouped.map(|grouped| self.item(grouped));
        if item.is_some() {
            self.refused.clear();
        }
        self.refused.extend(refusal.map(|reason| (entry.payload_offset, reason)));
        item
    }

    /// Returns why a field cannot be delivered, apart from the length.
    fn refusal(&self, entry: &Entry) -> Option<String> {
        let map = entry.sparse.as_deref()?;
        if let Some(fault) = map.fault() {
            return Some(format!("the sparse member cannot be expanded: {fault}"));
        }
        let reason = "a sparse member cannot be read by its offset; write the archive without `--sparse`, or stream \
                      the shard";
        self.is_by_range.then(|| reason.to_owned())
    }

    /// Ends the shard; returns the last item, if any.
    pub(crate) fn finish(&mut self) -> Option<ShardItem> {
        let grouped = self.grouper.finish()?;
        Some(self.item(grouped))
    }

    /// Handles a fault: a truncated member loses its sample; any other fault ends the shard after a sample
    /// that is, as far as can be known, complete.
    fn fail(&mut self, fault: &ArchiveFault) -> Vec<ShardItem> {
        let cut = fault.entry.as_deref().and_then(split_key);
        let key = cut.as_ref().map(|(key, _)| (*key).to_owned());
        let last = match &key {
            Some(key) if self.grouper.key() == Some(key) => {
                self.grouper.abandon();
                None
            }
            _ => self.finish(),
        };
        let skipped = Skipped {
            shard: self.shard.to_string(),
            offset: fault.offset,
            key,
            field: cut.map(|(_, extension)| extension),
            reason: fault.fault.to_string(),
        };
        last.into_iter().chain([ShardItem::Skipped(skipped)]).collect()
    }

    fn item(&self, grouped: SampleGroup) -> ShardItem {
        match grouped {
            Ok(mut sample) => {
                // All fields are grouped before the selection, so that a repeated field is found even if it
                // is not read.
                sample.fields.retain(|field| self.fields.wants(&field.extension));
                match sample.fields.iter().find(|field| field.payload.is_none()) {
                    None => ShardItem::Sample(sample),
                    Some(field) => {
                        let refused = self.refused.iter().find(|(offset, _)| *offset == field.offset);
                        let too_long =
                            || format!("field of {} bytes, over {}", field.bytes, self.field_bytes_max);
                        let reason = refused.map_or_else(too_long, |(_, reason)| reason.clone());
                        let (offset, field) = (sample.offset, Some(field.extension.to_string()));
                        self.skipped(offset, sample.key, field, reason)
                    }
                }
            }
            Err(DuplicateField { key, field, offset }) => {
                let reason = format!("duplicate field `{field}`");
                self.skipped(offset, key, Some(field), reason)
            }
        }
    }

    fn skipped(&self, offset: u64, key: String, field: Option<String>, reason: String) -> ShardItem {
        ShardItem::Skipped(Skipped { shard: self.shard.to_string(), offset, key: Some(key), field, reason })
    }
}

/// Iterates over samples from a shard in memory; payloads are slices into the shard.
#[derive(Debug)]
pub struct MappedSamples {
    entries: SliceEntries,
    assembler: Assembler,
    pending: VecDeque<ShardItem>,
    is_done: bool,
}

impl MappedSamples {
    /// Starts at the beginning of an uncompressed shard.
    #[must_use]
    pub fn new(shard: Arc<str>, archive: Bytes, field_bytes_max: u64) -> Self {
        let assembler = Assembler::new(shard, field_bytes_max);
        let entries = SliceEntries::new(archive).expanding(field_bytes_max);
        Self { entries, assembler, pending: VecDeque::new(), is_done: false }
    }

    /// Selects the fields to read.
    #[must_use]
    pub fn fields(mut self, fields: FieldSelection) -> Self {
        self.assembler.fields = fields;
        self
    }
}

impl Iterator for MappedSamples {
    type Item = ShardItem;

    fn next(&mut self) -> Option<ShardItem> {
        while self.pending.is_empty() && !self.is_done {
            match self.entries.next() {
                Some(Ok((entry, payload))) => {
                    self.pending.extend(self.assembler.push(&entry, Some(payload)));
                }
                Some(Err(fault)) => self.pending.extend(self.assembler.fail(&fault)),
                None => {
                    self.pending.extend(self.assembler.finish());
                    self.is_done = true;
                }
            }
        }
        self.pending.pop_front()
    }
}

/// Iterates over samples from an uncompressed shard that is read by range; a payload may be only the start of
/// a field.
pub(crate) struct RangedSamples<A> {
    entries: RangedEntries<A>,
    assembler: Assembler,
    pending: VecDeque<ShardItem>,
    is_done: bool,
}

impl<A: Archive> RangedSamples<A> {
    /// Starts at the beginning of an archive whose fields are read later, by range; `wanted` returns how many
    /// payload bytes are read now.
    pub(crate) fn new(shard: Arc<str>, archive: A, field_bytes_max: u64, wanted: Wanted) -> Self {
        let entries = RangedEntries::new(archive, wanted);
        let assembler = Assembler::new(shard, field_bytes_max).by_range();
        Self { entries, assembler, pending: VecDeque::new(), is_done: false }
    }

    /// Starts at the beginning, and reads the selected fields completely.
    pub(crate) fn whole(shard: Arc<str>, archive: A, field_bytes_max: u64, fields: FieldSelection) -> Self {
        let selected = Assembler { fields: fields.clone(), ..Assembler::new(shard.clone(), field_bytes_max) };
        let wanted = move |entry: &Entry| {
            let is_wanted = entry.bytes <= field_bytes_max && selected.is_read(entry);
            if is_wanted { entry.bytes } else { 0 }
        };
        let entries = RangedEntries::new(archive, Box::new(wanted));
        let assembler = Assembler { fields, ..Assembler::new(shard, field_bytes_max) };
        Self { entries, assembler, pending: VecDeque::new(), is_done: false }
    }

    /// Returns the archive.
    pub(crate) fn archive(&mut self) -> &mut A {
        &mut self.entries.archive
    }
}

impl<A: Archive> Iterator for RangedSamples<A> {
    /// A failure to read the shard is an error and the last item, because all samples in the shard may be
    /// good.
    type Item = std::io::Result<ShardItem>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.pending.is_empty() && !self.is_done {
            match self.entries.next() {
                Some(Ok((entry, payload))) => {
                    self.pending.extend(self.assembler.push(&entry, Some(payload)));
                }
                Some(Err(StreamFault::Archive(fault))) => self.pending.extend(self.assembler.fail(&fault)),
                Some(Err(StreamFault::Read { source, .. })) => {
                    self.is_done = true;
                    return Some(Err(source));
                }
                None => {
                    self.pending.extend(self.assembler.finish());
                    self.is_done = true;
                }
            }
        }
        self.pending.pop_front().map(Ok)
    }
}

/// Reads samples from a decompressed byte stream.
#[derive(Debug)]
pub struct StreamedSamples<R> {
    entries: StreamEntries<R>,
    assembler: Assembler,
    pending: VecDeque<ShardItem>,
    is_done: bool,
}

impl<R: AsyncRead + Unpin> StreamedSamples<R> {
    /// Starts at the beginning of `reader`.
    pub fn new(shard: Arc<str>, reader: R, field_bytes_max: u64) -> Self {
        let entries = StreamEntries::new(reader, field_bytes_max);
        let assembler = Assembler::new(shard, field_bytes_max);
        Self { entries, assembler, pending: VecDeque::new(), is_done: false }
    }

    /// Selects the fields to read; all other payloads are skipped.
    #[must_use]
    pub fn fields(mut self, fields: FieldSelection) -> Self {
        self.assembler.fields = fields;
        self
    }

    /// Rejects members that cannot be read later by offset and length.
    pub(crate) fn by_range(mut self) -> Self {
        self.assembler.is_by_range = true;
        self
    }

    /// Reads the next sample; `None` after the last.
    ///
    /// # Cancel safety
    /// Not cancel safe: a dropped future loses the bytes already read.
    pub async fn next(&mut self) -> Option<ShardItem> {
        while self.pending.is_empty() && !self.is_done {
            let assembler = &self.assembler;
            match self.entries.next_if(|entry| assembler.is_read(entry)).await {
                Ok(Some((entry, payload))) => self.pending.extend(self.assembler.push(&entry, payload)),
                Ok(None) => {
                    self.pending.extend(self.assembler.finish());
                    self.is_done = true;
                }
                Err(StreamFault::Archive(fault)) => self.pending.extend(self.assembler.fail(&fault)),
                Err(StreamFault::Read { offset, source }) => self.fail_read(offset, &source),
            }
        }
        self.pending.pop_front()
    }

    /// Records a read error: the sample under construction may be truncated, and is lost.
    fn fail_read(&mut self, offset: u64, source: &std::io::Error) {
        let key = self.assembler.grouper.abandon();
        let shard = self.assembler.shard.to_string();
        let reason = format!("read failed: {source}");
        self.pending.push_back(ShardItem::Skipped(Skipped { shard, offset, key, field: None, reason }));
    }
}
