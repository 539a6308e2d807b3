//! Packs a dataset of litdata.
//!
//! `index.json` lists chunks, the formats of the leaves of an item, and the tree that the leaves form. An
//! item starts with the lengths of its leaves, then come the leaves. Chunks of texts and numbers may hold
//! their items as an Arrow file behind empty items instead. Pickled leaves are left out: reading one can run
//! any code.

use std::io::{self, Cursor, Read};
use std::path::Path;

use arrow_ipc::reader::{FileReader, StreamReader};
use serde::Deserialize;
use serde_json::Value;

use super::items::{Cut, Items};
use super::values::{bytes, element_type, json, list, npy, pillow, scalar, text};
use super::{damaged, fail, inside, open, read_index};
use crate::error::{Result, excerpt, guarded};
use crate::import::columnar::pack_batch;
use crate::import::packer::Packer;
use crate::import::row::{Cell, Columns, RowRules};
use crate::shard::FIELD_BYTES_MAX;

/// Column of an item that is a single value.
const VALUE: &str = "value";
/// End of a chunk whose items lie in an Arrow file, whose length of 32 bits precedes it.
const FOOTER: &[u8] = b"LDARW01\0";
/// Start of a chunk whose items are compressed together, in frames.
const FRAMED: [u8; 8] = *b"LDFZ01\0\0";
/// Compression of each item by itself.
const SAMPLE_LEVEL: &str = "sample";
/// Deepest tree of an item.
const DEPTH_MAX: usize = 32;
/// Types of the elements of a NumPy array, by their number in it.
const NUMPY_TYPES: [&str; 14] = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
];
/// Types of the elements of a PyTorch tensor, by their number in it; NumPy lacks `bfloat16`.
const TORCH_TYPES: [&str; 21] = [
    "float32",
    "float32",
    "float64",
    "float64",
    "complex64",
    "complex64",
    "complex128",
    "complex128",
    "float16",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int16",
    "int32",
    "int32",
    "int64",
    "int64",
    "bool",
    "uint16",
];

#[derive(Deserialize)]
struct Index {
    chunks: Vec<Chunk>,
    config: Config,
}

#[derive(Deserialize)]
struct Chunk {
    filename: String,
    chunk_size: u64,
}

#[derive(Deserialize)]
struct Config {
    compression: Option<String>,
    compression_level: Option<String>,
    encryption: Option<Value>,
    #[serde(default)]
    data_format: Vec<String>,
    data_spec: Option<String>,
    item_loader: Option<String>,
}

/// Layout of an item.
struct Layout {
    /// Format of each leaf.
    formats: Vec<String>,
    /// Tree of the leaves.
    tree: Tree,
}

/// Tree of an item: a leaf, or named or numbered values.
enum Tree {
    Leaf,
    Object(Vec<(String, Tree)>),
    List(Vec<Tree>),
}

/// Packs every item, in the order of the chunks.
pub(in crate::import) fn pack_litdata(directory: &Path, packer: &mut Packer<'_>) -> Result<()> {
    let path = directory.join("index.json");
    let index: Index = serde_json::from_value(read_index(directory)?)
        .map_err(|error| fail(&path, &format!("expected the index of litdata chunks: {error}")))?;
    let layout = index.config.layout().map_err(|reason| fail(&path, &reason))?;
    for (at, format) in layout.formats.iter().enumerate() {
        if is_left_out(format) {
            packer.leave_out(&layout.tree.leaf_path(at), "pickled values are not read");
        }
    }
    packer.begin(index.chunks.iter().map(|chunk| chunk.chunk_size).sum());
    for chunk in &index.chunks {
        let passed = packer.pass(chunk.chunk_size);
        if packer.is_done() {
            break;
        }
        if passed < chunk.chunk_size {
            pack_chunk(directory, chunk, passed, (&index.config, &layout), packer)?;
        }
    }
    Ok(())
}

/// Packs a chunk from its item `first` on.
fn pack_chunk(
    directory: &Path,
    chunk: &Chunk,
    first: u64,
    (config, layout): (&Config, &Layout),
    packer: &mut Packer<'_>,
) -> Result<()> {
    let path = inside(directory, &chunk.filename)?;
    let failed = |error| damaged(&path, error);
    // Chunks that the whole-file compression left alone keep the name of an uncompressed one.
    let is_compressed = chunk.filename.contains(".zstd");
    let compression = config.compression.as_deref().filter(|_| is_compressed);
    let mut items = open_items(open(&path, compression)?).map_err(failed)?;
    if items.len() != chunk.chunk_size {
        let reason = format!("it has {} items, and `index.json` counts {}", items.len(), chunk.chunk_size);
        return Err(fail(&path, &reason));
    }
    let rules = RowRules::new(packer.column_map());
    if items.is_blank() && chunk.chunk_size > 0 {
        let rest = items.rest().map_err(failed)?;
        let table = footer(&rest).ok_or_else(|| fail(&path, "its items have no bytes"))?;
        return pack_table(&path, table, (&chunk.filename, first), &rules, packer);
    }
    items.pass(first).map_err(failed)?;
    for row in first..chunk.chunk_size {
        if packer.is_done() {
            break;
        }
        let Some(mut item) = items.next().map_err(failed)? else { break };
        if config.compression_level.as_deref() == Some(SAMPLE_LEVEL) {
            item = decompress(&item).map_err(failed)?;
        }
        packer.add_row(&chunk.filename, row, || layout.read(&item), &rules)?;
    }
    Ok(())
}

/// Opens the items of a chunk, which may be compressed in frames.
fn open_items(mut file: Box<dyn Read>) -> io::Result<Items<Box<dyn Read>>> {
    let mut start = [0; FRAMED.len()];
    file.read_exact(&mut start)?;
    if start == FRAMED {
        Items::open_framed(file)
    } else {
        Items::open(Box::new(Cursor::new(start).chain(file)))
    }
}

/// Decompresses one item.
fn decompress(item: &[u8]) -> io::Result<Vec<u8>> {
    let mut decompressed = Vec::new();
    zstd::Decoder::with_buffer(item)?.take(FIELD_BYTES_MAX).read_to_end(&mut decompressed)?;
    Ok(decompressed)
}

/// Returns the Arrow file at the end of a chunk.
fn footer(rest: &[u8]) -> Option<&[u8]> {
    let (rest, length) = rest.strip_suffix(FOOTER)?.split_last_chunk::<4>()?;
    let start = rest.len().checked_sub(u32::from_le_bytes(*length) as usize)?;
    Some(&rest[start..])
}

/// Packs the rows of an Arrow file or stream in memory.
fn pack_table(
    path: &Path,
    table: &[u8],
    (file, first): (&str, u64),
    rules: &RowRules,
    packer: &mut Packer<'_>,
) -> Result<()> {
    let broken =
        |reason: String| fail(path, &format!("its Arrow table is damaged: {}", excerpt(&reason, 200)));
    let read = || -> std::result::Result<Vec<_>, arrow_schema::ArrowError> {
        if table.starts_with(b"ARROW1") {
            FileReader::try_new(Cursor::new(table), None)?.collect()
        } else {
            StreamReader::try_new(Cursor::new(table), None)?.collect()
        }
    };
    let batches = guarded(read).map_err(broken)?.map_err(|error| broken(error.to_string()))?;
    let (mut row, mut before) = (0, first);
    for batch in batches {
        let passed = before.min(batch.num_rows() as u64);
        before -= passed;
        row += passed;
        pack_batch(
            &batch.slice(passed as usize, batch.num_rows() - passed as usize),
            file,
            &mut row,
            rules,
            packer,
        )?;
    }
    Ok(())
}

fn is_left_out(format: &str) -> bool {
    format == "pickle" || format == "graph"
}

impl Config {
    /// Checks that items can be read, and returns their layout.
    fn layout(&self) -> std::result::Result<Layout, String> {
        if self.encryption.is_some() {
            return Err("its chunks are encrypted".to_owned());
        }
        let levels = ["chunk", "batch", SAMPLE_LEVEL];
        if let Some(level) = self.compression_level.as_deref().filter(|level| !levels.contains(level)) {
            let level = excerpt(level, 40);
            return Err(format!("its chunks are compressed by `{level}`; expected chunk, batch or sample"));
        }
        if let Some(loader) = self.item_loader.as_deref().filter(|name| *name != "PyTreeLoader") {
            return Err(format!("its items are those of `{}`; expected `PyTreeLoader`", excerpt(loader, 40)));
        }
        let spec = self.data_spec.as_deref().unwrap_or_default();
        let spec: Value =
            serde_json::from_str(spec).map_err(|error| format!("its `data_spec` is no JSON: {error}"))?;
        let tree = Tree::parse(spec.get(1).unwrap_or(&Value::Null), 0)
            .ok_or("its `data_spec` is not a tree of dictionaries, lists and tuples")?;
        if tree.leaves() != self.data_format.len() {
            let (leaves, formats) = (tree.leaves(), self.data_format.len());
            return Err(format!("its `data_spec` has {leaves} leaves, its `data_format` {formats}"));
        }
        Ok(Layout { formats: self.data_format.clone(), tree })
    }
}

impl Layout {
    /// Reads an item.
    fn read(&self, item: &[u8]) -> std::result::Result<Columns, String> {
        let mut item = Cut(item);
        let mut lengths = Cut(item.bytes(4 * self.formats.len())?);
        let mut leaves = Vec::with_capacity(self.formats.len());
        for (at, format) in self.formats.iter().enumerate() {
            let value = item.bytes(lengths.number()? as usize)?;
            let decoded = if is_left_out(format) { Ok(Cell::Null) } else { decode(format, value) };
            leaves.push(decoded.map_err(|reason| format!("column `{}`: {reason}", self.tree.leaf_path(at)))?);
        }
        Ok(match self.tree.fill(&mut leaves.into_iter()) {
            Cell::Object(columns) => columns,
            Cell::List(values) => {
                values.into_iter().enumerate().map(|(at, value)| (at.to_string(), value)).collect()
            }
            value => vec![(VALUE.to_owned(), value)],
        })
    }
}

impl Tree {
    /// Reads a tree as `torch.utils._pytree.treespec_dumps` writes it.
    fn parse(node: &Value, depth: usize) -> Option<Self> {
        let children = node.get("children_spec")?.as_array()?;
        if depth > DEPTH_MAX {
            return None;
        }
        let parsed: Option<Vec<Self>> = children.iter().map(|child| Self::parse(child, depth + 1)).collect();
        let parsed = parsed?;
        match node.get("type").and_then(Value::as_str) {
            None if parsed.is_empty() => Some(Self::Leaf),
            Some("builtins.dict" | "collections.OrderedDict") => {
                // The context is a JSON text in JSON.
                let names: Vec<Value> = match node.get("context")? {
                    Value::String(text) => serde_json::from_str(text).ok()?,
                    Value::Array(names) => names.clone(),
                    _ => return None,
                };
                let name = |name: &Value| name.as_str().map_or_else(|| name.to_string(), str::to_owned);
                let named = names.iter().map(name).zip(parsed).collect::<Vec<_>>();
                (named.len() == children.len()).then_some(Self::Object(named))
            }
            Some("builtins.list" | "builtins.tuple") => Some(Self::List(parsed)),
            _ => None,
        }
    }

    fn leaves(&self) -> usize {
        match self {
            Self::Leaf => 1,
            Self::Object(values) => values.iter().map(|(_, value)| value.leaves()).sum(),
            Self::List(values) => values.iter().map(Self::leaves).sum(),
        }
    }

    /// Returns the names on the way to a leaf, joined by dots.
    fn leaf_path(&self, leaf: usize) -> String {
        let children: Vec<(String, &Self)> = match self {
            Self::Leaf => return String::new(),
            Self::Object(values) => values.iter().map(|(name, value)| (name.clone(), value)).collect(),
            Self::List(values) => values.iter().enumerate().map(|(at, v)| (at.to_string(), v)).collect(),
        };
        let mut before = 0;
        for (name, child) in children {
            if leaf < before + child.leaves() {
                let below = child.leaf_path(leaf - before);
                return if below.is_empty() { name } else { format!("{name}.{below}") };
            }
            before += child.leaves();
        }
        String::new()
    }

    fn fill(&self, leaves: &mut impl Iterator<Item = Cell>) -> Cell {
        match self {
            Self::Leaf => leaves.next().unwrap_or(Cell::Null),
            Self::Object(values) => {
                Cell::Object(values.iter().map(|(name, value)| (name.clone(), value.fill(leaves))).collect())
            }
            Self::List(values) => Cell::List(values.iter().map(|value| value.fill(leaves)).collect()),
        }
    }
}

/// Decodes a leaf by its format.
fn decode(format: &str, value: &[u8]) -> std::result::Result<Cell, String> {
    let (kind, detail) = format.split_once(':').unwrap_or((format, ""));
    match kind {
        "str" | "text" => text(value),
        "bool" => scalar("bool", value),
        "int" => scalar("int64", value),
        "float" => scalar("float64", value),
        "bytes" | "jpeg" | "image" | "video" | "audio" | "file" | "tiff" | "tifffile" | "pdf" | "nifti"
        | "mesh" => Ok(bytes(value)),
        "pil" => pillow(value),
        "jpeg_array" => list(value, |one| Ok(bytes(one))),
        // Values of a first byte below a space are in a layout of litdata's own.
        "json" if value.first().is_some_and(|byte| *byte > b' ') => json(value),
        "numpy" => array(value, &NUMPY_TYPES, u32::from_le_bytes),
        "tensor" => array(value, &TORCH_TYPES, u32::from_be_bytes),
        "no_header_numpy" => flat_array(value, &NUMPY_TYPES, detail),
        "no_header_tensor" => flat_array(value, &TORCH_TYPES, detail),
        _ => Err(format!("its format `{}` is not known", excerpt(format, 40))),
    }
}

/// Decodes an array that starts with type, number of axes, and sizes.
fn array(value: &[u8], types: &[&str], number: fn([u8; 4]) -> u32) -> std::result::Result<Cell, String> {
    let mut value = Cut(value);
    let mut next = || value.number().map(|little| number(little.to_le_bytes()));
    let (kind, axes) = (next()?, next()?);
    let shape = (0..axes).map(|_| next().map(u64::from)).collect::<std::result::Result<Vec<u64>, _>>()?;
    let name = types.get(kind as usize).copied().unwrap_or("unknown");
    let element = element_type(name).ok_or_else(|| format!("an array of the type {name} ({kind})"))?;
    npy(element, &shape, value.0)
}

/// Decodes an array of one axis whose type is part of its format.
fn flat_array(value: &[u8], types: &[&str], kind: &str) -> std::result::Result<Cell, String> {
    let name = kind.parse().ok().and_then(|kind: usize| types.get(kind)).copied().unwrap_or("unknown");
    let element = element_type(name).ok_or_else(|| format!("an array of the type {name}"))?;
    npy(element, &[(value.len() / element.1) as u64], value)
}
