//! Runs a step's passes individually: an oracle for makespans.

use dflop_balancer::schedule::{Part, Pass, PassKind};
use dflop_balancer::{Instance, PipelineConfig, StageTimes};

/// Pass times in a step, `[rank][stage][microbatch]`, forward and backward, and which stages all ranks share.
pub(crate) struct StepPasses {
    pub(crate) times_ns: Vec<Vec<Vec<(u64, u64)>>>,
    is_shared: Vec<bool>,
    /// First stage in each parallel encoder, and in the last module.
    firsts: Vec<usize>,
}

/// Stage passes on a rank, run sequentially.
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
        let modules = if config.has_parallel_encoders { 0 } else { config.stages.len() - 1 };
        let first = |module: usize| config.stages[..module].iter().sum();
        // A chain of modules counts as a single encoder.
        let firsts = (0..config.stages.len()).filter(|module| *module == 0 || *module >= modules).map(first);
        Self { times_ns: times.iter().map(of_rank).collect(), is_shared, firsts: firsts.collect() }
    }

    /// Lists the stages that send a stage's input or gradient.
    fn senders(&self, stage: usize, is_backward: bool) -> Vec<usize> {
        let last = *self.firsts.last().unwrap();
        let ends = || self.firsts[1..].iter().map(|first| first - 1);
        match is_backward {
            true if ends().any(|end| end == stage) => vec![last],
            true => (stage + 1..self.is_shared.len()).take(1).collect(),
            false if stage == last => ends().collect(),
            false if self.firsts.contains(&stage) => Vec::new(),
            false => vec![stage - 1],
        }
    }

    /// Returns the number of stages from this stage to the loss.
    fn stages_left(&self, stage: usize) -> usize {
        1 + self.senders(stage, true).first().map_or(0, |next| self.stages_left(*next))
    }

    /// Runs every pass as soon as all inputs have ended, in 1F1B order on each stage and rank; returns when
    /// the last pass ends.
    fn run(&self) -> u64 {
        let (ranks, stages) = (self.times_ns.len(), self.is_shared.len());
        let microbatches = self.times_ns[0][0].len();
        let mut ends = std::collections::HashMap::new();
        let mut lanes = Vec::new();
        for stage in 0..stages {
            for rank in 0..if self.is_shared[stage] { 1 } else { ranks } {
                let order = one_forward_one_backward(self.stages_left(stage), microbatches);
                lanes.push(Lane { stage, rank, order, next: 0, free_ns: 0 });
            }
        }
        while ends.len() < lanes.iter().map(|lane| lane.order.len()).sum() {
            for Lane { stage, rank, order, next, free_ns } in &mut lanes {
                let Some(&(microbatch, is_backward)) = order.get(*next) else { continue };
                let ranks_of = |sender: usize| match (self.is_shared[sender], self.is_shared[*stage]) {
                    (true, _) => 0..1,
                    (false, true) => 0..ranks,
                    (false, false) => *rank..*rank + 1,
                };
                let end = |(sender, rank)| ends.get(&(sender, rank, microbatch, is_backward)).copied();
                let senders = self.senders(*stage, is_backward);
                let lanes =
                    senders.into_iter().flat_map(|sender| ranks_of(sender).map(move |rank| (sender, rank)));
                let inputs: Option<Vec<u64>> = lanes.map(end).collect();
                let Some(inputs) = inputs else { continue };
                let (forward_ns, backward_ns) = self.times_ns[*rank][*stage][microbatch];
                let begin_ns = inputs.into_iter().max().unwrap_or(0).max(*free_ns);
                *free_ns = begin_ns + if is_backward { backward_ns } else { forward_ns };
                ends.insert((*stage, *rank, microbatch, is_backward), *free_ns);
                *next += 1;
            }
        }
        ends.into_values().max().unwrap()
    }
}

/// Lists microbatches in 1F1B order on a stage, with whether the pass is backward.
fn one_forward_one_backward(stages_left: usize, microbatches: usize) -> Vec<(usize, bool)> {
    let warm_up = stages_left.min(microbatches);
    let mut order: Vec<_> = (0..warm_up).map(|microbatch| (microbatch, false)).collect();
    for microbatch in 0..microbatches {
        order.push((microbatch, true));
        order.extend((warm_up + microbatch < microbatches).then_some((warm_up + microbatch, false)));
    }
    order
}

/// Simulates a step's makespan from every rank's items.
pub(crate) fn simulated(instance: &Instance, config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> u64 {
    StepPasses::new(instance, config, ranks).run()
}
