//! Runs the passes of a step one by one: an oracle for makespans.

use dflop_balancer::schedule::{Part, Pass, PassKind};
use dflop_balancer::{Instance, PipelineConfig, StageTimes};

/// Times of a step's passes, `[rank][stage][microbatch]`, forward and backward, and which stages all ranks
/// share.
pub(crate) struct StepPasses {
    pub(crate) times_ns: Vec<Vec<Vec<(u64, u64)>>>,
    is_shared: Vec<bool>,
}

/// Passes of a stage on a rank, run one after the other.
struct Lane {
    stage: usize,
    rank: usize,
    /// Microbatches, with whether the pass is backward.
    order: Vec<(usize, bool)>,
    next: usize,
    free_ns: u64,
}

impl StepPasses {
    pub(crate) fn new(instance: &Instance, config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> Self {
        let module_of = config.stages.iter().enumerate().flat_map(|(module, count)| vec![module; *count]);
        let is_shared = module_of.map(|module| config.module_dp_size(module) != config.dp_size).collect();
        let stages: usize = config.stages.iter().sum();
        let times = config.ranks_times(instance, ranks).unwrap();
        let of_rank = |times: &StageTimes| -> Vec<Vec<(u64, u64)>> {
            let of_stage = |stage: usize| {
                let pass_ns = |microbatch, kind| {
                    let part = Part { microbatch, stage: stage as u16 };
                    times.pass_ns(Pass { kind, part })
                };
                let both = |microbatch| {
                    (pass_ns(microbatch, PassKind::Forward), pass_ns(microbatch, PassKind::Backward))
                };
                (0..times.microbatches() as u32).map(both).collect()
            };
            (0..stages).map(of_stage).collect()
        };
        Self { times_ns: times.iter().map(of_rank).collect(), is_shared }
    }

    /// Runs every pass as soon as its inputs have ended, in 1F1B's order on each stage of each rank; returns
    /// the end of the last.
    fn run(&self) -> u64 {
        let (ranks, stages) = (self.times_ns.len(), self.is_shared.len());
        let microbatches = self.times_ns[0][0].len();
        let mut ends = std::collections::HashMap::new();
        let mut lanes = Vec::new();
        for stage in 0..stages {
            for rank in 0..if self.is_shared[stage] { 1 } else { ranks } {
                let order = one_forward_one_backward(stages - stage, microbatches);
                lanes.push(Lane { stage, rank, order, next: 0, free_ns: 0 });
            }
        }
        while ends.len() < lanes.iter().map(|lane| lane.order.len()).sum() {
            for Lane { stage, rank, order, next, free_ns } in &mut lanes {
                let Some(&(microbatch, is_backward)) = order.get(*next) else { continue };
                let sender = if is_backward { stage.checked_add(1) } else { stage.checked_sub(1) };
                let senders = sender.filter(|sender| *sender < stages).map(|sender| {
                    let all = if self.is_shared[sender] {
                        0..1
                    } else if self.is_shared[*stage] {
                        0..ranks
                    } else {
                        *rank..*rank + 1
                    };
                    all.map(|rank| ends.get(&(sender, rank, microbatch, is_backward)).copied()).collect()
                });
                let inputs: Option<Vec<u64>> = senders.unwrap_or_else(|| Some(vec![0]));
                let Some(inputs) = inputs else { continue };
                let (forward_ns, backward_ns) = self.times_ns[*rank][*stage][microbatch];
                let begin_ns = inputs.into_iter().max().unwrap().max(*free_ns);
                *free_ns = begin_ns + if is_backward { backward_ns } else { forward_ns };
                ends.insert((*stage, *rank, microbatch, is_backward), *free_ns);
                *next += 1;
            }
        }
        ends.into_values().max().unwrap()
    }
}

/// Lists microbatches in 1F1B's order on a stage, with whether the pass is backward.
fn one_forward_one_backward(stages_left: usize, microbatches: usize) -> Vec<(usize, bool)> {
    let warm_up = stages_left.min(microbatches);
    let mut order: Vec<_> = (0..warm_up).map(|microbatch| (microbatch, false)).collect();
    for microbatch in 0..microbatches {
        order.push((microbatch, true));
        order.extend((warm_up + microbatch < microbatches).then_some((warm_up + microbatch, false)));
    }
    order
}

/// Simulates the makespan of a step from the items of every rank.
pub(crate) fn simulated(instance: &Instance, config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> u64 {
    StepPasses::new(instance, config, ranks).run()
}
