//! How long it takes to predict what samples cost.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_benches::profiles::formula;
use dflop_benches::shapes::{mixture, text, with_images};
use dflop_costmodel::{CostModel, DatasetStatistics, DeviceRate, ModelSpec, ProfileOptions, SampleShape};

const GLOBAL_BATCH: usize = 8_192;
/// Samples of a data profile.
const PROFILED: usize = 100_000;

/// Cuts an image that is alone into tiles of any resolution; of several in a sample, each gets one tile.
const ANY_RES: &str = "llava-ov-qwen2.5-7b";
/// Cuts every image into tiles, however many there are.
const DYNAMIC_TILES: &str = "internvl3-8b";

fn model(name: &str) -> CostModel {
    CostModel::new(
        ModelSpec::preset(name).expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    )
}

/// The same model with times from a measured profile: one image is to take less than 0.5 us, eight images in tiles
/// less than 3 us.
fn measured(name: &str) -> CostModel {
    let spec = ModelSpec::preset(name).expect("a known model");
    CostModel::from_profile(spec, &formula(), ProfileOptions::default())
        .expect("all modules are in the profile")
}

fn bench_annotate(c: &mut Criterion) {
    let mut group = c.benchmark_group("costmodel/annotate");
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

/// A batch of 8,192 is to take less than 5 ms.
fn bench_annotate_batch(c: &mut Criterion) {
    let shapes = mixture(GLOBAL_BATCH);
    let mut group = c.benchmark_group("costmodel/annotate_batch");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    for (source, model) in [("samples", model(ANY_RES)), ("samples_from_a_profile", measured(ANY_RES))] {
        let tokens = |shape: &SampleShape| model.predict(shape).expect("the model takes the sample").tokens;
        group.bench_with_input(BenchmarkId::new(source, GLOBAL_BATCH), &shapes, |b, shapes| {
            b.iter(|| shapes.iter().map(tokens).max());
        });
    }
    group.finish();
}

/// What `dflop stats` does with shapes: a million samples are to take less than 2 s on one core.
fn bench_data_profile(c: &mut Criterion) {
    let (model, shapes) = (model(ANY_RES), mixture(PROFILED));
    let mut group = c.benchmark_group("costmodel/data_profile");
    group.sample_size(10).throughput(Throughput::Elements(PROFILED as u64));
    group.bench_with_input(BenchmarkId::new("samples", PROFILED), &shapes, |b, shapes| {
        b.iter(|| {
            let mut profile = DatasetStatistics::new(&model);
            for (place, shape) in (0..).zip(shapes) {
                profile.add(place, shape, &model.predict(shape).expect("the model takes the sample"));
            }
            profile.summarize(24)
        });
    });
    group.finish();
}

criterion_group!(benches, bench_annotate, bench_annotate_batch, bench_data_profile);
criterion_main!(benches);
