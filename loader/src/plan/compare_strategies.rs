//! Compares strategies: runs planned steps through the pipeline simulator.
//!
//! Simulated seconds are the cost model's predictions summed by a schedule, nothing else: no
//! communication, no jitter.

use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, Simulation, Strategy};
use dflop_costmodel::percentile;

use super::lockstep::times_ns;
use super::planner::StepPlanner;
use super::step_plan::StepPlan;
use crate::error::{Error, PlanError, Result};

/// Simulated times for a strategy over multiple steps.
#[derive(Debug, Clone, PartialEq)]
pub struct StrategySummary {
    /// The strategy.
    pub strategy: Strategy,
    /// Simulated seconds per step, for the slowest rank.
    pub step_seconds: Vec<f64>,
    /// Idle fraction over all stages of all ranks until the slowest rank is done, over all steps.
    pub bubble_fraction: f64,
    /// Fraction of microbatch time in which launches limit a module, the mean over the steps.
    pub launch_limited: f64,
    /// Lower bound of the step in seconds, the mean over the steps.
    pub bound_seconds: f64,
}

/// Sums over the planned steps of a strategy.
#[derive(Debug, Default)]
pub(super) struct StepSums {
    step_seconds: Vec<f64>,
    busy_ns: u128,
    available_ns: u128,
    launch_limited: f64,
    bound_seconds: f64,
}

impl StepSums {
    /// Adds a step.
    ///
    /// - `busy_ns`, `devices`: time summed over the devices, and their number
    fn add(&mut self, plan: &StepPlan, makespan_ns: u64, busy_ns: u128, devices: usize) {
        self.add_times([makespan_ns, plan.bound.ns], busy_ns, devices);
        self.launch_limited += plan.launch_limited_share();
    }

    fn add_times(&mut self, [makespan_ns, bound_ns]: [u64; 2], busy_ns: u128, devices: usize) {
        self.step_seconds.push(makespan_ns as f64 / 1e9);
        self.busy_ns += busy_ns;
        self.available_ns += devices as u128 * u128::from(makespan_ns);
        self.bound_seconds += bound_ns as f64 / 1e9;
    }

    /// Adds a step of ranks that share samples.
    ///
    /// - `step_ns`: time of the step, and its bound
    /// - `times_ns`: by rank, microbatch and module
    /// - `devices`: of all ranks
    pub(super) fn add_shared(&mut self, step_ns: [u64; 2], times_ns: &[Vec<Vec<u64>>], devices: usize) {
        let busy_ns = times_ns.iter().flatten().flatten().copied().map(u128::from).sum();
        self.add_times(step_ns, busy_ns, devices);
    }

    /// Adds a step of ranks that run all modules.
    pub(super) fn add_lockstep(&mut self, plan: &StepPlan) {
        let times = times_ns(plan);
        let busy_ns = times.iter().flatten().flatten().copied().map(u128::from).sum();
        self.add(plan, plan.makespan_ns, busy_ns, times.len());
    }

    pub(super) fn summary(self, strategy: Strategy) -> StrategySummary {
        let Self { step_seconds, busy_ns, available_ns, launch_limited, bound_seconds } = self;
        let steps = step_seconds.len().max(1) as f64;
        let is_idle = available_ns == 0;
        StrategySummary {
            strategy,
            step_seconds,
            bubble_fraction: if is_idle { 0.0 } else { 1.0 - busy_ns as f64 / available_ns as f64 },
            launch_limited: launch_limited / steps,
            bound_seconds: bound_seconds / steps,
        }
    }
}

impl StrategySummary {
    /// Returns the mean step in seconds.
    #[must_use]
    pub fn mean_seconds(&self) -> f64 {
        self.step_seconds.iter().sum::<f64>() / self.step_seconds.len().max(1) as f64
    }

    /// Returns the step time in seconds that 95 % of the steps do not exceed.
    #[must_use]
    pub fn p95_seconds(&self) -> f64 {
        if self.step_seconds.is_empty() { 0.0 } else { percentile(self.step_seconds.clone(), 95) }
    }
}

/// Plans the same steps by each strategy and simulates them.
///
/// Plans are computed for the schedule; for 1F1B if it is `zb-h1`, whose backward passes are split.
///
/// # Errors
/// [`Error::Plan`] if a step cannot be planned; [`Error::Config`] if the schedule does not fit the stages.
pub fn compare_strategies(
    planner: &StepPlanner,
    strategies: &[Strategy],
    steps: std::ops::Range<u64>,
    schedule: ScheduleKind,
) -> Result<Vec<StrategySummary>> {
    strategies.iter().map(|&strategy| summarize(planner, strategy, steps.clone(), schedule)).collect()
}

fn summarize(
    planner: &StepPlanner,
    strategy: Strategy,
    steps: std::ops::Range<u64>,
    schedule: ScheduleKind,
) -> Result<StrategySummary> {
    let mut planner = planner.clone().strategy(strategy);
    if schedule != ScheduleKind::ZeroBubble {
        planner = planner.schedule(schedule)?;
    }
    let mut sums = StepSums::default();
    for step in steps {
        let plan = planner.plan(step)?;
        if let (Some(context), false) = (&plan.context, planner.is_lockstep()) {
            sums.add_shared([plan.makespan_ns, plan.bound.ns], &context.times_ns, planner.devices());
            continue;
        }
        if planner.is_lockstep() {
            sums.add_lockstep(&plan);
            continue;
        }
        let simulations = simulate_plan(&planner, &plan, schedule)?;
        let makespan_ns = simulations.iter().map(|simulation| simulation.makespan_ns).max().unwrap_or(0);
        let busy_ns = simulations.iter().flat_map(|simulation| &simulation.busy_ns);
        let devices = simulations.iter().map(|simulation| simulation.busy_ns.len()).sum();
        sums.add(&plan, makespan_ns, busy_ns.copied().map(u128::from).sum(), devices);
    }
    Ok(sums.summary(strategy))
}

/// Simulates every DP rank in a planned step, `[dp_size]`: a pipeline with the stages of all modules,
/// encoders in parallel.
///
/// - `schedule`: with more than one chunk, all stages are one chain, and `chunks` stages share a
///   pipeline rank, assigned round robin
///
/// # Errors
/// [`Error::Plan`] if the plan was computed with different settings, the stages are not a multiple of the
/// chunks, or modules have different DP sizes: no rank can be simulated alone then.
pub fn simulate_plan(
    planner: &StepPlanner,
    plan: &StepPlan,
    schedule: ScheduleKind,
) -> Result<Vec<Simulation>> {
    let plan_error = |source| Error::Plan(PlanError::Unsolved { step: plan.step, source });
    let (instance, ranks) = planner.as_run(plan).map_err(plan_error)?;
    let pipeline = planner.pipeline();
    let stages: usize = pipeline.stages.iter().sum();
    if !stages.is_multiple_of(schedule.chunks()) {
        let reason = format!("{schedule} does not fit {stages} pipeline stages");
        return Err(plan_error(dflop_balancer::Error::Config { setting: "schedule", reason }));
    }
    let simulate_rank = |microbatches: &Vec<Vec<u32>>| {
        let times = pipeline.stage_times(&instance, microbatches)?;
        let layout = match schedule.chunks() {
            1 => {
                let last = pipeline.stages.len() - 1;
                let module = |stages: &usize| ModuleStages::new(*stages, 1).feeds(last);
                let modules: Vec<ModuleStages> = pipeline.stages.iter().map(module).collect();
                PipelineLayout::from_modules(&modules, microbatches.len())?
            }
            chunks => PipelineLayout::chain(stages / chunks, chunks, microbatches.len())?,
        };
        let free = Communication::free(layout.stages(), layout.microbatches());
        layout.simulate(&layout.schedule(schedule)?, &times, &free)
    };
    ranks.iter().map(simulate_rank).collect::<Result<_, _>>().map_err(plan_error)
}
