//! Checks the requests that servers receive, and that odd but readable answers are read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_loader::Loader;
use dflop_loader::decode::Decode;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards_in;
use dflop_loader::store::{Backoff, RetryConfig, ShardCache, Stores, StoresBuilder};
use dflop_tests::loaders::{balanced, plain};
use dflop_tests::odd_server::{OddRequest, OddServer, chunked, response};
use dflop_tests::tar::TarBytes;
use futures::{StreamExt, TryStreamExt};

const SAMPLES: usize = 40;

/// Creates a shard with texts, all with the same length whatever the word is.
fn shard(word: &str) -> Vec<u8> {
    let mut tar = TarBytes::new();
    for number in 0..SAMPLES {
        tar = tar.file(&format!("{number:03}.txt"), format!("{word} {number:03}").as_bytes());
    }
    tar.finish()
}

fn stores() -> StoresBuilder {
    let backoff = Backoff { first: Duration::from_millis(1), most: Duration::from_millis(20) };
    Stores::builder().retry(RetryConfig { retry_seconds: 20, backoff }).chunk_bytes(4_096)
}

/// Returns the keys and texts at a URL, or the error.
fn texts(stores: &Stores, url: &str) -> Result<Vec<String>, String> {
    let shards = expand_shards_in(&[url], &stores.into()).map_err(|error| error.to_string())?;
    let output = plain(shards, 1);
    match output.error {
        Some(error) => Err(error),
        None => Ok(output.samples.iter().map(|(key, fields)| format!("{key} {fields:?}")).collect()),
    }
}

fn read_locally(bytes: &[u8]) -> Vec<String> {
    let file = tempfile::Builder::new().suffix(".tar").tempfile().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    texts(&Stores::default(), file.path().to_str().unwrap()).unwrap()
}

/// Answers as a server without oddities does.
fn served(request: &OddRequest, bytes: &[u8], headers: &[&str]) -> Vec<u8> {
    let range = request.requested_range(bytes);
    let is_part = request.header("range").is_some() && request.method == "GET";
    let status = if is_part { "HTTP/1.1 206 Partial Content" } else { "HTTP/1.1 200 OK" };
    let part = &bytes[range.clone()];
    let mut lines = vec![format!("Content-Length: {}", part.len())];
    if is_part {
        lines.push(format!("Content-Range: bytes {}-{}/{}", range.start, range.end - 1, bytes.len()));
    }
    let lines: Vec<&str> = lines.iter().map(String::as_str).chain(headers.iter().copied()).collect();
    response(request, status, &lines, part)
}

#[test]
fn a_server_is_asked_for_exactly_the_url_with_its_user() {
    let bytes = shard("plain");
    let expected = read_locally(&bytes);
    let server = OddServer::start({
        let bytes = bytes.clone();
        move |request| match request.header("authorization") {
            // alice:p@w/1
            Some("Basic YWxpY2U6cEB3LzE=") => served(request, &bytes, &[]),
            Some(_) => response(request, "HTTP/1.1 403 Forbidden", &["Content-Length: 0"], b""),
            None if request.target.contains("open") => served(request, &bytes, &[]),
            None => response(request, "HTTP/1.1 401 Unauthorized", &["Content-Length: 0"], b""),
        }
    });
    let host = server.host();
    for target in [
        "/open/resolve/refs%2Fpr%2F1/a.tar",
        "/open//d//a.tar",
        "/open/a%20b%25.tar?download=true&x=%2F&y=a+b",
        "/?open=1&shard=3",
    ] {
        assert_eq!(texts(&stores().build().unwrap(), &format!("http://{host}{target}")).unwrap(), expected);
        let requests = server.requests();
        assert_eq!(requests.last().unwrap().target, target);
        assert!(requests.iter().all(|request| request.header("authorization").is_none()));
    }
    let url = format!("http://alice:p%40w%2F1@{host}/a.tar");
    assert_eq!(texts(&stores().build().unwrap(), &url).unwrap(), expected);
    for user in ["", "alice:wrong@"] {
        let started = server.requests().len();
        let error = texts(&stores().build().unwrap(), &format!("http://{user}{host}/a.tar")).unwrap_err();
        assert!(error.contains("40") && !error.contains("wrong"), "{error}");
        assert!(server.requests().len() - started <= 2, "it is not tried again");
    }
}

/// Answers a request for the bytes.
type Mode = fn(&OddRequest, &[u8]) -> Vec<u8>;

#[test]
fn answers_that_do_not_tell_a_length_are_read_to_their_end() {
    let bytes = shard("plain");
    let expected = read_locally(&bytes);
    let modes: [(&str, Mode); 7] = [
        ("chunked without ranges", |request, bytes| {
            response(request, "HTTP/1.1 200 OK", &["Transfer-Encoding: chunked"], &chunked(bytes))
        }),
        ("HTTP/1.0", |request, bytes| response(request, "HTTP/1.0 200 OK", &["Server: old"], bytes)),
        ("chunked parts", |request, bytes| {
            let range = request.requested_range(bytes);
            if request.method == "HEAD" || request.header("range").is_none() {
                return response(
                    request,
                    "HTTP/1.1 200 OK",
                    &["Transfer-Encoding: chunked"],
                    &chunked(bytes),
                );
            }
            let part = format!("Content-Range: bytes {}-{}/{}", range.start, range.end - 1, bytes.len());
            let lines = ["Transfer-Encoding: chunked", &part];
            response(request, "HTTP/1.1 206 Partial Content", &lines, &chunked(&bytes[range]))
        }),
        ("parts of an unknown total", |request, bytes| {
            let range = request.requested_range(bytes);
            if request.method == "HEAD" || request.header("range").is_none() {
                return response(
                    request,
                    "HTTP/1.1 200 OK",
                    &["Transfer-Encoding: chunked"],
                    &chunked(bytes),
                );
            }
            let part = format!("Content-Range: bytes {}-{}/*", range.start, range.end - 1);
            let length = format!("Content-Length: {}", range.len());
            response(request, "HTTP/1.1 206 Partial Content", &[&part, &length], &bytes[range])
        }),
        ("HEAD without a length", |request, bytes| match request.method.as_str() {
            "HEAD" => response(request, "HTTP/1.1 200 OK", &["Content-Length: 0"], b""),
            _ => served(request, bytes, &[]),
        }),
        ("HEAD refused", |request, bytes| match request.method.as_str() {
            "HEAD" => response(request, "HTTP/1.1 501 Not Implemented", &["Content-Length: 0"], b""),
            _ => served(request, bytes, &[]),
        }),
        ("odd dates", |request, bytes| {
            served(request, bytes, &["Last-Modified: yesterday", "ETag: \"\u{fc}\""])
        }),
    ];
    for (name, mode) in modes {
        let server = OddServer::start({
            let bytes = bytes.clone();
            move |request| mode(request, &bytes)
        });
        let url = format!("http://{}/a.tar", server.host());
        assert_eq!(texts(&stores().build().unwrap(), &url).as_ref(), Ok(&expected), "{name}");
        let directory = tempfile::tempdir().unwrap();
        let options =
            IndexOptions { directory: Some(directory.path().to_owned()), ..IndexOptions::default() };
        let shards = expand_shards_in(&[&url], &(&stores().build().unwrap()).into()).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &options).unwrap());
        assert_eq!(index.len(), SAMPLES as u64, "{name}");
        assert_eq!(balanced(&index, 3).error, None, "{name}");
    }
}

#[test]
fn versions_differ_only_where_a_validator_contradicts() {
    let bytes = shard("plain");
    let expected = read_locally(&bytes);
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let with_headers = |headers: fn(usize) -> Vec<String>| {
        let (bytes, count) = (bytes.clone(), count.clone());
        OddServer::start(move |request| {
            let number = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let headers = headers(number);
            served(request, &bytes, &headers.iter().map(String::as_str).collect::<Vec<_>>())
        })
    };
    let read =
        |server: &OddServer| texts(&stores().build().unwrap(), &format!("http://{}/a.tar", server.host()));
    let weak = with_headers(|number| vec![format!("ETag: {}\"a\"", if number % 2 == 0 { "W/" } else { "" })]);
    assert_eq!(read(&weak).unwrap(), expected);
    let now = with_headers(|number| {
        let now = format!("Thu, 01 Jan 2026 00:{:02}:00 GMT", number % 60);
        vec![format!("Date: {now}"), format!("Last-Modified: {now}")]
    });
    assert_eq!(read(&now).unwrap(), expected);
    let dated = with_headers(|number| {
        vec!["ETag: \"a\"".into(), format!("Last-Modified: Thu, 01 Jan 2026 00:{:02}:00 GMT", number % 60)]
    });
    assert_eq!(read(&dated).unwrap(), expected);
    let tagged = with_headers(|number| vec![format!("ETag: \"{number}\"")]);
    let error = read(&tagged).unwrap_err();
    assert!(error.contains("its entity tag was"), "{error}");
}

#[test]
fn a_store_that_restarts_is_waited_for_and_what_is_permanent_is_not() {
    let bytes = shard("plain");
    let expected = read_locally(&bytes);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{free}/a.tar");
    let reading = std::thread::spawn(move || texts(&stores().build().unwrap(), &url));
    std::thread::sleep(Duration::from_millis(600));
    let listener = std::net::TcpListener::bind(free).unwrap();
    let _server = OddServer::start_on(listener, move |request| served(request, &bytes, &[]));
    assert_eq!(reading.join().unwrap().unwrap(), expected);
    for status in ["400 Bad Request", "401 Unauthorized", "403 Forbidden", "404 Not Found", "410 Gone"] {
        let server = OddServer::start(move |request| {
            response(request, &format!("HTTP/1.1 {status}"), &["Content-Length: 0"], b"")
        });
        let started = Instant::now();
        let error =
            texts(&stores().build().unwrap(), &format!("http://{}/a.tar", server.host())).unwrap_err();
        assert!(error.contains(status), "{error}");
        assert!(server.requests().len() <= 2 && started.elapsed() < Duration::from_secs(10), "{status}");
    }
    let server =
        OddServer::start(|request| response(request, "HTTP/1.1 302 Found", &["Location: /again"], b""));
    let error = texts(&stores().build().unwrap(), &format!("http://{}/a.tar", server.host())).unwrap_err();
    assert!(error.contains("redirections end after ten"), "{error}");
    assert!(server.requests().len() <= 11, "a loop is left once");
    // No TLS, where the URL asks for it.
    let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/a.tar", plain.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in plain.incoming().flatten() {
            let _ = std::io::Read::read(&mut stream, &mut [0; 512]);
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let error = texts(&stores().build().unwrap(), &url).unwrap_err();
    assert!(error.contains("TLS is refused"), "{error}");
}

#[test]
fn pages_and_other_formats_are_named() {
    for (body, name) in [
        (&b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"[..], "an HTML page"),
        (b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", "an XML document"),
        (b"{\"error\": \"unauthorized\"}", "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a pointer of Git LFS"),
        (b"PK\x03\x04\x14\0\0\0", "a zip archive"),
        (b"\x04\x22\x4d\x18\x64\x40", "lz4"),
    ] {
        let server = OddServer::start(move |request| served(request, body, &[]));
        let url = format!("http://{}/a.tar", server.host());
        let shards = expand_shards_in(&[url], &(&stores().build().unwrap()).into()).unwrap();
        let loader = Loader::builder(shards).decode(Decode::Raw).build().unwrap();
        let error = dflop_tests::run(loader.stream().try_collect::<Vec<_>>()).unwrap_err().to_string();
        assert!(error.contains(name) && error.starts_with("no sample was found"), "{error}");
    }
}

/// Shards with equal lengths and validators that differ only in the query.
#[test]
fn shards_that_differ_in_their_query_are_never_taken_for_each_other() {
    let shards = ["red", "tan", "sky"].map(shard);
    let expected: Vec<String> = shards.iter().flat_map(|bytes| read_locally(bytes)).collect();
    let server = OddServer::start(move |request| {
        let number =
            request.target.split_once("shard=").and_then(|(_, rest)| rest[..1].parse::<usize>().ok());
        served(
            request,
            &shards[number.unwrap_or(0)],
            &["ETag: \"same\"", "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"],
        )
    });
    let url = |query: &str| format!("http://{}/get?{query}", server.host());
    let directory = tempfile::tempdir().unwrap();
    let cache = ShardCache { directory: directory.path().join("cache"), bytes_max: 64 << 20 };
    for _pass in 0..2 {
        let cached = stores().cache(cache.clone()).build().unwrap();
        assert_eq!(texts(&cached, &url("shard={0..2}")).unwrap(), expected);
        let swapped = texts(&cached, &url("shard={2..0}")).unwrap();
        assert_eq!(swapped[..SAMPLES], expected[2 * SAMPLES..]);
    }
    let before = server.requests().len();
    let signed = texts(&stores().cache(cache).build().unwrap(), &url("shard=1&X-Amz-Signature=new")).unwrap();
    assert_eq!(signed, expected[SAMPLES..2 * SAMPLES]);
    assert!(server.requests()[before..].iter().all(|request| request.method == "HEAD"), "it is in the cache");
    // Each list has a separate index.
    let indexed = |query: &str| {
        let shards = expand_shards_in(&[url(query)], &(&stores().build().unwrap()).into()).unwrap();
        let options =
            IndexOptions { directory: Some(directory.path().join("index")), ..IndexOptions::default() };
        let index = Arc::new(Index::open_or_build(shards, &options).unwrap());
        let read = dflop_tests::run(dflop_loader::read_samples(&index, &[0], 100)).unwrap();
        (
            index.path().unwrap().to_owned(),
            String::from_utf8(read[0].fields[0].payload.clone().unwrap().to_vec()).unwrap(),
        )
    };
    let (first, second) = (indexed("shard=0"), indexed("shard=1"));
    assert_eq!((first.1.as_str(), second.1.as_str()), ("red 000", "tan 000"));
    assert_ne!(first.0, second.0);
}

#[test]
fn a_state_of_one_query_is_refused_by_another_and_taken_with_a_fresh_signature() {
    let bytes = shard("same");
    let server = OddServer::start(move |request| served(request, &bytes, &["ETag: \"same\""]));
    let loader = |query: &str| {
        let url = format!("http://{}/get?{query}", server.host());
        let shards = expand_shards_in(&[url], &(&stores().build().unwrap()).into()).unwrap();
        Loader::builder(shards).decode(Decode::Raw).batch_size(4)
    };
    let begun = loader("shard=0&sig=old").build().unwrap();
    dflop_tests::run(begun.stream().take(3).try_for_each(async |_| Ok(()))).unwrap();
    let state = begun.state().unwrap();
    let rest = |query: &str| {
        let resumed = loader(query).restore(state.clone()).build().map_err(|error| error.to_string())?;
        let batches = dflop_tests::run(resumed.stream().try_collect::<Vec<_>>());
        let batches = batches.map_err(|error| error.to_string())?;
        Ok::<_, String>(batches.iter().map(|batch| batch.samples.len()).sum::<usize>())
    };
    assert_eq!(rest("shard=0&sig=new").unwrap(), SAMPLES - 12);
    let error = rest("shard=1&sig=old").unwrap_err();
    assert!(error.contains("state does not fit"), "{error}");
}
