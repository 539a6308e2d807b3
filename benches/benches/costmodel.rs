//! How long it takes to predict what samples cost.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_benches::shapes::{mixture, text, with_pictures};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};

const GLOBAL_BATCH: usize = 8_192;

/// Cuts a picture that is alone into tiles of any resolution; of several in a sample, each gets one tile.
const ANY_RES: &str = "llava-ov-qwen2.5-7b";
/// Cuts every picture into tiles, however many there are.
const DYNAMIC_TILES: &str = "internvl3-8b";

fn model(name: &str) -> CostModel {
    CostModel::new(
        ModelSpec::preset(name).expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    )
}

fn bench_annotate(c: &mut Criterion) {
    let mut group = c.benchmark_group("costmodel/annotate");
    group.throughput(Throughput::Elements(1));
    let samples = [
        ("text", ANY_RES, text()),
        ("one_any_res_picture", ANY_RES, with_pictures(1)),
        ("eight_pictures_of_one_tile", ANY_RES, with_pictures(8)),
        ("eight_tiled_pictures", DYNAMIC_TILES, with_pictures(8)),
    ];
    for (name, model_name, shape) in samples {
        let model = model(model_name);
        group.bench_function(name, |b| {
            b.iter(|| model.annotate(black_box(&shape)).expect("the model takes the sample"));
        });
    }
    group.finish();
}

fn bench_annotate_batch(c: &mut Criterion) {
    let model = model(ANY_RES);
    let shapes = mixture(GLOBAL_BATCH);
    let tokens = |shape: &SampleShape| model.annotate(shape).expect("the model takes the sample").tokens;
    let mut group = c.benchmark_group("costmodel/annotate_batch");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    group.bench_with_input(BenchmarkId::new("samples", GLOBAL_BATCH), &shapes, |b, shapes| {
        b.iter(|| shapes.iter().map(tokens).max());
    });
    group.finish();
}

criterion_group!(benches, bench_annotate, bench_annotate_batch);
criterion_main!(benches);
