//! Adds a store from outside the crate: the shards are written, listed, indexed, cached and read as usual.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dflop_loader::error::BoxError;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards, expand_shards_in};
use dflop_loader::store::object_store::ObjectStore;
use dflop_loader::store::object_store::memory::InMemory;
use dflop_loader::store::{ShardCache, ShardStore, Stores, StoresBuilder};
use dflop_loader::write::ShardWriter;
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::{balanced, plain};

/// Shelves in memory; `shelf://locked` has no key.
#[derive(Default)]
struct Shelves {
    objects: Arc<InMemory>,
    opened: AtomicUsize,
}

impl ShardStore for Shelves {
    fn open(&self, root: &str) -> Result<Arc<dyn ObjectStore>, BoxError> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        if root == "shelf://locked" {
            return Err("the shelf is locked".into());
        }
        Ok(self.objects.clone())
    }
}

fn builder(shelves: &Arc<Shelves>) -> StoresBuilder {
    Stores::builder().store("shelf", shelves.clone())
}

fn shards(stores: &Stores, pattern: &str) -> Vec<Shard> {
    expand_shards_in(&[pattern], &stores.into()).unwrap()
}

#[test]
fn shards_in_a_store_of_ones_own_give_what_local_files_give() {
    let shelves = Arc::new(Shelves::default());
    let stores = builder(&shelves).chunk_bytes(16 << 10).build().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let cached = ShardCache { directory: cache.path().to_owned(), bytes_max: 1 << 30 };
    let cached = builder(&shelves).cache(cached).build().unwrap();
    for (stored, prefix) in [(Compression::Plain, "plain"), (Compression::Zstd, "packed")] {
        let data = TempDataset::new(3, 24, stored);
        for file in
            std::fs::read_dir(data.directory()).unwrap().flatten().filter(|file| file.path().is_file())
        {
            let name = file.file_name().into_string().unwrap();
            stores.put_file(&format!("shelf://one/{prefix}/{name}"), &file.path()).unwrap();
        }
        let local = plain(expand_shards(&[data.pattern()]).unwrap(), 2);
        for stores in [&stores, &cached] {
            let pattern = format!("shelf://one/{prefix}/");
            assert_eq!(plain(shards(stores, &pattern), 2), local);
            let directory = tempfile::tempdir().unwrap();
            let options =
                IndexOptions { directory: Some(directory.path().to_owned()), ..IndexOptions::default() };
            let index = Arc::new(Index::open_or_build(shards(stores, &pattern), &options).unwrap());
            assert_eq!(index.fingerprint(), data.index().fingerprint());
            assert_eq!(balanced(&index, 9), balanced(&data.index(), 9));
        }
    }
    assert_eq!(shelves.opened.load(Ordering::Relaxed), 2, "each of both handles opens the root once");
}

#[test]
fn shards_are_written_to_a_store_of_ones_own() {
    let stores = builder(&Arc::default()).build().unwrap();
    let write = |append| ShardWriter::builder("shelf://one/run").stores(&stores).append(append).build();
    let mut writer = write(false).unwrap();
    writer.write("kite", &[("txt", b"a red kite")]).unwrap();
    assert_eq!(writer.finish().unwrap().shards.len(), 1);
    assert!(write(false).unwrap_err().to_string().contains("in the way"));
    assert_eq!(shards(&stores, "shelf://one/run/").len(), 1);
}

#[test]
fn schemes_and_stores_that_do_not_fit_are_refused() {
    for scheme in ["", "file", "Shelf", "9p", "she lf"] {
        let refused = Stores::builder().store(scheme, Arc::new(Shelves::default())).build();
        assert!(refused.unwrap_err().to_string().contains("is not the scheme of a store"), "{scheme}");
    }
    let stores = builder(&Arc::default()).build().unwrap();
    let refusal = |pattern: &str| expand_shards_in(&[pattern], &(&stores).into()).unwrap_err().to_string();
    assert!(refusal("shelf://locked/a.tar").contains("the shelf is locked"));
    assert!(refusal("shelf:///a.tar").contains("expected a bucket"));
    assert!(refusal("shed://one/a.tar").contains("`shed://` is not supported"));
}

#[test]
fn a_built_in_store_can_be_replaced() {
    let shelves = Arc::new(Shelves::default());
    let stores = Stores::builder().store("s3", shelves.clone()).build().unwrap();
    let data = TempDataset::new(1, 4, Compression::Plain);
    stores.put_file("s3://bucket/a.tar", &data.shard(0)).unwrap();
    assert_eq!(
        plain(shards(&stores, "s3://bucket/a.tar"), 1),
        plain(expand_shards(&[data.pattern()]).unwrap(), 1)
    );
    assert!(shelves.opened.load(Ordering::Relaxed) > 0);
}
