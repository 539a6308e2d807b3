//! How long it takes to partition a global batch, to simulate a pipeline, and to plan the parallelism of a cluster.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_balancer::plan::{Cluster, EncoderShare, Freedom, PlanProblem, plan};
use dflop_balancer::schedule::{ScheduleKind, schedule};
use dflop_balancer::{
    Budget, Caps, CompiledSchedule, Instance, PipelineConfig, Strategy, balance, balance_pipeline, simulate,
};
use dflop_benches::instances::instance;
use dflop_tests::plan_cases::CASES;

/// Items and groups of the partition problems.
const SIZES: [(usize, usize); 3] = [(512, 64), (2_048, 128), (8_192, 1_024)];
/// A quick search; see `Budget`.
const WORK: u64 = 20_000;
/// Samples of the pipeline's global batch.
const GLOBAL_BATCH: usize = 512;
const DP_SIZE: usize = 4;
const MICROBATCHES: usize = 16;
/// Pipeline stages of the encoder and of the LLM.
const STAGES: [usize; 2] = [1, 3];

fn bench_partition(group: &mut BenchmarkGroup<'_, WallTime>, strategy: Strategy) {
    for (items, groups) in SIZES {
        let instance = instance(items, groups);
        group.throughput(Throughput::Elements(items as u64));
        group.bench_with_input(BenchmarkId::new("items", items), &instance, |b, instance| {
            b.iter(|| {
                balance(instance, strategy, &Caps::default(), &mut Budget::work(WORK)).expect("no cap is set")
            });
        });
    }
}

fn bench_multi_lpt(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/multi_lpt");
    bench_partition(&mut group, Strategy::MultiLpt);
    group.finish();
}

fn bench_search(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/search_20k");
    bench_partition(&mut group, Strategy::Search);
    group.finish();
}

fn pipeline() -> (Instance, PipelineConfig) {
    let instance = instance(GLOBAL_BATCH, DP_SIZE * MICROBATCHES);
    (instance, PipelineConfig { dp_size: DP_SIZE, stages: STAGES.to_vec() })
}

fn bench_pipeline(c: &mut Criterion) {
    let (instance, config) = pipeline();
    let mut group = c.benchmark_group("balancer/pipeline_4x16");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    for strategy in [Strategy::MultiLpt, Strategy::Search] {
        group.bench_function(strategy.name(), |b| {
            b.iter(|| {
                balance_pipeline(&instance, &config, strategy, &Caps::default(), &mut Budget::work(WORK))
                    .expect("it fits")
            });
        });
    }
    group.finish();
}

fn bench_simulator(c: &mut Criterion) {
    let (instance, config) = pipeline();
    let work = &mut Budget::work(0);
    let found = balance_pipeline(&instance, &config, Strategy::MultiLpt, &Caps::default(), work);
    let ranks = found.expect("the configuration fits").ranks;
    let times = config.stage_times(&instance, &ranks[0]).expect("the configuration fits");
    let kind = ScheduleKind::OneForwardOneBackward;
    let stages = times.stages();
    let lists: Vec<_> = (0..stages).map(|stage| schedule(kind, stage, stages, MICROBATCHES)).collect();
    let rows: Vec<usize> = (0..stages).collect();
    let mut compiled = CompiledSchedule::new(kind, &rows, MICROBATCHES).expect("there are stages");
    let mut group = c.benchmark_group("balancer/simulate_4_stages_16_microbatches");
    group.bench_function("timeline", |b| {
        b.iter(|| simulate(&lists, &times).expect("1F1B never waits for ever"));
    });
    group.bench_function("makespan", |b| b.iter(|| compiled.makespan_ns(&times)));
    group.finish();
}

/// GPUs and global batches that are planned for; the targets are 0.1, 1 and 10 seconds.
const CLUSTERS: [(u32, u32); 3] = [(64, 512), (1_024, 2_048), (16_384, 8_192)];

fn bench_plan(c: &mut Criterion) {
    let case = &CASES[3].prepare();
    let mut group = c.benchmark_group("balancer/plan");
    group.sample_size(10);
    for (gpus, global_batch) in CLUSTERS {
        let workload = case.workload(global_batch, 50);
        let problem = PlanProblem {
            encoder: &case.costs[0],
            llm: &case.costs[1],
            workload: &workload,
            cluster: Cluster { gpus, ..case.cluster },
            freedom: Freedom::default(),
            share: EncoderShare::Tile,
            memory_margin: 1.1,
        };
        group.bench_function(BenchmarkId::new("gpus", gpus), |b| {
            b.iter(|| plan(&problem).expect("a plan fits"));
        });
    }
    group.finish();
}

criterion_group!(benches, bench_multi_lpt, bench_search, bench_pipeline, bench_simulator, bench_plan);
criterion_main!(benches);
