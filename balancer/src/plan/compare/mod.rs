//! Methods side by side on the same batches: what planning gains, what balancing gains, and what is left.
//!
//! Each method is a plan and a way to cut batches, judged by the same simulation:
//!
//! | method | plan | batches |
//! | --- | --- | --- |
//! | data-blind, uniform | the best with one TP and one DP degree for both modules | dealt round robin |
//! | data-blind | ours | dealt round robin |
//! | LPT | ours | longest processing time first, on each sample's slower module |
//! | paper | Algorithm 1 of the paper, the better of two numbers of microbatches | the least largest sum of a module in a microbatch |
//! | ours | ours | the makespan itself |
//!
//! The *ideal* is a lower bound of every plan on these batches, whatever the balancing.

mod data_blind;
mod makespan;
mod paper;
mod uniform;

use super::cluster::Placement;
use super::problem::PlanProblem;
use super::report::{Plan, PlanReport};
use super::score::Score;
use super::space::{Candidate, Space};
use super::step::Cells;
use super::timeline::{StepTimes, Timeline};
use super::workload::ItemSize;
use crate::budget::Budget;
use crate::constraint::Caps;
use crate::error::{Error, Result};
use crate::instance::Instance;
use crate::strategy::Strategy;

/// A way to plan and to balance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// One TP and one DP degree for both modules, samples dealt round robin.
    DataBlindUniform,
    /// Our plan, samples dealt round robin.
    DataBlind,
    /// Our plan, microbatches by LPT.
    Lpt,
    /// The paper's plan and its min-max microbatches.
    Paper,
    /// Our plan, microbatches by makespan.
    Ours,
}

impl Method {
    /// All methods, ours last.
    pub const ALL: [Self; 5] = [Self::DataBlindUniform, Self::DataBlind, Self::Lpt, Self::Paper, Self::Ours];

    /// Returns the name that is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DataBlindUniform => "data-blind, uniform",
            Self::DataBlind => "data-blind",
            Self::Lpt => "lpt",
            Self::Paper => "paper",
            Self::Ours => "dflop",
        }
    }
}

/// One method in figures.
#[derive(Debug, Clone, PartialEq)]
pub struct MethodScore {
    /// The method.
    pub method: Method,
    /// Its plan.
    pub plan: Plan,
    /// Mean makespan of the batches.
    pub step_seconds: f64,
    /// The makespan that 95 % of the batches do not exceed.
    pub step_seconds_p95: f64,
    /// Share of the plan's GPU time in which nothing is computed, in `0..=1`.
    pub idle_fraction: f64,
    /// Whether every batch fits into memory; data-blind microbatches may not.
    pub fits: bool,
}

/// Methods on the batches of one problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Those for which there is a plan, in the order of [`Method::ALL`].
    pub methods: Vec<MethodScore>,
    /// What no plan and no balancing can beat on average.
    pub ideal_seconds: f64,
}

/// One batch by one method.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    makespan_ns: u64,
    /// Nanoseconds in which a GPU computes, summed over GPUs.
    busy_ns: f64,
    /// What the fullest GPU holds.
    bytes: f64,
}

/// Compares all methods on the batches of a problem whose plan was found.
///
/// Data-blind samples come in a random order that depends on nothing but the batch.
///
/// # Errors
/// [`Error::Config`] if the plan is not one of the problem's space; those of [`super::plan`].
pub fn compare(problem: &PlanProblem<'_>, found: &PlanReport) -> Result<Comparison> {
    let space = problem.space()?;
    let outside = || Error::Config { setting: "plan", reason: "it is not one of the space".to_owned() };
    let ours = space.candidate(&found.plan).ok_or_else(outside)?;
    let mut methods = Vec::new();
    for method in Method::ALL {
        let candidates = match method {
            Method::DataBlindUniform => uniform::best(&space).into_iter().collect(),
            Method::Paper => paper::plans(&space),
            _ => vec![ours],
        };
        let scores = candidates.iter().map(|candidate| space.judge(method, candidate));
        let scores = scores.collect::<Result<Vec<MethodScore>>>()?;
        let rank = |score: &MethodScore| (!score.fits, score.step_seconds);
        methods.extend(scores.into_iter().min_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        }));
    }
    Ok(Comparison { methods, ideal_seconds: found.lower_bound_seconds })
}

impl Space<'_> {
    fn judge(&self, method: Method, candidate: &Candidate) -> Result<MethodScore> {
        let batches = self.load.batches();
        let mut timeline = Timeline::default();
        let (mut score, mut busy_ns, mut bytes) = (Score::default(), 0.0, 0.0_f64);
        for batch in batches {
            let outcome = self.outcome(method, candidate, batch, &mut timeline)?;
            score.makespans_ns.push(outcome.makespan_ns);
            busy_ns += outcome.busy_ns;
            bytes = bytes.max(outcome.bytes);
        }
        let all_ns = score.mean_ns() * batches.len() as f64 * f64::from(self.gpus(&candidate.family));
        Ok(MethodScore {
            method,
            plan: self.plan(candidate),
            step_seconds: score.mean_ns() / 1e9,
            step_seconds_p95: score.p95_ns() as f64 / 1e9,
            idle_fraction: if all_ns > 0.0 { (1.0 - busy_ns / all_ns).clamp(0.0, 1.0) } else { 0.0 },
            fits: bytes <= self.budget_bytes,
        })
    }

    fn outcome(
        &self,
        method: Method,
        candidate: &Candidate,
        batch: &[ItemSize],
        timeline: &mut Timeline,
    ) -> Result<Outcome> {
        match method {
            Method::DataBlindUniform => Ok(self.blind_pipelines(candidate, batch, timeline)),
            Method::DataBlind => Ok(self.blind(candidate, batch, timeline)),
            Method::Lpt => self.partitioned(candidate, batch, Strategy::Lpt, timeline),
            Method::Paper => self.partitioned(candidate, batch, Strategy::Search, timeline),
            Method::Ours => self.by_makespan(candidate, batch, timeline),
        }
    }

    /// Microbatches of a strategy in the order in which it numbers them.
    fn partitioned(
        &self,
        candidate: &Candidate,
        batch: &[ItemSize],
        strategy: Strategy,
        timeline: &mut Timeline,
    ) -> Result<Outcome> {
        let instance = Instance::new(candidate.groups(), 2, self.sizes_ns(candidate, batch).concat())?;
        let found = crate::balance(&instance, strategy, &Caps::default(), &mut Budget::work(makespan::WORK))?;
        let cell_of = group_of(&found.groups, batch.len());
        let cells = Cells::new(self, candidate, batch, |item| cell_of[item], self.share);
        Ok(self.run(candidate, &cells, timeline))
    }

    /// Runs cells as they are.
    fn run(&self, candidate: &Candidate, cells: &Cells, timeline: &mut Timeline) -> Outcome {
        Outcome {
            makespan_ns: self.makespan_ns(candidate, cells, timeline),
            busy_ns: self.busy_gpu_ns(candidate, cells),
            bytes: cells.need(self, candidate).most(),
        }
    }

    /// Nanoseconds of computing, each times the GPUs that take part; encoder ranks work as long as the busiest.
    fn busy_gpu_ns(&self, candidate: &Candidate, cells: &Cells) -> f64 {
        let family = &candidate.family;
        let (encoder, llm) = (&self.encoder_shapes[family.encoder], &self.llm_shapes[family.llm]);
        let step: StepTimes = cells.times(self, candidate);
        let sum = |stages: &[usize], rows: &[[Vec<u64>; 2]]| -> f64 {
            stages.iter().map(|row| rows[*row].iter().flatten().sum::<u64>() as f64).sum()
        };
        let of_encoder = match family.placement {
            Placement::Disaggregated => sum(&step.encoder_stages, &step.encoder_ns),
            Placement::Colocated => cells.phase_ns(self, candidate) as f64,
        };
        of_encoder * f64::from(family.encoder_dp * encoder.tp)
            + sum(&step.llm_stages, &step.llm_ns) * f64::from(llm.tp)
    }
}

/// The group of each item.
fn group_of(groups: &[Vec<u32>], items: usize) -> Vec<u32> {
    let mut group_of = vec![0; items];
    for (group, own) in groups.iter().enumerate() {
        for &item in own {
            group_of[item as usize] = group as u32;
        }
    }
    group_of
}
