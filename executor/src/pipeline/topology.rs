//! Maps parts of a step to pipeline ranks: the balancer's layout, replicated where that is a single pipeline.

use std::ops::Range;

use dflop_balancer::schedule::{Action, Message, ModuleStages, Part, Pass, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, StageTimes};

use super::job::Job;
use super::pass_times::PassTimes;
use crate::error::Result;

/// Parts of a step, the ranks that run them, and the parts they take activations from.
///
/// The layout of a schedule with chunks is a single pipeline; replicas are added here. Microbatch `k` of
/// replica `d` of `D` is `k * D + d`, as in jobs with encoders.
pub(super) struct Topology {
    layout: PipelineLayout,
    /// Number of parallel pipelines; 1 if the layout covers the whole job.
    replicas: usize,
    schedule: ScheduleKind,
}

impl Topology {
    /// - `microbatches`: per DP rank of the LLM
    pub(super) fn new(job: &Job, microbatches: usize) -> Result<Self> {
        let (schedule, llm) = (job.schedule, job.llm());
        if let ScheduleKind::Interleaved { chunks } = schedule {
            let chunks = usize::from(chunks);
            let layout = PipelineLayout::chain(llm.stages.len() / chunks, chunks, microbatches)?;
            return Ok(Self { layout, replicas: llm.dp_size, schedule });
        }
        // Each encoder feeds the LLM, the last module; its replicas share the media of a round, unless each
        // belongs to a replica of the LLM.
        let last = job.modules.len() - 1;
        let stages = |(index, module): (usize, &super::job::ModuleParallelism)| {
            let stages = ModuleStages::new(module.stages.len(), module.dp_size);
            match index {
                index if index == last => stages,
                index if job.shares_media(index) => stages.share_rounds().feeds(last),
                _ => stages.feeds(last),
            }
        };
        let modules: Vec<ModuleStages> = job.modules.iter().enumerate().map(stages).collect();
        Ok(Self { layout: PipelineLayout::of_modules(&modules, microbatches)?, replicas: 1, schedule })
    }

    /// Returns the actions of a pipeline rank.
    pub(super) fn list(&self, pipeline_rank: usize) -> Result<Vec<Action>> {
        let mut lists = self.layout.schedule(self.schedule)?;
        let replica = pipeline_rank / self.layout.ranks();
        let list = lists.swap_remove(pipeline_rank % self.layout.ranks());
        Ok(list.into_iter().map(|action| self.in_replica(action, replica)).collect())
    }

    /// Moves an action to one of the parallel pipelines.
    fn in_replica(&self, action: Action, replica: usize) -> Action {
        let message = |message: Message| Message {
            microbatch: self.outside(message.microbatch, replica),
            peer: (usize::from(message.peer) + replica * self.layout.ranks()) as u16,
            ..message
        };
        let part = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        match action {
            _ if self.replicas == 1 => action,
            Action::Recv(of) => Action::Recv(message(of)),
            Action::Send(of) => Action::Send(message(of)),
            Action::RecvGrad(of) => Action::RecvGrad(message(of)),
            Action::SendGrad(of) => Action::SendGrad(message(of)),
            Action::Forward(of) => Action::Forward(part(of)),
            Action::Backward(of) => Action::Backward(part(of)),
            Action::BackwardInput(of) => Action::BackwardInput(part(of)),
            Action::BackwardWeight(of) => Action::BackwardWeight(part(of)),
            Action::ReduceGrads(stage) => Action::ReduceGrads(stage),
        }
    }

    fn outside(&self, microbatch: u32, replica: usize) -> u32 {
        microbatch * self.replicas as u32 + replica as u32
    }

    /// Returns a part as the layout numbers it, and its replica.
    fn inside(&self, part: Part) -> (Part, usize) {
        let replicas = self.replicas as u32;
        (Part { microbatch: part.microbatch / replicas, ..part }, (part.microbatch % replicas) as usize)
    }

    /// Returns the pipeline rank that runs a part.
    pub(super) fn rank(&self, part: Part) -> usize {
        let (inside, replica) = self.inside(part);
        self.layout.rank(inside) + replica * self.layout.ranks()
    }

    /// Returns the parts whose activations a part takes.
    pub(super) fn upstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        self.layout.producers(inside).map(outside).collect()
    }

    /// Returns the parts that take the activations of a part.
    pub(super) fn downstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        self.layout.consumers(inside).map(outside).collect()
    }
}

/// Pipeline rank, pass, and time range of the pass in nanoseconds.
pub(crate) type Simulated = (usize, Pass, Range<u64>);

/// Simulates the action lists of a job's ranks; messages and gradient sums take no time.
///
/// - `microbatches`: per DP rank of the LLM
/// - returns the end of the last rank in nanoseconds, and all passes
pub(crate) fn simulate(job: &Job, microbatches: usize, times: &PassTimes) -> Result<(u64, Vec<Simulated>)> {
    let topology = Topology::new(job, microbatches)?;
    let layout = &topology.layout;
    let lists = layout.schedule(topology.schedule)?;
    let free = Communication::free(layout.stages(), layout.microbatches());
    let (mut makespan_ns, mut passes) = (0, Vec::new());
    for replica in 0..topology.replicas {
        let part_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            // Modules with fewer replicas have fewer microbatches; their remaining cells stay empty.
            if inside < layout.microbatches_of(stage) {
                let microbatch = topology.outside(inside as u32, replica);
                times.part_ns(Part { microbatch, stage: stage as u16 })
            } else {
                [0, 0]
            }
        };
        // Without a measured part, the balancer splits the backward pass in half.
        let weight_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            if inside >= layout.microbatches_of(stage) {
                return Some(0);
            }
            let part = Part { microbatch: topology.outside(inside as u32, replica), stage: stage as u16 };
            if times.part_ns(part)[1] == 0 { Some(0) } else { times.weight_ns(part) }
        };
        let cells = 0..layout.stages() * layout.microbatches();
        let (forward_ns, backward_ns) =
            cells.map(part_ns).map(|[forward, backward]| (forward, backward)).unzip();
        let mut stage_times =
            StageTimes::new(layout.stages(), layout.microbatches(), forward_ns, backward_ns)?;
        let measured: Option<Vec<u64>> =
            (0..layout.stages() * layout.microbatches()).map(weight_ns).collect();
        if let Some(measured) = measured {
            stage_times = stage_times.weight_ns(measured)?;
        }
        let simulation = layout.simulate(&lists, &stage_times, &free)?;
        makespan_ns = makespan_ns.max(simulation.makespan_ns);
        passes.extend(simulation.events.into_iter().map(|event| {
            let microbatch = topology.outside(event.microbatch, replica);
            let part = Part { microbatch, stage: event.stage as u16 };
            let rank = event.rank + replica * layout.ranks();
            (rank, Pass { kind: event.kind, part }, event.start_ns..event.end_ns)
        }));
    }
    Ok((makespan_ns, passes))
}
