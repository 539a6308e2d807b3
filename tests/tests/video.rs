//! Videos in shards: shapes in the index, frames in the samples; opaque where FFmpeg is not built in.

use std::path::Path;
use std::sync::Arc;

use dflop_loader::decode::{Media, VideoSampling};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::loader::Loader;
use dflop_loader::measure::FieldShape;
use dflop_loader::shard::expand_shards;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

/// Writes a shard with one video and a text.
fn shard(folder: &Path, video: &[u8]) -> String {
    let tar = TarBytes::new().file("a.mp4", video).file("a.txt", b"a kite").finish();
    let path = folder.join("v.tar");
    std::fs::write(&path, tar).unwrap();
    path.to_str().unwrap().to_owned()
}

fn index(pattern: &str, video_sampling: VideoSampling) -> Arc<Index> {
    let options = IndexOptions { video_sampling, ..IndexOptions::default() };
    Arc::new(Index::open_or_build(expand_shards(&[pattern]).unwrap(), &options).unwrap())
}

fn shape_of_video(index: &Index) -> FieldShape {
    index.sample(0).fields().next().unwrap().shape
}

fn first_field(builder: dflop_loader::loader::LoaderBuilder) -> Media {
    let batches: Vec<_> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    batches[0].samples[0].field("mp4").unwrap().clone()
}

#[cfg(not(feature = "video"))]
#[test]
fn without_ffmpeg_a_video_is_opaque() {
    let folder = tempfile::tempdir().unwrap();
    let pattern = shard(folder.path(), b"not looked at");
    let index = index(&pattern, VideoSampling::default());
    assert_eq!((shape_of_video(&index), index.video_sampling()), (FieldShape::Opaque, None));
    let loader = || Loader::builder(expand_shards(&[&pattern]).unwrap());
    assert_eq!(first_field(loader()), Media::Opaque("not looked at".into()));
    let refused = loader().video_sampling(VideoSampling::default()).build().unwrap_err().to_string();
    assert!(refused.contains("feature `video`"), "{refused}");
}

#[cfg(feature = "video")]
#[test]
fn the_index_counts_the_frames_that_loaders_deliver() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made.mp4");
    let source = "testsrc=size=48x32:rate=10:duration=2";
    let command = ["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", path.to_str().unwrap()];
    let Ok(status) = std::process::Command::new("ffmpeg").args(command).status() else { return };
    assert!(status.success());
    let pattern = shard(folder.path(), &std::fs::read(&path).unwrap());
    for (sampling, frames) in [
        (VideoSampling::default(), 4),
        (VideoSampling::Uniform { frames: 6 }, 6),
        (VideoSampling::default(), 4),
    ] {
        let index = index(&pattern, sampling);
        let FieldShape::Video(shape) = shape_of_video(&index) else { panic!("no video") };
        assert_eq!((shape.frames, shape.width, shape.height), (frames, 48, 32), "{sampling:?}");
        assert_eq!(index.video_sampling(), Some(sampling));
        let loader = Loader::builder(expand_shards(&[&pattern]).unwrap()).video_sampling(sampling);
        let Media::Video(video) = first_field(loader) else { panic!("no video") };
        assert_eq!((video.frames(), video.width, video.height), (frames as usize, 48, 32));
    }
}
