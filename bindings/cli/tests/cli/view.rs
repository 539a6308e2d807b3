//! Tests `dflop view` over HTTP: answers, rejections, and shutdown.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::media::{jpeg, wav};
use dflop_tests::tar::TarBytes;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::command::{command, dflop, text};

const EVIL: &str = "<script>alert(1)<_script>";

/// A server started by the command, ended when this value is dropped.
pub(crate) struct View {
    child: Child,
    port: u16,
    /// Page path with the token.
    path: String,
    samples: u64,
    skipped: u64,
}

pub(crate) struct Reply {
    status: u16,
    head: String,
    pub(crate) body: Vec<u8>,
}

impl View {
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut child = command(&[&["view", "--json"], args].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line).expect("a line");
        let serving: Value = serde_json::from_str(&line).expect("an object");
        let url = serving["url"].as_str().expect("an address");
        let (port, path) =
            url.strip_prefix("http://127.0.0.1:").and_then(|rest| rest.split_once('/')).expect("a port");
        let number = |name: &str| serving[name].as_u64().expect("a number");
        let (samples, skipped) = (number("samples"), number("skipped"));
        Self { child, port: port.parse().expect("a number"), path: format!("/{path}"), samples, skipped }
    }

    /// Sends a request with these lines and returns the reply.
    fn send(&self, request: &str) -> Reply {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        write!(stream, "{request}\r\nConnection: close\r\n\r\n").expect("it is sent");
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).expect("it is answered");
        let end = reply.windows(4).position(|four| four == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(reply[..end].to_vec()).expect("text").to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Reply { status, head, body: reply[end + 4..].to_vec() }
    }

    fn get_with(&self, path: &str, headers: &str) -> Reply {
        let (root, port) = (&self.path, self.port);
        self.send(&format!("GET {root}{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}{headers}"))
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.get_with(path, "")
    }

    fn json(&self, path: &str) -> Value {
        let reply = self.get(path);
        assert_eq!(reply.status, 200, "{path}: {}", String::from_utf8_lossy(&reply.body));
        serde_json::from_slice(&reply.body).expect("JSON")
    }

    fn keys(&self, query: &str) -> Vec<String> {
        let answer = self.json(&format!("samples?{query}"));
        let samples = answer["samples"].as_array().expect("a list").iter();
        samples.map(|sample| sample["key"].as_str().expect("a key").to_owned()).collect()
    }

    /// Ends the server as Ctrl-C does; returns the exit status.
    fn interrupt(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), Signal::INT).expect("it runs");
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a shard with a conversation, a clip, a name and a text that are markup, a page, and a bad image.
fn shard(directory: &std::path::Path) -> String {
    let chat = br#"{"images": ["0.jpg"], "conversations": [
        {"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "<b>A kite</b>"}]}"#;
    let tar = TarBytes::new()
        .file("a.0.jpg", &jpeg(64, 48, 1))
        .file("a.json", chat)
        .file("b.wav", &wav(16_000, 8_000))
        .file(&format!("{EVIL}.txt"), b"<img src=x onerror=alert(1)>")
        .file("page.html", b"<script>alert(1)</script>")
        .file("page.txt", b"a page")
        .file("z.jpg", b"no image");
    let path = directory.join("shard-000.tar");
    std::fs::write(&path, tar.finish()).expect("the directory can be written");
    text(directory).to_owned()
}

#[test]
fn callers_without_the_token_hold_no_connection_that_others_need() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let view = View::start(&[&shard(directory.path())]);
    let connect = || TcpStream::connect(("127.0.0.1", view.port)).expect("it listens");
    let mut callers: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    let started = Instant::now();
    for _ in 0..3 {
        assert_eq!(view.get("summary").status, 200);
    }
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    // Neither a byte from time to time nor requests without the token hold a connection.
    let mut slow = callers.pop().expect("a caller");
    let mut wrong = connect();
    let ended = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
        let mut bytes = [0; 4096];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            }
        }
    };
    let started = Instant::now();
    let (mut is_slow_ended, mut is_wrong_ended) = (false, false);
    while !(is_slow_ended && is_wrong_ended) {
        assert!(started.elapsed() < Duration::from_secs(20), "{is_slow_ended} {is_wrong_ended}");
        let _ = slow.write_all(b"G");
        let _ = write!(wrong, "GET /none/ HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", view.port);
        std::thread::sleep(Duration::from_millis(500));
        is_slow_ended = is_slow_ended || ended(&mut slow);
        is_wrong_ended = is_wrong_ended || ended(&mut wrong);
    }
    // A connection that has sent the token stays for longer.
    let mut kept = connect();
    let mut ask = || {
        write!(kept, "GET {}summary HTTP/1.1\r\nHost: 127.0.0.1:{}\r\n\r\n", view.path, view.port)
            .expect("sent");
        kept.read(&mut [0; 4096]).expect("it is answered")
    };
    assert!(ask() > 0);
    std::thread::sleep(Duration::from_secs(6));
    assert!(ask() > 0);
}

#[test]
fn samples_are_sorted_filtered_and_shown() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let view = View::start(&[&shard(directory.path())]);
    assert_eq!((view.samples, view.skipped), (4, 1));
    assert_eq!(view.keys(""), ["a", "b", EVIL, "page"]);
    let by_cost = view.keys("sort=cost_ns&descending=1");
    assert_eq!(by_cost.len(), 4);
    let costs: Vec<u64> = view.json("samples?sort=cost_ns&descending=1")["samples"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|sample| sample["module_ns"].as_array().expect("times").iter().filter_map(Value::as_u64).sum())
        .collect();
    assert!(costs.is_sorted_by(|a, b| a >= b) && costs[0] > 0, "{costs:?}");
    assert_eq!(view.keys("key=SCRIPT"), [EVIL]);
    assert_eq!(view.keys("field=wav"), ["b"]);
    assert_eq!(view.keys("pixels_min=1"), ["a"]);
    assert_eq!(view.keys("offset=1&limit=1"), ["b"]);
    assert_eq!(view.keys("text=A+KITE"), ["a"]);
    assert_eq!(view.keys("text=a&field=txt"), [EVIL, "page"]);
    assert_eq!(view.keys("text=conversations"), [""; 0]);
    let searched = view.json("samples?text=page&sort=cost_ns&descending=1");
    assert_eq!((&searched["count"], &searched["searched"]), (&1.into(), &4.into()));
    assert_eq!(view.json("samples")["searched"], Value::Null);
    let counted = view.json("histogram?sort=tokens");
    let counts = counted["counts"].as_array().expect("counts").iter().filter_map(Value::as_u64);
    assert_eq!(counts.sum::<u64>() + counted["zeros"].as_u64().expect("zeros"), 4);
    let skipped = view.json("skipped");
    assert_eq!(skipped["skipped"][0]["key"], "z");
    assert!(skipped["skipped"][0]["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
    let [reason, count] = &skipped["reasons"][0].as_array().expect("a pair")[..] else { panic!("{skipped}") };
    assert_eq!(count, 1);
    let chosen = reason.as_str().expect("a text").replace(' ', "+").replace('`', "%60");
    assert_eq!(view.json(&format!("skipped?reason={chosen}"))["count"], 1);
    assert_eq!(view.json("skipped?reason=other")["count"], 0);
    let chat = view.json("sample/0");
    assert_eq!(chat["content"]["turns"][0]["parts"][0]["field"], 0);
    assert_eq!(chat["content"]["turns"][1]["parts"][0]["text"], "<b>A kite</b>");
    assert_eq!(chat["content"]["fields"][0]["type"], "image/jpeg");
    assert_eq!(view.json("summary")["samples"], 4);
}

#[test]
fn media_are_served_by_their_bytes_and_nothing_else_is_shown() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let view = View::start(&[&shard(directory.path())]);
    let image = view.get("sample/0/field/0");
    assert_eq!(image.body, jpeg(64, 48, 1));
    assert!(
        image.head.contains("content-type: image/jpeg") && image.head.contains("nosniff"),
        "{}",
        image.head
    );
    for small in ["sample/0/thumbnail/0", "sample/0/rendered/0"] {
        assert!(view.get(small).body.starts_with(&[0xFF, 0xD8]), "{small}");
    }
    let page = view.get("sample/3/field/0");
    assert_eq!(page.body, b"<script>alert(1)</script>");
    for expected in ["content-type: application/octet-stream", "content-disposition: attachment", "sandbox"] {
        assert!(page.head.contains(expected), "{}", page.head);
    }
    let clip = view.get("sample/1/field/0").body;
    let part = view.get_with("sample/1/field/0", "\r\nRange: bytes=4-7");
    assert_eq!((part.status, &part.body[..]), (206, &clip[4..8]));
    assert!(part.head.contains(&format!("content-range: bytes 4-7/{}", clip.len())), "{}", part.head);
    assert_eq!(view.get_with("sample/1/field/0", "\r\nRange: bytes=999999999-").status, 416);
    assert_eq!(view.get_with("sample/1/field/0", "\r\nRange: bytes=0-1\r\nIf-Range: \"x\"").status, 200);
    for missing in ["sample/4", "sample/0/field/9", "sample/9/field/0", "sample/0/field/..%2f", "../", "x"] {
        assert_eq!(view.get(missing).status, 404, "{missing}");
    }
    assert_eq!(view.get("samples?sort=color").status, 400);
    assert_eq!(view.get("sample/1/rendered/0").status, 422);
    let sign = view.get("sample/1/thumbnail/0");
    assert!(sign.status == 200 && sign.head.contains("content-type: image/svg+xml"), "{}", sign.head);
}

#[test]
fn only_this_machine_with_the_token_is_answered() {
    let data = TempDataset::new(1, 4, Compression::Gzip);
    let view = View::start(&[&data.pattern()]);
    let (root, port) = (view.path.clone(), view.port);
    let status = |line: &str, host: &str| view.send(&format!("{line} HTTP/1.1\r\nHost: {host}")).status;
    let own = format!("127.0.0.1:{port}");
    assert_eq!(status(&format!("GET {root}"), &own), 200);
    assert_eq!(status(&format!("GET {root}"), &format!("localhost:{port}")), 200);
    assert_eq!(status("GET /", &own), 404);
    assert_eq!(status("GET /00000000000000000000000000000000/", &own), 404);
    assert_eq!(status(&format!("GET {root}"), &format!("attacker.example:{port}")), 403);
    assert_eq!(status(&format!("GET {root}"), "127.0.0.1"), 403);
    assert_eq!(status(&format!("GET http://attacker.example{root}"), &own), 403);
    assert_eq!(view.send(&format!("GET {root} HTTP/1.1\r\nHost: {own}\r\nHost: {own}")).status, 403);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(status(&format!("{method} {root}"), &own), 405, "{method}");
    }
    let page = view.get("");
    for expected in ["default-src 'none'", "frame-ancestors 'none'", "no-referrer", "no-store", "nosniff"] {
        assert!(page.head.contains(expected), "{}", page.head);
    }
    let head = view.send(&format!("HEAD {root} HTTP/1.1\r\nHost: {own}"));
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert!(head.head.contains(&format!("content-length: {}", page.body.len())), "{}", head.head);
    // The thumbnails for a compressed shard come from the decompressed copy.
    assert_eq!(view.json("sample/0")["sample"]["key"], data.keys[0]);
    assert_eq!(view.interrupt(), Some(0));
}

#[test]
fn a_port_in_use_is_an_error_and_two_views_have_different_tokens() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let (one, other) = (View::start(&[&data.pattern()]), View::start(&[&data.pattern()]));
    assert!(one.path != other.path && one.path.len() == 34);
    let run = dflop(&["view", &data.pattern(), "--port", &one.port.to_string()]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains(&format!("could not listen on 127.0.0.1:{}", one.port)), "{}", run.stderr);
}
