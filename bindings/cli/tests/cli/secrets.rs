//! Tests that no command shows or writes the credentials in a URL, regardless of the URL's faults.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::fault_server::{Behavior, FaultServer};
use serde_json::json;
use tempfile::TempDir;

use crate::command::{Run, command, text};
use crate::documents::commands;
use crate::view::View;

const SECRET: &str = "CANARY";

/// URLs that are rejected, or whose server cannot be reached, with a secret each.
const URLS: [&str; 44] = [
    "http://u:CANARY@127.0.0.1:9/n.tar",
    "http://CANARY@127.0.0.1:9/n.tar",
    "http://u:CAN%2FCANARY@127.0.0.1:9/n.tar?sig=CANARY#CANARY",
    "http://u:CAN/CANARY@127.0.0.1:9/n.tar",
    "http://u:CAN@CANARY@127.0.0.1:9/n.tar",
    "http://u:CAN?CANARY@127.0.0.1:9/n.tar",
    "http://u:`CANARY`@127.0.0.1:9/n.tar",
    "http://127.0.0.1:9/n.tar?a=`CANARY",
    "http://127.0.0.1:9/n.tar?a='CANARY'b",
    "http://127.0.0.1:9/n.tar?a=\"CANARY",
    "http://127.0.0.1:9/n.tar?a=\\CANARY",
    "http://127.0.0.1:9/n.tar?a= CANARY",
    "http://127.0.0.1:9/a b.tar?sig=CANARY x CANARY",
    "http://127.0.0.1:9/n.tar;sig=CANARY",
    "http://127.0.0.1:9/n.tar?sig=1::http://u:CANARY@127.0.0.1:9/n.tar",
    "http://127.0.0.1:9/{a,b?sig=CANARY",
    "http://127.0.0.1:9/{000..001}.tar?sig=CANARY",
    "http://u:CANARY@127.0.0.1:9/d/",
    "http://u:CANARY@127.0.0.1:x/n.tar",
    "http://u:CANARY@[::1/n.tar",
    "http://u:CANARY@",
    "HTTP://u:CANARY@h/n.tar?sig=CANARY",
    "Https://h/n.tar?sig=CANARY",
    "http:/u:CANARY@h/n.tar",
    "http:u:CANARY@h/n.tar?sig=CANARY",
    "http:///u:CANARY@h/n.tar",
    "http:\\\\u:CANARY@h\\n.tar",
    " http://u:CANARY@h/n.tar",
    "http%3A//u:CANARY@h/n.tar",
    "//u:CANARY@h/n.tar",
    "u:CANARY@h/n.tar",
    "h/n.tar?X-Amz-Signature=CANARY",
    "s3:/k:CANARY@b/n.tar",
    "s3://k:se/CANARY@b//n.tar",
    "s3:///n.tar?X-Amz-Signature=CANARY",
    "s3://b//n.tar?X-Amz-Signature=CANARY",
    "s3://b/../n.tar?X-Amz-Signature=CANARY",
    "az://c/n.tar?sv=1&sig=CANARY",
    "abfss://c@/n.tar?sig=CANARY",
    "gs:///n.tar?X-Goog-Signature=CANARY",
    "ftp://u:CANARY@h/n.tar?sig=CANARY",
    "file:///none/n.tar?sig=CANARY",
    "other://u:CANARY@h/n.tar?sig=CANARY",
    "pipe:curl http://u:CANARY@h/n.tar?sig=CANARY",
];

/// Arguments for each command that accepts a name: `URL` is replaced, `IN` is the input directory. Files are
/// written below the current directory.
const COMMANDS: [&[&str]; 41] = [
    &["list", "URL", "--set", "store.retry_seconds=0"],
    &["list", "URL", "--set", "store.retry_seconds=0", "--json"],
    &["list", "IN/list.json", "--set", "store.retry_seconds=0"],
    &["list", "IN/list.json", "--set", "store.retry_seconds=0", "--set", "store.allow=outside"],
    &[
        "stream",
        "URL",
        "--set",
        "store.retry_seconds=0",
        "--decode",
        "raw",
        "--state-out",
        "state.json",
        "--json",
    ],
    &["stream", "URL", "--set", "store.retry_seconds=0", "--decode", "raw", "--set", "store.cache=cache"],
    &["index", "URL", "--set", "store.retry_seconds=0", "--json"],
    &["index", "URL", "--set", "store.retry_seconds=0", "--out", "index"],
    &["stats", "URL", "--set", "store.retry_seconds=0", "--report", "stats.html"],
    &["view", "URL", "--set", "store.retry_seconds=0"],
    &[
        "order",
        "URL",
        "--set",
        "store.retry_seconds=0",
        "--global-batch-size",
        "2",
        "--dp-size",
        "1",
        "--report",
        "o.json",
    ],
    &[
        "order",
        "--mix",
        "1=URL",
        "--set",
        "store.retry_seconds=0",
        "--global-batch-size",
        "2",
        "--dp-size",
        "1",
        "--json",
    ],
    &["order", "--mix", "x=URL", "--global-batch-size", "2", "--dp-size", "1"],
    &["order", "--mix", "URL", "--global-batch-size", "2", "--dp-size", "1"],
    &[
        "order",
        "--mix",
        "IN/mixture.json",
        "--set",
        "store.retry_seconds=0",
        "--global-batch-size",
        "2",
        "--dp-size",
        "1",
    ],
    &["order", "IN/a.tar", "--global-batch-size", "2", "--dp-size", "1", "--resume", "URL"],
    &[
        "order",
        "IN/a.tar",
        "--global-batch-size",
        "2",
        "--dp-size",
        "1",
        "--split",
        "x",
        "--set",
        "index.splits=URL",
    ],
    &[
        "batches",
        "URL",
        "--set",
        "store.retry_seconds=0",
        "--global-batch-size",
        "2",
        "--dp-size",
        "1",
        "--tokenizer",
        "URL",
    ],
    &["simulate", "URL", "--set", "store.retry_seconds=0", "--global-batch-size", "2", "--dp-size", "1"],
    &["plan", "URL", "--set", "store.retry_seconds=0", "--gpus", "8", "--global-batch-size", "8"],
    &["plan", "--shapes", "URL", "--gpus", "8", "--global-batch-size", "8"],
    &["balance", "--instance", "URL", "--dp", "2"],
    &["pack", "URL", "--out", "packed"],
    &["pack", "IN/manifest.jsonl", "--out", "URL/"],
    &["pack", "IN/manifest.jsonl", "--out", "packed", "--json"],
    &["train", "URL"],
    &["train", "IN/train.toml", "--report", "train.html", "--checkpoints", "states", "--json"],
    &["train", "IN/train.toml", "--check"],
    &["profile", "--model", "URL"],
    &["memory", "--model", "URL", "--tokens", "8,8"],
    &["models", "--model", "URL"],
    &["describe", "URL"],
    &["accuracy", "--profile", "URL", "--observed", "URL"],
    &["report", "URL"],
    &["top", "URL", "--once"],
    &["demo", "URL"],
    &["list", "--set", "store.read=URL"],
    &["list", "--URL"],
    &["URL"],
    &["completions", "bash"],
    &["man", "list"],
];

/// Input directory and output directory for a run.
struct Place {
    inputs: TempDir,
    outputs: TempDir,
}

impl Place {
    fn new(url: &str) -> Self {
        let inputs = tempfile::tempdir().expect("a temporary directory");
        let outputs = tempfile::tempdir().expect("a temporary directory");
        let write = |name: &str, text: &str| {
            std::fs::write(inputs.path().join(name), text).expect("the file is written");
        };
        let list = json!({"wids_version": 1, "shardlist": [{"url": url}]});
        write("list.json", &list.to_string());
        write("mixture.json", &json!({"data_sets": [{"shards": [url]}]}).to_string());
        write("manifest.jsonl", &format!("{}\n", json!({"image": url, "text": "a"})));
        write(
            "train.toml",
            &format!("[model]\nname = \"none\"\n[data]\nshards = [{url:?}]\nglobal_batch_size = 2\n"),
        );
        Self { inputs, outputs }
    }

    fn run(&self, args: &[&str], url: &str) -> Run {
        let inputs = text(self.inputs.path());
        let args: Vec<String> = args.iter().map(|arg| arg.replace("IN/", &format!("{inputs}/"))).collect();
        let args: Vec<String> = args.iter().map(|arg| arg.replace("URL", url)).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut run = command(&args);
        run.current_dir(self.outputs.path()).env("HOME", self.outputs.path());
        run.env("XDG_CACHE_HOME", self.outputs.path().join("home-cache")).env("HF_HUB_OFFLINE", "1");
        run.output().expect("the command starts").into()
    }

    /// Fails if the printed or written output of a run has the secret.
    fn check(&self, run: &Run, args: &[&str], url: &str) {
        assert!(run.status.is_some(), "{args:?} {url}: {run:?}");
        let shown = [&run.stdout, &run.stderr].into_iter().flat_map(|text| text.lines());
        let leaks: Vec<&str> = shown.filter(|line| line.contains(SECRET)).collect();
        assert!(leaks.is_empty(), "{args:?} {url}: {leaks:#?}");
        for file in files_below(self.outputs.path()) {
            let bytes = std::fs::read(&file).expect("the file is there");
            let is_leak = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
            assert!(!is_leak, "{args:?} {url}: {}", file.display());
        }
    }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).expect("the directory is there").flatten() {
        let path = entry.path();
        match entry.file_type().expect("it has a type") {
            kind if kind.is_dir() => files.extend(files_below(&path)),
            kind if kind.is_file() => files.push(path),
            _ => {}
        }
    }
    files
}

/// Runs every job on a few threads, because a process spends most time on its start.
fn on_threads<T: Send>(jobs: Vec<T>, run: impl Fn(T) + Sync) {
    let jobs = Mutex::new(jobs);
    let next = || jobs.lock().expect("no holder panics").pop();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(job) = next() {
                    run(job);
                }
            });
        }
    });
}

#[test]
fn every_command_is_looked_at() {
    for name in commands() {
        assert!(COMMANDS.iter().any(|args| args[0] == name), "`{name}` is not in the table");
    }
}

#[test]
fn no_command_shows_the_secret_of_a_url_that_it_cannot_read() {
    // All URLs with a single command, and all commands with some URLs.
    let is_taken = |command: usize, url: usize| command == 0 || (command * 7 + url).is_multiple_of(6);
    let pairs = (0..COMMANDS.len()).flat_map(|command| (0..URLS.len()).map(move |url| (command, url)));
    let jobs: Vec<_> = pairs.filter(|&(command, url)| is_taken(command, url)).collect();
    on_threads(jobs, |(command, url)| {
        let (args, url) = (COMMANDS[command], URLS[url]);
        // They have no option for how long a server is asked again.
        let is_retried = url.starts_with("http://") && ["train", "pack"].contains(&args[0]);
        // File names in the data, which nothing tells from other names.
        let is_bare =
            url.starts_with("//") || url.starts_with("u:") || url.starts_with("h/") || url.contains("%3A");
        let is_data = args.contains(&"IN/manifest.jsonl") && is_bare;
        if !is_retried && !is_data {
            let place = Place::new(url);
            place.check(&place.run(args, url), args, url);
        }
    });
}

#[test]
fn no_command_shows_or_writes_the_secret_of_a_url_that_it_reads() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    // A truncated shard leaves a record with the names of skipped samples.
    let bytes = std::fs::read(data.shard(1)).expect("the shard is there");
    std::fs::write(data.shard(1), &bytes[..bytes.len() * 2 / 3]).expect("the shard is cut");
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let url = |name: &str| {
        format!("{}?X-Amz-Signature=CANARY", server.url(name).replacen("://", "://alice:CANARY@", 1))
    };
    let both = url("shard-{000..001}.tar");
    let jobs: Vec<_> = COMMANDS.iter().filter(|args| !["train", "view"].contains(&args[0])).collect();
    on_threads(jobs, |args| {
        let place = Place::new(&both);
        let run = place.run(args, &both);
        place.check(&run, args, &both);
        if ["list", "stream", "index", "stats"].contains(&args[0]) && args[1] == "URL" {
            // The bad sample in the truncated shard is a failure in some commands.
            let is_read = run.status == Some(0) || run.stderr.contains("truncated");
            assert!(is_read, "{args:?}: {run:?}");
        }
    });
    let place = Place::new(&both);
    let index = place.outputs.path().join("index");
    let view = View::start(&[&both, "--set", &format!("index.directory={}", text(&index))]);
    for path in ["", "summary", "samples", "skipped", "sample/0"] {
        let body = String::from_utf8_lossy(&view.get(path).body).into_owned();
        assert!(!body.contains(SECRET), "{path}: {body}");
    }
}
