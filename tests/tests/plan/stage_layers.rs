//! Checks plans for stages that hold layers from multiple modules.

use dflop_loader::{Error, StepPlannerBuilder};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

const RANKS: usize = 2;

/// Plans 24 samples with images, audio and text over 2 LLM ranks with 3 microbatches each.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    loaders::builder(data.index(), 24, RANKS).microbatches(3)
}

/// Vision, audio and LLM layers by stage.
fn layers(vision: [usize; 2], audio: [usize; 2], llm: [usize; 2]) -> Vec<Vec<usize>> {
    [vision, audio, llm].map(|layers| layers.to_vec()).to_vec()
}

/// A stage time is the share of each module time for the stage layers; the makespan is computed for a single
/// chain.
#[test]
fn the_makespan_is_that_of_the_chain() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    for (layers, counts) in [
        (layers([4, 0], [2, 2], [0, 8]), vec![1, 1]),
        (layers([2, 2], [2, 2], [4, 4]), vec![2]),
        (layers([0, 0], [0, 0], [4, 4]), vec![2]),
    ] {
        let planner = builder(&data).stage_layers(layers.clone()).build().unwrap();
        let (plan, pipeline) = (planner.plan(0).unwrap(), planner.pipeline());
        assert_eq!((&pipeline.stages, pipeline.has_parallel_encoders), (&counts, false));
        let longest = |rank: &Vec<Vec<u32>>| {
            // In a chain with two stages, forward and backward in the slowest stage never overlap.
            let of_stage = |stage: usize| -> f64 {
                let ns = |place: &u32| {
                    let cost = &plan.costs[*place as usize].module_ns;
                    let of_module = |(ns, layers): (&u64, &Vec<usize>)| {
                        *ns as f64 * layers[stage] as f64 / layers.iter().sum::<usize>().max(1) as f64
                    };
                    cost.as_slice().iter().zip(&layers).map(of_module).sum::<f64>()
                };
                rank.iter().flatten().map(ns).sum()
            };
            of_stage(0).max(of_stage(1))
        };
        let slowest = plan.ranks.iter().map(longest).fold(0.0, f64::max);
        assert!(plan.makespan_ns as f64 >= slowest * (1.0 - 1e-6), "{} below {slowest}", plan.makespan_ns);
        assert!((plan.makespan_ns as f64) < 2.0 * slowest, "{} far above {slowest}", plan.makespan_ns);
        assert!(plan.bound.ns <= plan.makespan_ns);
    }
}

/// An encoder without layers in the pipeline has no time in it.
#[test]
fn a_module_outside_the_pipeline_is_not_counted() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let with = |vision: [usize; 2]| {
        builder(&data).stage_layers(layers(vision, [0, 0], [4, 4])).build().unwrap().plan(0).unwrap()
    };
    assert!(with([0, 0]).makespan_ns < with([2, 2]).makespan_ns);
}

#[test]
fn layers_that_do_not_fit_are_refused() {
    let data = TempDataset::new(1, 30, Compression::Plain);
    let reason = |builder: StepPlannerBuilder| match builder.build().unwrap_err() {
        Error::Config { setting, reason } => format!("{setting}: {reason}"),
        other => panic!("{other}"),
    };
    let good = || layers([1, 0], [1, 0], [0, 2]);
    let missing = reason(builder(&data).stage_layers(vec![vec![1]; 2]));
    assert!(missing.contains(
        "stage_layers: give the layers in each of 1 to 1024 stages, for each of vision, audio, llm"
    ));
    let empty = reason(builder(&data).stage_layers(layers([1, 0], [1, 0], [2, 0])));
    assert_eq!(empty, "stage_layers: stage 1 has no layer");
    for both in [builder(&data).stages(vec![1; 3]), builder(&data).module_dp_sizes(vec![1, 1, RANKS])] {
        assert!(reason(both.stage_layers(good())).contains("stage_layers: cannot be used with `stages`"));
    }
}
