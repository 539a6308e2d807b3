//! Runs an HTTP server that injects faults: it serves a directory, or is a proxy of another server.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Pause in the middle of a slow response.
const STALL: Duration = Duration::from_secs(20);

/// Fault of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// Status 503, with this many seconds of `Retry-After` if any.
    Unavailable(Option<u64>),
    /// Status 429, with this many seconds of `Retry-After` if any.
    TooMany(Option<u64>),
    /// Status 500.
    Internal,
    /// The connection is reset in the middle of the body.
    Reset,
    /// The connection is closed in the middle of the body, after its full length was announced.
    Truncated,
    /// The body pauses in the middle for longer than any timeout of a test.
    Slow,
    /// The whole object is sent instead of the range.
    RangeIgnored,
    /// The entity tag differs from earlier ones.
    WrongEtag,
    /// The response redirects to the same object under another name.
    Redirect,
    /// The connection is closed without an answer.
    Refused,
}

/// Latency and faults of the server.
#[derive(Debug, Clone, Default)]
pub struct Behavior {
    /// Delay before every response.
    pub latency: Duration,
    /// Share of the requests that get a fault, in percent.
    pub faulty_percent: u64,
    /// Faults, used in turn.
    pub faults: Vec<Fault>,
    /// Part of the path of requests that get faults; all requests if empty.
    pub path_contains: String,
    /// Number of first requests that get no fault.
    pub faultless_first: u64,
}

impl Behavior {
    /// Injects one fault at a rate.
    #[must_use]
    pub fn faulty(percent: u64, fault: Fault) -> Self {
        Self { faulty_percent: percent, faults: vec![fault], ..Self::default() }
    }
}

/// Counts of the requests that the server has answered.
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

    /// Returns the bytes of bodies that were to be sent.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.body_bytes.load(Ordering::Relaxed)
    }

    /// Returns the largest number of requests that waited for their answers at the same time.
    #[must_use]
    pub fn concurrent_max(&self) -> usize {
        self.concurrent_max.load(Ordering::Relaxed)
    }

    /// Returns the number of times that each fault was injected.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<Fault, u64> {
        self.faults.lock().expect("no holder panics").clone()
    }
}

#[derive(Debug)]
enum Backend {
    Directory(PathBuf),
    Upstream(SocketAddr),
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
    /// Serves the files of a directory, with ranges and entity tags.
    ///
    /// # Panics
    /// If no port is free.
    #[must_use]
    pub fn serve_directory(directory: &Path, behavior: Behavior) -> Self {
        Self::start(Backend::Directory(directory.to_owned()), behavior, 0)
    }

    /// Starts a proxy of another server; port 0 takes any free one.
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
                    // A client may close its connection at any time.
                    let _ = serve(stream, &shared).await;
                });
            }
        });
        Self { address, shared, runtime: Some(runtime) }
    }

    /// Returns the URL of a file.
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

struct Request {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default().trim_start_matches('/')
    }

    fn is_get(&self) -> bool {
        self.method == "GET"
    }
}

struct Response {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Response {
    fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new() }
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.headers.push((name.to_owned(), value.into()));
    }
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
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

async fn read_head(
    stream: &mut (impl AsyncBufReadExt + Unpin),
) -> io::Result<Option<(String, Vec<(String, String)>)>> {
    let mut first = String::new();
    if stream.read_line(&mut first).await? == 0 {
        return Ok(None);
    }
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    Ok(Some((first, headers)))
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> io::Result<Option<Request>> {
    let Some((first, headers)) = read_head(stream).await? else { return Ok(None) };
    let mut words = first.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let length = header(&headers, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(Some(Request { method: method.to_owned(), target: target.to_owned(), headers, body }))
}

/// Answers one request; `false` if the connection must not be used again.
async fn answer(stream: &mut BufReader<TcpStream>, request: &Request, shared: &Shared) -> io::Result<bool> {
    let (latency, fault) = choose(request, shared);
    tokio::time::sleep(latency).await;
    // From here on the client may have its answer and send the next request.
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

/// Chooses delay and fault of a request, by its number alone.
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

async fn respond(request: &Request, backend: &Backend, has_ranges: bool) -> io::Result<Response> {
    match backend {
        Backend::Directory(directory) => Ok(of_file(request, directory, has_ranges)),
        Backend::Upstream(address) => forward(request, *address, has_ranges).await,
    }
}

fn of_file(request: &Request, directory: &Path, has_ranges: bool) -> Response {
    if !request.is_get() && request.method != "HEAD" {
        return Response::status(405);
    }
    let path = directory.join(request.path());
    let Ok(metadata) = path.metadata().and_then(|metadata| Ok((metadata.len(), metadata.modified()?))) else {
        return Response::status(404);
    };
    let (length, modified) = metadata;
    let changed = modified.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let etag = format!("\"{length:x}-{changed:x}\"");
    if request.header("if-match").is_some_and(|wanted| wanted != etag) {
        return Response::status(412);
    }
    let mut response = Response::status(200);
    response.set("ETag", etag);
    response.set("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT");
    let range = request.header("range").filter(|_| has_ranges && request.is_get());
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (mut start, mut end) = (0, length);
    if let Some((from, to)) = range {
        start = from.parse().unwrap_or(0);
        end = to.parse().map_or(length, |last: u64| last.saturating_add(1).min(length));
        if start >= end {
            return Response::status(416);
        }
        response.status = 206;
        response.set("Content-Range", format!("bytes {start}-{}/{length}", end - 1));
    }
    if request.is_get() {
        let mut body = vec![0; (end - start) as usize];
        let read = std::fs::File::open(&path).and_then(|file| file.read_exact_at(&mut body, start));
        if read.is_err() {
            return Response::status(404);
        }
        response.body = body;
    } else {
        response.set("Content-Length", length.to_string());
    }
    response
}

/// Forwards a request to the server; a response is read whole before it is passed on.
async fn forward(request: &Request, upstream: SocketAddr, has_ranges: bool) -> io::Result<Response> {
    let mut stream = TcpStream::connect(upstream).await?;
    let mut head = vec![format!("{} {} HTTP/1.1\r\n", request.method, request.target)];
    for (name, value) in &request.headers {
        let is_hop = name.eq_ignore_ascii_case("connection");
        if !is_hop && (has_ranges || !name.eq_ignore_ascii_case("range")) {
            head.push(format!("{name}: {value}\r\n"));
        }
    }
    head.push("Connection: close\r\n\r\n".to_owned());
    let head = head.concat();
    stream.write_all(&[head.as_bytes(), &request.body].concat()).await?;
    let mut stream = BufReader::new(stream);
    let (first, headers) = read_head(&mut stream).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(502);
    let mut body = Vec::new();
    if request.method != "HEAD" {
        stream.read_to_end(&mut body).await?;
    }
    Ok(Response { status, headers, body })
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
