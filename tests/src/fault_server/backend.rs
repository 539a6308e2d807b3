//! Backend of the server: a directory, or an upstream server.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::http::{Request, Response, read_head};

/// Origin of responses.
#[derive(Debug)]
pub(super) enum Backend {
    Directory(PathBuf),
    Upstream(SocketAddr),
}

/// Returns the backend response, without faults.
///
/// - `has_ranges`: whether ranges are regarded
pub(super) async fn respond(request: &Request, backend: &Backend, has_ranges: bool) -> io::Result<Response> {
    match backend {
        Backend::Directory(directory) => Ok(file_response(request, directory, has_ranges)),
        Backend::Upstream(address) => forward(request, *address, has_ranges).await,
    }
}

fn file_response(request: &Request, directory: &Path, has_ranges: bool) -> Response {
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

/// Forwards a request to the server; a response is read completely before it is passed on.
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
