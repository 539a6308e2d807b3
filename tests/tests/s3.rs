//! Shards in an S3 bucket behind a proxy that misbehaves; `make test-stores` starts the bucket's server and sets what
//! these tests read: `DFLOP_S3_SERVER`, its address, and the AWS variables, whose endpoint is where the proxy listens.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dflop_loader::collate::Decode;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::loader::Loader;
use dflop_loader::shard::{Shard, expand_shards, expand_shards_in};
use dflop_loader::store::{ShardCache, Stores};
use dflop_tests::data_set::{DataSet, Stored};
use dflop_tests::fault_server::{Behaviour, Fault, FaultServer};
use dflop_tests::run;
use dflop_tests::samples::{balanced, plain};
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

const BUCKET: &str = "dflop-shards";
/// One test at a time has the proxy's port.
static PORT: Mutex<()> = Mutex::new(());

/// The proxy, until it is dropped.
fn proxy(behaviour: Behaviour) -> (FaultServer, MutexGuard<'static, ()>) {
    let guard = PORT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let server = std::env::var("DFLOP_S3_SERVER").expect("run `make test-stores`");
    let server: SocketAddr = server.parse().expect("an address");
    let endpoint = std::env::var("AWS_ENDPOINT_URL").expect("run `make test-stores`");
    let port = endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
    let request =
        format!("PUT /{BUCKET} HTTP/1.1\r\nHost: {server}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    let mut stream = TcpStream::connect(server).expect("the server listens");
    stream.write_all(request.as_bytes()).expect("it takes requests");
    stream.read_to_string(&mut String::new()).expect("it answers");
    (FaultServer::in_front_of(server, behaviour, port), guard)
}

/// One request in twenty suffers something.
fn faulty() -> Behaviour {
    let faults = vec![
        Fault::Unavailable(None),
        Fault::Unavailable(Some(1)),
        Fault::TooMany(None),
        Fault::Internal,
        Fault::Reset,
        Fault::Truncated,
        Fault::RangeIgnored,
        Fault::Refused,
    ];
    Behaviour { faulty_percent: 5, faults, ..Behaviour::default() }
}

fn upload(stores: &Stores, folder: &Path, prefix: &str) {
    for file in std::fs::read_dir(folder).unwrap().flatten().filter(|file| file.path().is_file()) {
        let name = file.file_name().into_string().unwrap();
        stores.put_file(&format!("s3://{BUCKET}/{prefix}/{name}"), &file.path()).unwrap();
    }
}

fn shards(stores: &Stores, prefix: &str) -> Vec<Shard> {
    expand_shards_in(&[format!("s3://{BUCKET}/{prefix}/")], stores).unwrap()
}

fn index(shards: Vec<Shard>) -> (tempfile::TempDir, Arc<Index>) {
    let folder = tempfile::tempdir().unwrap();
    let options = IndexOptions { folder: Some(folder.path().to_owned()), ..IndexOptions::default() };
    let index = Index::open_or_build(shards, &options).unwrap();
    (folder, Arc::new(index))
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_behind_faults_gives_what_local_files_give() {
    let (server, _port) = proxy(faulty());
    for (stored, prefix) in [(Stored::Plain, "plain"), (Stored::Zstd, "packed")] {
        let data = DataSet::new(3, 24, stored);
        let stores = Stores::builder().chunk_bytes(64 << 10).build().unwrap();
        upload(&stores, data.folder(), prefix);
        let local = plain(expand_shards(&[data.pattern()]).unwrap(), 2);
        let in_steps = balanced(&data.index(), 9);
        let cache = tempfile::tempdir().unwrap();
        let cached = ShardCache { folder: cache.path().to_owned(), bytes_max: 1 << 30 };
        let cached = Stores::builder().cache(cached).build().unwrap();
        for stores in [&stores, &cached] {
            assert_eq!(plain(shards(stores, prefix), 2), local);
            let (_folder, index) = index(shards(stores, prefix));
            assert_eq!(index.fingerprint(), data.index().fingerprint());
            assert_eq!(balanced(&index, 9), in_steps);
        }
    }
    let faults = server.counts().faults();
    assert!(faults.values().sum::<u64>() > 3, "{faults:?}");
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_takes_files_of_many_parts_whole() {
    let behaviour = Behaviour { faults: vec![Fault::Unavailable(None), Fault::Internal], ..faulty() };
    let (_server, _port) = proxy(behaviour);
    let folder = tempfile::tempdir().unwrap();
    let noise: Vec<u8> = (0..30_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let tar = TarBytes::new().file("a.bin", &noise).file("a.txt", b"a kite");
    std::fs::write(folder.path().join("long.tar"), tar.finish()).unwrap();
    let stores = Stores::default();
    upload(&stores, folder.path(), "long");
    let local = plain(expand_shards(&[folder.path().to_str().unwrap()]).unwrap(), 1);
    assert_eq!(plain(shards(&stores, "long"), 1), local);
    let error = stores.put_file("s3://no-such-bucket/a.tar", &folder.path().join("long.tar")).unwrap_err();
    assert!(error.to_string().contains("no-such-bucket"), "{error}");
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_without_credentials_says_what_to_set() {
    let (_server, _port) = proxy(Behaviour::faulty(100, Fault::Internal));
    let missing = expand_shards(&[format!("s3://{BUCKET}/none/")]);
    let error = std::error::Error::source(&missing.unwrap_err()).unwrap().to_string();
    assert!(error.contains("given up after"), "{error}");
}

/// Pictures of a usual size whose content does not compress away.
fn pictures(folder: &Path) {
    for shard in 0..8u32 {
        let tar = (0..60u32).fold(TarBytes::new(), |tar, number| {
            let seed = shard * 60 + number;
            let picture = dflop_tests::media::noisy_jpeg(480 + seed * 7 % 160, 400 + seed * 13 % 160, seed);
            tar.file(&format!("{seed:05}.jpg"), &picture)
                .file(&format!("{seed:05}.txt"), b"a kite over the sea")
        });
        std::fs::write(folder.join(format!("shard-{shard:03}.tar")), tar.finish()).unwrap();
    }
}

/// Samples a second of full decoding.
fn rate(shards: Vec<Shard>) -> f64 {
    let side = const { std::num::NonZeroU32::new(224).unwrap() };
    let loader = Loader::builder(shards).decode(Decode::Pixels { side }).workers(2).build().unwrap();
    let started = Instant::now();
    let batches: Vec<usize> =
        run(loader.stream().map_ok(|batch| batch.samples.len()).try_collect::<Vec<_>>()).unwrap();
    batches.iter().sum::<usize>() as f64 / started.elapsed().as_secs_f64()
}

/// Rates of local files and of the same files elsewhere, by turns; the medians and their ratio.
fn compared(local: &str, elsewhere: &dyn Fn() -> Vec<Shard>) -> serde_json::Value {
    let mut rates = (Vec::new(), Vec::new());
    for _ in 0..5 {
        rates.0.push(rate(expand_shards(&[local]).unwrap()));
        rates.1.push(rate(elsewhere()));
    }
    rates.0.sort_by(f64::total_cmp);
    rates.1.sort_by(f64::total_cmp);
    let (local, remote) = (rates.0[2], rates.1[2]);
    serde_json::json!({
        "local_samples_per_second": local, "remote_samples_per_second": remote, "ratio": remote / local,
    })
}

#[test]
#[ignore = "a measurement: make test-stores"]
fn s3_at_30_ms_is_measured_against_local_files() {
    let latency = Duration::from_millis(30);
    let (_server, _port) = proxy(Behaviour { latency, ..Behaviour::default() });
    let folder = tempfile::tempdir().unwrap();
    pictures(folder.path());
    let http = FaultServer::of_folder(folder.path(), Behaviour { latency, ..Behaviour::default() });
    let stores = Stores::default();
    upload(&stores, folder.path(), "pictures");
    let local = folder.path().to_str().unwrap();
    let over_http = compared(local, &|| expand_shards(&[http.url("shard-{000..007}.tar")]).unwrap());
    let over_s3 = compared(local, &|| shards(&stores, "pictures"));
    let bytes: u64 =
        std::fs::read_dir(folder.path()).unwrap().flatten().map(|file| file.metadata().unwrap().len()).sum();
    let report = serde_json::json!({
        "what": "stream --decode rgb224, 2 workers, medians of 5 runs by turns, 30 ms before every response",
        "profile": if cfg!(debug_assertions) { "dev" } else { "release" },
        "samples": 480, "bytes": bytes, "http": over_http, "s3_moto": over_s3,
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results/remote.json");
    std::fs::write(&path, format!("{report:#}\n")).unwrap();
}
