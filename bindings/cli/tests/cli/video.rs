//! Tests video frame sampling by the commands.

use dflop_tests::tar::TarBytes;

use crate::command::{dflop, text};

/// The arguments for every command that reads samples.
const READERS: [(&str, &[&str]); 6] = [
    ("index", &[]),
    ("stream", &[]),
    ("stats", &[]),
    ("order", &["--global-batch-size", "1", "--dp-size", "1"]),
    ("simulate", &["--global-batch-size", "1", "--dp-size", "1"]),
    ("batches", &["--global-batch-size", "1", "--dp-size", "1", "--tokenizer", "nowhere"]),
];

#[cfg(not(feature = "video"))]
#[test]
fn a_build_without_ffmpeg_refuses_to_choose_frames() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("v.tar");
    std::fs::write(&path, TarBytes::new().file("a.txt", b"a kite").finish()).expect("a shard");
    for (command, args) in READERS.into_iter().filter(|(command, _)| *command != "batches") {
        let run = dflop(&[&[command, text(&path)], args, &["--set", "index.videos=fps:2:8"]].concat());
        assert_eq!(run.status, Some(2), "{command}: {}", run.stderr);
        assert!(run.stderr.contains("`videos`"), "{command}: {}", run.stderr);
        assert!(run.stderr.contains("feature `video`"), "{command}: {}", run.stderr);
    }
}

#[test]
fn every_reader_explains_the_frames_of_videos() {
    for (command, _) in READERS {
        let run = dflop(&[command, "--help"]);
        assert!(run.stdout.contains("index.videos: Frames of each video"), "{command}");
    }
}

#[cfg(feature = "video")]
#[test]
fn commands_count_the_frames_that_are_asked_for() {
    use crate::command::object;

    let directory = tempfile::tempdir().expect("a temporary directory");
    let video = directory.path().join("made.mp4");
    let source = "testsrc=size=48x32:rate=10:duration=2";
    let command = ["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", text(&video)];
    let Ok(status) = std::process::Command::new("ffmpeg").args(command).status() else { return };
    assert!(status.success());
    let path = directory.path().join("v.tar");
    let video = std::fs::read(&video).expect("a video");
    std::fs::write(&path, TarBytes::new().file("a.mp4", &video).finish()).expect("a shard");
    // Frames of 48 x 32 pixels are 392 x 280, 14 x 10 tokens a pair, between two markers.
    for (args, pairs) in [
        (&[][..], 2),
        (&["--set", "index.videos=uniform:6"], 3),
        (&["--set", "index.videos=fps:5:64"], 5),
        (&["--set", "index.videos=fps:5:2"], 1),
    ] {
        let stats = ["stats", text(&path), "--model", "qwen2-vl-7b", "--json"];
        let found = object(&[&stats, args].concat());
        let tokens = found["quantiles"]["tokens"]["max"].as_f64();
        assert_eq!(tokens, Some(f64::from(140 * pairs + 2)), "{args:?}: {}", found["quantiles"]);
    }
    let indexed = object(&["index", text(&path), "--set", "index.videos=fps:2:3", "--json"]);
    assert_eq!(indexed["video_sampling"]["fps"]["frames_max"], 3);
    for videos in ["uniform:0", "fps:0:8", "keyframes:1:2"] {
        for command in ["index", "stream"] {
            let run = dflop(&[command, text(&path), "--set", &format!("index.videos={videos}")]);
            assert_eq!(run.status, Some(2), "{command} {videos}: {}", run.stderr);
            assert!(run.stderr.contains("expected fps:RATE:MAX"), "{command} {videos}: {}", run.stderr);
        }
    }
}
