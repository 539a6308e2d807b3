//! Maps step parts to pipeline ranks: the balancer's layout, replicated if it is a single pipeline, and with
//! pass lists for ranks that several modules share.

use dflop_balancer::schedule::{ModuleStages, Part, Pass, PassKind, PipelineLayout, ScheduleKind};
use dflop_planner::Placement;

use super::job::Job;
use super::module_parallelism::ModuleParallelism;
use super::shared_ranks::{self, RankPasses};
use crate::error::Result;

/// Step parts, the ranks that run them, and the parts they receive activations from.
///
/// The layout for a schedule with chunks is a single pipeline; replicas are added here. Microbatch `k` on
/// replica `d` out of `D` is `k * D + d`, as in jobs with encoders.
pub(super) struct Topology {
    layout: PipelineLayout,
    /// Number of parallel pipelines; 1 if the layout covers the complete job.
    replicas: usize,
    schedule: ScheduleKind,
    /// Passes on every world rank, if modules share ranks.
    shared: Option<RankPasses>,
    /// Media pools for every encoder, and replicas that share each pool.
    pools: Vec<(usize, usize)>,
}

impl Topology {
    /// - `microbatches`: number of microbatches per LLM DP rank
    pub(super) fn new(job: &Job, microbatches: usize) -> Result<Self> {
        let (schedule, llm) = (job.schedule, job.llm());
        if let ScheduleKind::Interleaved { chunks } = schedule {
            let chunks = usize::from(chunks);
            let layout = PipelineLayout::chain(llm.stages.len() / chunks, chunks, microbatches)?;
            let replicas = llm.dp_size;
            return Ok(Self { layout, replicas, schedule, shared: None, pools: Vec::new() });
        }
        // Each encoder feeds the LLM, the last module; encoder replicas share a round's media, unless each
        // belongs to an LLM replica. Shared rounds connect all replicas; `is_linked` leaves out replicas in
        // other pools.
        let last = job.modules.len() - 1;
        let stages = |(index, module): (usize, &ModuleParallelism)| {
            let stages = ModuleStages::new(module.stages.len(), module.dp_size);
            match index {
                index if index == last => stages,
                index if !job.is_paired(index) => stages.share_rounds().feeds(last),
                _ => stages.feeds(last),
            }
        };
        let modules: Vec<ModuleStages> = job.modules.iter().enumerate().map(stages).collect();
        let layout = PipelineLayout::from_modules(&modules, microbatches)?;
        let shared = match job.placement() {
            Placement::Disaggregated => None,
            _ => Some(shared_ranks::passes(job, microbatches)?),
        };
        let sharers = |module: usize| (job.media_pools(module), job.modules[module].dp_size);
        let pools = (0..last).map(sharers).map(|(pools, replicas)| (pools, replicas / pools)).collect();
        Ok(Self { layout, replicas: 1, schedule, shared, pools })
    }

    pub(super) fn outside(&self, microbatch: u32, replica: usize) -> u32 {
        microbatch * self.replicas as u32 + replica as u32
    }

    /// Returns a part as numbered in the layout, and its replica.
    fn inside(&self, part: Part) -> (Part, usize) {
        let replicas = self.replicas as u32;
        (Part { microbatch: part.microbatch / replicas, ..part }, (part.microbatch % replicas) as usize)
    }

    /// Returns the pipeline rank that runs a part.
    pub(super) fn rank(&self, part: Part) -> usize {
        let (inside, replica) = self.inside(part);
        self.layout.rank(inside) + replica * self.layout.ranks()
    }

    /// Returns the parts whose activations a part receives.
    pub(super) fn upstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        let producers = self.layout.producers(inside).map(outside);
        producers.filter(|&upstream| self.is_linked(upstream, part)).collect()
    }

    /// Returns the parts that receive the activations of a part.
    pub(super) fn downstream_parts(&self, part: Part) -> Vec<Part> {
        let (inside, replica) = self.inside(part);
        let outside = |part: Part| Part { microbatch: self.outside(part.microbatch, replica), ..part };
        let consumers = self.layout.consumers(inside).map(outside);
        consumers.filter(|&downstream| self.is_linked(part, downstream)).collect()
    }

    /// Returns the parts that a pass receives rows from, and the parts that it sends rows to.
    pub(super) fn neighbors(&self, Pass { kind, part }: Pass) -> (Vec<Part>, Vec<Part>) {
        match kind {
            PassKind::Forward => (self.upstream_parts(part), self.downstream_parts(part)),
            PassKind::Backward | PassKind::BackwardInput => {
                (self.downstream_parts(part), self.upstream_parts(part))
            }
            PassKind::BackwardWeight => (Vec::new(), Vec::new()),
        }
    }

    /// Returns whether rows can go from `upstream` to `downstream`: not from an encoder replica to an LLM
    /// replica with media in a different pool.
    fn is_linked(&self, upstream: Part, downstream: Part) -> bool {
        let [from, to] = [upstream, downstream].map(|part| self.layout.module(usize::from(part.stage)));
        let Some(&(pools, sharers)) = self.pools.get(from).filter(|(pools, _)| from != to && *pools > 1)
        else {
            return true;
        };
        upstream.microbatch as usize / sharers % pools == downstream.microbatch as usize % pools
    }

    pub(super) fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    pub(super) fn schedule(&self) -> ScheduleKind {
        self.schedule
    }

    /// Returns the number of parallel pipelines that the layout does not cover.
    pub(super) fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the passes on every world rank, if modules share ranks.
    pub(super) fn shared(&self) -> Option<&RankPasses> {
        self.shared.as_ref()
    }
}
