//! Data-parallel layouts agree with formulas where there is no choice, and use memory as far as it goes.

use dflop_balancer::Error;
use dflop_costmodel::memory::ReplicaMemory;
use dflop_costmodel::{
    CostModel, DevicePreset, DeviceRate, ImageSize, ModelSpec, ModuleTraffic, RankLayout, SampleShape,
    SampleUnits, Sharding,
};
use dflop_planner::{
    Cluster, DataParallelPlan, EncoderSplit, ItemSize, ModelCostsBuilder, PlanProblem, SearchSpaceOptions,
    Workload, data_parallel,
};

use super::closed_form;

fn spec() -> ModelSpec {
    ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap()
}

fn shape() -> SampleShape {
    let images = vec![ImageSize { width: 640, height: 480 }];
    SampleShape { text_tokens: 100, images, ..SampleShape::default() }
}

fn sizes() -> Vec<ItemSize> {
    (0..97).map(|at: u32| ItemSize::from_tiles(at % 9, 300 + at % 9 * 729 + at * 37 % 400)).collect()
}

/// Plans for 8 GPUs in a node.
fn plans(
    sizes: &[ItemSize],
    global_batch: u32,
    memory_bytes: u64,
    has_recomputation: bool,
) -> Vec<DataParallelPlan> {
    let spec = spec();
    let rate = DeviceRate::preset("h100").unwrap();
    let model = ModelCostsBuilder::new(&spec).rate(rate).build().unwrap();
    let workload = Workload::draw(sizes, global_batch, 6, 1).unwrap();
    let links = DevicePreset::named("h100").unwrap().links().map(Into::into);
    let problem = PlanProblem {
        encoders: model.encoder_costs(),
        llm: &model.llm,
        workload: &workload,
        cluster: Cluster { gpus: 8, gpus_per_node: 8, memory_bytes, links },
        options: SearchSpaceOptions { has_recomputation, ..SearchSpaceOptions::default() },
        encoder_split: EncoderSplit::Sample,
        memory_margin: 1.0,
    };
    data_parallel(&problem, &ReplicaMemory::new(&spec)).unwrap()
}

/// Every GPU has the same sample, so that all layouts compute as long, and only communication differs.
#[test]
fn a_sample_per_gpu_takes_the_predicted_time_and_the_communication_that_it_does_not_hide() {
    let spec = spec();
    let units = SampleUnits::new(&spec, &shape()).unwrap();
    let model = CostModel::new(spec.clone(), DeviceRate::preset("h100").unwrap());
    let cost = model.predict(&shape()).unwrap();
    let module_seconds: Vec<f64> = cost.module_ns.as_slice().iter().map(|ns| *ns as f64 / 1e9).collect();
    let compute_seconds: f64 = module_seconds.iter().sum();
    let memory = ReplicaMemory::new(&spec);
    let links = DevicePreset::named("h100").unwrap().links().unwrap();
    let found = plans(&[units.try_into().unwrap()], 8, 1 << 40, false);
    let layouts: Vec<RankLayout> = found.iter().map(|plan| plan.layout).collect();
    assert_eq!(layouts, RankLayout::all(8, 8, 8));
    for plan in found {
        let waits = |(parameters, seconds): (_, &f64)| {
            let traffic = ModuleTraffic::new(&parameters, plan.layout, &links);
            traffic.exposed_seconds(*seconds, [0, 1]) + traffic.after_update_seconds()
        };
        let exposed_seconds: f64 = memory.modules().into_iter().zip(&module_seconds).map(waits).sum();
        let expected_seconds = compute_seconds + exposed_seconds;
        assert!((plan.step_seconds / expected_seconds - 1.0).abs() < 1e-3, "{plan:?} {expected_seconds}");
        let difference = (plan.exposed_seconds - exposed_seconds).abs();
        assert!(difference < 1e-3 * expected_seconds, "{plan:?} {exposed_seconds}");
        let tokens = [u64::from(cost.encoder_tokens), u64::from(cost.tokens)];
        assert_eq!(plan.memory, memory.rank(plan.layout, &tokens).unwrap());
        assert_eq!((plan.microbatches, plan.microbatch_tokens_max), (1, tokens[1]));
        assert!(plan.fits && !plan.is_recomputed);
    }
}

#[test]
fn less_memory_needs_more_microbatches_or_recomputation() {
    let roomy = plans(&sizes(), 64, 1 << 40, false);
    assert!(roomy.iter().all(|plan| plan.fits && plan.microbatches == 1));
    let fsdp = roomy.last().unwrap();
    assert_eq!(fsdp.layout.sharding, Sharding::Parameters);
    let memory_bytes = fsdp.memory.total() - 1;
    let tight = plans(&sizes(), 64, memory_bytes, false);
    let again = tight.last().unwrap();
    assert!(again.fits && again.microbatches > 1 && again.memory.total() <= memory_bytes, "{again:?}");
    assert!(again.step_seconds > 0.99 * fsdp.step_seconds, "{again:?}");
    assert!(again.microbatch_tokens_max < fsdp.microbatch_tokens_max, "{again:?}");
    let recomputed = plans(&sizes(), 64, memory_bytes, true);
    let recomputed = recomputed.last().unwrap();
    assert!(recomputed.fits && recomputed.step_seconds <= again.step_seconds, "{recomputed:?}");
    assert_eq!(plans(&sizes(), 64, memory_bytes, false), tight);
    // 16 bytes for each of 8 billion parameters are more than 80 GiB.
    let ddp = &plans(&sizes(), 64, 80 << 30, false)[0];
    assert_eq!((ddp.layout.sharding, ddp.fits, ddp.microbatches), (Sharding::Nothing, false, 8));
}

#[test]
fn layouts_without_times_or_samples_are_refused() {
    let workload = Workload::draw(&closed_form::sizes(), 6, 2, 1).unwrap();
    let refused = |degrees: Vec<u32>, gpus: u32| {
        let llm = closed_form::ClosedForm { degrees, ..closed_form::llm() };
        let costs = (closed_form::encoder(), llm);
        let problem = closed_form::problem(&costs, &workload, closed_form::cluster(gpus, 1 << 40));
        data_parallel(&problem, &ReplicaMemory::new(&spec())).unwrap_err()
    };
    assert!(matches!(refused(vec![1], 8), Error::Config { setting: "global_batch_size", .. }));
    assert!(matches!(refused(vec![2, 4], 4), Error::Config { setting: "profile", .. }));
}
