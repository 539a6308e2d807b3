//! Finds the first frame of an image sequence, in the color track that the `moov` box describes.

use std::ops::Range;

use dflop_costmodel::ImageSize;

use super::FORMAT;
use super::boxes::Fields;
use super::properties::Properties;
use crate::media::error::DecodeError;

/// Reads a `moov` box body: properties and first-frame file ranges of the first color track.
pub(super) fn read_track(mut movie: Fields<'_>) -> Result<(Properties, Vec<Range<u64>>), DecodeError> {
    while let Some((kind, track)) = movie.next_box()? {
        if &kind == b"trak" && is_color_track(track)? {
            let table = track.need(*b"mdia")?.need(*b"minf")?.need(*b"stbl")?;
            let mut properties = entry_properties(table.need(*b"stsd")?)?;
            properties.size = Some(displayed_size(track.need(*b"tkhd")?)?);
            return Ok((properties, vec![first_sample(table)?]));
        }
    }
    Err(movie.malformed("no track has frames"))
}

/// Returns whether the track has frames that are not alpha or depth for another track.
fn is_color_track(track: Fields<'_>) -> Result<bool, DecodeError> {
    let mut handler = track.need(*b"mdia")?.need(*b"hdlr")?;
    handler.bytes(8)?;
    let has_frames = &handler.kind()? == b"pict";
    let is_auxiliary = match track.find(*b"tref")? {
        Some(references) => references.find(*b"auxl")?.is_some(),
        None => false,
    };
    Ok(has_frames && !is_auxiliary)
}

fn displayed_size(mut header: Fields<'_>) -> Result<ImageSize, DecodeError> {
    let (version, _) = header.version()?;
    // Times, track number, layer, volume and matrix come first.
    header.bytes(if version == 1 { 32 } else { 20 } + 52)?;
    let (width, height) = (header.u32()? >> 16, header.u32()? >> 16);
    Ok(ImageSize { width, height })
}

/// Reads the first sample entry, whose boxes are properties.
fn entry_properties(mut entries: Fields<'_>) -> Result<Properties, DecodeError> {
    const FIELDS_BYTES: usize = 78;
    entries.bytes(8)?;
    let Some((kind, mut entry)) = entries.next_box()? else {
        return Err(entries.malformed("a track has no sample entry"));
    };
    if &kind != b"av01" {
        return Err(DecodeError::unsupported(FORMAT, "a sequence that is not coded in AV1"));
    }
    entry.bytes(FIELDS_BYTES)?;
    let mut properties = Properties::default();
    while let Some((kind, body)) = entry.next_box()? {
        properties.add(kind, body, false)?;
    }
    Ok(properties)
}

/// Returns the file range of the first sample, which starts the first chunk.
fn first_sample(table: Fields<'_>) -> Result<Range<u64>, DecodeError> {
    let (mut chunks, offset_bytes) = match table.find(*b"stco")? {
        Some(chunks) => (chunks, 4),
        None => (table.need(*b"co64")?, 8),
    };
    chunks.bytes(8)?;
    let start = chunks.uint(offset_bytes)?;
    let mut sizes = table.need(*b"stsz")?;
    sizes.version()?;
    let shared = sizes.u32()?;
    sizes.u32()?;
    let length = if shared == 0 { sizes.u32()? } else { shared };
    Ok(start..start.saturating_add(length.into()))
}
