//! Tests the generated datasets that are kept in the cache directory of the user.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::config::{Job, loss_bits};
use crate::command::text;

/// Sorted names of the cached directories.
fn kept(job: &Job) -> Vec<String> {
    let entries = fs::read_dir(job.path("dflop/train")).expect("a cache").filter_map(Result::ok);
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it exists").mode() & 0o777
}

#[test]
fn a_generated_dataset_is_the_users_alone_and_found_again() {
    let job = Job::new();
    let first = job.lines(&["--steps", "2"]);
    let generated = job.generated();
    assert_eq!((mode(&generated), mode(&job.path("dflop/train"))), (0o700, 0o700));
    let made = fs::metadata(generated.join("shards")).and_then(|shards| shards.modified()).expect("a time");
    assert_eq!(loss_bits(&job.lines(&["--steps", "2"])), loss_bits(&first));
    assert_eq!(kept(&job).len(), 1);
    let found = fs::metadata(generated.join("shards")).and_then(|shards| shards.modified()).expect("a time");
    assert_eq!(found, made, "it was not generated again");
}

#[test]
fn directories_that_others_can_change_are_refused_by_name() {
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let refused = |path: &Path, words: &str| {
        let run = job.run(&["--steps", "1"]);
        assert_eq!(run.status, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains(text(path)) && run.stderr.contains(words), "{}", run.stderr);
    };
    let (root, generated) = (job.path("dflop/train"), job.generated());
    for path in [&root, &generated] {
        fs::set_permissions(path, Permissions::from_mode(0o770)).expect("the mode can be changed");
        refused(path, "can be written by other users (mode 770)");
        fs::set_permissions(path, Permissions::from_mode(0o700)).expect("the mode can be changed");
    }
    // only a superuser can change the owner of a directory
    let user = 65534;
    if std::os::unix::fs::chown(&generated, Some(user), None).is_ok() {
        refused(&generated, "belongs to user 65534");
    }
}

#[test]
fn without_a_directory_of_the_user_a_run_names_the_variables() {
    let job = Job::new();
    let output = job.command(&[]).env_remove("XDG_CACHE_HOME").env_remove("HOME").output();
    let run = crate::command::Run::from(output.expect("the command starts"));
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("`XDG_CACHE_HOME` or `HOME`"), "{}", run.stderr);
}

#[test]
fn datasets_that_were_used_long_ago_are_removed_unless_they_are_in_use() {
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let root = job.path("dflop/train");
    let make = |name: &str, hours: u64| {
        let directory = root.join(name);
        fs::create_dir(&directory).expect("the directory can be written");
        let file = File::create(directory.join("in-use")).expect("the directory can be written");
        let used = SystemTime::now() - Duration::from_hours(hours);
        file.set_modified(used).expect("the time can be set");
        File::open(&directory).and_then(|opened| opened.set_modified(used)).expect("the time can be set");
        file
    };
    for (name, hours) in [("mix-1", 1), ("mix-2", 2), ("mix-3", 3), ("mix-4", 4), ("model-9", 9)] {
        make(name, hours);
    }
    let used = make("mix-5", 5);
    used.lock_shared().expect("locks");
    make(".partial-abandoned", 30);
    make(".partial-recent", 2);
    job.lines(&["--steps", "1"]);
    let names = kept(&job);
    let others: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.len() < 20).collect();
    assert_eq!(others, [".partial-recent", "mix-1", "mix-2", "mix-3", "mix-5", "model-9"]);
    assert_eq!(names.len(), others.len() + 1, "the dataset of the job: {names:?}");
}
