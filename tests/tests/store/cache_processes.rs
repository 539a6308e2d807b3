//! Checks a shared cache in many processes, some of which are killed: correct bytes always, never above the
//! limit.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dflop_loader::shard::{expand_shards, expand_shards_in};
use dflop_loader::store::{ShardCache, Stores};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::fault_server::{Behavior, FaultServer};
use dflop_tests::loaders::plain;

const SHARDS: usize = 10;
const PROCESSES: usize = 5;
/// Name of the test below that each process runs.
const READER: &str = "store::cache_processes::reads_through_the_cache_of_another_test";
const URLS: &str = "DFLOP_TEST_CACHED_URLS";
const DIRECTORY: &str = "DFLOP_TEST_CACHE";
const BYTES: &str = "DFLOP_TEST_CACHE_BYTES";
const LOCAL: &str = "DFLOP_TEST_LOCAL";

#[test]
#[ignore = "a process of another test"]
fn reads_through_the_cache_of_another_test() {
    let Ok(urls) = std::env::var(URLS) else { return };
    let value = |name| std::env::var(name).unwrap();
    let expected = plain(expand_shards(&[value(LOCAL)]).unwrap(), 1);
    let cache = ShardCache { directory: value(DIRECTORY).into(), bytes_max: value(BYTES).parse().unwrap() };
    let stores = Stores::builder().cache(cache).chunk_bytes(16 << 10).build().unwrap();
    for _ in 0..3 {
        let read = plain(expand_shards_in(&[&urls], &(&stores).into()).unwrap(), 1);
        assert_eq!(read, expected);
    }
}

fn reader(urls: &str, cache: &Path, bytes: u64, local: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", READER, "--ignored"])
        .env(URLS, urls)
        .env(DIRECTORY, cache)
        .env(BYTES, bytes.to_string())
        .env(LOCAL, local)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns the total bytes in the cache at a single moment, and the number of parts.
fn kept(cache: &Path) -> (u64, usize) {
    let Ok(lock) = std::fs::File::options().write(true).open(cache.join("lock")) else { return (0, 0) };
    lock.lock().unwrap();
    let files: Vec<_> = std::fs::read_dir(cache).unwrap().flatten().collect();
    let parts = files.iter().filter(|file| file.path().extension().is_some_and(|ending| ending == "part"));
    (files.iter().map(|file| file.metadata().map_or(0, |metadata| metadata.len())).sum(), parts.count())
}

#[test]
fn killed_and_competing_processes_leave_right_bytes_and_keep_the_limit() {
    let data = TempDataset::new(SHARDS, 12, Compression::Plain);
    let latency = Duration::from_millis(5);
    let server = FaultServer::serve_directory(data.directory(), Behavior { latency, ..Behavior::default() });
    let urls = server.url("shard-{000..009}.tar");
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("cache");
    let sizes: u64 = (0..SHARDS).map(|shard| data.shard(shard).metadata().unwrap().len()).sum();
    let most = sizes / 2;
    let start = || reader(&urls, &cache, most, &data.pattern());
    let mut readers: Vec<Child> = (0..PROCESSES).map(|_| start()).collect();
    let (started, mut next_kill, mut killed) = (Instant::now(), Duration::from_millis(300), 0);
    while started.elapsed() < Duration::from_secs(5) {
        assert!(kept(&cache).0 <= most, "{} of {most} bytes", kept(&cache).0);
        if started.elapsed() > next_kill {
            next_kill = started.elapsed() + Duration::from_millis(130);
            let victim = killed % PROCESSES;
            let is_running = readers[victim].try_wait().unwrap().is_none();
            readers[victim].kill().unwrap();
            let ended = std::mem::replace(&mut readers[victim], start()).wait_with_output().unwrap();
            let is_good = is_running || ended.status.success();
            assert!(is_good, "{}", String::from_utf8_lossy(&ended.stderr));
            killed += 1;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    for reader in readers {
        let ended = reader.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    assert!(killed > 10);
    assert!(start().wait_with_output().unwrap().status.success());
    let (bytes, parts) = kept(&cache);
    assert!(bytes <= most && bytes > 0 && parts == 0, "{bytes} of {most} bytes, {parts} leftovers");
}
