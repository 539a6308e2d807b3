//! TODO shard.

mod compression;
mod field_selection;
mod group_entries;
mod list;
mod medium_kind;
mod order;
mod raw_sample;
mod reader;
mod samples;
mod scan;
pub mod tar;
mod wids;
pub use self::compression::{Compression, sniff_compression};
pub(crate) use self::compression::decompress;
pub use self::field_selection::FieldSelection;
pub use self::group_entries::{DuplicateField, Grouped, Grouper, RawPayload, is_metadata, split_key};
pub use self::list::{Shard, expand_shards, expand_shards_in};
pub(crate) use self::list::{expand_braces, expand_name, shown};
pub(crate) use self::order::{ItemPlace, KnownShards, Passes, Position, ShardIdentity, ShardOrder, is_rereadable};
pub use self::raw_sample::{RawField, RawSample};
pub(crate) use self::reader::{SourceConfig, SourceItem, read_shards};
pub use self::samples::{FIELD_BYTES_MAX, MappedSamples, ShardItem, StreamedSamples};
pub(crate) use self::samples::{Assembler, RangedSamples};
pub use self::scan::scan_shards;
pub use self::wids::{ListedShard, ShardList, listed_shards, parse_shard_list};
