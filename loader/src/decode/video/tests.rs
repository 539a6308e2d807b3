//! Against FFmpeg's own commands, on real files where there are any and on files that the command makes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::decode::tests::shared_files;
use crate::probe::is_video_extension;

const ALL: VideoSampling = VideoSampling::Uniform { frames: u32::MAX };

/// Runs a command; `None` if it is not installed.
fn output_of(command: &str, arguments: &[&str], path: &Path) -> Option<Vec<u8>> {
    let output = Command::new(command).args(["-v", "error"]).args(arguments).arg(path).output().ok()?;
    Some(output.stdout)
}

/// Frames, width and height of the largest stream as `ffprobe` finds them by decoding everything; width and height
/// turned.
fn probed(path: &Path) -> Option<(u32, u32, u32)> {
    let entries = "stream=width,height,nb_read_frames:stream_side_data=rotation";
    let arguments = ["-select_streams", "v", "-count_frames", "-show_entries", entries, "-of", "json"];
    let found: serde_json::Value = serde_json::from_slice(&output_of("ffprobe", &arguments, path)?).ok()?;
    let rows = |stream: &&serde_json::Value| stream["height"].as_u64();
    let stream = found["streams"].as_array()?.iter().max_by_key(rows)?;
    let number = |name: &str| stream[name].as_u64().map(|number| number as u32);
    let frames = stream["nb_read_frames"].as_str()?.parse().ok()?;
    let rotation = stream["side_data_list"][0]["rotation"].as_i64().unwrap_or(0);
    let (width, height) = (number("width")?, number("height")?);
    Some(if rotation % 180 == 0 { (frames, width, height) } else { (frames, height, width) })
}

/// One frame of a video, turned, as the `ffmpeg` command converts it to RGB.
fn converted(path: &Path, frame: usize) -> Option<Vec<u8>> {
    let path = path.to_str()?;
    let select = format!("select=eq(n\\,{frame})");
    let command = ["-v", "error", "-i", path, "-vf", &select, "-frames:v", "1"];
    let output =
        Command::new("ffmpeg").args(command).args(["-pix_fmt", "rgb24", "-f", "rawvideo", "-"]).output();
    Some(output.ok()?.stdout)
}

fn mean_difference(left: &[u8], right: &[u8]) -> f64 {
    if left.len() != right.len() {
        return f64::INFINITY;
    }
    let sum: u64 = left.iter().zip(right).map(|(left, right)| u64::from(left.abs_diff(*right))).sum();
    sum as f64 / left.len() as f64
}

fn videos() -> Vec<(PathBuf, Vec<u8>)> {
    let is_video = |path: &Path| {
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        is_video_extension(&extension)
    };
    ["mp4", "mkv", "webm", "avi", "mov"]
        .iter()
        .flat_map(|ending| shared_files(ending))
        .filter(|(path, _)| is_video(path) && !path.to_string_lossy().contains("malformed"))
        .collect()
}

#[test]
fn frames_and_sizes_of_real_videos_are_those_of_ffprobe() {
    let mut others = Vec::new();
    for (path, bytes) in videos() {
        let Some(expected) = probed(&path) else { continue };
        let shape = video_shape(&bytes, &ALL).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let found = (shape.frames, shape.width, shape.height);
        if found != expected {
            others.push((path, found, expected));
        }
    }
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
fn sampled_frames_of_real_videos_are_those_of_ffmpeg() {
    let mut others = Vec::new();
    for (path, bytes) in videos() {
        let limits = VideoLimits { sampling: VideoSampling::Uniform { frames: 3 }, ..VideoLimits::default() };
        let all = video_shape(&bytes, &ALL).unwrap().frames as usize;
        let video =
            decode_video(&bytes, &limits).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(video.frames(), all.min(3), "{}", path.display());
        assert!(video.times_seconds.is_sorted());
        let at = |frame: usize| if all <= 3 { frame } else { (2 * frame + 1) * all / 6 };
        for frame in 0..video.frames() {
            let Some(expected) = converted(&path, at(frame)).filter(|pixels| !pixels.is_empty()) else {
                continue;
            };
            let difference = mean_difference(video.frame(frame), &expected);
            if difference >= 1.0 {
                others.push((path.clone(), frame, difference));
            }
        }
    }
    assert!(others.is_empty(), "{others:#?}");
}

/// A video of moving colours, made by the `ffmpeg` command where there is one.
fn made(folder: &Path, name: &str) -> Option<Vec<u8>> {
    made_with(folder, name, &[])
}

fn made_with(folder: &Path, name: &str, settings: &[&str]) -> Option<Vec<u8>> {
    let path = folder.join(name);
    let source = "testsrc=size=48x32:rate=10:duration=2";
    let command = ["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", "-g", "5"];
    let status = Command::new("ffmpeg").args(command).args(settings).arg(&path).status().ok()?;
    status.success().then(|| std::fs::read(&path).unwrap())
}

#[test]
fn every_sampling_delivers_the_frames_that_its_shape_promises() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.mp4", "a.mkv", "a.avi", "a.mov"] {
        let Some(bytes) = made(folder.path(), name) else { return };
        for (sampling, frames) in [
            (ALL, 20),
            (VideoSampling::Uniform { frames: 7 }, 7),
            (VideoSampling::Fps { per_second: 2.0, frames_max: 64 }, 4),
            (VideoSampling::Fps { per_second: 2.0, frames_max: 3 }, 3),
            (VideoSampling::Keyframes { frames_max: 64 }, 4),
        ] {
            let shape = video_shape(&bytes, &sampling).unwrap();
            assert_eq!((shape.frames, shape.width, shape.height), (frames, 48, 32), "{name} {sampling:?}");
            let video = decode_video(&bytes, &VideoLimits { sampling, ..VideoLimits::default() }).unwrap();
            assert_eq!(video.frames(), frames as usize, "{name} {sampling:?}");
            assert_eq!(video.pixels.len(), frames as usize * 48 * 32 * 3);
        }
        let all = decode_video(&bytes, &VideoLimits { sampling: ALL, ..VideoLimits::default() }).unwrap();
        assert!((all.times_seconds[19] - 1.9).abs() < 0.11, "{name}: {:?}", all.times_seconds);
        assert!((1..20).all(|frame| all.frame(frame) != all.frame(frame - 1)), "{name}: frames repeat");
    }
}

#[test]
fn what_is_no_video_is_refused_and_nothing_else_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret.txt"), "secret").unwrap();
    let playlist = format!("#EXTM3U\n#EXTINF:1,\n{}/secret.txt\n", folder.path().display());
    let concat = format!("ffconcat version 1.0\nfile {}/secret.txt\n", folder.path().display());
    for bytes in [&b""[..], b"no video at all", playlist.as_bytes(), concat.as_bytes(), &[0; 4_096]] {
        assert!(video_shape(bytes, &ALL).is_err());
        assert!(decode_video(bytes, &VideoLimits::default()).is_err());
    }
    let Some(bytes) = made(folder.path(), "b.mp4") else { return };
    let limits = VideoLimits { decoded_bytes_max: 1_000, ..VideoLimits::default() };
    assert!(matches!(decode_video(&bytes, &limits), Err(crate::decode::DecodeError::TooLarge { .. })));
    for length in (0..bytes.len()).step_by(97) {
        // A cut file is refused or gives what it has; it never hangs or panics.
        let _ = decode_video(&bytes[..length], &VideoLimits::default());
    }
}

#[test]
fn a_video_that_does_not_say_its_duration_has_all_frames() {
    let folder = tempfile::tempdir().unwrap();
    let live = made_with(folder.path(), "live.mkv", &["-live", "1"]);
    let fragments = made_with(folder.path(), "parts.mp4", &["-movflags", "frag_keyframe+empty_moov"]);
    for bytes in [live, fragments] {
        let Some(bytes) = bytes else { return };
        assert_eq!(video_shape(&bytes, &ALL).unwrap().frames, 20);
        let half_seconds = VideoSampling::Fps { per_second: 2.0, frames_max: 64 };
        let limits = VideoLimits { sampling: half_seconds, ..VideoLimits::default() };
        let video = decode_video(&bytes, &limits).unwrap();
        let off = video.times_seconds.iter().zip([0.0, 0.5, 1.0, 1.5]);
        assert!(off.clone().len() == 4 && off.clone().all(|(time, point)| (time - point).abs() < 0.11));
    }
}

#[test]
fn damage_inside_a_frame_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let Some(sound) = made(folder.path(), "c.mp4") else { return };
    let limits = VideoLimits { sampling: ALL, ..VideoLimits::default() };
    assert!(decode_video(&sound, &limits).is_ok());
    let payload = sound.windows(4).position(|window| window == b"mdat").unwrap() + 4;
    let mut damaged = sound.clone();
    damaged[payload + 200..payload + 260].fill(0x55);
    let error = decode_video(&damaged, &limits).unwrap_err();
    assert!(matches!(error, crate::decode::DecodeError::Codec { format: "video", .. }), "{error}");
}

#[test]
fn frames_larger_than_the_limit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some(bytes) = made(folder.path(), "d.mp4") else { return };
    let limits = VideoLimits { pixels_max: 48 * 32 - 1, ..VideoLimits::default() };
    let error = decode_video(&bytes, &limits).unwrap_err();
    assert!(error.to_string().contains("pixels_max"), "{error}");
    let limits = VideoLimits { pixels_max: 48 * 32, ..VideoLimits::default() };
    assert!(decode_video(&bytes, &limits).is_ok());
}
