//! Compares with FFmpeg's own commands, on real files if available and on files that the command generates.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::media::tests::shared_files;
use crate::media::video::*;
use crate::media::{Modality, extension_modality};

const ALL: VideoSampling = VideoSampling::Uniform { frames: u32::MAX };

/// Runs a command and returns the output; `None` if the command is not installed.
fn command_output(command: &str, arguments: &[&str], path: &Path) -> Option<Vec<u8>> {
    let output = Command::new(command).args(["-v", "error"]).args(arguments).arg(path).output().ok()?;
    Some(output.stdout)
}

/// Returns frames, width and height for the largest stream, after rotation, as `ffprobe` finds them by
/// decoding everything.
fn probed(path: &Path) -> Option<(u32, u32, u32)> {
    let entries = "stream=width,height,nb_read_frames:stream_side_data=rotation";
    let arguments = ["-select_streams", "v", "-count_frames", "-show_entries", entries, "-of", "json"];
    let found: serde_json::Value =
        serde_json::from_slice(&command_output("ffprobe", &arguments, path)?).ok()?;
    let rows = |stream: &&serde_json::Value| stream["height"].as_u64();
    let stream = found["streams"].as_array()?.iter().max_by_key(rows)?;
    let number = |name: &str| stream[name].as_u64().map(|number| number as u32);
    let frames = stream["nb_read_frames"].as_str()?.parse().ok()?;
    let rotation = stream["side_data_list"][0]["rotation"].as_i64().unwrap_or(0);
    let (width, height) = (number("width")?, number("height")?);
    Some(if rotation % 180 == 0 { (frames, width, height) } else { (frames, height, width) })
}

/// Returns all frames in a video, rotated and converted to RGB by the `ffmpeg` command.
fn converted(path: &Path) -> Option<Vec<u8>> {
    let command = ["-v", "error", "-i", path.to_str()?, "-fps_mode", "passthrough"];
    let output =
        Command::new("ffmpeg").args(command).args(["-pix_fmt", "rgb24", "-f", "rawvideo", "-"]).output();
    Some(output.ok()?.stdout)
}

/// Returns the number of differing bytes and the maximum difference between two frame sequences; `None` if
/// the lengths differ.
fn difference(video: &Video, frames: &[usize], expected: &[u8]) -> Option<(usize, u8)> {
    let bytes = 3 * video.width as usize * video.height as usize;
    let expected: Vec<&[u8]> = expected.chunks(bytes).collect();
    let pairs = frames.iter().enumerate().map(|(at, &frame)| Some((video.frame(at), *expected.get(frame)?)));
    let pairs: Vec<(&[u8], &[u8])> = pairs.collect::<Option<_>>()?;
    let off = pairs.into_iter().flat_map(|(actual, truth)| actual.iter().zip(truth));
    let off: Vec<u8> = off.map(|(actual, truth)| actual.abs_diff(*truth)).filter(|off| *off > 0).collect();
    Some((off.len(), off.into_iter().max().unwrap_or(0)))
}

fn videos() -> Vec<(PathBuf, Vec<u8>)> {
    let is_video = |path: &Path| {
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        extension_modality(&extension) == Some(Modality::Video)
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
        let frames: Vec<usize> = (0..video.frames()).map(at).collect();
        let Some(expected) = converted(&path) else { return };
        let off = difference(&video, &frames, &expected);
        if off != Some((0, 0)) {
            others.push((path.clone(), off));
        }
    }
    assert!(others.is_empty(), "{others:#?}");
}

/// Sources, codecs and settings for videos that the command generates; an unavailable codec is skipped.
const GENERATED: [(&str, &str, &[&str]); 17] = [
    ("yuv420p.mp4", "mpeg4", &["-pix_fmt", "yuv420p", "-bf", "2", "-g", "7"]),
    ("mpeg2.mkv", "mpeg2video", &["-bf", "2", "-g", "6"]),
    ("interlaced.avi", "mpeg4", &["-flags", "+ildct+ilme"]),
    ("yuv422p.mkv", "ffv1", &["-pix_fmt", "yuv422p"]),
    ("yuv444p.mkv", "ffv1", &["-pix_fmt", "yuv444p"]),
    ("yuv410p.mkv", "ffv1", &["-pix_fmt", "yuv410p"]),
    ("full_range.mov", "mjpeg", &["-pix_fmt", "yuvj420p"]),
    ("full_range_444.avi", "mjpeg", &["-pix_fmt", "yuvj444p"]),
    ("10_bits.mkv", "ffv1", &["-pix_fmt", "yuv420p10le"]),
    ("16_bits.mkv", "ffv1", &["-pix_fmt", "yuv444p16le"]),
    ("gray.mkv", "ffv1", &["-pix_fmt", "gray"]),
    ("rgb.mov", "png", &["-pix_fmt", "rgb24"]),
    ("rgba.mov", "qtrle", &["-pix_fmt", "argb"]),
    ("bgr.avi", "rawvideo", &["-pix_fmt", "bgr24"]),
    ("bt709.mkv", "ffv1", &["-pix_fmt", "yuv420p", "-colorspace", "bt709", "-color_range", "pc"]),
    ("vp8.webm", "libvpx", &["-auto-alt-ref", "1", "-lag-in-frames", "5"]),
    ("uneven_times.mkv", "mpeg4", &["-vf", "select=not(eq(mod(n\\,5)\\,2))", "-fps_mode", "vfr", "-bf", "2"]),
];

/// Tests every pixel format, frame order and time spacing, byte for byte.
#[test]
fn every_frame_of_made_videos_is_that_of_ffmpeg() {
    let directory = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for (number, (name, codec, settings)) in GENERATED.into_iter().enumerate() {
        // Sides that are not multiples of a macroblock, and odd ones where nothing is subsampled.
        let size = if codec == "ffv1" && number % 2 == 0 { "61x47" } else { "62x46" };
        let source = format!("testsrc2=size={size}:rate=12:duration=1.5");
        let path = directory.path().join(name);
        let command = ["-v", "error", "-f", "lavfi", "-i", &source, "-c:v", codec];
        let Ok(status) = Command::new("ffmpeg").args(command).args(settings).arg(&path).status() else {
            return;
        };
        if !status.success() {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let limits = VideoLimits { sampling: ALL, ..VideoLimits::default() };
        let video = decode_video(&bytes, &limits).unwrap_or_else(|error| panic!("{name}: {error}"));
        let frames: Vec<usize> = (0..video.frames()).collect();
        let expected = converted(&path).unwrap();
        assert_eq!(expected.len(), video.pixels.len(), "{name}: other frames");
        assert_eq!(difference(&video, &frames, &expected), Some((0, 0)), "{name}");
        compared += 1;
    }
    assert!(compared >= 14, "only {compared} codecs are available");
}

#[test]
fn turned_videos_are_turned_as_ffmpeg_turns_them() {
    let directory = tempfile::tempdir().unwrap();
    let Some(_) = generate(directory.path(), "plain.mp4") else { return };
    for (turn, width, height) in [("90", 32, 48), ("180", 48, 32), ("270", 32, 48)] {
        let path = directory.path().join(format!("{turn}.mp4"));
        let plain = directory.path().join("plain.mp4");
        let rotate = format!("rotate={turn}");
        let command = ["-v", "error", "-i", plain.to_str().unwrap(), "-c", "copy", "-metadata:s:v", &rotate];
        assert!(Command::new("ffmpeg").args(command).arg(&path).status().unwrap().success());
        let bytes = std::fs::read(&path).unwrap();
        let video = decode_video(&bytes, &VideoLimits { sampling: ALL, ..VideoLimits::default() }).unwrap();
        assert_eq!((video.width, video.height), (width, height), "{turn}");
        let frames: Vec<usize> = (0..video.frames()).collect();
        assert_eq!(difference(&video, &frames, &converted(&path).unwrap()), Some((0, 0)), "{turn}");
    }
}

/// Generates a video with moving colors with the `ffmpeg` command, if it is installed.
fn generate(directory: &Path, name: &str) -> Option<Vec<u8>> {
    generate_with(directory, name, &[])
}

fn generate_with(directory: &Path, name: &str, settings: &[&str]) -> Option<Vec<u8>> {
    let path = directory.join(name);
    let source = "testsrc=size=48x32:rate=10:duration=2";
    let command = ["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", "-g", "5"];
    let status = Command::new("ffmpeg").args(command).args(settings).arg(&path).status().ok()?;
    status.success().then(|| std::fs::read(&path).unwrap())
}

#[test]
fn every_sampling_delivers_the_frames_that_its_shape_promises() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a.mp4", "a.mkv", "a.avi", "a.mov"] {
        let Some(bytes) = generate(directory.path(), name) else { return };
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
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("secret.txt"), "secret").unwrap();
    let playlist = format!("#EXTM3U\n#EXTINF:1,\n{}/secret.txt\n", directory.path().display());
    let concat = format!("ffconcat version 1.0\nfile {}/secret.txt\n", directory.path().display());
    for bytes in [&b""[..], b"no video at all", playlist.as_bytes(), concat.as_bytes(), &[0; 4_096]] {
        assert!(video_shape(bytes, &ALL).is_err());
        assert!(decode_video(bytes, &VideoLimits::default()).is_err());
    }
    let Some(bytes) = generate(directory.path(), "b.mp4") else { return };
    let limits = VideoLimits { decoded_bytes_max: 1_000, ..VideoLimits::default() };
    assert!(matches!(decode_video(&bytes, &limits), Err(crate::media::DecodeError::TooLarge { .. })));
}

#[test]
fn a_cut_file_is_refused_wherever_it_is_cut() {
    let directory = tempfile::tempdir().unwrap();
    for (name, settings) in [
        ("c.mp4", &[][..]),
        ("fast.mp4", &["-movflags", "faststart"]),
        ("c.mkv", &[]),
        ("c.avi", &[]),
        ("c.mov", &["-movflags", "faststart"]),
    ] {
        let Some(bytes) = generate_with(directory.path(), name, settings) else { return };
        for length in (0..bytes.len()).step_by(89).chain([bytes.len() - 1]) {
            let cut = &bytes[..length];
            assert!(decode_video(cut, &VideoLimits::default()).is_err(), "{name} at {length}");
            assert!(video_shape(cut, &ALL).is_err(), "{name} at {length}");
        }
        assert!(decode_video(&bytes, &VideoLimits::default()).is_ok(), "{name}");
    }
}

/// Changes bytes anywhere in the file; decoding may fail, but must end, and yield the declared number of
/// frames.
#[test]
fn damaged_files_are_refused_or_whole_and_never_panic_or_hang() {
    let directory = tempfile::tempdir().unwrap();
    let mut random = 1_u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for name in ["d.mp4", "d.mkv", "d.avi", "d.mov"] {
        let Some(bytes) = generate(directory.path(), name) else { return };
        let mut refused = 0;
        for _ in 0..120 {
            let mut damaged = bytes.clone();
            for _ in 0..=draw(6) {
                let at = draw(damaged.len());
                damaged[at] = draw(256) as u8;
            }
            let started = std::time::Instant::now();
            let limits = VideoLimits { sampling: ALL, decoded_bytes_max: 64 << 20, ..VideoLimits::default() };
            match decode_video(&damaged, &limits) {
                Ok(video) => {
                    let bytes = 3 * video.width as usize * video.height as usize;
                    assert_eq!(video.pixels.len(), video.frames() * bytes, "{name}");
                }
                Err(error) => {
                    assert!(!crate::error::error_reason(&error).contains("panicked"), "{name}: {error}");
                    refused += 1;
                }
            }
            assert!(started.elapsed().as_secs() < 20, "{name} took {:?}", started.elapsed());
        }
        assert!(refused > 10, "{name}: {refused} refused");
    }
}

#[test]
fn a_video_that_does_not_say_its_duration_has_all_frames() {
    let directory = tempfile::tempdir().unwrap();
    let live = generate_with(directory.path(), "live.mkv", &["-live", "1"]);
    let fragments = generate_with(directory.path(), "parts.mp4", &["-movflags", "frag_keyframe+empty_moov"]);
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
    let directory = tempfile::tempdir().unwrap();
    let Some(sound) = generate(directory.path(), "c.mp4") else { return };
    let limits = VideoLimits { sampling: ALL, ..VideoLimits::default() };
    assert!(decode_video(&sound, &limits).is_ok());
    let payload = sound.windows(4).position(|window| window == b"mdat").unwrap() + 4;
    let mut damaged = sound.clone();
    damaged[payload + 200..payload + 260].fill(0x55);
    let error = decode_video(&damaged, &limits).unwrap_err();
    assert!(matches!(error, crate::media::DecodeError::Codec { format: "video", .. }), "{error}");
}

#[test]
fn frames_larger_than_the_limit_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let Some(bytes) = generate(directory.path(), "d.mp4") else { return };
    let limits = VideoLimits { pixels_max: 48 * 32 - 1, ..VideoLimits::default() };
    let error = decode_video(&bytes, &limits).unwrap_err();
    assert!(error.to_string().contains("pixels_max"), "{error}");
    let limits = VideoLimits { pixels_max: 48 * 32, ..VideoLimits::default() };
    assert!(decode_video(&bytes, &limits).is_ok());
}
