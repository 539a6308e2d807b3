//! Benchmarks sample cost prediction.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_benches::planning::{formula, mixture, text, with_images};
use dflop_costmodel::{CostModel, DatasetStatistics, DeviceRate, ModelSpec, ProfileOptions, SampleShape};

const GLOBAL_BATCH: usize = 8_192;
/// Number of samples in the dataset statistics.
const PROFILED: usize = 100_000;

/// Model that cuts one sample image into tiles at any resolution; with more than one image, each has one
/// tile.
const ANY_RES: &str = "llava-ov-qwen2.5-7b";
/// Model that cuts every image into tiles, however many images there are.
const DYNAMIC_TILES: &str = "internvl3-8b";

fn model(name: &str) -> CostModel {
    CostModel::new(
        ModelSpec::preset(name).expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    )
}

/// Creates the same model with times from a measured profile. Targets: one image below 0.5 us, eight images
/// in tiles below 3 us.
fn measured(name: &str) -> CostModel {
    let spec = ModelSpec::preset(name).expect("a known model");
    CostModel::from_profile(spec, &formula(), ProfileOptions::default())
        .expect("all modules are in the profile")
}

fn bench_predict(c: &mut Criterion) {
    let mut group = c.benchmark_group("costmodel/predict");
    group.throughput(Throughput::Elements(1));
    let samples = [
        ("text", ANY_RES, text()),
        ("one_any_res_image", ANY_RES, with_images(1)),
        ("eight_images_of_one_tile", ANY_RES, with_images(8)),
        ("eight_tiled_images", DYNAMIC_TILES, with_images(8)),
    ];
    for (name, model_name, shape) in samples {
        let model = model(model_name);
        group.bench_function(name, |b| {
            b.iter(|| model.predict(black_box(&shape)).expect("the model takes the sample"));
        });
        let measured = measured(model_name);
        group.bench_function(format!("{name}_from_a_profile"), |b| {
            b.iter(|| measured.predict(black_box(&shape)).expect("the model takes the sample"));
        });
    }
    group.finish();
}

/// Times batches; the target for 8,192 samples is 5 ms.
fn bench_predict_batch(c: &mut Criterion) {
    let shapes = mixture(GLOBAL_BATCH);
    let mut group = c.benchmark_group("costmodel/predict_batch");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    for (source, model) in [("samples", model(ANY_RES)), ("samples_from_a_profile", measured(ANY_RES))] {
        let tokens = |shape: &SampleShape| model.predict(shape).expect("the model takes the sample").tokens;
        group.bench_with_input(BenchmarkId::new(source, GLOBAL_BATCH), &shapes, |b, shapes| {
            b.iter(|| shapes.iter().map(tokens).max());
        });
    }
    group.finish();
}

/// Benchmarks the shape statistics in `dflop stats`; the target for a million samples is 2 s on a single
/// core.
fn bench_dataset_statistics(c: &mut Criterion) {
    let (model, shapes) = (model(ANY_RES), mixture(PROFILED));
    let mut group = c.benchmark_group("costmodel/dataset_statistics");
    group.sample_size(10).throughput(Throughput::Elements(PROFILED as u64));
    group.bench_with_input(BenchmarkId::new("samples", PROFILED), &shapes, |b, shapes| {
        b.iter(|| {
            let mut statistics = DatasetStatistics::new(&model);
            for (number, shape) in (0..).zip(shapes) {
                statistics.add(number, shape, &model.predict(shape).expect("the model takes the sample"));
            }
            statistics.summarize(24)
        });
    });
    group.finish();
}

criterion_group!(benches, bench_predict, bench_predict_batch, bench_dataset_statistics);
criterion_main!(benches);
