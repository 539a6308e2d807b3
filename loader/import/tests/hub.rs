use super::*;
use dflop_loader::shard::Shard;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Mutex;

/// Commit behind `main`, and behind `refs%2Fconvert%2Fparquet`.
const COMMITS: [&str; 2] =
    ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"];
/// Variable with the directory of the files, for the test that runs as a process of its own.
const FILES: &str = "DFLOP_TEST_HUB";

/// A hub with the files of one dataset, `DIRECTORY/COMMIT/PATH`, whose listings have one entry per page.
struct Hub {
    directory: PathBuf,
    requests: Mutex<Vec<String>>,
}

/// Head and body of an answer.
type Answer = (String, Vec<u8>);

impl Hub {
    fn serve(self: Arc<Self>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = self.clone();
                std::thread::spawn(move || hub.answer(&stream));
            }
        });
        address
    }

    fn answer(&self, mut stream: &TcpStream) {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let Some(line) = lines.next() else { return };
        let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            let found = headers.iter().filter_map(|line| line.split_once(": "));
            found.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
        };
        let mut words = line.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        self.requests.lock().unwrap().push(format!("{target} {}", header("range").unwrap_or("whole")));
        let (head, body) = match header("authorization") {
            Some("Bearer secret") => self.found(target, header("range")),
            _ => ("401 Unauthorized".to_owned(), Vec::new()),
        };
        let mut answer =
            format!("HTTP/1.1 {head}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len())
                .into_bytes();
        if method == "GET" {
            answer.extend(body);
        }
        drop(stream.write_all(&answer));
    }

    fn found(&self, target: &str, range: Option<&str>) -> Answer {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let missing = || ("404 Not Found".to_owned(), Vec::new());
        let ok = |body: String| ("200 OK".to_owned(), body.into_bytes());
        if let Some(revision) = path.strip_prefix("/api/datasets/o/n/revision/") {
            let known = ["main", "refs%2Fconvert%2Fparquet"].iter().position(|known| *known == revision);
            return known.map_or_else(missing, |at| ok(format!(r#"{{"sha": "{}"}}"#, COMMITS[at])));
        }
        if let Some(below) = path.strip_prefix("/api/datasets/o/n/tree/") {
            return self.page(path, &below.replace("%20", " "), query);
        }
        let file = path.strip_prefix("/datasets/o/n/resolve/").map(|file| file.replace("%20", " "));
        let Some(bytes) = file.and_then(|file| fs::read(self.directory.join(file)).ok()) else {
            return missing();
        };
        match range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
            Some((first, last)) => {
                let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
                let head =
                    format!("206 Partial Content\r\ncontent-range: bytes {first}-{last}/{}", bytes.len());
                (head, bytes[first..=last].to_vec())
            }
            None => ("200 OK".to_owned(), bytes),
        }
    }

    /// Returns the entry at the cursor in the query, and a link to the next page.
    fn page(&self, path: &str, below: &str, query: &str) -> Answer {
        let at: usize = query.split_once("cursor=").map_or(0, |(_, at)| at.parse().unwrap());
        let mut entries: Vec<PathBuf> =
            fs::read_dir(self.directory.join(below)).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        let entry = &entries[at];
        let (_, name) =
            entry.strip_prefix(&self.directory).unwrap().to_str().unwrap().split_once('/').unwrap();
        let kind = if entry.is_dir() { "directory" } else { "file" };
        let link = format!("\r\nlink: <{path}?recursive=false&cursor={}>; rel=\"next\"", at + 1);
        let link = if at + 1 < entries.len() { link } else { String::new() };
        (format!("200 OK{link}"), format!(r#"[{{"type": "{kind}", "path": "{name}"}}]"#).into_bytes())
    }
}

#[test]
fn a_dataset_on_a_hub_is_pinned_listed_by_pages_and_read_by_range() {
    let place = tempfile::tempdir().unwrap();
    for commit in COMMITS {
        let directory = place.path().join(commit).join("data dir");
        fs::create_dir_all(directory.join("deep")).unwrap();
        for number in 0..2 {
            let name = format!("train-0000{number}-of-00002.parquet");
            write(&directory.join(name), &rows(20 + number), properties(6));
        }
    }
    let hub = Arc::new(Hub { directory: place.path().to_owned(), requests: Mutex::default() });
    let run = |token: &str| {
        // Variables are read from the environment, which no test may change for the others.
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "hub::process", "--ignored", "--nocapture"]);
        child.env("HF_ENDPOINT", hub.clone().serve()).env("HF_TOKEN", token).env(FILES, place.path());
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run("secret");
    let requests = std::mem::take(&mut *hub.requests.lock().unwrap());
    let count = |part: &str| requests.iter().filter(|request| request.contains(part)).count();
    assert_eq!(count("revision/refs%2Fconvert%2Fparquet"), 1, "one commit for the process: {requests:?}");
    assert!(count("cursor=1") > 0 && count("bytes=") > 0, "{requests:?}");
    assert!(
        requests.iter().filter(|request| request.contains("resolve")).all(|file| file.contains("data%20dir"))
    );
    run("wrong");
}

fn listed(name: &str) -> Vec<Shard> {
    expand_shards(&[name]).unwrap()
}

fn fingerprint(name: &str, directory: &Path) -> String {
    let options = IndexOptions { directory: Some(directory.to_owned()), ..IndexOptions::default() };
    Index::open_or_build(listed(name), &options).unwrap().fingerprint().to_owned()
}

#[test]
#[ignore = "needs the hub of the test above, which runs it"]
fn process() {
    let Some(files) = std::env::var_os(FILES).map(PathBuf::from) else { return };
    register_tables();
    let directory = "hf://datasets/o/n@refs%2Fconvert%2Fparquet/data dir/";
    if std::env::var("HF_TOKEN").unwrap() == "wrong" {
        let error = expand_shards(&[directory]).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("401") && cause.contains("HF_TOKEN"), "{error}: {cause}");
        return;
    }
    let shards = listed(directory);
    let names: Vec<&str> = shards.iter().map(|shard| &*shard.url).collect();
    let name =
        |number| format!("hf://datasets/o/n@{}/data dir/train-0000{number}-of-00002.parquet", COMMITS[1]);
    assert_eq!(names, [name(0), name(1)]);
    assert_eq!(listed("hf://datasets/o/n@~parquet/data dir/train-*1-of-*.parquet")[0].url, shards[1].url);
    for (number, shard) in shards.iter().enumerate() {
        let items: Vec<_> = block_on(scan_shards(vec![shard.clone()]).collect());
        let read = items.into_iter().map(|item| match item.unwrap() {
            ShardItem::Sample(sample) => (sample.key.clone(), fields(&sample)),
            ShardItem::Skipped(bad) => panic!("{bad:?}"),
        });
        let local = files.join(COMMITS[1]).join(format!("data dir/train-0000{number}-of-00002.parquet"));
        let local =
            scanned(&local).0.iter().map(|sample| (sample.key.clone(), fields(sample))).collect::<Vec<_>>();
        assert_eq!(read.collect::<Vec<_>>(), local);
    }
    let index = files.join("index");
    let [one, other] = COMMITS.map(|commit| {
        fingerprint(&format!("hf://datasets/o/n@{commit}/data dir/train-00000-of-00002.parquet"), &index)
    });
    assert_ne!(one, other, "the commit is part of the fingerprint");
    for (name, reason) in [
        ("hf://datasets/o/n/data dir/none-*", "no file of the dataset matches"),
        ("hf://o/n/a.parquet", "hf://datasets/OWNER/NAME/PATH"),
        ("hf://datasets/o/n@none/a.parquet", "404"),
    ] {
        let error = expand_shards(&[name]).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {cause}").contains(reason), "{name}: {error}: {cause}");
    }
}
