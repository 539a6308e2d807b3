//! Tests an image that is damaged after indexing.

use std::path::{Path, PathBuf};

use super::config::{Job, difference, losses};

/// The shard that a job made for itself.
pub(super) fn shard(job: &Job) -> PathBuf {
    let entries = std::fs::read_dir(job.generated().join("shards")).expect("it can be read");
    let mut files = entries.filter_map(Result::ok).map(|entry| entry.path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "tar")).expect("a shard")
}

/// Overwrites the second half of the first image, where no index looks; returns the image's sample.
pub(super) fn break_image(shard: &Path) -> String {
    let modified = std::fs::metadata(shard).and_then(|shard| shard.modified()).expect("it has a time");
    let mut bytes = std::fs::read(shard).expect("the shard is there");
    let mut header = 0;
    loop {
        let name = String::from_utf8_lossy(&bytes[header..header + 100]).trim_end_matches('\0').to_owned();
        let size = String::from_utf8_lossy(&bytes[header + 124..header + 135]).into_owned();
        let size = usize::from_str_radix(size.trim_matches([' ', '\0']), 8).expect("a size");
        let start = header + 512;
        if let Some(key) = name.strip_suffix(".jpg") {
            bytes[start + size / 2..start + size].fill(0);
            std::fs::write(shard, bytes).expect("the shard can be written");
            let file = std::fs::File::options().write(true).open(shard).expect("the shard is there");
            file.set_modified(modified).expect("the time can be set");
            return key.rsplit('/').next().expect("a name").to_owned();
        }
        header = start + size.next_multiple_of(512);
    }
}

#[test]
fn a_damaged_image_is_left_out_once_and_named_by_who_reads_it() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 1, dp = 2 }")]);
    job.lines(&["--steps", "1"]);
    let key = break_image(&shard(&job));
    let run = job.run(&["--steps", "8"]);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let lines = run.objects();
    let dropped = lines.iter().filter(|line| line["dropped_samples"] == 1).collect::<Vec<_>>();
    assert_eq!((lines.len(), dropped.len()), (8, 1), "an epoch has the sample once");
    assert_eq!(dropped[0]["samples"], 7);
    // Rank 0 encodes, so it reports both.
    for words in
        [format!("step={} key=\"{key}\"", dropped[0]["step"]), format!("key=\"{key}\" field=\"jpg\"")]
    {
        assert_eq!(run.stderr.matches(&words).count(), 1, "{words}: {}", run.stderr);
    }
    let alone = job.run(&["--steps", "8", "--stages", "1"]).objects();
    assert!(difference(&losses(&alone), &losses(&lines)) < 1e-5);
}
