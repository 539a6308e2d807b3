//! Tests shards: grouping, damage, writing, importing.

mod hostile_tar;
mod malformed;
mod pack_parts;
mod webdataset_rules;
mod writing;
