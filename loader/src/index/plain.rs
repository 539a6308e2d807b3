//! Builds the rows for an uncompressed shard without reading payloads that no row needs.

use std::io;

use bytes::Bytes;
use dflop_samples::media::{Payload, extension_codec};
use dflop_samples::sample::measure_sample;

use super::builder::Builder;
use crate::shard::tar::Entry;
use crate::shard::tar::ranged::Archive;
use crate::shard::{FIELD_BYTES_MAX, RangedSamples, RawSample, Shard, ShardItem, split_key};

/// Number of bytes read from the start of a payload that is not read whole.
const PREFIX_BYTES: u64 = 64 << 10;

/// Reads an archive's samples into `builder`. Reads only the start of a medium over `whole_bytes_max` where
/// that determines the shape.
///
/// # Errors
/// The archive error.
pub(super) fn push_plain<A: Archive>(
    builder: &mut Builder,
    shard: &Shard,
    archive: A,
    whole_bytes_max: u64,
) -> io::Result<()> {
    let is_verified = builder.is_verified();
    let wanted = move |entry: &Entry| wanted_bytes(entry, is_verified, whole_bytes_max);
    let mut samples = RangedSamples::new(shard.url.clone(), archive, FIELD_BYTES_MAX, Box::new(wanted));
    while let Some(item) = samples.next() {
        push_completed(builder, item?, samples.archive())?;
    }
    Ok(())
}

/// Adds an item, after reading the missing bytes that the shape needs.
///
/// # Errors
/// The error of the archive.
fn push_completed<A: Archive>(builder: &mut Builder, mut item: ShardItem, archive: &mut A) -> io::Result<()> {
    if let ShardItem::Sample(sample) = &mut item {
        complete(sample, archive)?;
    }
    builder.push(item);
    Ok(())
}

/// Returns how much of a payload is needed for its shape, judged by its name; everything if it is decoded.
fn wanted_bytes(entry: &Entry, is_decoded: bool, whole_bytes_max: u64) -> u64 {
    if entry.sparse.is_some() {
        return 0;
    }
    if is_decoded || entry.bytes <= whole_bytes_max.max(PREFIX_BYTES) {
        return entry.bytes;
    }
    let extension = split_key(&entry.name).map(|(_, extension)| extension).unwrap_or_default();
    let is_whole = extension_codec(&extension).is_some_and(|codec| codec.payload() == Payload::Whole);
    if is_whole { entry.bytes } else { PREFIX_BYTES }
}

/// Reads the rest of sample fields whose start does not determine the shape: images that store the
/// orientation after the pixels, and everything that cannot be parsed.
fn complete<A: Archive>(sample: &mut RawSample, archive: &mut A) -> io::Result<()> {
    let is_cut = |payload: &Option<Bytes>, bytes: u64| {
        payload.as_ref().is_some_and(|payload| (payload.len() as u64) < bytes)
    };
    if !sample.fields.iter().any(|field| is_cut(&field.payload, field.bytes)) {
        return Ok(());
    }
    let is_understood = measure_sample(sample).is_ok();
    for field in &mut sample.fields {
        let prefix = field.payload.as_deref().unwrap_or_default();
        let is_settled = extension_codec(&field.extension).is_none_or(|codec| codec.is_settled(prefix));
        let is_enough = is_understood && is_settled;
        if is_cut(&field.payload, field.bytes) && !is_enough {
            field.payload = Some(archive.read(field.offset..field.offset + field.bytes)?);
        }
    }
    Ok(())
}
