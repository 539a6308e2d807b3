//! Compares the retries in dflop's readers with the retries in `object_store`, on a server that injects
//! faults.
//!
//! Both ways read the same shards with the same loader, timeouts and waits. In the first, dflop's readers try
//! again, from the last received byte, and the store does not; in the second, the store does, by
//! `RetryConfig`, and the readers do not. Each line has the lost samples, the requests, the bytes in excess
//! of a run without faults, and the seconds, as medians over several runs.
//!
//! `cargo bench -p dflop-benches --bench retries`
#![expect(clippy::print_stdout, reason = "the figures are what the program is run for")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_loader::error::BoxError;
use dflop_loader::shard::{expand_shards, expand_shards_in};
use dflop_loader::store::object_store::http::HttpBuilder;
use dflop_loader::store::object_store::{self, BackoffConfig, ClientOptions, ObjectStore};
use dflop_loader::store::{Backoff, RetryConfig, ShardStore, Stores};
use dflop_tests::fault_server::{Behavior, Fault, FaultServer};
use dflop_tests::loaders::{DeliveredSample, plain};
use dflop_tests::tar::TarBytes;

const SHARDS: usize = 4;
const SAMPLES: usize = 32;
const FIELD_BYTES: usize = 96 << 10;
const CHUNK_BYTES: u64 = 1 << 20;
const RETRY_SECONDS: u64 = 180;
/// Maximum number of store attempts; the readers' time limit allows more.
const ATTEMPTS_MAX: u32 = 8;
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(10), most: Duration::from_millis(200) };
const TIMEOUT: Duration = Duration::from_secs(1);
const RUNS: usize = 3;

/// Shards on an HTTP server, whose requests `object_store` retries.
struct RetriedByStore;

impl ShardStore for RetriedByStore {
    fn open(&self, root: &str) -> Result<Arc<dyn ObjectStore>, BoxError> {
        let backoff = BackoffConfig { init_backoff: BACKOFF.first, max_backoff: BACKOFF.most, base: 2.0 };
        let retry = object_store::RetryConfig {
            backoff,
            max_retries: ATTEMPTS_MAX as usize - 1,
            retry_timeout: Duration::from_mins(3),
        };
        let options = ClientOptions::new().with_allow_http(true).with_timeout(TIMEOUT);
        let url = root.replace("own://", "http://");
        Ok(Arc::new(HttpBuilder::new().with_url(url).with_retry(retry).with_client_options(options).build()?))
    }
}

/// Way to read the shards.
#[derive(Clone, Copy)]
enum Way {
    Readers,
    Store,
}

/// Cost of a single run.
struct Run {
    lost: usize,
    requests: u64,
    body_bytes: u64,
    seconds: f64,
    error: Option<String>,
}

fn read(server: &FaultServer, way: Way, expected: &[DeliveredSample]) -> Run {
    let (scheme, retry_seconds) = match way {
        Way::Readers => ("http://", RETRY_SECONDS),
        Way::Store => ("own://", 0),
    };
    let retry = RetryConfig { retry_seconds, backoff: BACKOFF };
    // The reader timeout must not end the store attempts.
    let timeout = if matches!(way, Way::Store) { Duration::from_mins(3) } else { TIMEOUT };
    let stores = Stores::builder().store("own", Arc::new(RetriedByStore)).retry(retry);
    let stores = stores.request_timeout(timeout).chunk_bytes(CHUNK_BYTES).build().expect("valid settings");
    let url = server.url("shard-{0..3}.tar").replace("http://", scheme);
    let shards = expand_shards_in(&[url], &(&stores).into()).expect("a valid pattern");
    let counts = || (server.counts().requests(), server.counts().body_bytes());
    let (before, started) = (counts(), Instant::now());
    let output = plain(shards, 1);
    let (after, seconds) = (counts(), started.elapsed().as_secs_f64());
    let delivered = output.samples.iter().filter(|sample| expected.contains(sample)).count();
    Run {
        lost: expected.len() - delivered,
        requests: after.0 - before.0,
        body_bytes: after.1 - before.1,
        seconds,
        error: output.error,
    }
}

fn median<T: PartialOrd + Copy>(runs: &[Run], value: impl Fn(&Run) -> T) -> T {
    let mut values: Vec<T> = runs.iter().map(value).collect();
    values.sort_by(|a, b| a.partial_cmp(b).expect("comparable"));
    values[values.len() / 2]
}

fn main() {
    let directory = tempfile::tempdir().expect("a directory");
    for shard in 0..SHARDS {
        let mut archive = TarBytes::new();
        for sample in shard * SAMPLES..(shard + 1) * SAMPLES {
            let payload: Vec<u8> = (0..FIELD_BYTES).map(|at| ((at * 31 + sample * 7) % 251) as u8).collect();
            archive = archive.file(&format!("{sample:05}.bin"), &payload);
        }
        let path = directory.path().join(format!("shard-{shard}.tar"));
        std::fs::write(path, archive.finish()).expect("a shard is written");
    }
    let local = format!("{}/shard-{{0..3}}.tar", directory.path().display());
    let expected = plain(expand_shards(&[local]).expect("shards"), 1).samples;
    assert_eq!(expected.len(), SHARDS * SAMPLES);
    let server = FaultServer::serve_directory(directory.path(), Behavior::default());
    let faultless = read(&server, Way::Readers, &expected);
    println!(
        "{} samples, {} requests, {} bytes of bodies without faults",
        expected.len(),
        faultless.requests,
        faultless.body_bytes
    );
    println!("fault                        by      lost  ended early  requests  bytes again  seconds");
    for (name, percent, fault) in [
        ("none", 0, Fault::Reset),
        ("503, one in five", 20, Fault::Unavailable(None)),
        ("429, Retry-After 1 s", 20, Fault::TooMany(Some(1))),
        ("reset, one in five", 20, Fault::Reset),
        ("truncated, one in five", 20, Fault::Truncated),
        ("truncated, four in five", 80, Fault::Truncated),
        ("refused, one in five", 20, Fault::Refused),
        ("slow, one in twenty", 5, Fault::Slow),
        ("redirected, one in five", 20, Fault::Redirect),
        ("ranges ignored", 100, Fault::RangeIgnored),
        ("replaced while read", 100, Fault::WrongEtag),
    ] {
        for (label, way) in [("readers", Way::Readers), ("store", Way::Store)] {
            let mut runs = Vec::new();
            for _ in 0..RUNS {
                // Lengths are served; the order of faults depends on the request number.
                let faultless_first = server.counts().requests() + SHARDS as u64;
                let behavior = Behavior { faultless_first, ..Behavior::faulty(percent, fault) };
                server.set_behavior(behavior);
                runs.push(read(&server, way, &expected));
            }
            println!(
                "{name:<28} {label:<8} {:>4}  {:>2} of {RUNS} runs {:>9} {:>12} {:>8.2}  {}",
                median(&runs, |run| run.lost),
                runs.iter().filter(|run| run.error.is_some()).count(),
                median(&runs, |run| run.requests),
                median(&runs, |run| run.body_bytes.saturating_sub(faultless.body_bytes)),
                median(&runs, |run| run.seconds),
                runs.iter().find_map(|run| run.error.clone()).unwrap_or_default(),
            );
        }
    }
}
