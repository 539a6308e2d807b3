//! Compares planning and balancing methods on the same batches, and with the ideal.
//!
//! Each method is a plan and a way to partition batches, judged by the same simulation:
//!
//! | method | plan | batches |
//! | --- | --- | --- |
//! | by hand, joint | the least TP, then the fewest stages that fit, encoder first; a sample a microbatch | dealt round robin |
//! | LPT, sorted | ours | longest processing time first, on each sample's slower module; sorted by size |
//! | data-blind, joint | every rank the whole model: the best TP, stages and microbatches | dealt round robin |
//! | data-blind, uniform | the best with one TP and one DP degree for both modules | dealt round robin |
//! | data-blind | ours | dealt round robin |
//! | LPT | ours | LPT, in an arbitrary order |
//! | paper | Algorithm 1 of the paper, on even layers, the better of two numbers of microbatches | min-max of module sums |
//! | ours | ours | the makespan itself |
//!
//! LPT and the paper's method create microbatches without an order: they run in an arbitrary order and, as
//! separate methods, sorted by size. Sorted microbatches are similar across ranks in each slot, so ranks that
//! share an encoder wait less for each other.
//!
//! A method's idle time is divided by cause ([`IdleBreakdown`]), on the same batches;
//! [`method_step`](method_step()) lists the passes in a step.
//!
//! The *ideal* is a lower bound for every plan in the search space on these batches, with any balancing.
//!
//! For a plan from anywhere, only the methods that balance a given plan are compared, with a lower bound for
//! this plan alone.

mod data_blind;
mod given;
mod idle_breakdown;
pub(super) mod joint;
mod method_step;
mod outcome;
pub(super) mod paper;
pub(super) mod uniform;

pub use idle_breakdown::IdleBreakdown;
pub use method_step::{MethodPass, MethodStep, method_step};

use super::problem::{ParallelismPlan, PlanProblem};
use super::report::{ModuleBytes, PlanReport};
use super::score::Score;
use super::score::batch_balance::GroupOrder;
use super::score::slot_assignment::SlotAssignment;
use super::space::memory::{self, MemoryRequirement};
use super::space::{Candidate, SearchSpace, SearchSpaceOptions, bound};
use super::workload::ItemSize;
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Result, Strategy};
use idle_breakdown::WaitTimes;
use outcome::Outcome;

/// Planning and balancing method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// Every rank holds the whole model, with TP, stages and microbatches tuned; samples dealt round robin.
    DataBlindJoint,
    /// Equal TP and DP degrees for both modules, samples dealt round robin.
    DataBlindUniform,
    /// Minimum TP, then the minimum number of stages that fits, encoder in the first stage; samples dealt
    /// round robin, one per microbatch.
    ByHand,
    /// Our plan, samples dealt round robin.
    DataBlind,
    /// Our plan, microbatches by LPT in an arbitrary order.
    Lpt,
    /// Our plan, microbatches by LPT, sorted by size.
    LptSorted,
    /// The paper's plan and its min-max microbatches in an arbitrary order.
    Paper,
    /// The paper's plan and its min-max microbatches, sorted by size.
    PaperSorted,
    /// Our plan, microbatches by makespan.
    Ours,
}

impl Method {
    /// All methods: first those to beat, ours last.
    pub const ALL: [Self; 9] = [
        Self::ByHand,
        Self::LptSorted,
        Self::DataBlindJoint,
        Self::DataBlindUniform,
        Self::DataBlind,
        Self::Lpt,
        Self::Paper,
        Self::PaperSorted,
        Self::Ours,
    ];

    /// Methods that balance batches for a given plan: data-blind first, ours last.
    pub const ON_GIVEN_PLAN: [Self; 4] = [Self::DataBlind, Self::Lpt, Self::LptSorted, Self::Ours];

    /// Returns the name that is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DataBlindUniform => "data-blind, uniform",
            Self::DataBlindJoint => "data-blind, joint",
            Self::ByHand => "by hand, joint",
            Self::DataBlind => "data-blind",
            Self::Lpt => "lpt",
            Self::LptSorted => "lpt, sorted",
            Self::Paper => "paper",
            Self::PaperSorted => "paper, sorted",
            Self::Ours => "dflop",
        }
    }
}

/// Score for a method.
#[derive(Debug, Clone, PartialEq)]
pub struct MethodScore {
    /// Scored method.
    pub method: Method,
    /// Plan that the method uses.
    pub plan: ParallelismPlan,
    /// Mean makespan over the batches, in seconds.
    pub step_seconds: f64,
    /// Smallest makespan that 95 % of the batches do not exceed, in seconds.
    pub step_seconds_p95: f64,
    /// Share of the plan's GPU time without computation, in `0..=1`.
    pub idle_fraction: f64,
    /// Idle fraction by cause.
    pub waits: IdleBreakdown,
    /// Memory on each module's fullest GPU, encoders first, over all batches and with the longest sample.
    pub memory: Vec<ModuleBytes>,
    /// Whether the memory fits, with the problem's margin; data-blind microbatches may not.
    pub fits: bool,
}

/// Scores for several methods on one problem's batches.
#[derive(Debug, Clone, PartialEq)]
pub struct MethodComparison {
    /// Methods that have a plan, in [`Method::ALL`] or [`Method::ON_GIVEN_PLAN`] order.
    pub methods: Vec<MethodScore>,
    /// Lower bound on the mean makespan for any plan in the search space, or for the given plan, and any
    /// balancing, in seconds.
    pub ideal_seconds: f64,
}

/// Compares all methods on the batches of a problem whose plan was found.
///
/// Data-blind samples and arbitrary microbatches come in a random order that depends only on the batch.
///
/// # Errors
/// [`dflop_balancer::Error::Config`] if the plan does not suit the problem; the errors of [`super::plan`].
pub fn compare(problem: &PlanProblem<'_>, found: &PlanReport) -> Result<MethodComparison> {
    let mut ours = compare_plan(problem, &found.plan)?.methods;
    // Other methods have different placements, under the same memory and link rules.
    let options = SearchSpaceOptions {
        is_disaggregated: true,
        is_joint: true,
        has_other_schedules: false,
        schedule: match problem.options.schedule {
            ScheduleKind::Interleaved { .. } => ScheduleKind::OneForwardOneBackward,
            other => other,
        },
        ..problem.options
    };
    let others = PlanProblem { options, ..problem.clone() }.space()?;
    let papers = paper::plans(&others);
    let mut methods = Vec::new();
    for method in Method::ALL {
        let candidates: Vec<Candidate> = match method {
            Method::DataBlindUniform => uniform::best(&others).into_iter().collect(),
            Method::DataBlindJoint => joint::best(&others).into_iter().collect(),
            Method::ByHand => joint::by_hand(&others).into_iter().collect(),
            Method::Paper | Method::PaperSorted => papers.clone(),
            Method::DataBlind | Method::Lpt | Method::LptSorted | Method::Ours => {
                let own = ours.iter().position(|score| score.method == method);
                methods.extend(own.map(|own| ours.swap_remove(own)));
                continue;
            }
        };
        let scores = candidates.iter().map(|candidate| judge(&others, method, candidate));
        let scores = scores.collect::<Result<Vec<MethodScore>>>()?;
        // A plan that fits beats any plan that does not.
        let rank = |score: &MethodScore| (!score.fits, score.step_seconds);
        methods.extend(scores.into_iter().min_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        }));
    }
    Ok(MethodComparison { methods, ideal_seconds: found.lower_bound_seconds })
}

/// Compares the [`Method::ON_GIVEN_PLAN`] methods on a plan from anywhere: the search space need not have it.
///
/// The plan may leave GPUs free, and stages may have any layers. The scores of a plan from [`super::plan`]
/// are those in [`compare`].
///
/// # Errors
/// [`dflop_balancer::Error::Config`] with the part of the plan that model, cluster or placement do not allow.
pub fn compare_plan(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<MethodComparison> {
    problem.with_expert_parallel(plan.expert_parallel, |problem| at_degree(problem, plan))?
}

/// Compares the methods on a given plan if the costs are at the plan's expert-parallel degree.
fn at_degree(problem: &PlanProblem<'_>, plan: &ParallelismPlan) -> Result<MethodComparison> {
    let (space, candidate) = given::space_with(problem, plan)?;
    let methods = Method::ON_GIVEN_PLAN.iter().map(|method| judge(&space, *method, &candidate));
    Ok(MethodComparison {
        methods: methods.collect::<Result<Vec<MethodScore>>>()?,
        ideal_seconds: bound::lower_bound_ns(&space, &candidate) / 1e9,
    })
}

fn judge(space: &SearchSpace<'_>, method: Method, candidate: &Candidate) -> Result<MethodScore> {
    let batches = space.workload.batches();
    let (mut score, mut busy_ns) = (Score::default(), 0.0);
    let mut requirement = MemoryRequirement::default();
    let mut waits = WaitTimes::default();
    for batch in batches {
        let (outcome, of_batch) = run_batch(space, method, candidate, batch)?;
        score.makespans_ns.push(outcome.makespan_ns);
        busy_ns += outcome.busy_ns;
        requirement = requirement.max(outcome.requirement);
        waits += of_batch;
    }
    // The longest sample overall may not be in the batches.
    let Candidate { family, microbatches } = candidate;
    let need = requirement.max(memory::requirement(space, family, *microbatches, *microbatches));
    let modules = need.encoder_bytes[..family.encoders.len()].iter().copied().chain([need.llm_bytes]);
    let steps_ns = score.mean_ns() * batches.len() as f64;
    let all_ns = steps_ns * f64::from(space.gpus(&candidate.family));
    Ok(MethodScore {
        method,
        plan: ParallelismPlan::new(space, candidate),
        step_seconds: score.mean_ns() / 1e9,
        step_seconds_p95: score.p95_ns() as f64 / 1e9,
        idle_fraction: if all_ns > 0.0 { (1.0 - busy_ns / all_ns).clamp(0.0, 1.0) } else { 0.0 },
        waits: waits.over(steps_ns),
        memory: modules.map(|bytes| ModuleBytes::new(bytes, &space.cluster)).collect(),
        fits: need.most() <= space.budget_bytes,
    })
}

fn run_batch(
    space: &SearchSpace<'_>,
    method: Method,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<(Outcome, WaitTimes)> {
    Ok(match assign(space, method, candidate, batch)? {
        Assigned::Pipelines(pipelines) => {
            let outcome = data_blind::run_pipelines(space, candidate, &pipelines);
            (outcome, idle_breakdown::for_pipelines(space, candidate, &pipelines, &outcome))
        }
        Assigned::Job(assignment) => {
            let outcome = outcome::run(space, candidate, &assignment);
            (outcome, idle_breakdown::for_job(space, candidate, &assignment, &outcome))
        }
    })
}

/// Batch on the ranks of a plan.
enum Assigned {
    /// LLM ranks that form one job.
    Job(SlotAssignment),
    /// DP ranks that are separate pipelines.
    Pipelines(Vec<SlotAssignment>),
}

fn assign(
    space: &SearchSpace<'_>,
    method: Method,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<Assigned> {
    let partition = |strategy, order| outcome::partitioned(space, candidate, batch, (strategy, order));
    Ok(Assigned::Job(match method {
        Method::DataBlindUniform | Method::DataBlindJoint | Method::ByHand => {
            return Ok(Assigned::Pipelines(data_blind::pipelines(space, candidate, batch)));
        }
        Method::DataBlind => data_blind::one_job(space, candidate, batch),
        Method::Ours => outcome::best(space, candidate, batch)?,
        Method::Lpt => partition(Strategy::LPT, GroupOrder::Arbitrary)?,
        Method::LptSorted => partition(Strategy::LPT, GroupOrder::Sorted)?,
        Method::Paper => partition(Strategy::SEARCH, GroupOrder::Arbitrary)?,
        Method::PaperSorted => partition(Strategy::SEARCH, GroupOrder::Sorted)?,
    }))
}
