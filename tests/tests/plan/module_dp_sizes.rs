//! Checks plans for encoders whose DP size is not the LLM's: the makespan equals the makespan of the job that
//! runs.

use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, StageTimes};
use dflop_loader::sample::BatchLayout;
use dflop_loader::{Error, StepPlan, StepPlannerBuilder};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

const RANKS: usize = 2;
const ROUNDS: usize = 3;

/// Plans 24 samples with images, audio and text over 2 LLM ranks with 3 microbatches each.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    loaders::builder(data.index(), 24, RANKS).microbatches(ROUNDS)
}

/// Simulates a plan by the action lists of all ranks, one stage per module: an encoder replica runs an even
/// part of a round's media, or the longest sample, or the media from the same LLM rank.
fn simulated_ns(plan: &StepPlan, dp_sizes: [usize; 3]) -> u64 {
    let last = dp_sizes.len() - 1;
    let is_shared = |module: usize| dp_sizes[module] != RANKS;
    let module = |module: usize| {
        let own = ModuleStages::new(1, dp_sizes[module]).feeds(last);
        if is_shared(module) { own.share_rounds() } else { own }
    };
    let modules: Vec<ModuleStages> = (0..=last).map(module).collect();
    let layout = PipelineLayout::from_modules(&modules, ROUNDS).unwrap();
    let mut times_ns = Vec::new();
    for (module, dp_size) in dp_sizes.into_iter().enumerate() {
        for microbatch in 0..layout.microbatches() {
            let (round, replica) = (microbatch / dp_size, microbatch % dp_size);
            let ns = |place: &u32| plan.costs[*place as usize].module_ns.as_slice()[module];
            let of_rank = |rank: usize| plan.ranks[rank].get(round).into_iter().flatten().map(ns);
            times_ns.push(if is_shared(module) {
                let all: Vec<u64> = (0..RANKS).flat_map(of_rank).collect();
                let longest = all.iter().copied().max().unwrap_or(0);
                all.iter().sum::<u64>().div_ceil(dp_size as u64).max(longest)
            } else {
                of_rank(replica).sum()
            });
        }
    }
    let times = StageTimes::split(layout.stages(), layout.microbatches(), &times_ns).unwrap();
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    let free = Communication::free(layout.stages(), layout.microbatches());
    layout.simulate(&lists, &times, &free).unwrap().makespan_ns
}

#[test]
fn a_step_is_planned_for_the_job_that_runs() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    for dp_sizes in [[1, 3, 2], [2, 1, 2], [2, 2, 2]] {
        let planner = builder(&data).module_dp_sizes(dp_sizes.to_vec()).build().unwrap();
        let plan = planner.plan(0).unwrap();
        assert_eq!(plan.makespan_ns, simulated_ns(&plan, dp_sizes), "{dp_sizes:?}");
        assert!(plan.bound.ns <= plan.makespan_ns);
    }
    let default = builder(&data).build().unwrap().plan(0).unwrap();
    let equal = builder(&data).module_dp_sizes(vec![2; 3]).build().unwrap().plan(0).unwrap();
    assert_eq!(default.ranks, equal.ranks);
}

#[test]
fn padding_is_work_of_the_job_as_well() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let planner = |dp_sizes: &[usize]| {
        let builder = builder(&data).pad_to_tokens(4096, BatchLayout::Packed);
        builder.module_dp_sizes(dp_sizes.to_vec()).build().unwrap()
    };
    for dp_sizes in [[1, 3, 2], [2, 2, 2]] {
        let padded = planner(&dp_sizes).plan(0).unwrap();
        assert!(!padded.padding_ns.is_empty());
        assert!(padded.makespan_ns > simulated_ns(&padded, dp_sizes), "{dp_sizes:?}");
    }
}

#[test]
fn dp_sizes_that_do_not_fit_are_refused() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    for dp_sizes in [vec![1, 2], vec![1, 0, 2], vec![1, 1, 3]] {
        let refused = builder(&data).module_dp_sizes(dp_sizes).build();
        assert!(matches!(refused, Err(Error::Config { setting: "module_dp_sizes", .. })), "{refused:?}");
    }
}
