//! Checks shards in an S3 bucket behind a proxy with faults.
//!
//! `make test-stores` starts the bucket server and sets the variables that these tests read:
//! `DFLOP_S3_SERVER`, the server address, and the AWS variables, whose endpoint is the proxy address.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards, expand_shards_in};
use dflop_loader::store::{ShardCache, Stores};
use dflop_loader::write::{ShardWriter, ShardWriterBuilder};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::fault_server::{Behavior, Fault, FaultServer};
use dflop_tests::loaders::{balanced, plain};
use dflop_tests::tar::TarBytes;

const BUCKET: &str = "dflop-shards";
/// Lock for the proxy port: a single test uses it at a time.
static PORT: Mutex<()> = Mutex::new(());

/// Running proxy; stops when it is dropped.
fn proxy(behavior: Behavior) -> (FaultServer, MutexGuard<'static, ()>) {
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
    (FaultServer::proxy(server, behavior, port), guard)
}

/// One request in twenty has a fault.
fn faulty() -> Behavior {
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
    Behavior { faulty_percent: 5, faults, ..Behavior::default() }
}

fn upload(stores: &Stores, directory: &Path, prefix: &str) {
    for file in std::fs::read_dir(directory).unwrap().flatten().filter(|file| file.path().is_file()) {
        let name = file.file_name().into_string().unwrap();
        stores.put_file(&format!("s3://{BUCKET}/{prefix}/{name}"), &file.path()).unwrap();
    }
}

fn shards(stores: &Stores, prefix: &str) -> Vec<Shard> {
    expand_shards_in(&[format!("s3://{BUCKET}/{prefix}/")], &stores.into()).unwrap()
}

fn index(shards: Vec<Shard>) -> (tempfile::TempDir, Arc<Index>) {
    let directory = tempfile::tempdir().unwrap();
    let options = IndexOptions { directory: Some(directory.path().to_owned()), ..IndexOptions::default() };
    let index = Index::open_or_build(shards, &options).unwrap();
    (directory, Arc::new(index))
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_behind_faults_gives_what_local_files_give() {
    let (server, _port) = proxy(faulty());
    for (stored, prefix) in [(Compression::Plain, "plain"), (Compression::Zstd, "packed")] {
        let data = TempDataset::new(3, 24, stored);
        let stores = Stores::builder().chunk_bytes(64 << 10).build().unwrap();
        upload(&stores, data.directory(), prefix);
        let local = plain(expand_shards(&[data.pattern()]).unwrap(), 2);
        let in_steps = balanced(&data.index(), 9);
        let cache = tempfile::tempdir().unwrap();
        let cached = ShardCache { directory: cache.path().to_owned(), bytes_max: 1 << 30 };
        let cached = Stores::builder().cache(cached).build().unwrap();
        for stores in [&stores, &cached] {
            assert_eq!(plain(shards(stores, prefix), 2), local);
            let (_directory, index) = index(shards(stores, prefix));
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
    let behavior = Behavior { faults: vec![Fault::Unavailable(None), Fault::Internal], ..faulty() };
    let (_server, _port) = proxy(behavior);
    let directory = tempfile::tempdir().unwrap();
    let noise: Vec<u8> = (0..30_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let tar = TarBytes::new().file("a.bin", &noise).file("a.txt", b"a kite");
    std::fs::write(directory.path().join("long.tar"), tar.finish()).unwrap();
    let stores = Stores::default();
    upload(&stores, directory.path(), "long");
    let local = plain(expand_shards(&[directory.path().to_str().unwrap()]).unwrap(), 1);
    assert_eq!(plain(shards(&stores, "long"), 1), local);
    let error = stores.put_file("s3://no-such-bucket/a.tar", &directory.path().join("long.tar")).unwrap_err();
    assert!(error.to_string().contains("no-such-bucket"), "{error}");
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_that_only_fails_is_given_up_on_with_its_answer() {
    let (_server, _port) = proxy(Behavior::faulty(100, Fault::Internal));
    let missing = expand_shards(&[format!("s3://{BUCKET}/none/")]);
    let error = std::error::Error::source(&missing.unwrap_err()).unwrap().to_string();
    assert!(error.contains("given up after"), "{error}");
}

#[test]
#[ignore = "needs an S3 server: make test-stores"]
fn s3_takes_written_shards_whose_index_is_that_of_a_scan() {
    let (_server, _port) =
        proxy(Behavior { faults: vec![Fault::Unavailable(None), Fault::Internal], ..faulty() });
    let (local, stores) = (tempfile::tempdir().unwrap(), Stores::default());
    let url = format!("s3://{BUCKET}/written");
    let write = |builder: ShardWriterBuilder, keys: std::ops::Range<usize>| {
        let mut writer = builder.shard_samples(4).build().unwrap();
        for key in keys {
            writer.write(&format!("{key:03}"), &[("txt", format!("kite {key}").as_bytes())]).unwrap();
        }
        writer.finish().unwrap()
    };
    write(ShardWriter::builder(local.path()), 0..14);
    let written = write(ShardWriter::builder(&url).stores(&stores), 0..10);
    assert_eq!(written.shards.len(), 3);
    assert!(
        ShardWriter::builder(&url).stores(&stores).build().unwrap_err().to_string().contains("in the way")
    );
    // Ten samples end in a shard with two, so the local shards differ after the eighth sample.
    write(ShardWriter::builder(&url).stores(&stores).append(true), 10..14);
    let expected = plain(expand_shards(&[local.path().to_str().unwrap()]).unwrap(), 1);
    assert_eq!(plain(shards(&stores, "written"), 1), expected);
    let kept = Index::open_or_build(shards(&stores, "written"), &IndexOptions::default()).unwrap();
    let (_directory, scanned) = index(shards(&stores, "written"));
    assert_eq!(kept.fingerprint(), scanned.fingerprint());
    let bytes = |index: &Index| std::fs::read(index.path().unwrap()).unwrap();
    assert!(bytes(&kept) == bytes(&scanned), "the index of written shards is that of a scan");
}
