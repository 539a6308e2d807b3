//! Packs local files, manifests, tables and rows into shards, and reads Parquet and Arrow files in place as
//! shards.
//!
//! The source format is detected from the path and the first bytes, unless it is set:
//!
//! | source | samples |
//! | --- | --- |
//! | a directory | files that share their path without extension, such as `a/b.jpg` and `a/b.txt` |
//! | JSON Lines, or a JSON array of objects | one object each: LLaVA-style conversations, captions, `NeMo` manifests |
//! | a JSON object of id → object | one entry each: `SpeechBrain` manifests |
//! | CSV with a header | one row each |
//! | Parquet and Arrow files, directories of them, datasets saved by Hugging Face `datasets` | one row each |
//!
//! Everything that is not packed is in [`Packed::skipped`] with a reason; nothing is lost silently. Samples
//! are read and written one at a time, in an order that depends only on the source, so equal sources produce
//! equal shards. A manifest entry becomes a sample with the media, `txt` with the transcript if it is a
//! recording, `cls` with the label, and `json` with the entry itself, verbatim unless it holds media as
//! base64. A row becomes the same, and the document names the file and the row number. Shards are written by
//! [`dflop_loader::write`].

mod columnar;
mod directory;
mod document;
mod in_place;
mod options;
mod pack;
mod packer;
mod parts;
mod record;
mod row;
mod source;
mod tables;

pub use self::in_place::register_tables;
pub use self::options::{LabelSource, PackOptions, SourceFormat};
pub use self::pack::{CLASSES_FILE, pack, pack_all};
pub use self::packer::SourcePart;
pub use self::parts::{PackedPart, finish_parts, list_parts, pack_part};
pub use self::row::ColumnMap;
pub use pack::{Row, pack_batches, pack_rows};
pub use record::{ImportReport, Packed, SkippedSource};

#[cfg(test)]
mod tests;
