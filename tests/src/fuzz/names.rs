//! Shard names, and shard lists from other tools.

use std::path::Path;

use dflop_import::PackOptions;
use dflop_loader::Splits;
use dflop_loader::shard::{expand_shards, parse_shard_list};
use dflop_loader::store::{Location, redact};

use super::with_text;

/// Expands a pattern; it never names a command.
pub(super) fn pattern(bytes: &[u8]) {
    with_text(bytes, |pattern| {
        // The fuzzer must not read local directories or lists.
        if Path::new(pattern).exists() {
            return;
        }
        for shard in expand_shards(&[pattern]).unwrap_or_default() {
            assert!(!matches!(shard.location, Location::Pipe(_)), "{}", shard.url);
            assert_eq!(redact(&shard.url), &*shard.url, "a name holds no credentials");
        }
    });
}

/// Reads a wids shard list.
pub(super) fn shard_list(bytes: &[u8]) {
    if let Ok(list) = parse_shard_list(bytes) {
        let resolve = |url: &str| list.resolve(Path::new("directory/list.json"), url);
        let _urls: Vec<_> = list.shards.iter().map(|shard| resolve(&shard.url)).collect();
    }
}

/// Reads the splits in an Energon dataset.
pub(super) fn energon_split(bytes: &[u8]) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = place.path().join(".nv-meta");
    std::fs::create_dir(&directory).expect("the directory is made");
    std::fs::write(directory.join("split.yaml"), bytes).expect("the file is written");
    let _splits = Splits::energon(place.path());
}

/// Packs the samples that a list describes; none of the named files exist.
pub(super) fn pack(bytes: &[u8]) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let list = place.path().join(if bytes.starts_with(b"[") { "list.json" } else { "list.jsonl" });
    std::fs::write(&list, bytes).expect("the list is written");
    let out = place.path().join("shards");
    let packed = dflop_import::pack(&list, &out, &PackOptions::default());
    assert!(packed.is_err() || out.is_dir());
}

/// Reads named splits.
pub(super) fn splits(bytes: &[u8]) {
    with_text(bytes, |text| drop(Splits::parse(text)));
}
