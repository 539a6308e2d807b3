//! Archives and indexes: all ways to read a shard return the same samples, and the index knows the good
//! samples.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock, OnceLock};

use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::decode;
use dflop_loader::shard::{
    Compression, MappedSamples, RawSample, Shard, ShardAccess, ShardItem, StreamedSamples, expand_shards_in,
    scan_shards, sniff_compression,
};
use dflop_loader::store::{ReadMode, Stores};
use futures::StreamExt;
use tokio::runtime::Runtime;

/// Largest field, so that a false length in a header costs no memory.
const FIELD_BYTES_MAX: u64 = 1 << 20;

/// Process directory for the files that targets read back, and the runtime that reads.
static PLACE: LazyLock<(tempfile::TempDir, Runtime)> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    (tempfile::tempdir().expect("a temporary directory"), runtime.expect("a runtime starts"))
});

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

/// Compares an archive that is read by range with the same bytes in memory; fields may be as long as the
/// archive.
pub(super) fn ranged(bytes: &[u8]) {
    let path = written(bytes);
    let name: Arc<str> = path.as_str().into();
    if !matches!(sniff_compression(&name, bytes), Ok(Compression::None)) {
        return;
    }
    let mapped = MappedSamples::new(name, bytes.to_vec().into(), bytes.len() as u64).map(comparable);
    assert_eq!(mapped.collect::<Vec<_>>(), scanned(&path, ReadMode::Pread));
}

/// Writes a shard and returns the path.
fn written(bytes: &[u8]) -> String {
    let path = PLACE.0.path().join(format!("{:?}.tar", std::thread::current().id()));
    std::fs::write(&path, bytes).expect("the shard is written");
    path.into_os_string().into_string().expect("temporary directories are UTF-8")
}

/// Opens a shard.
fn opened(path: &str, read: ReadMode) -> Vec<Shard> {
    let stores = Stores::builder().read(read).build().expect("the defaults are valid");
    expand_shards_in(&[path], &ShardAccess::new(&stores)).expect("the shard is there")
}

/// Returns the items in a shard.
fn scanned(path: &str, read: ReadMode) -> Vec<ShardItem> {
    let items = scan_shards(opened(path, read)).filter_map(async |item| item.ok());
    PLACE.1.block_on(items.collect::<Vec<_>>()).into_iter().map(comparable).collect()
}

/// Returns an item without the part that may differ between read modes: how many bytes were missing.
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

/// Compares a shard, compressed or not, read by system calls, mapped, and through an index, which has all
/// samples that a loader could deliver.
pub(super) fn shard(bytes: &[u8]) {
    let path = written(bytes);
    let by_call = scanned(&path, ReadMode::Pread);
    assert_eq!(by_call, scanned(&path, ReadMode::Mmap));
    let directory = PLACE.0.path().join("index");
    // Shards with the same length within the same clock tick look the same.
    let _none = std::fs::remove_dir_all(&directory);
    let options = IndexOptions { directory: Some(directory), ..IndexOptions::default() };
    let index = Index::open_or_build(opened(&path, ReadMode::Pread), &options);
    let rows = index.iter().flat_map(|index| (0..index.len()).map(|sample| index.sample(sample)));
    let mut indexed = rows.map(|row| (row.offset(), row.key().to_owned())).peekable();
    for item in &by_call {
        let ShardItem::Sample(sample) = item else { continue };
        let is_indexed = indexed.next_if(|(offset, key)| (*offset, key) == (sample.offset, &sample.key));
        assert!(is_indexed.is_some() || !is_decoded(sample), "the index lacks sample `{}`", sample.key);
    }
    assert_eq!(indexed.next(), None, "the shard lacks a sample of the index");
}

/// Returns whether all media in a sample can be decoded.
fn is_decoded(sample: &RawSample) -> bool {
    let limits = super::media::limits();
    sample.fields.iter().all(|field| {
        let payload = field.payload.clone();
        payload.is_some_and(|payload| decode(&field.extension, payload, &limits).is_ok())
    })
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
