//! Checks that data-parallel layouts cost the same in parallelism plans as in simulated step plans.

use dflop_costmodel::memory::ReplicaMemory;
use dflop_costmodel::{DevicePreset, DeviceRate, ModelSpec, RankLayout, SampleShape, SampleUnits};
use dflop_loader::{LayoutSummary, RankTraining, Synchronization, compare_layouts};
use dflop_planner::{
    Cluster, DataParallelPlan, EncoderSplit, ItemSize, ModelCostsBuilder, PlanProblem, SearchSpaceOptions,
    Workload, data_parallel,
};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

/// All samples of a dataset in one batch, one microbatch per rank: by the step planner, and by the planner.
fn both(samples: u64, ranks: u32) -> Vec<(LayoutSummary, DataParallelPlan)> {
    let data = TempDataset::new(2, samples as usize / 2, Compression::Plain);
    let spec = ModelSpec::preset("omni-7b").unwrap();
    let memory = ReplicaMemory::new(&spec);
    let links = DevicePreset::named("h100").unwrap().links();
    let training = RankTraining { memory: memory.clone(), links, gpus_per_node: 8 };
    let builder = loaders::builder(data.index(), samples, ranks as usize).work(20_000);
    let planner = builder.microbatches(1).one_device(Synchronization::PerMicrobatch).build().unwrap();
    let layouts = RankLayout::all(ranks, 8, 8);
    let simulated = compare_layouts(&planner, &layouts, 0..1, &training).unwrap();
    let (index, mut shape) = (data.index(), SampleShape::default());
    let mut sizes: Vec<ItemSize> = Vec::new();
    for sample in 0..index.len() {
        index.sample(sample).read_shape(&mut shape);
        sizes.push(SampleUnits::new(&spec, &shape).unwrap().try_into().unwrap());
    }
    let model = ModelCostsBuilder::new(&spec).rate(DeviceRate::preset("h100").unwrap()).build().unwrap();
    let workload = Workload::draw(&sizes, samples as u32, 1, 0).unwrap();
    let problem = PlanProblem {
        encoders: model.encoder_costs(),
        llm: &model.llm,
        workload: &workload,
        cluster: Cluster {
            gpus: ranks,
            gpus_per_node: 8,
            memory_bytes: 1 << 40,
            links: links.map(Into::into),
        },
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Sample,
        memory_margin: 1.1,
    };
    let planned = data_parallel(&problem, &memory).unwrap();
    assert_eq!(planned.len(), simulated.len());
    simulated.into_iter().zip(planned).collect()
}

/// Without a choice, everything is equal.
#[test]
fn a_sample_per_gpu_has_one_time_and_one_memory() {
    for (simulated, planned) in both(8, 8) {
        assert_eq!((simulated.layout, planned.microbatches), (planned.layout, 1));
        let exposed_seconds = simulated.exposed_seconds.unwrap();
        let seconds = simulated.step_seconds + exposed_seconds;
        assert!((planned.step_seconds / seconds - 1.0).abs() < 2e-3, "{planned:?} {simulated:?}");
        let difference = (planned.exposed_seconds - exposed_seconds).abs();
        assert!(difference < 2e-3 * seconds, "{planned:?} {simulated:?}");
        assert_eq!(planned.memory, simulated.memory);
    }
}

/// Both balance the same batch by search, from different orders.
#[test]
fn a_balanced_batch_takes_as_long_in_both() {
    for (simulated, planned) in both(48, 4) {
        let seconds = simulated.step_seconds + simulated.exposed_seconds.unwrap();
        assert!((planned.step_seconds / seconds - 1.0).abs() < 0.03, "{planned:?} {simulated:?}");
        let bytes = [planned.memory.total(), simulated.memory.total()].map(|bytes| bytes as f64);
        assert!((bytes[0] / bytes[1] - 1.0).abs() < 0.05, "{planned:?} {simulated:?}");
    }
}
