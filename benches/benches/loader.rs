//! Benchmarks the loader steps: headers, groups, index, order and plan, pixels.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use dflop_benches::archives::{archive, jpeg, write_headers_only};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::StepPlanner;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::{Audio, ImageLimits, ImageTensorDecoder, decode_rgb};
use dflop_loader::processors::audio::{AudioProcessor, LongClips};
use dflop_loader::processors::image::ImageProcessor;
use dflop_loader::shard::tar::{Entry, SliceEntries};
use dflop_loader::shard::{Grouper, Shard, expand_shards};
use dflop_loader::write::ShardWriter;

/// Number of samples and image bytes in the in-memory archive, about 62 MB in total.
const ARCHIVE_SAMPLES: usize = 1_000;
const IMAGE_BYTES: usize = 60_000;
const INDEX_SAMPLES: usize = 100_000;
const WRITTEN_SAMPLES: u64 = 1_000;
const GLOBAL_BATCH: u64 = 2_048;

/// Scans headers; payloads are slices of the archive, as in a memory-mapped shard, and are not read.
fn bench_tar_scan(c: &mut Criterion) {
    let archive = Bytes::from(archive(ARCHIVE_SAMPLES, IMAGE_BYTES));
    let mut group = c.benchmark_group("loader/tar_scan");
    group.throughput(Throughput::Bytes(archive.len() as u64));
    group.bench_function("headers_only", |b| {
        b.iter(|| {
            SliceEntries::new(archive.clone())
                .map(|entry| entry.expect("a good archive").0.bytes)
                .sum::<u64>()
        });
    });
    group.finish();
}

fn bench_group(c: &mut Criterion) {
    let archive = Bytes::from(archive(ARCHIVE_SAMPLES, IMAGE_BYTES));
    let entries: Vec<(Entry, Bytes)> = SliceEntries::new(archive).filter_map(Result::ok).collect();
    let shard: Arc<str> = "shard-000000.tar".into();
    let group_all = |entries: Vec<(Entry, Bytes)>| {
        let mut grouper = Grouper::new(shard.clone());
        let samples =
            entries.iter().filter_map(|(entry, payload)| grouper.push(entry, Some(payload.clone())));
        samples.count() + usize::from(grouper.finish().is_some())
    };
    let mut group = c.benchmark_group("loader/group");
    group.throughput(Throughput::Elements(ARCHIVE_SAMPLES as u64));
    group.bench_function("three_fields_a_sample", |b| {
        b.iter_batched(|| entries.clone(), group_all, BatchSize::LargeInput);
    });
    group.finish();
}

/// Writes shards to a temporary directory, which removes them when it is dropped.
fn indexed() -> (tempfile::TempDir, Vec<Shard>, IndexOptions) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    write_headers_only(directory.path(), INDEX_SAMPLES);
    let pattern = directory.path().to_str().expect("temporary directories are UTF-8");
    let shards = expand_shards(&[pattern]).expect("shards are there");
    let options = IndexOptions { directory: Some(directory.path().join("index")), ..IndexOptions::default() };
    (directory, shards, options)
}

fn planner(index: &Arc<Index>) -> StepPlanner {
    let model = CostModel::new(
        ModelSpec::preset("qwen2.5-vl-7b").expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    );
    let builder = StepPlanner::builder(index.clone(), model).global_batch(GLOBAL_BATCH).dp_size(8);
    builder.microbatches(16).stages(vec![1, 3]).seed(7).build().expect("the settings fit")
}

fn bench_index_and_plan(c: &mut Criterion) {
    let (_directory, shards, options) = indexed();
    let index = Index::open_or_build(shards.clone(), &options).expect("the index is made");
    let planner = planner(&Arc::new(index));
    let mut group = c.benchmark_group("loader/index");
    group.throughput(Throughput::Elements(INDEX_SAMPLES as u64));
    group.bench_function("open_100k", |b| {
        b.iter(|| Index::open_or_build(shards.clone(), &options).expect("the index is there"));
    });
    group.finish();

    let mut group = c.benchmark_group("loader/order");
    group.throughput(Throughput::Elements(GLOBAL_BATCH));
    let mut steps = 0_u64..;
    let mut next = || steps.next().unwrap_or_default();
    group.bench_function("step_samples_2048", |b| b.iter(|| planner.steps().samples(next())));
    group.bench_function("plan_2048", |b| b.iter(|| planner.plan(next()).expect("no cap is set")));
    group.finish();
}

/// Writes samples with and without measuring them for the index; payloads are as in [`bench_tar_scan`].
fn bench_write(c: &mut Criterion) {
    let image = jpeg(587, 520);
    let write = |is_indexed| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut writer =
            ShardWriter::builder(directory.path()).index(is_indexed).build().expect("an empty directory");
        for sample in 0..WRITTEN_SAMPLES {
            let fields: [(&str, &[u8]); 2] = [("jpg", &image), ("txt", b"a kite over the sea")];
            writer.write(&format!("{sample:06}"), &fields).expect("the directory can be written");
        }
        writer.finish().expect("the directory can be written")
    };
    let mut group = c.benchmark_group("loader/write");
    group.throughput(Throughput::Elements(WRITTEN_SAMPLES));
    group.bench_function("with_index", |b| b.iter(|| write(true)));
    group.bench_function("without_index", |b| b.iter(|| write(false)));
    group.finish();
}

fn bench_rgb224(c: &mut Criterion) {
    let file = jpeg(587, 520);
    let mut kernel = ImageTensorDecoder::new(ImageLimits::default());
    let mut out = vec![0.0; kernel.values()];
    let mut group = c.benchmark_group("loader/rgb224");
    group.throughput(Throughput::Elements(1));
    group.bench_function("jpeg_587x520", |b| {
        b.iter(|| kernel.decode_into(black_box(&file), &mut out).expect("a good JPEG"));
    });
    group.finish();
}

/// Benchmarks the work of a decode thread after decoding, for a photo with a common size and half a minute of
/// sound.
fn bench_prepare(c: &mut Criterion) {
    let photo = decode_rgb(&jpeg(1024, 768), &ImageLimits::default()).expect("a good JPEG");
    let mut group = c.benchmark_group("loader/prepare");
    for preset in ["llava-ov-qwen2.5-7b", "internvl3-8b", "qwen2-vl-7b"] {
        let model = ModelSpec::preset(preset).expect("a known model");
        let processor = ImageProcessor::for_model(&model).expect("the model has a vision encoder");
        group.bench_function(format!("{preset}_1024x768"), |b| {
            b.iter(|| processor.images(black_box(&[&photo])).expect("the model takes it"));
        });
    }
    let sample = |index: u32| (index.wrapping_mul(0x9E37_79B1) >> 8) as f32 / 16_777_216.0 - 0.5;
    for (name, sample_rate_hz) in [("whisper_30s_16khz", 16_000), ("whisper_30s_44khz", 44_100)] {
        let samples = (0..30 * sample_rate_hz).map(sample).collect();
        let clip = Audio { sample_rate_hz, channels: 1, samples, is_truncated: false };
        let processor = AudioProcessor { mels: 128, long_clips: LongClips::Windows };
        group.bench_function(name, |b| {
            b.iter(|| processor.clip(black_box(&clip)).expect("the model takes it"));
        });
    }
    group.finish();
}

criterion_group!(
    benches,
    bench_tar_scan,
    bench_group,
    bench_index_and_plan,
    bench_write,
    bench_rgb224,
    bench_prepare
);
criterion_main!(benches);
