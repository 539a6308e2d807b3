//! The planner's entry points: a problem in, a plan out; or the score of a given plan.

use super::cluster::Cluster;
use super::costs::ModuleCosts;
use super::fit::Need;
use super::halving::{Halving, Scored};
use super::report::{Plan, PlanReport};
use super::score::EncoderShare;
use super::space::{Freedom, Space};
use super::timeline::Timeline;
use super::workload::Workload;
use crate::error::{Error, Result};

/// Plans that are simulated in the first round of halving, at most.
const SWEEP_MAX: usize = 128;
/// Samples that the first round may simulate for each GPU; large batches start with fewer plans.
const SWEEP_UNITS: u64 = 512;
/// Up to so much, in samples of all batches of all plans, every plan is looked at.
const ALL_UNITS: u64 = 2_000_000;

/// Room in memory for microbatches above the mean, tried one after another.
const SLACKS: [f64; 4] = [1.0, 1.15, 1.35, 1.7];

/// What is to be planned.
#[derive(Clone, Copy)]
pub struct PlanProblem<'a> {
    /// Costs of the encoder, whose units are tiles.
    pub encoder: &'a dyn ModuleCosts,
    /// Costs of the LLM, whose units are tokens.
    pub llm: &'a dyn ModuleCosts,
    /// Batches that plans are judged on.
    pub workload: &'a Workload,
    /// The devices.
    pub cluster: Cluster,
    /// What may be planned.
    pub freedom: Freedom,
    /// How encoder ranks share a slot.
    pub share: EncoderShare,
    /// What is allocated over what is counted: fragments, communication buffers. 1 counts on none, and is the least.
    pub memory_margin: f64,
}

/// What a given plan takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// Makespan of each batch, nanoseconds.
    pub makespans_ns: Vec<u64>,
    /// Fullest GPU of the encoder over all batches, bytes.
    pub encoder_bytes: u64,
    /// Fullest GPU of the LLM.
    pub llm_bytes: u64,
    /// What the plan cannot beat on these batches, nanoseconds.
    pub lower_bound_ns: f64,
}

impl Evaluation {
    /// Returns the mean makespan in seconds.
    #[must_use]
    pub fn mean_seconds(&self) -> f64 {
        self.makespans_ns.iter().map(|ns| *ns as f64).sum::<f64>() / self.makespans_ns.len() as f64 / 1e9
    }
}

/// Finds the fastest plan.
///
/// # Errors
/// [`Error::NothingFits`] with the smallest change that would, [`Error::Config`] if the problem makes no sense,
/// [`Error::Overflow`] if times are too long to compute with.
pub fn plan(problem: &PlanProblem<'_>) -> Result<PlanReport> {
    let space = problem.space()?;
    let search = Search::run(&space)?;
    let Some(best) = search.finals.first() else {
        return Err(Error::NothingFits { reason: problem.remedy(&space) });
    };
    let mean_ns = best.score.mean_ns();
    Ok(PlanReport {
        plan: space.plan(&best.candidate),
        step_seconds: mean_ns / 1e9,
        step_seconds_p95: best.score.p95_ns() as f64 / 1e9,
        lower_bound_seconds: space.least_bound_ns(mean_ns) / 1e9,
        plans_bounded: search.bounded,
        plans_simulated: search.simulated,
        is_exhaustive: search.is_exhaustive,
        batches: best.score.makespans_ns.len(),
        explanation: space.explain(&search.finals),
    })
}

/// Scores a given plan on the batches of a problem, with the balancing of finalizts.
///
/// Memory is reported; batches of a plan that does not fit are balanced as if there were enough.
///
/// # Errors
/// [`Error::Config`] if the problem's space has no such plan.
pub fn evaluate(problem: &PlanProblem<'_>, plan: &Plan) -> Result<Evaluation> {
    let (mut space, mut timeline) = (problem.space()?, Timeline::default());
    let outside = || Error::Config { setting: "plan", reason: format!("{plan:?} is not one of the space") };
    let candidate = space.candidate(plan).ok_or_else(outside)?;
    if !space.holds(&candidate) {
        return Err(outside());
    }
    let all = 0..space.load.batches().len();
    let score = space.score(&candidate, all.clone(), &mut timeline);
    if score.is_none() {
        space.budget_bytes = f64::INFINITY;
    }
    let score = score.or_else(|| space.score(&candidate, all.clone(), &mut timeline));
    let mut score = score.ok_or_else(outside)?;
    space.improve(&candidate, all, &mut score, &mut timeline)?;
    let Need { encoder_bytes, llm_bytes } = score.need();
    Ok(Evaluation {
        makespans_ns: score.makespans_ns,
        encoder_bytes: encoder_bytes as u64,
        llm_bytes: llm_bytes as u64,
        lower_bound_ns: space.bound_ns(&candidate),
    })
}

/// What a search found.
struct Search {
    finals: Vec<Scored>,
    bounded: u64,
    simulated: u64,
    is_exhaustive: bool,
}

impl Search {
    /// Sweeps and halves, once more with room in memory as long as most of the plans turn out not to fit.
    fn run(space: &Space<'_>) -> Result<Self> {
        let items = u64::from(space.load.global_batch());
        let batches = space.load.batches().len() as u64;
        let gpus = u64::from(space.cluster.gpus.max(64));
        let length = (SWEEP_UNITS * gpus / items).clamp(16, SWEEP_MAX as u64) as usize;
        let mut halving = Halving::new(space);
        let mut search = Self { finals: Vec::new(), bounded: 0, simulated: 0, is_exhaustive: false };
        for slack in SLACKS {
            let with_slack = Space { slack, ..space.clone() };
            let swept = with_slack.sweep(length, (ALL_UNITS / (items * batches)) as usize);
            search.bounded = swept.plans;
            search.is_exhaustive = swept.is_all;
            if swept.is_all {
                search.finals = halving.run_all(swept.candidates)?;
                break;
            }
            let has_room = halving.run(swept.candidates, &mut search.finals)?;
            if has_room && !search.finals.is_empty() {
                break;
            }
        }
        search.simulated = halving.simulated();
        Ok(search)
    }
}

impl<'a> PlanProblem<'a> {
    pub(super) fn space(&self) -> Result<Space<'a>> {
        self.cluster.check()?;
        if self.encoder.layers() == 0 || self.llm.layers() == 0 {
            return Err(Error::Config { setting: "layers", reason: "a module has at least one".to_owned() });
        }
        if !(self.memory_margin >= 1.0 && self.memory_margin.is_finite()) {
            let reason = format!("{} is no number of at least 1", self.memory_margin);
            return Err(Error::Config { setting: "memory_margin", reason });
        }
        let mut space = Space::new(self.encoder, self.llm, self.workload, self.cluster, self.freedom);
        space.share = self.share;
        space.budget_bytes = self.cluster.memory_bytes as f64 / self.memory_margin;
        Ok(space)
    }
}
