//! Runs an HTTP server whose answers the caller creates, byte by byte.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Request as it came.
#[derive(Debug, Clone)]
pub struct OddRequest {
    /// Method, such as `HEAD`.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// Names, in lower case, and values.
    pub headers: Vec<(String, String)>,
}

impl OddRequest {
    /// Returns a header value; the name is in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns the requested range of `bytes`, or all bytes without a range.
    #[must_use]
    pub fn requested_range(&self, bytes: &[u8]) -> std::ops::Range<usize> {
        let range = self.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let Some((start, last)) = range else { return 0..bytes.len() };
        let end = last.parse().map_or(bytes.len(), |last: usize| (last + 1).min(bytes.len()));
        start.parse().unwrap_or(0)..end
    }
}

/// Bytes that answer a request, from the status line to the end of the body; then the connection is closed.
type Answer = dyn Fn(&OddRequest) -> Vec<u8> + Send + Sync;

/// Server that runs until the process ends.
pub struct OddServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<OddRequest>>>,
}

impl OddServer {
    /// Starts on a free port.
    ///
    /// # Panics
    /// If no port is free.
    pub fn start(answer: impl Fn(&OddRequest) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::start_on(TcpListener::bind("127.0.0.1:0").expect("a port is free"), answer)
    }

    /// Starts on a port.
    ///
    /// # Panics
    /// If the socket has no address.
    pub fn start_on(
        listener: TcpListener,
        answer: impl Fn(&OddRequest) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("a bound socket has an address");
        let requests = Arc::<Mutex<Vec<OddRequest>>>::default();
        let (seen, answer): (_, Arc<Answer>) = (requests.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, answer) = (seen.clone(), answer.clone());
                // A client may close the connection at any time.
                std::thread::spawn(move || serve(stream, &seen, &*answer));
            }
        });
        Self { address, requests }
    }

    /// Returns the address as `HOST:PORT`.
    #[must_use]
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Returns the requests so far.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn requests(&self) -> Vec<OddRequest> {
        self.requests.lock().expect("no holder panics").clone()
    }
}

fn serve(mut stream: TcpStream, seen: &Mutex<Vec<OddRequest>>, answer: &Answer) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&bytes| bytes > 0)?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines.first()?.split(' ').map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let header = |line: &String| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_lowercase(), value.trim().to_owned()))
    };
    let request = OddRequest { method, target, headers: lines.iter().skip(1).filter_map(header).collect() };
    seen.lock().expect("no holder panics").push(request.clone());
    stream.write_all(&answer(&request)).ok()
}

/// Joins a status line, headers and a body; a `HEAD` response has no body.
#[must_use]
pub fn response(request: &OddRequest, status: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let lines: Vec<String> = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let head = format!("{status}\r\nConnection: close\r\n{}\r\n", lines.concat());
    let body = if request.method == "HEAD" { &[] } else { body };
    [head.as_bytes(), body].concat()
}

/// Encodes a body in chunks.
#[must_use]
pub fn chunked(body: &[u8]) -> Vec<u8> {
    let chunk = |part: &[u8]| [format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat();
    let mut chunks: Vec<u8> = body.chunks(700).flat_map(chunk).collect();
    chunks.extend(b"0\r\n\r\n");
    chunks
}
