//! Tests video frame sampling by the commands.

use dflop_tests::tar::TarBytes;

use crate::command::{dflop, text};

/// The arguments for every command that reads samples.
const READERS: [(&str, &[&str]); 6] = [
    ("index", &[]),
    ("stream", &[]),
    ("stats", &[]),
    ("order", &["--global-batch", "1", "--dp-size", "1"]),
    ("simulate", &["--global-batch", "1", "--dp-size", "1"]),
    ("batches", &["--global-batch", "1", "--dp-size", "1", "--tokenizer", "nowhere"]),
];

#[cfg(not(feature = "video"))]
#[test]
fn a_build_without_ffmpeg_refuses_to_choose_frames() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("v.tar");
    std::fs::write(&path, TarBytes::new().file("a.txt", b"a kite").finish()).expect("a shard");
    for (command, args) in READERS.into_iter().filter(|(command, _)| *command != "batches") {
        let run = dflop(&[&[command, text(&path)], args, &["--video-frames", "8"]].concat());
        assert_eq!(run.status, Some(2), "{command}: {}", run.stderr);
        assert!(run.stderr.contains("invalid `--video-frames`"), "{command}: {}", run.stderr);
        assert!(run.stderr.contains("feature `video`"), "{command}: {}", run.stderr);
    }
}

#[test]
fn every_reader_explains_the_arguments_of_videos() {
    for (command, _) in READERS {
        let run = dflop(&[command, "--help"]);
        for argument in ["--video-sampling", "--video-frames", "--video-fps"] {
            assert!(run.stdout.contains(argument), "{command} {argument}");
        }
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
        (&["--video-sampling", "uniform", "--video-frames", "6"], 3),
        (&["--video-fps", "5"], 5),
        (&["--video-fps", "5", "--video-frames", "2"], 1),
    ] {
        let stats = ["stats", text(&path), "--model", "qwen2-vl-7b", "--json"];
        let found = object(&[&stats, args].concat());
        let tokens = found["quantiles"]["tokens"]["max"].as_f64();
        assert_eq!(tokens, Some(f64::from(140 * pairs + 2)), "{args:?}: {}", found["quantiles"]);
    }
    let indexed = object(&["index", text(&path), "--video-frames", "3", "--json"]);
    assert_eq!(indexed["video_sampling"]["fps"]["frames_max"], 3);
    for (args, reason) in [
        (&["--video-frames", "0"][..], "at least 1 frame"),
        (&["--video-fps", "0"], "above 0"),
        (&["--video-sampling", "keyframes", "--video-fps", "1"], "needs `--video-sampling fps`"),
    ] {
        for command in ["index", "stream"] {
            let run = dflop(&[&[command, text(&path)], args].concat());
            assert_eq!(run.status, Some(2), "{command} {args:?}: {}", run.stderr);
            assert!(run.stderr.contains(reason), "{command} {args:?}: {}", run.stderr);
        }
    }
}
