//! Checks shards on a server with faults: nothing is lost, nothing is repeated, and errors name the reason.

use std::sync::Arc;
use std::time::Duration;

use dflop_loader::decode::Decode;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards, expand_shards_in};
use dflop_loader::store::{Backoff, RetryConfig, ShardCache, Stores, StoresBuilder};
use dflop_loader::{BalancedLoader, Loader};
use dflop_tests::dataset::{Compression, TempDataset, compress};
use dflop_tests::fault_server::{Behavior, Fault, FaultServer};
use dflop_tests::loaders::{LoaderOutput, balanced, plain};
use dflop_tests::media::jpeg;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

const SHARDS: usize = 4;
const STEPS: u64 = 9;

/// Returns stores with quick retries and small requests, so that many faults occur in a short test.
fn stores() -> StoresBuilder {
    let backoff = Backoff { first: Duration::from_millis(1), most: Duration::from_millis(20) };
    Stores::builder()
        .retry(RetryConfig { retry_seconds: 60, backoff })
        .request_timeout(Duration::from_secs(1))
        .chunk_bytes(32 << 10)
        .request_bytes_max(64 << 10)
        .gap_bytes_max(4 << 10)
}

fn remote(server: &FaultServer, stores: &Stores) -> Vec<Shard> {
    expand_shards_in(&[server.url("shard-{000..003}.tar")], &stores.into()).unwrap()
}

fn index(shards: Vec<Shard>, directory: &std::path::Path) -> dflop_loader::Result<Arc<Index>> {
    let options = IndexOptions { directory: Some(directory.to_owned()), ..IndexOptions::default() };
    Index::open_or_build(shards, &options).map(Arc::new)
}

/// Returns the output of both loaders from the local files.
fn local(data: &TempDataset) -> (LoaderOutput, LoaderOutput) {
    let plain = plain(expand_shards(&[data.pattern()]).unwrap(), 2);
    let balanced = balanced(&data.index(), STEPS);
    assert_eq!(plain.samples.len(), 2 * data.keys.len());
    assert_eq!((balanced.samples.len() as u64, &balanced.error), (8 * STEPS, &None));
    (plain, balanced)
}

#[test]
fn every_fault_is_survived_and_every_byte_is_that_of_the_local_run() {
    let faults = [
        Fault::Unavailable(None),
        Fault::TooMany(None),
        Fault::Internal,
        Fault::Reset,
        Fault::Truncated,
        Fault::Slow,
        Fault::RangeIgnored,
        Fault::Redirect,
        Fault::Refused,
    ];
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let expected = local(&data);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    for fault in faults {
        let percent = if fault == Fault::Slow { 6 } else { 20 };
        server.set_behavior(Behavior::faulty(percent, fault));
        let stores = stores().build().unwrap();
        let index_directory = tempfile::tempdir().unwrap();
        assert_eq!(plain(remote(&server, &stores), 2), expected.0, "{fault:?}");
        let index = index(remote(&server, &stores), index_directory.path()).unwrap();
        assert_eq!(index.fingerprint(), data.index().fingerprint(), "{fault:?}");
        assert_eq!(balanced(&index, STEPS), expected.1, "{fault:?}");
        assert!(server.counts().faults().contains_key(&fault), "{fault:?} was made");
    }
}

#[test]
fn compressed_shards_come_whole_with_and_without_a_cache() {
    for stored in [Compression::Gzip, Compression::Zstd] {
        let data = TempDataset::new(SHARDS, 12, stored);
        let expected = (plain(expand_shards(&[data.pattern()]).unwrap(), 2), balanced(&data.index(), STEPS));
        let faults = vec![Fault::Reset, Fault::Unavailable(None), Fault::Truncated];
        let behavior = Behavior { faulty_percent: 10, faults, ..Behavior::default() };
        let server = FaultServer::serve_directory(data.directory(), behavior);
        let directory = tempfile::tempdir().unwrap();
        let cache = ShardCache { directory: directory.path().join("cache"), bytes_max: 64 << 20 };
        for stores in [stores(), stores().cache(cache)] {
            let stores = stores.build().unwrap();
            assert_eq!(plain(remote(&server, &stores), 2), expected.0, "{stored:?}");
            let index = index(remote(&server, &stores), directory.path()).unwrap();
            assert_eq!(index.fingerprint(), data.index().fingerprint(), "{stored:?}");
            assert_eq!(balanced(&index, STEPS), expected.1, "{stored:?}");
        }
    }
}

#[test]
fn a_server_without_ranges_is_read_in_order() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let expected = local(&data).0;
    let mut behavior = Behavior::faulty(100, Fault::RangeIgnored);
    let server = FaultServer::serve_directory(data.directory(), behavior.clone());
    let stores = stores().build().unwrap();
    assert_eq!(plain(remote(&server, &stores), 2), expected);
    let sizes: u64 = (0..SHARDS).map(|shard| data.shard(shard).metadata().unwrap().len()).sum();
    let sent = server.counts().body_bytes();
    assert!(sent < 2 * 4 * sizes, "{sent} bytes for {} is not quadratic", 2 * sizes);
    behavior.faults.push(Fault::Truncated);
    server.set_behavior(behavior);
    assert_eq!(plain(remote(&server, &stores), 2), expected);
}

#[test]
fn a_loader_counts_its_own_retries() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let stores = stores().build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let index = index(remote(&server, &stores), directory.path()).unwrap();
    let undisturbed = Loader::builder(remote(&server, &stores)).decode(Decode::Raw).build().unwrap();
    assert!(!run(undisturbed.stream().try_collect::<Vec<_>>()).unwrap().is_empty());
    server.set_behavior(Behavior::faulty(30, Fault::Unavailable(None)));
    let faults = || server.counts().faults().values().sum::<u64>();
    let loader = Loader::builder(remote(&server, &stores)).decode(Decode::Raw).build().unwrap();
    run(loader.stream().try_collect::<Vec<_>>()).unwrap();
    let of_plain = faults();
    assert!(of_plain > 0);
    assert_eq!(loader.metrics().retries, of_plain);
    let planner = dflop_tests::loaders::planner(&index, 8, 1, 2, dflop_loader::Tail::Carry);
    let loader = BalancedLoader::builder(planner, 0).steps(STEPS).decode(Decode::Raw).build().unwrap();
    run(loader.stream().try_collect::<Vec<_>>()).unwrap();
    assert!(faults() > of_plain);
    assert_eq!(loader.metrics().retries, faults() - of_plain);
    assert_eq!(undisturbed.metrics().retries, 0, "it shares the handle, not the count");
}

#[test]
fn retry_after_is_honored() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let server =
        FaultServer::serve_directory(data.directory(), Behavior::faulty(100, Fault::TooMany(Some(1))));
    let stores = stores().build().unwrap();
    let shards = expand_shards_in(&[server.url("shard-000.tar")], &(&stores).into()).unwrap();
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| plain(shards, 1));
        while server.counts().faults().is_empty() && started.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        server.set_behavior(Behavior::default());
        assert_eq!(reading.join().unwrap().samples.len(), 4);
    });
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.counts().faults()[&Fault::TooMany(Some(1))], 1, "it was not asked again before");
}

#[test]
fn permanent_faults_name_the_shard_and_the_offset() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let quick = || {
        let backoff = Backoff { first: Duration::from_millis(1), most: Duration::from_millis(2) };
        stores().retry(RetryConfig { retry_seconds: 1, backoff }).build().unwrap()
    };
    let indexed = {
        let directory = tempfile::tempdir().unwrap();
        index(remote(&server, &quick()), directory.path()).unwrap()
    };
    for (fault, reason) in [
        (Fault::Internal, "500"),
        (Fault::Unavailable(None), "503"),
        (Fault::Refused, "`retry_seconds` is the limit"),
        (Fault::WrongEtag, "replaced while it was read"),
    ] {
        // Lengths and first chunks are served; then every request for one shard fails.
        let behavior =
            Behavior { faultless_first: server.counts().requests() + 8, ..Behavior::faulty(100, fault) };
        server.set_behavior(Behavior { path_contains: "shard-002".into(), ..behavior });
        let run = plain(remote(&server, &quick()), 1);
        let error = run.error.unwrap_or_else(|| panic!("{fault:?} is permanent"));
        assert!(error.contains("shard-002.tar") && error.contains("at offset"), "{error}");
        assert!(error.contains(reason), "{error}");
        let keys = run.samples.iter().map(|(key, _)| key);
        assert!(
            keys.eq(data.keys.iter().take(run.samples.len())),
            "delivered samples are complete and in order"
        );
        let error = balanced(&indexed, STEPS).error.unwrap_or_else(|| panic!("{fault:?} is permanent"));
        assert!(error.contains("shard-002.tar") && error.contains("at offset"), "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn what_is_not_there_is_said_at_once() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let shards = expand_shards(&[server.url("none.tar")]).unwrap();
    let error = plain(shards.clone(), 1).error.unwrap();
    assert!(error.contains("none.tar") && error.contains("404"), "{error}");
    assert!(Index::open_or_build(shards, &IndexOptions::default()).is_err());
    assert!(server.counts().requests() <= 2, "nothing is retried");
    let error = expand_shards(&[server.url("directory/")]).unwrap_err();
    let reason = std::error::Error::source(&error).unwrap().to_string();
    assert!(reason.contains("do not list"), "{reason}");
}

#[test]
fn a_replaced_shard_is_indexed_again_and_refused_by_the_old_index() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let stores = stores().build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let before = index(remote(&server, &stores), directory.path()).unwrap();
    let requests = server.counts().requests();
    let again = index(remote(&server, &stores), directory.path()).unwrap();
    assert_eq!(server.counts().requests() - requests, SHARDS as u64, "only lengths are asked for");
    assert_eq!(again.fingerprint(), before.fingerprint());
    let mut bytes = std::fs::read(data.shard(1)).unwrap();
    let at = bytes.windows(4).position(|window| window == b"kite").unwrap();
    bytes[at..at + 4].copy_from_slice(b"KITE");
    std::fs::write(data.shard(1), bytes).unwrap();
    let error = balanced(&before, STEPS).error.unwrap();
    assert!(error.contains("shard-001.tar") && error.contains("index them again"), "{error}");
    let after = index(remote(&server, &stores), directory.path()).unwrap();
    assert_eq!(balanced(&after, STEPS).error, None);
}

/// Writes samples with images, and with opaque fields that are megabytes long.
fn long_fields() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let mut tar = TarBytes::new();
    for number in 0..6u32 {
        let noise: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(number + 7) >> 5) as u8).collect();
        let image = jpeg(40 + number, 30, number);
        let padded = [&image[..], &noise[..2_000_000]].concat();
        tar = tar.file(&format!("k{number}.txt"), b"a kite");
        tar = tar.file(&format!("k{number}.jpg"), &padded);
        tar = tar.file(&format!("k{number}.bin"), &noise);
    }
    std::fs::write(directory.path().join("shard-000.tar"), tar.finish()).unwrap();
    directory
}

#[test]
fn long_payloads_are_jumped_over_when_a_shard_is_indexed() {
    let directory = long_fields();
    let server = FaultServer::serve_directory(directory.path(), Behavior::default());
    let local = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
    let local = index(local, &directory.path().join("local")).unwrap();
    let remote = expand_shards(&[server.url("shard-000.tar")]).unwrap();
    let remote = index(remote, &directory.path().join("remote")).unwrap();
    assert_eq!(remote.fingerprint(), local.fingerprint());
    for sample in 0..local.len() {
        assert!(local.sample(sample).fields().eq(remote.sample(sample).fields()));
    }
    let sent = server.counts().body_bytes();
    let bytes = directory.path().join("shard-000.tar").metadata().unwrap().len();
    assert!(sent < bytes / 4, "{sent} of {bytes} bytes were sent");
}

#[test]
fn a_step_costs_few_requests_and_their_number_is_bounded() {
    let data = TempDataset::new(SHARDS, 64, Compression::Plain);
    let latency = Duration::from_millis(5);
    let server = FaultServer::serve_directory(data.directory(), Behavior { latency, ..Behavior::default() });
    let directory = tempfile::tempdir().unwrap();
    let joined = Stores::builder().build().unwrap();
    let of_all = index(remote(&server, &joined), directory.path()).unwrap();
    let before = server.counts().requests();
    assert_eq!(balanced(&of_all, STEPS).samples.len() as u64, 8 * STEPS);
    let requests = server.counts().requests() - before;
    assert!(requests <= SHARDS as u64 * STEPS, "{requests}: the fields of a shard are close together");

    let separate = Stores::builder().gap_bytes_max(0).requests_max(3).build().unwrap();
    let server = FaultServer::serve_directory(data.directory(), Behavior { latency, ..Behavior::default() });
    let of_all = index(remote(&server, &separate), directory.path()).unwrap();
    assert_eq!(balanced(&of_all, STEPS).samples.len() as u64, 8 * STEPS);
    assert_eq!(server.counts().concurrent_max(), 3);
}

#[test]
fn cached_shards_are_downloaded_once() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let (expected, in_steps) = local(&data);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let directory = tempfile::tempdir().unwrap();
    let cache = ShardCache { directory: directory.path().join("cache"), bytes_max: 64 << 20 };
    let with_cache =
        || stores().request_timeout(Duration::from_secs(30)).cache(cache.clone()).build().unwrap();
    let sizes: u64 = (0..SHARDS).map(|shard| data.shard(shard).metadata().unwrap().len()).sum();
    assert_eq!(plain(remote(&server, &with_cache()), 2), expected);
    let first = server.counts().body_bytes();
    assert_eq!(first, sizes, "the second epoch reads the cache");
    let index = index(remote(&server, &with_cache()), &directory.path().join("index")).unwrap();
    let indexed = server.counts().body_bytes();
    assert_eq!(balanced(&index, STEPS), in_steps);
    assert_eq!(server.counts().body_bytes(), indexed, "steps are read from the cache");
    let tiny = stores().cache(ShardCache { bytes_max: 1, ..cache.clone() }).build().unwrap();
    assert_eq!(
        plain(remote(&server, &tiny), 2),
        expected,
        "shards that do not fit are read without the cache"
    );
}

#[test]
fn an_indexed_shard_comes_into_the_cache_behind_the_first_steps() {
    let data = TempDataset::new(SHARDS, 16, Compression::Plain);
    let in_steps = local(&data).1;
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let directory = tempfile::tempdir().unwrap();
    let cache = ShardCache { directory: directory.path().join("cache"), bytes_max: 64 << 20 };
    let stores = stores().cache(cache).build().unwrap();
    let index = index(remote(&server, &stores), &directory.path().join("index")).unwrap();
    assert_eq!(balanced(&index, STEPS), in_steps);
    let kept = || {
        let files = std::fs::read_dir(directory.path().join("cache")).unwrap().flatten();
        files.filter(|file| file.path().extension().is_some_and(|extension| extension == "shard")).count()
    };
    let patience = std::time::Instant::now();
    while kept() < SHARDS && patience.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(kept(), SHARDS);
    let requests = server.counts().requests();
    assert_eq!(balanced(&index, STEPS), in_steps);
    assert_eq!(server.counts().requests(), requests);
}

#[test]
fn compressing_does_not_change_what_is_delivered() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let bytes = std::fs::read(data.shard(0)).unwrap();
    std::fs::write(data.directory().join("shard-001.tar"), compress(&bytes, Compression::Zstd)).unwrap();
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let run = plain(expand_shards(&[server.url("shard-{000..001}.tar")]).unwrap(), 1);
    assert_eq!(run.samples[..8], run.samples[8..]);
}
