//! Checks videos in shards: shapes in the index, frames in the samples; opaque where FFmpeg is not built in.

use std::path::Path;
use std::sync::Arc;

use dflop_loader::Loader;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::{Media, MediaShape, VideoSampling};
use dflop_loader::shard::expand_shards;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

/// Writes a shard with one video and a text.
fn shard(directory: &Path, video: &[u8]) -> String {
    let tar = TarBytes::new().file("a.mp4", video).file("a.txt", b"a kite").finish();
    let path = directory.join("v.tar");
    std::fs::write(&path, tar).unwrap();
    path.to_str().unwrap().to_owned()
}

fn index(pattern: &str, video_sampling: VideoSampling) -> Arc<Index> {
    let options = IndexOptions { video_sampling, ..IndexOptions::default() };
    Arc::new(Index::open_or_build(expand_shards(&[pattern]).unwrap(), &options).unwrap())
}

fn shape_of_video(index: &Index) -> MediaShape {
    index.sample(0).fields().next().unwrap().shape
}

fn first_field(builder: dflop_loader::LoaderBuilder) -> Media {
    let batches: Vec<_> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    batches[0].samples[0].field("mp4").unwrap().clone()
}

#[cfg(not(feature = "video"))]
#[test]
fn without_ffmpeg_a_video_is_opaque() {
    let directory = tempfile::tempdir().unwrap();
    let pattern = shard(directory.path(), b"not read");
    let index = index(&pattern, VideoSampling::default());
    assert_eq!((shape_of_video(&index), index.video_sampling()), (MediaShape::Opaque, None));
    let loader = || Loader::builder(expand_shards(&[&pattern]).unwrap());
    assert_eq!(first_field(loader()), Media::Opaque("not read".into()));
    let refused = loader().video_sampling(VideoSampling::default()).build().unwrap_err().to_string();
    assert!(refused.contains("feature `video`"), "{refused}");
}

/// Creates a video with the `ffmpeg` command; `None` where there is no such command.
#[cfg(feature = "video")]
fn made(source: &str) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("made.mp4");
    let command = ["-v", "error", "-f", "lavfi", "-i", source, "-c:v", "mpeg4", path.to_str().unwrap()];
    let status = std::process::Command::new("ffmpeg").args(command).status().ok()?;
    assert!(status.success());
    Some(std::fs::read(&path).unwrap())
}

#[cfg(feature = "video")]
fn planner(index: &Arc<Index>, family: &str) -> dflop_loader::StepPlannerBuilder {
    use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
    let costs = CostModel::new(ModelSpec::preset(family).unwrap(), DeviceRate::preset("h100").unwrap());
    dflop_loader::StepPlanner::builder(index.clone(), costs).global_batch(2).dp_size(1).work(100)
}

#[cfg(feature = "video")]
#[test]
fn the_index_counts_the_frames_that_loaders_deliver() {
    let directory = tempfile::tempdir().unwrap();
    let Some(video) = made("testsrc=size=48x32:rate=10:duration=2") else { return };
    let pattern = shard(directory.path(), &video);
    for (sampling, frames) in [
        (VideoSampling::default(), 4),
        (VideoSampling::Uniform { frames: 6 }, 6),
        (VideoSampling::default(), 4),
    ] {
        let index = index(&pattern, sampling);
        let MediaShape::Video(shape) = shape_of_video(&index) else { panic!("no video") };
        assert_eq!((shape.frames, shape.width, shape.height), (frames, 48, 32), "{sampling:?}");
        assert_eq!(index.video_sampling(), Some(sampling));
        let loader = Loader::builder(expand_shards(&[&pattern]).unwrap()).video_sampling(sampling);
        let Media::Video(video) = first_field(loader) else { panic!("no video") };
        assert_eq!((video.frames(), video.width, video.height), (frames as usize, 48, 32));
    }
}

/// Writes videos without text, so that no text is estimated.
///
/// Frame labels are planned as the tokenizer in the released InternVL checkpoints writes them; the tests use
/// a small tokenizer.
#[cfg(feature = "video")]
#[test]
fn decoded_videos_have_as_many_tokens_as_their_index_plans() {
    use dflop_costmodel::ModelSpec;
    use dflop_loader::BalancedLoader;
    use dflop_loader::processors::{Preparer, Tokenizer};

    let directory = tempfile::tempdir().unwrap();
    let Some(video) = made("testsrc=size=120x80:rate=12:duration=3") else { return };
    let Some(tall) = made("testsrc=size=48x96:rate=25:duration=1") else { return };
    let tar = TarBytes::new().file("a.mp4", &video).file("b.0.mp4", &tall).file("b.1.mp4", &video).finish();
    let path = directory.path().join("v.tar");
    std::fs::write(&path, tar).unwrap();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
    for sampling in [
        VideoSampling::default(),
        VideoSampling::Uniform { frames: 5 },
        VideoSampling::Keyframes { frames_max: 2 },
    ] {
        let index = index(path.to_str().unwrap(), sampling);
        for family in ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-ov-qwen2.5-7b"] {
            let preparer = Preparer::builder(&ModelSpec::preset(family).unwrap());
            let preparer = preparer.tokenizer(Tokenizer::open(tokenizer).unwrap()).build().unwrap();
            let planner = planner(&index, family).build().unwrap();
            let loader = BalancedLoader::builder(planner, 0).steps(1).preparer(Arc::new(preparer));
            let loader = loader.build().unwrap();
            let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
            assert!(loader.skipped().is_empty(), "{family}: {:?}", loader.skipped());
            let microbatches: Vec<_> = steps.iter().flat_map(|step| &step.microbatches).collect();
            assert_eq!(microbatches.iter().map(|microbatch| microbatch.samples.len()).sum::<usize>(), 2);
            for microbatch in microbatches {
                assert_eq!(microbatch.tokens, microbatch.planned_tokens, "{family} {sampling:?}");
                let inputs = microbatch.inputs.as_ref().unwrap();
                assert!(inputs.tensor("pixel_values_videos").is_some(), "{family}");
                let is_video = |field: &dflop_loader::sample::Field| matches!(field.media, Media::Video(_));
                assert!(!microbatch.samples.iter().any(|sample| sample.fields.iter().any(is_video)));
            }
        }
    }
}

#[cfg(feature = "video")]
#[test]
fn a_run_goes_on_with_the_frames_that_it_began_with() {
    let directory = tempfile::tempdir().unwrap();
    let Some(video) = made("testsrc=size=48x32:rate=10:duration=2") else { return };
    let pattern = shard(directory.path(), &video);
    let (rate, spread) = (VideoSampling::default(), VideoSampling::Uniform { frames: 6 });
    let indexed = |sampling| planner(&index(&pattern, sampling), "qwen2-vl-7b").global_batch(1);
    let state = indexed(rate).build().unwrap().state(3).unwrap();
    let state = dflop_loader::LoaderState::from_json(&state.to_json()).unwrap();
    assert_eq!(indexed(rate).restore(state.clone()).build().unwrap().first_step(), 3);
    let refused = indexed(spread).restore(state.clone()).build().unwrap_err().to_string();
    let both = "were sampled as 2 frames per second, 64 at most, and are now as 6 frames evenly spread";
    assert!(refused.contains(both), "{refused}");
    let accepted = indexed(spread).restore(state.clone()).accept_changed_data().build().unwrap();
    let whole = indexed(rate).build().unwrap();
    assert_eq!(accepted.first_step(), 3);
    assert_eq!(accepted.plan(4).unwrap().samples, whole.plan(4).unwrap().samples);
    // A planner with other frames does not accept the state either.
    let other = indexed(spread).build().unwrap();
    let loader = dflop_loader::BalancedLoader::builder(other, 0).restore(state);
    assert!(loader.build().unwrap_err().to_string().contains(both));
}

#[cfg(feature = "video")]
#[test]
fn a_stream_goes_on_with_the_frames_that_it_began_with() {
    let directory = tempfile::tempdir().unwrap();
    let Some(video) = made("testsrc=size=48x32:rate=10:duration=2") else { return };
    let pattern = shard(directory.path(), &video);
    let builder = || Loader::builder(expand_shards(&[&pattern]).unwrap());
    let spread = VideoSampling::Uniform { frames: 6 };
    let state = builder().video_sampling(spread).build().unwrap().state().unwrap();
    assert!(builder().video_sampling(spread).restore(state.clone()).build().is_ok());
    let refused = builder().restore(state.clone()).build().unwrap_err().to_string();
    let both =
        "videos were sampled as 6 frames evenly spread, and are now as 2 frames per second, 64 at most";
    assert!(refused.contains(both), "{refused}");
    let undecoded = builder().decode(dflop_loader::decode::Decode::Raw).restore(state);
    assert!(undecoded.build().is_ok(), "no frame is chosen from stored videos");
}
