//! Reads shards: tar files whose entries are grouped into samples.
//!
//! [`expand_shards`] names them, [`tar`] walks the entries, [`Grouper`] groups entries into samples by key,
//! and a reader streams the samples from a shard list on a separate thread, ahead of the decoders.

mod access;
mod braces;
mod compression;
mod field_selection;
pub(crate) mod format;
mod group_entries;
mod list;
mod local_archive;
mod order;
mod reader;
mod samples;
pub mod tar;
mod wids;

pub use self::access::ShardAccess;
pub(crate) use self::braces::Expansion;
pub(crate) use self::compression::decompress;
pub use self::compression::{Compression, sniff_compression};
pub use self::field_selection::FieldSelection;
pub use self::group_entries::{DuplicateField, Grouped, Grouper, RawPayload, is_metadata, split_key};
pub(crate) use self::list::{PARTIAL, display_shards};
pub use self::list::{Shard, expand_shards, expand_shards_in};
pub(crate) use self::local_archive::LocalArchive;
pub(crate) use self::order::{
    ItemPosition, KnownShards, Position, ShardIdentity, ShardOrder, ShardPasses, is_rereadable,
};
pub use self::reader::scan_shards;
pub(crate) use self::reader::{ReaderItem, ReaderSettings, read_shards, read_through};
pub(crate) use self::samples::{Assembler, RangedSamples};
pub use self::samples::{FIELD_BYTES_MAX, MappedSamples, ShardItem, StreamedSamples};
pub use self::wids::{ListedShard, ShardList, parse_shard_list};
pub use dflop_samples::{RawField, RawSample, SampleId};
