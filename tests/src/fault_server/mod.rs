//! Runs an HTTP server that injects faults: it serves a directory, or proxies a second server.

mod backend;
mod http;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use self::backend::{Backend, respond};
use self::http::{Request, Response, header, read_request};

/// Pause in the middle of a slow response.
const STALL: Duration = Duration::from_secs(20);

/// Response fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// Status 503, with this many seconds in `Retry-After` if any.
    Unavailable(Option<u64>),
    /// Status 429, with this many seconds in `Retry-After` if any.
    TooMany(Option<u64>),
    /// Status 500.
    Internal,
    /// The connection is reset in the middle of the body.
    Reset,
    /// The connection is closed in the middle of the body, after the full length was announced.
    Truncated,
    /// The body pauses in the middle for longer than any test timeout.
    Slow,
    /// The complete object is sent instead of the range.
    RangeIgnored,
    /// The entity tag differs from earlier ones.
    WrongEtag,
    /// The response redirects to the same object under a different name.
    Redirect,
    /// The connection is closed without an answer.
    Refused,
}

/// Server latency and faults.
#[derive(Debug, Clone, Default)]
pub struct Behavior {
    /// Delay before every response.
    pub latency: Duration,
    /// Percentage of requests with a fault.
    pub faulty_percent: u64,
    /// Faults, used in turn.
    pub faults: Vec<Fault>,
    /// Path substring for requests with faults; all requests if empty.
    pub path_contains: String,
    /// Number of initial requests without faults.
    pub faultless_first: u64,
}

impl Behavior {
    /// Injects one fault at a rate.
    #[must_use]
    pub fn faulty(percent: u64, fault: Fault) -> Self {
        Self { faulty_percent: percent, faults: vec![fault], ..Self::default() }
    }
}

/// Counts of answered requests.
#[derive(Debug, Default)]
pub struct RequestCounts {
    requests: AtomicU64,
    body_bytes: AtomicU64,
    concurrent: AtomicUsize,
    concurrent_max: AtomicUsize,
    faults: Mutex<BTreeMap<Fault, u64>>,
}

impl RequestCounts {
    /// Returns the number of requests, answered or not.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the number of body bytes that were to be sent.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.body_bytes.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of requests that waited for answers at the same time.
    #[must_use]
    pub fn concurrent_max(&self) -> usize {
        self.concurrent_max.load(Ordering::Relaxed)
    }

    /// Returns how often each fault was injected.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<Fault, u64> {
        self.faults.lock().expect("no holder panics").clone()
    }
}

#[derive(Debug)]
struct Shared {
    backend: Backend,
    behavior: Mutex<Behavior>,
    counts: RequestCounts,
}

/// Server that runs until it is dropped.
#[derive(Debug)]
pub struct FaultServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl FaultServer {
    /// Serves the files in a directory, with ranges and entity tags.
    ///
    /// # Panics
    /// If no port is free.
    #[must_use]
    pub fn serve_directory(directory: &Path, behavior: Behavior) -> Self {
        Self::start(Backend::Directory(directory.to_owned()), behavior, 0)
    }

    /// Starts a proxy for a second server; port 0 selects any free port.
    ///
    /// # Panics
    /// If the port is not free.
    #[must_use]
    pub fn proxy(upstream: SocketAddr, behavior: Behavior, port: u16) -> Self {
        Self::start(Backend::Upstream(upstream), behavior, port)
    }

    fn start(backend: Backend, behavior: Behavior, port: u16) -> Self {
        let shared =
            Arc::new(Shared { backend, behavior: Mutex::new(behavior), counts: RequestCounts::default() });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime starts");
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", port))).expect("a port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let serving = shared.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = serving.clone();
                tokio::spawn(async move {
                    // A client may close the connection at any time.
                    let _ = serve(stream, &shared).await;
                });
            }
        });
        Self { address, shared, runtime: Some(runtime) }
    }

    /// Returns the URL for a file.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.address)
    }

    /// Changes the behavior from the next request on.
    ///
    /// # Panics
    /// Never.
    pub fn set_behavior(&self, behavior: Behavior) {
        *self.shared.behavior.lock().expect("no holder panics") = behavior;
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> &RequestCounts {
        &self.shared.counts
    }
}

impl Drop for FaultServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream).await? {
        let counts = &shared.counts;
        let concurrent = counts.concurrent.fetch_add(1, Ordering::Relaxed) + 1;
        counts.concurrent_max.fetch_max(concurrent, Ordering::Relaxed);
        if !answer(&mut stream, &request, shared).await? {
            return Ok(());
        }
    }
    Ok(())
}

/// Answers a request; `false` if the connection must not be used again.
async fn answer(stream: &mut BufReader<TcpStream>, request: &Request, shared: &Shared) -> io::Result<bool> {
    let (latency, fault) = choose(request, shared);
    tokio::time::sleep(latency).await;
    // From here on the client may have the answer and send the next request.
    shared.counts.concurrent.fetch_sub(1, Ordering::Relaxed);
    if let Some(fault) = fault {
        *shared.counts.faults.lock().expect("no holder panics").entry(fault).or_default() += 1;
    }
    let mut response = match fault {
        Some(Fault::Refused) => return Ok(false),
        Some(Fault::Unavailable(after)) => refusal(503, after),
        Some(Fault::TooMany(after)) => refusal(429, after),
        Some(Fault::Internal) => refusal(500, None),
        Some(Fault::Redirect) => {
            let mut response = Response::status(307);
            let mark = if request.target.contains('?') { '&' } else { '?' };
            response.set("Location", format!("{}{mark}moved=1", request.target));
            response
        }
        Some(Fault::RangeIgnored) => respond(request, &shared.backend, false).await?,
        _ => respond(request, &shared.backend, true).await?,
    };
    if fault == Some(Fault::WrongEtag) {
        response.set("ETag", "\"another\"");
    }
    let sent = match fault {
        Some(Fault::Reset | Fault::Truncated | Fault::Slow) => response.body.len() / 2,
        _ => response.body.len(),
    };
    shared.counts.body_bytes.fetch_add(sent as u64, Ordering::Relaxed);
    send(stream.get_mut(), request, &mut response, sent, fault).await?;
    Ok(sent == response.body.len())
}

/// Chooses delay and fault for a request, based only on the request number.
fn choose(request: &Request, shared: &Shared) -> (Duration, Option<Fault>) {
    let number = shared.counts.requests.fetch_add(1, Ordering::Relaxed);
    let behavior = shared.behavior.lock().expect("no holder panics");
    let is_meant = request.target.contains(&behavior.path_contains) && !request.target.contains("moved=1");
    let hash = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let is_faulty = (hash >> 33) % 100 < behavior.faulty_percent && number >= behavior.faultless_first;
    if !is_meant || !is_faulty || behavior.faults.is_empty() {
        return (behavior.latency, None);
    }
    let fault = behavior.faults[(hash >> 17) as usize % behavior.faults.len()];
    let fits = match fault {
        Fault::RangeIgnored => request.is_get() && request.header("range").is_some(),
        Fault::Reset | Fault::Truncated | Fault::Slow => request.is_get(),
        Fault::Redirect => request.is_get() || request.method == "HEAD",
        _ => true,
    };
    (behavior.latency, fits.then_some(fault))
}

fn refusal(status: u16, retry_after: Option<u64>) -> Response {
    let mut response = Response::status(status);
    if let Some(seconds) = retry_after {
        response.set("Retry-After", seconds.to_string());
    }
    response.body = b"<Error><Code>SlowDown</Code><Message>on purpose</Message></Error>".to_vec();
    response
}

async fn send(
    stream: &mut TcpStream,
    request: &Request,
    response: &mut Response,
    sent: usize,
    fault: Option<Fault>,
) -> io::Result<()> {
    let is_known = request.method == "HEAD" && header(&response.headers, "content-length").is_some();
    if !is_known {
        response.set("Content-Length", response.body.len().to_string());
    }
    response.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("connection"));
    let mut head = vec![format!("HTTP/1.1 {} -\r\n", response.status)];
    head.extend(response.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")));
    head.push("\r\n".to_owned());
    let head = head.concat();
    stream.write_all(head.as_bytes()).await?;
    if request.method == "HEAD" {
        return Ok(());
    }
    stream.write_all(&response.body[..sent]).await?;
    stream.flush().await?;
    match fault {
        Some(Fault::Reset) => stream.set_zero_linger(),
        Some(Fault::Slow) => {
            tokio::time::sleep(STALL).await;
            stream.write_all(&response.body[sent..]).await
        }
        _ => Ok(()),
    }
}
