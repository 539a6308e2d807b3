//! Benchmarks global batch partition, pipeline simulation, and parallelism planning.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind, schedule};
use dflop_balancer::{
    Budget, Caps, Communication, CompiledSchedule, Instance, PipelineConfig, PipelineObjective, StageTimes,
    Strategy, balance, balance_pipeline, lower_bound, simulate,
};
use dflop_benches::families::Family;
use dflop_benches::planning::{Target, instance};
use dflop_planner::{Cluster, EncoderSplit, PlanProblem, SearchSpaceOptions, plan};
use dflop_tests::plan_cases::CASES;

/// Number of items and groups in each partition problem.
const SIZES: [(usize, usize); 3] = [(512, 64), (2_048, 128), (8_192, 1_024)];
/// Work units for a quick search, see `Budget`.
const WORK: u64 = 20_000;
/// Number of samples in the pipeline's global batch.
const GLOBAL_BATCH: usize = 512;
const DP_SIZE: usize = 4;
const MICROBATCHES: usize = 16;
/// Number of pipeline stages for the encoder and for the LLM.
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
    bench_partition(&mut group, Strategy::MULTI_LPT);
    group.finish();
}

fn bench_search(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/search_20k");
    bench_partition(&mut group, Strategy::SEARCH);
    group.finish();
}

/// Benchmarks the search to each target: bound, start and the minimum work units that reach it.
fn bench_targets(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/to_gap");
    for target in Target::all() {
        let Target { family, items, groups, gap } = target;
        let (instance, work) = target.reached().expect("every target is within reach");
        let name = format!("{family:?}_n{items}_m{groups}/{gap}");
        group.bench_function(name, |b| {
            b.iter(|| {
                let budget = &mut Budget::work(work);
                balance(&instance, Strategy::SEARCH, &Caps::default(), budget).expect("no cap is set")
            });
        });
    }
    group.finish();
}

fn bench_bound(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/lower_bound");
    for family in Family::REALISTIC {
        let instance = family.instance(8_192, 1_024, 0);
        group.bench_function(format!("{family:?}_n8192_m1024"), |b| b.iter(|| lower_bound(&instance)));
    }
    group.finish();
}

fn bench_differencing(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/kk");
    bench_partition(&mut group, Strategy::KARMARKAR_KARP);
    group.finish();
}

fn pipeline() -> (Instance, PipelineConfig) {
    let instance = instance(GLOBAL_BATCH, DP_SIZE * MICROBATCHES);
    (instance, PipelineConfig::new(DP_SIZE, STAGES.to_vec()))
}

fn bench_pipeline(c: &mut Criterion) {
    let (instance, config) = pipeline();
    let mut group = c.benchmark_group("balancer/pipeline_4x16");
    group.throughput(Throughput::Elements(GLOBAL_BATCH as u64));
    let (makespan, min_max) = (PipelineObjective::Makespan, PipelineObjective::MinMax);
    for (name, strategy, objective, work) in [
        ("multi_lpt", Strategy::MULTI_LPT, makespan, 0),
        ("min_max_20k", Strategy::SEARCH, min_max, WORK),
        ("search_20k", Strategy::SEARCH, makespan, WORK),
        ("search_1400k", Strategy::SEARCH, makespan, 70 * WORK),
    ] {
        let config = config.clone().objective(objective);
        group.bench_function(name, |b| {
            b.iter(|| {
                balance_pipeline(&instance, &config, strategy, &Caps::default(), &mut Budget::work(work))
                    .expect("it fits")
            });
        });
    }
    group.finish();
}

fn bench_simulator(c: &mut Criterion) {
    let (instance, config) = pipeline();
    let work = &mut Budget::work(0);
    let found = balance_pipeline(&instance, &config, Strategy::MULTI_LPT, &Caps::default(), work);
    let ranks = found.expect("the configuration fits").ranks;
    let times = config.stage_times(&instance, &ranks[0]).expect("the configuration fits");
    let kind = ScheduleKind::OneForwardOneBackward;
    let stages = times.stages();
    let lists: Vec<_> = (0..stages).map(|stage| schedule(kind, stage, stages, MICROBATCHES)).collect();
    let rows: Vec<usize> = (0..stages).collect();
    let mut compiled = CompiledSchedule::new(kind, &rows, MICROBATCHES).expect("there are stages");
    let mut group = c.benchmark_group("balancer/simulate_4_stages_16_microbatches");
    group.bench_function("timeline", |b| {
        b.iter(|| simulate(&lists, &times).expect("1F1B never deadlocks"));
    });
    group.bench_function("makespan", |b| b.iter(|| compiled.makespan_ns(&times)));
    group.finish();
}

/// Schedules, pipeline ranks and microbatches.
const SCHEDULES: [(ScheduleKind, usize, usize); 6] = [
    (ScheduleKind::GPipe, 4, 16),
    (ScheduleKind::OneForwardOneBackward, 4, 16),
    (ScheduleKind::OneForwardOneBackward, 8, 16),
    (ScheduleKind::OneForwardOneBackward, 8, 64),
    (ScheduleKind::Interleaved { chunks: 2 }, 4, 16),
    (ScheduleKind::ZeroBubble, 4, 16),
];

/// Benchmarks makespans of compiled schedules, with different pass times in every call; elements are passes.
fn bench_compiled(c: &mut Criterion) {
    let mut group = c.benchmark_group("balancer/compiled_passes");
    for (kind, ranks, microbatches) in SCHEDULES {
        let layout = PipelineLayout::chain(ranks, kind.chunks(), microbatches).expect("it is small");
        let free = Communication::free(layout.stages(), microbatches);
        bench_layout(&mut group, &format!("{kind}/{ranks}x{microbatches}"), kind, &layout, &free);
    }
    let modules = [ModuleStages::new(1, 2), ModuleStages::new(3, 4)];
    let layout = PipelineLayout::from_modules(&modules, MICROBATCHES).expect("it is small");
    let per_stage = vec![100; layout.stages()];
    let timed = Communication::free(layout.stages(), layout.microbatches())
        .messages(&per_stage, &per_stage)
        .and_then(|timed| timed.reduce_grads(per_stage.clone(), true))
        .expect("a time for each stage");
    bench_layout(&mut group, "job_2x1_4x3_messages", ScheduleKind::OneForwardOneBackward, &layout, &timed);
    group.finish();
}

fn bench_layout(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    kind: ScheduleKind,
    layout: &PipelineLayout,
    communication: &Communication,
) {
    let (stages, microbatches) = (layout.stages(), layout.microbatches());
    let rows: Vec<usize> = (0..stages).collect();
    let times = [7_919, 104_729].map(|factor| {
        let times_ns: Vec<u64> =
            (0..stages * microbatches).map(|i| (i * factor % 997 + 500) as u64).collect();
        StageTimes::split(stages, microbatches, &times_ns).expect("they are short")
    });
    let lists = layout.schedule(kind).expect("the chunks fit");
    let passes = lists.iter().flatten().filter(|action| action.pass().is_some()).count();
    let mut compiled =
        CompiledSchedule::from_layout(kind, layout, &rows, communication).expect("the rows fit");
    let mut calls = 0;
    group.throughput(Throughput::Elements(passes as u64));
    group.bench_function(name, |b| {
        b.iter(|| {
            calls += 1;
            compiled.makespan_ns(&times[calls % 2])
        });
    });
}

/// GPUs and global batches to plan for; the targets are 0.1, 1 and 10 seconds.
const CLUSTERS: [(u32, u32); 3] = [(64, 512), (1_024, 2_048), (16_384, 8_192)];

fn bench_plan(c: &mut Criterion) {
    let case = &CASES[3].prepare();
    let mut group = c.benchmark_group("balancer/plan");
    group.sample_size(10);
    for (gpus, global_batch) in CLUSTERS {
        let workload = case.workload(global_batch, 50);
        let problem = PlanProblem {
            encoders: case.model.encoder_costs(),
            llm: &case.model.llm,
            workload: &workload,
            cluster: Cluster { gpus, ..case.cluster },
            options: SearchSpaceOptions::default(),
            encoder_split: EncoderSplit::Tile,
            memory_margin: 1.1,
        };
        group.bench_function(BenchmarkId::new("gpus", gpus), |b| {
            b.iter(|| plan(&problem).expect("a plan fits"));
        });
    }
    group.finish();
}

criterion_group!(
    benches,
    bench_multi_lpt,
    bench_differencing,
    bench_search,
    bench_bound,
    bench_targets,
    bench_pipeline,
    bench_simulator,
    bench_compiled,
    bench_plan
);
criterion_main!(benches);
