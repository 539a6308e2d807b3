//! Archives and indexes: all ways of reading a shard give the same samples, and the index knows the good
//! ones.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{
    MappedSamples, Shard, ShardAccess, ShardItem, StreamedSamples, expand_shards_in, scan_shards,
};
use dflop_loader::store::{ReadMode, Stores};
use futures::StreamExt;

/// Largest field, so that a false length in a header costs no memory.
const FIELD_BYTES_MAX: u64 = 1 << 20;

/// Compares an archive in memory with the same bytes as a stream.
pub(super) fn tar(bytes: &[u8]) {
    let name: Arc<str> = Arc::from("fuzz.tar");
    let mapped: Vec<_> =
        MappedSamples::new(name.clone(), bytes.to_vec().into(), FIELD_BYTES_MAX).map(comparable).collect();
    let mut samples = StreamedSamples::new(name, bytes, FIELD_BYTES_MAX);
    let mut streamed = Vec::new();
    futures::executor::block_on(async {
        while let Some(item) = samples.next().await {
            streamed.push(comparable(item));
        }
    });
    assert_eq!(mapped, streamed);
}

/// Returns an item without what may differ between the ways of reading: how many bytes were missing.
fn comparable(item: ShardItem) -> ShardItem {
    match item {
        ShardItem::Skipped(skipped) => {
            let reason = skipped.reason.split(|character: char| character.is_ascii_digit()).next();
            let reason = reason.unwrap_or_default().to_owned();
            ShardItem::Skipped(dflop_loader::error::Skipped { reason, ..skipped })
        }
        sample @ ShardItem::Sample(_) => sample,
    }
}

/// Compares a shard, compressed or not, read by system calls, mapped, and through its index.
pub(super) fn shard(bytes: &[u8]) {
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = place.path().join("fuzz.tar");
    std::fs::write(&path, bytes).expect("the shard is written");
    let shards = |read| -> Vec<Shard> {
        let stores = Stores::builder().read(read).build().expect("the defaults are valid");
        let name = path.to_str().expect("temporary directories are UTF-8");
        expand_shards_in(&[name], &ShardAccess::new(&stores)).expect("the shard is there")
    };
    let scan = |read| -> Vec<ShardItem> {
        let items =
            crate::run(scan_shards(shards(read)).filter_map(async |item| item.ok()).collect::<Vec<_>>());
        items.into_iter().map(comparable).collect()
    };
    let by_call = scan(ReadMode::Pread);
    assert_eq!(by_call, scan(ReadMode::Mmap));
    let options = IndexOptions { directory: Some(place.path().join("index")), ..IndexOptions::default() };
    let Ok(index) = Index::open_or_build(shards(ReadMode::Pread), &options) else { return };
    let keys = by_call.iter().filter_map(|item| match item {
        ShardItem::Sample(sample) => Some(sample.key.as_str()),
        ShardItem::Skipped(_) => None,
    });
    // The index leaves out samples whose media it cannot measure, and no others.
    let mut scanned = keys;
    for row in (0..index.len()).map(|sample| index.sample(sample)) {
        assert!(scanned.any(|key| key == row.key()), "sample `{}` is not in the shard", row.key());
    }
}

/// Opens the bytes as the index of a small dataset: it is used, or built again.
pub(super) fn index(bytes: &[u8]) {
    static DATASET: OnceLock<(crate::dataset::TempDataset, PathBuf)> = OnceLock::new();
    let (data, path) = DATASET.get_or_init(|| {
        let data = crate::dataset::TempDataset::new(1, 3, crate::dataset::Compression::Plain);
        let path = data.index().path().expect("the index is kept").to_owned();
        (data, path)
    });
    std::fs::write(path, bytes).expect("the index is written");
    let index = data.index();
    for sample in 0..index.len() {
        let row = index.sample(sample);
        let _read = (row.key(), row.offset(), row.bytes(), row.fields().count());
    }
}
