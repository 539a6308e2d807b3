//! How long it takes to predict what samples cost.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_benches::shapes::{mixture, text, with_pictures};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};

const GLOBAL_BATCH: usize = 8_192;

/// A model that cuts pictures into tiles of any resolution, the dearest of the token rules.
fn model() -> CostModel {
    CostModel::new(
        ModelSpec::preset("llava-ov-qwen2.5-7b").expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    )
}

fn bench_annotate(c: &mut Criterion) {
    let model = model();
    let mut group = c.benchmark_group("costmodel/annotate");
    group.throughput(Throughput::Elements(1));
    let samples = [("text", text()), ("one_picture", with_pictures(1)), ("eight_pictures", with_pictures(8))];
    for (name, shape) in samples {
        group.bench_function(name, |b| b.iter(|| model.annotate(black_box(&shape))));
    }
    group.finish();
}

fn bench_annotate_batch(c: &mut Criterion) {
    let model = model();
    let shapes = mixture(GLOBAL_BATCH);
    let mut group = c.benchmark_group("costmodel/annotate_batch");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    group.bench_with_input(BenchmarkId::new("samples", GLOBAL_BATCH), &shapes, |b, shapes| {
        b.iter(|| shapes.iter().filter_map(|shape| model.annotate(shape).ok()).map(|cost| cost.tokens).max());
    });
    group.finish();
}

criterion_group!(benches, bench_annotate, bench_annotate_batch);
criterion_main!(benches);
