//! Packs a dataset of `MosaicML` Streaming in the format MDS.
//!
//! `index.json` lists shards with their columns and encodings. A row starts with the lengths of those columns
//! whose values have no fixed length, then come the values. Pickled columns are left out: reading one can run
//! any code.

use std::path::Path;

use serde::Deserialize;

use super::items::{Cut, Items};
use super::values::{bytes, element_type, json, list, npy, pillow, scalar, text};
use super::{damaged, fail, inside, open, read_index};
use crate::error::{Result, excerpt};
use crate::import::packer::Packer;
use crate::import::row::{Cell, Columns, RowRules};

/// Types of the elements of an array, by their number in it.
const ARRAY_TYPES: [(u8, &str); 11] = [
    (8, "uint8"),
    (9, "int8"),
    (16, "uint16"),
    (17, "int16"),
    (18, "float16"),
    (32, "uint32"),
    (33, "int32"),
    (34, "float32"),
    (64, "uint64"),
    (65, "int64"),
    (66, "float64"),
];

#[derive(Deserialize)]
struct Index {
    shards: Vec<Shard>,
}

#[derive(Deserialize)]
struct Shard {
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u32>>,
    compression: Option<String>,
    raw_data: ShardFile,
    zip_data: Option<ShardFile>,
    samples: u64,
}

#[derive(Deserialize)]
struct ShardFile {
    basename: String,
}

/// Packs every row, in the order of the shards.
pub(in crate::import) fn pack_mds(directory: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let index_path = directory.join("index.json");
    let index: Index = serde_json::from_value(read_index(directory)?)
        .map_err(|error| fail(&index_path, &format!("expected the index of MDS shards: {error}")))?;
    packer.begin(index.shards.iter().map(|shard| shard.samples).sum());
    for shard in &index.shards {
        let columns = shard.column_names.len();
        if shard.column_encodings.len() != columns || shard.column_sizes.len() != columns {
            let reason =
                format!("shard `{}` has not one encoding and size per column", shard.raw_data.basename);
            return Err(fail(&index_path, &reason));
        }
        let passed = packer.pass(shard.samples);
        if packer.is_done() {
            break;
        }
        if passed < shard.samples {
            pack_shard(directory, shard, passed, packer)?;
        }
    }
    Ok(())
}

/// Packs a shard from its row `first` on.
fn pack_shard(directory: &Path, shard: &Shard, first: u64, packer: &mut Packer<'_>) -> Result<()> {
    let mut path = inside(directory, &shard.raw_data.basename)?;
    let mut compression = None;
    if let Some(zip) = shard.zip_data.as_ref().filter(|_| !path.exists()) {
        path = inside(directory, &zip.basename)?;
        compression = shard.compression.as_deref();
    }
    let failed = |error| damaged(&path, error);
    let mut items = Items::open(open(&path, compression)?).map_err(failed)?;
    if items.len() != shard.samples {
        let reason = format!("it has {} rows, and `index.json` counts {}", items.len(), shard.samples);
        return Err(fail(&path, &reason));
    }
    for (name, encoding) in shard.column_names.iter().zip(&shard.column_encodings) {
        if encoding == "pkl" {
            packer.leave_out(name, "pickled values are not read");
        }
    }
    items.pass(first).map_err(failed)?;
    let rules = RowRules::new(packer.column_map());
    for row in first..shard.samples {
        if packer.is_done() {
            break;
        }
        let Some(item) = items.next().map_err(failed)? else { break };
        packer.add_row(&shard.raw_data.basename, row, || read_row(&item, shard), &rules)?;
    }
    Ok(())
}

fn read_row(item: &[u8], shard: &Shard) -> std::result::Result<Columns, String> {
    let mut item = Cut(item);
    let mut lengths = Vec::with_capacity(shard.column_sizes.len());
    for size in &shard.column_sizes {
        // A size of 0 is unknown, too.
        lengths.push(match size {
            Some(size) if *size > 0 => *size,
            _ => item.number()?,
        });
    }
    let mut columns = Columns::with_capacity(lengths.len());
    let described = shard.column_names.iter().zip(&shard.column_encodings);
    for ((name, encoding), length) in described.zip(lengths) {
        let value = item.bytes(length as usize)?;
        if encoding == "pkl" {
            continue;
        }
        let cell = decode(encoding, value).map_err(|reason| format!("column `{name}`: {reason}"))?;
        columns.push((name.clone(), cell));
    }
    Ok(columns)
}

/// Decodes a value by the name of its encoding.
fn decode(encoding: &str, value: &[u8]) -> std::result::Result<Cell, String> {
    match encoding {
        "bytes" | "jpeg" | "png" => Ok(bytes(value)),
        "str" | "str_decimal" => text(value),
        "str_int" | "str_float" => number_text(value),
        "json" => json(value),
        "int" => scalar("int64", value),
        "pil" => pillow(value),
        "jpeg_array" | "jpegarray" => list(value, |one| Ok(bytes(one))),
        "list[jpeg]" | "list[png]" => list(after_zero(value)?, |one| Ok(bytes(one))),
        "list[pil]" => list(after_zero(value)?, pillow),
        _ => match encoding.split_once(':').unwrap_or((encoding, "")) {
            ("ndarray", described) => array(described, value),
            ("jpeg" | "png", _) => Ok(bytes(value)),
            _ if element_type(encoding).is_some() => scalar(encoding, value),
            _ => Err(format!("its encoding `{}` is not known", excerpt(encoding, 40))),
        },
    }
}

/// Returns a number that is stored as text; it stays text if 64 bits do not hold it.
fn number_text(value: &[u8]) -> std::result::Result<Cell, String> {
    let text = str::from_utf8(value).map_err(|error| format!("its text is not UTF-8: {error}"))?;
    let integer = text.parse().map(Cell::Int).or_else(|_| text.parse().map(Cell::Unsigned));
    let float = || text.parse().ok().filter(|_| text.contains(['.', 'e', 'n'])).map(Cell::Float);
    Ok(integer.ok().or_else(float).unwrap_or_else(|| Cell::Text(text.to_owned())))
}

/// Passes over the unused number at the start of a list.
fn after_zero(value: &[u8]) -> std::result::Result<&[u8], String> {
    let mut value = Cut(value);
    value.number()?;
    Ok(value.0)
}

/// Decodes an array; `described` holds its type and shape, such as `uint8:3,4`, as far as they are the same
/// in all rows.
fn array(described: &str, value: &[u8]) -> std::result::Result<Cell, String> {
    let mut value = Cut(value);
    let (name, fixed) = described.split_once(':').unwrap_or((described, ""));
    let name = if name.is_empty() {
        let number = value.bytes(1)?[0];
        let known = ARRAY_TYPES.iter().find(|(known, _)| *known == number);
        known.map(|(_, name)| *name).ok_or_else(|| format!("an array of the unknown type {number}"))?
    } else {
        name
    };
    let element =
        element_type(name).ok_or_else(|| format!("an array of the type `{}`", excerpt(name, 40)))?;
    let shape = if fixed.is_empty() {
        let byte = value.bytes(1)?[0];
        let (axes, width) = (usize::from(byte >> 2), 1 << (byte % 4));
        let sizes = value.bytes(axes * width)?;
        let size = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |size, byte| size << 8 | u64::from(*byte));
        sizes.chunks(width).map(size).collect()
    } else {
        let sizes: std::result::Result<Vec<u64>, _> = fixed.split(',').map(str::parse).collect();
        sizes.map_err(|_| format!("an array of the shape `{}`", excerpt(fixed, 40)))?
    };
    npy(element, &shape, value.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_state_what_their_encoding_leaves_open() {
        let data = [1u8, 0, 2, 0];
        let fixed = array("int16:2,1", &data).unwrap();
        assert_eq!(fixed, array("int16", &[&[2 << 2, 2, 1][..], &data].concat()).unwrap());
        assert_eq!(fixed, array("", &[&[17, (2 << 2) | 1, 2, 0, 1, 0][..], &data].concat()).unwrap());
        for described in ["int16:3", "int16:x", "object", "int16"] {
            assert!(array(described, &data).is_err(), "{described}");
        }
    }
}
