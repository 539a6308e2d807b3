//! Tests that a shard list stays in its directory, for every way to name the list and every reader.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::json;

use crate::command::{Run, command, text};

/// A directory `d` with a shard in `sub`, next to `up.tar`, with links that stay inside and links that do
/// not; and a dataset elsewhere.
struct Place {
    elsewhere: TempDataset,
    place: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let (elsewhere, place) = (TempDataset::new(2, 4, Compression::Plain), tempfile::tempdir());
        let made = Self { elsewhere, place: place.expect("a temporary directory") };
        let at = |name: &str| made.place.path().join(name);
        std::fs::create_dir_all(at("d/sub")).expect("the directory is made");
        for shard in ["d/sub/in.tar", "up.tar"] {
            std::fs::copy(made.elsewhere.shard(0), at(shard)).expect("the shard is copied");
        }
        let links = [
            (made.elsewhere.shard(0), "d/file.tar"),
            (made.elsewhere.directory().to_owned(), "d/far"),
            ("sub".into(), "d/near"),
            (at("d"), "link"),
        ];
        for (target, link) in links {
            symlink(target, at(link)).expect("the link is made");
        }
        made
    }

    fn directory(&self) -> PathBuf {
        self.place.path().join("d")
    }

    /// List names, each in a directory that is current.
    fn names(&self) -> [(PathBuf, String); 6] {
        let absolute = text(&self.directory().join("list.json")).to_owned();
        [
            (self.directory(), "list.json".to_owned()),
            (self.directory(), "./list.json".to_owned()),
            (self.directory(), "sub/../list.json".to_owned()),
            (self.directory().join("sub"), "../list.json".to_owned()),
            (self.directory(), absolute),
            (self.directory(), "../link/list.json".to_owned()),
        ]
    }

    /// Writes a list with a single shard; a base that starts with `datasets:` belongs to a part.
    fn write(&self, base: &str, url: &str) {
        let shards = [json!({"url": url})];
        let list = match (base, base.strip_prefix("datasets:")) {
            ("", _) => json!({"wids_version": 1, "shardlist": shards}),
            (_, Some(base)) => {
                json!({"wids_version": 1, "datasets": [{"base": base, "shardlist": shards}]})
            }
            _ => json!({"wids_version": 1, "base": base, "shardlist": shards}),
        };
        std::fs::write(self.directory().join("list.json"), list.to_string()).expect("the list is written");
    }
}

fn run_in(at: &Path, args: &[&str]) -> Run {
    command(args).current_dir(at).output().expect("the command starts").into()
}

#[test]
fn a_list_given_by_any_name_stays_in_its_directory() {
    let place = Place::new();
    let outside = place.elsewhere.shard(0);
    let (outside, far) = (text(&outside), text(place.elsewhere.directory()));
    let (root, from_root) = outside.split_at(1);
    let leading_outside = [
        ("", outside),
        ("", &format!("file:{outside}")),
        ("", &format!("file://localhost{outside}")),
        ("", &format!("file://{}", outside.replace('.', "%2e"))),
        ("", "../up.tar"),
        ("", "sub/../../up.tar"),
        ("", "none/../../up.tar"),
        ("", "file.tar"),
        ("", "far/shard-000.tar"),
        ("", "far/../d/sub/in.tar"),
        ("", "/proc/self/cwd/../../up.tar"),
        ("", "HTTP://localhost/a.tar"),
        ("", &format!("FILE://{outside}")),
        (root, from_root),
        (far, "shard-000.tar"),
        ("..", "up.tar"),
        (&format!("datasets:{far}"), "shard-000.tar"),
        ("datasets:../", "up.tar"),
        (&format!("file://{far}"), "shard-000.tar"),
    ];
    for (base, url) in leading_outside {
        place.write(base, url);
        for (at, name) in place.names() {
            let run = run_in(&at, &["list", &name]);
            assert!(matches!(run.status, Some(1 | 2)), "{base} {url} by {name}: {run:?}");
            let is_named =
                ["outside its directory", "is not supported"].iter().any(|why| run.stderr.contains(why));
            assert!(is_named && run.stdout.is_empty(), "{base} {url} by {name}: {}", run.stderr);
        }
    }
    for (base, url) in
        [("", "sub/in.tar"), ("sub", "in.tar"), ("", "near/in.tar"), ("", "near/../sub/in.tar")]
    {
        place.write(base, url);
        for (at, name) in place.names() {
            let run = run_in(&at, &["list", &name]);
            assert_eq!((run.status, run.stdout.lines().count()), (Some(0), 4), "{url} by {name}: {run:?}");
        }
    }
}

#[test]
fn every_command_confines_a_list() {
    let place = Place::new();
    place.write("", text(&place.elsewhere.shard(0)));
    let mixture = json!({"data_sets": [{"shards": ["list.json"]}]}).to_string();
    std::fs::write(place.directory().join("mixture.json"), mixture).expect("the mixture is written");
    let order = ["--global-batch-size", "2", "--dp-size", "1"];
    for reader in [
        &["list", "list.json"][..],
        &["stream", "list.json", "--decode", "raw"],
        &["stats", "list.json"],
        &["index", "list.json"],
        &[&["order", "list.json"], &order[..]].concat(),
        &[&["order", "--mix", "1=list.json"], &order[..]].concat(),
        &[&["order", "--mix", "mixture.json"], &order[..]].concat(),
        &["view", "list.json"],
    ] {
        let run = run_in(&place.directory(), reader);
        assert!(matches!(run.status, Some(1 | 2)), "{reader:?}: {run:?}");
        assert!(run.stderr.contains("outside its directory"), "{reader:?}: {}", run.stderr);
        if reader[0] != "view" {
            let run = run_in(&place.directory(), &[reader, &["--set", "store.allow=outside"]].concat());
            assert_eq!(run.status, Some(0), "{reader:?}: {run:?}");
        }
    }
}
