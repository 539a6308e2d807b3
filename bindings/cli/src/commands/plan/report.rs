//! Shows a parallelism plan as JSON or as a table.

use std::io::Write;

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::{LaunchLimit, ModelSpec};
use dflop_planner::{
    Degrees, Explanation, ModuleBytes, ModulePlan, ParallelismPlan, PlanProblem, PlanReport,
};
use serde::Serialize;

use super::layouts::LayoutsJson;
use super::samples::{RefusedJson, SamplesJson};
use super::trainer::TrainerJson;
use crate::commands::simulate::print_launch_limits;
use crate::failure::Failure;
use crate::output::layouts::BYTES_PER_GIB;
use crate::report::{Basis, Origin, Plan, PlannedModule, PlannedParallelism, RunReport, verdict};

#[derive(Debug, Serialize)]
pub(super) struct PlanJson {
    #[serde(flatten)]
    plan: DegreesJson,
    step_seconds: f64,
    step_seconds_p95: f64,
    /// Lower bound on the step time for all plans in [`PlanJson::searched`] that fit, on the same batches.
    lower_bound_seconds: f64,
    /// Plans that were searched, for people.
    searched: String,
    search_seconds: f64,
    gpus_used: u32,
    /// Unit in which encoder ranks share the media of microbatches at the same position: `tile` or `sample`.
    encoder_share: &'static str,
    bottleneck: BottleneckJson,
    /// Microbatch sizes below which launches limit a module.
    pub(super) launch_limits: Vec<LaunchLimit>,
    memory: MemoryJson,
    runner_up: Option<RunnerUpJson>,
    plans_bounded: u64,
    plans_simulated: u64,
    is_exhaustive: bool,
    batches: usize,
    /// Load imbalance of ranks that share experts; left out for a model without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_imbalance: Option<ExpertImbalanceJson>,
    /// What to pass to a trainer other than the executor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trainer: Option<TrainerJson>,
    #[serde(flatten)]
    pub(super) layouts: LayoutsJson,
    samples: SamplesJson,
    model: String,
    times_from: String,
}

/// Maximum rank load over the mean.
#[derive(Debug, Clone, Copy, Serialize)]
struct ExpertImbalanceJson {
    planned: f64,
    expected: f64,
    worst: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct DegreesJson {
    /// Encoder degrees, for the first of several encoders.
    encoder: ModuleJson,
    llm: ModuleJson,
    /// Every module by name, the LLM last.
    modules: Vec<NamedModuleJson>,
    microbatches: u32,
    placement: &'static str,
    /// Schedule that runs the microbatches, as `parallel.schedule` in a training run names it.
    schedule: String,
    /// Number of rounds that the encoder runs ahead of 1F1B.
    rounds_ahead: u16,
    /// Whether the executor runs the plan.
    is_run: bool,
    layers: LayersJson,
    recompute: RecomputeJson,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct ModuleJson {
    tp: u32,
    pp: u32,
    dp: u32,
    /// Number of DP ranks that divide the experts; for an LLM with more than one such rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    ep: Option<u32>,
}

/// Named module plan.
#[derive(Debug, Serialize)]
struct NamedModuleJson {
    name: &'static str,
    #[serde(flatten)]
    degrees: ModuleJson,
    /// Number of layers in each stage.
    layers: Vec<u32>,
    recompute: bool,
}

#[derive(Debug, Serialize)]
struct LayersJson {
    encoder: Vec<u32>,
    llm: Vec<u32>,
}

#[derive(Debug, Serialize)]
struct RecomputeJson {
    encoder: bool,
    llm: bool,
}

#[derive(Debug, Serialize)]
struct BottleneckJson {
    module: &'static str,
    stage: usize,
    stages: usize,
    busy_fraction: f64,
    other_busy_fraction: f64,
}

#[derive(Debug, Serialize)]
struct MemoryJson {
    limit_gib: f64,
    margin: f64,
    encoder: ModuleMemoryJson,
    llm: ModuleMemoryJson,
    /// Every module, in plan order.
    modules: Vec<ModuleMemoryJson>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct ModuleMemoryJson {
    pub(crate) gib: f64,
    pub(crate) headroom_gib: f64,
}

#[derive(Debug, Serialize)]
struct RunnerUpJson {
    #[serde(flatten)]
    plan: DegreesJson,
    step_seconds: f64,
    reason: String,
}

impl PlanJson {
    pub(super) fn new(
        spec: &ModelSpec,
        problem: &PlanProblem<'_>,
        found: &PlanReport,
        samples: SamplesJson,
        times_from: String,
        search_seconds: f64,
    ) -> Self {
        let Explanation { bottleneck, encoder_memory, llm_memory, runner_up } = &found.explanation;
        let names = problem.encoder_names();
        let memory: Vec<ModuleMemoryJson> =
            encoder_memory.iter().chain([llm_memory]).map(|bytes| (*bytes).into()).collect();
        Self {
            plan: DegreesJson::new(&found.plan, &names),
            step_seconds: found.step_seconds,
            step_seconds_p95: found.step_seconds_p95,
            lower_bound_seconds: found.lower_bound_seconds,
            searched: problem.searched(),
            search_seconds,
            gpus_used: found.plan.gpus(),
            encoder_share: problem.encoder_split.name(),
            launch_limits: Vec::new(),
            bottleneck: BottleneckJson {
                module: bottleneck.module,
                stage: bottleneck.stage,
                stages: bottleneck.stages,
                busy_fraction: bottleneck.busy_fraction,
                other_busy_fraction: bottleneck.other_busy_fraction,
            },
            memory: MemoryJson {
                limit_gib: problem.cluster.memory_bytes as f64 / BYTES_PER_GIB,
                margin: problem.memory_margin,
                encoder: memory[0],
                llm: (*llm_memory).into(),
                modules: memory,
            },
            runner_up: runner_up.as_ref().map(|next| RunnerUpJson {
                plan: DegreesJson::new(&next.plan, &names),
                step_seconds: next.step_seconds,
                reason: next.reason.clone(),
            }),
            plans_bounded: found.plans_bounded,
            plans_simulated: found.plans_simulated,
            is_exhaustive: found.is_exhaustive,
            batches: found.batches,
            expert_imbalance: found.expert_loads.map(|loads| ExpertImbalanceJson {
                planned: loads.planned,
                expected: loads.expected,
                worst: loads.worst,
            }),
            trainer: None,
            layouts: LayoutsJson::default(),
            samples,
            model: spec.name.clone(),
            times_from,
        }
    }

    /// Returns the plan and the runner-up as a report for a browser.
    pub(super) fn to_report(&self) -> RunReport {
        let title = format!("Parallelism plan for {}", self.model);
        let mut report = RunReport::new("plan", title, Origin::for_this_process());
        let gap = self.step_seconds / self.lower_bound_seconds.max(f64::MIN_POSITIVE) - 1.0;
        let next = self.runner_up.as_ref().map_or_else(String::new, |next| {
            let slower = (next.step_seconds / self.step_seconds.max(f64::MIN_POSITIVE) - 1.0) * 100.0;
            format!("; the runner-up takes {slower:.1} % longer")
        });
        let text = format!(
            "{} GPUs: {}. A step takes {:.4} s, {:.1} % above the lower bound of the plans searched{next}.",
            self.gpus_used,
            self.plan,
            self.step_seconds,
            gap * 100.0
        );
        report.verdict.push(verdict(Basis::Simulated, text));
        report.fact("Model", &self.model);
        report.fact("Times", &self.times_from);
        report.fact("GPUs used", self.gpus_used.to_string());
        report.fact("Memory per GPU", format!("{:.1} GiB", self.memory.limit_gib));
        report.fact("Schedule", &self.plan.schedule);
        report.fact("Simulated batches", self.batches.to_string());
        report.fact("Samples", format!("{} of {}", self.samples.read, self.samples.samples));
        let BottleneckJson { module, stage, stages, busy_fraction, .. } = &self.bottleneck;
        let memory: Vec<f64> = self.memory.modules.iter().map(|module| module.gib).collect();
        report.plan = Some(Plan {
            winner: PlannedParallelism {
                step_seconds_p95: Some(self.step_seconds_p95),
                ..self.plan.to_planned(self.step_seconds, &memory)
            },
            runner_up: self.runner_up.as_ref().map(|next| next.plan.to_planned(next.step_seconds, &[])),
            reason: self.runner_up.as_ref().map_or_else(String::new, |next| next.reason.clone()),
            lower_bound_seconds: self.lower_bound_seconds,
            memory_limit_gib: self.memory.limit_gib,
            bottleneck: format!(
                "{module} stage {} of {stages}, busy {:.1} % of the step",
                stage + 1,
                busy_fraction * 100.0
            ),
            searched: self.searched.clone(),
        });
        self.layouts.add_to(&mut report);
        if !self.plan.is_run {
            report.notes.push("This plan is simulated; the executor does not run it yet.".to_owned());
        }
        if let Some(RefusedJson { key, reason }) = &self.samples.first_refused {
            let refused = self.samples.refused;
            report.notes.push(format!(
                "Left out: {refused} samples that the model refuses, the first: {key}: {reason}."
            ));
        }
        report
    }

    /// Prints a table.
    pub(super) fn print(&self, out: &mut impl Write) -> Result<(), Failure> {
        self.layouts.print_winner(out)?;
        writeln!(out, "{} on {}, {} GPUs used", self.model, self.times_from, self.gpus_used)?;
        writeln!(
            out,
            "{:<9} {:>3} {:>4} {:>5} {:>10} {:>12}  layers of stages",
            "", "tp", "pp", "dp", "GiB", "headroom"
        )?;
        for (module, memory) in self.plan.modules.iter().zip(&self.memory.modules) {
            let NamedModuleJson { name, degrees: ModuleJson { tp, pp, dp, .. }, layers, .. } = module;
            let ModuleMemoryJson { gib, headroom_gib } = memory;
            let recomputed: u32 = layers.iter().sum();
            let note = if module.recompute { format!(", {recomputed} recomputed") } else { String::new() };
            let layers = format!("{}{note}", format_layers(layers));
            writeln!(out, "{name:<9} {tp:>3} {pp:>4} {dp:>5} {gib:>10.1} {headroom_gib:>12.1}  {layers}")?;
        }
        self.print_samples(out)?;
        let Self { step_seconds, step_seconds_p95, lower_bound_seconds, searched, batches, .. } = self;
        writeln!(
            out,
            "{} microbatches per rank, {}, media shared by {}",
            self.plan.microbatches, self.plan.placement, self.encoder_share
        )?;
        if let (Some(ep), Some(loads)) = (self.plan.llm.ep, &self.expert_imbalance) {
            let ExpertImbalanceJson { planned, expected, worst } = loads;
            writeln!(
                out,
                "expert parallelism: {ep} ranks, load imbalance {planned:.3} (uniform routing {expected:.3}, worst \
                 {worst:.3})"
            )?;
        }
        if let Some(schedule) = self.plan.unusual_schedule() {
            writeln!(out, "schedule: {schedule}")?;
        }
        if !self.plan.is_run {
            writeln!(out, "this plan is simulated; the executor does not run it yet")?;
        }
        writeln!(
            out,
            "step: {step_seconds:.4} s, 95th percentile {step_seconds_p95:.4} s ({batches} simulated batches)"
        )?;
        writeln!(out, "no plan below {lower_bound_seconds:.4} s, of the plans searched: {searched}")?;
        let BottleneckJson { module, stage, stages, busy_fraction, .. } = &self.bottleneck;
        let busy = busy_fraction * 100.0;
        writeln!(out, "bottleneck: {module} stage {} of {stages}, busy {busy:.1} % of the step", stage + 1)?;
        print_launch_limits(out, &self.launch_limits)?;
        if let Some(next) = &self.runner_up {
            writeln!(out, "runner-up: {}: {}", next.plan, next.reason)?;
        }
        let how =
            if self.is_exhaustive { "every plan is ruled out or simulated" } else { "the rest by estimate" };
        let Self { plans_bounded, plans_simulated, search_seconds, .. } = self;
        writeln!(
            out,
            "{plans_bounded} plans bounded, {plans_simulated} simulated, {how}, in {search_seconds:.3} s"
        )?;
        self.trainer.iter().try_for_each(|trainer| trainer.print(out))?;
        self.layouts.print(out)
    }

    /// Prints the samples that are not looked at.
    fn print_samples(&self, out: &mut impl Write) -> Result<(), Failure> {
        let SamplesJson { samples, read, refused, first_refused } = &self.samples;
        if read < samples {
            writeln!(out, "shapes of {read} of {samples} samples, at even distances")?;
        }
        if let Some(RefusedJson { key, reason }) = first_refused {
            writeln!(out, "left out: {refused} samples that the model refuses, the first: {key}: {reason}")?;
        }
        Ok(())
    }
}

/// Formats layers by equal stages: `4x7` is four stages with seven layers.
fn format_layers(layers: &[u32]) -> String {
    let runs = layers.chunk_by(|a, b| a == b);
    runs.map(|run| format!("{}x{}", run.len(), run[0])).collect::<Vec<_>>().join(" ")
}

impl std::fmt::Display for ModuleJson {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "tp {} pp {} dp {}", self.tp, self.pp, self.dp)?;
        self.ep.map_or(Ok(()), |ep| write!(formatter, " ep {ep}"))
    }
}

impl std::fmt::Display for DegreesJson {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { modules, microbatches, placement, is_run, .. } = self;
        for NamedModuleJson { name, degrees, .. } in modules {
            write!(formatter, "{name} {degrees}, ")?;
        }
        write!(formatter, "{microbatches} microbatches, {placement}")?;
        if let Some(schedule) = self.unusual_schedule() {
            write!(formatter, ", {schedule}")?;
        }
        if *is_run { Ok(()) } else { write!(formatter, " (not run yet)") }
    }
}

impl DegreesJson {
    /// Converts a plan with the encoder names.
    pub(crate) fn new(plan: &ParallelismPlan, names: &[&'static str]) -> Self {
        let degrees = |module: &ModulePlan| {
            let Degrees { tp, pp, dp } = module.degrees;
            ModuleJson { tp, pp, dp, ep: None }
        };
        let ep = (plan.expert_parallel > 1).then_some(plan.expert_parallel);
        let of_llm = ModuleJson { ep, ..degrees(&plan.llm) };
        let named = |(name, module): (&'static str, &ModulePlan)| NamedModuleJson {
            name,
            degrees: degrees(module),
            layers: module.layers.clone(),
            recompute: module.is_recomputed,
        };
        // A plan has at least one encoder.
        let (first, llm) = (&plan.encoders[0], &plan.llm);
        let modules = names.iter().copied().zip(&plan.encoders).chain([("llm", llm)]);
        Self {
            encoder: degrees(first),
            llm: of_llm,
            modules: modules
                .map(named)
                .map(|module| match module.name {
                    "llm" => NamedModuleJson { degrees: of_llm, ..module },
                    _ => module,
                })
                .collect(),
            microbatches: plan.microbatches,
            placement: plan.placement.name(),
            schedule: plan.schedule.to_string(),
            rounds_ahead: match plan.schedule {
                ScheduleKind::EncoderAhead { rounds } => rounds,
                _ => 0,
            },
            is_run: ep.is_none(),
            layers: LayersJson { encoder: first.layers.clone(), llm: llm.layers.clone() },
            recompute: RecomputeJson { encoder: first.is_recomputed, llm: llm.is_recomputed },
        }
    }
}

impl DegreesJson {
    /// Returns the name of a schedule other than 1F1B.
    pub(crate) fn unusual_schedule(&self) -> Option<&str> {
        Some(self.schedule.as_str()).filter(|name| *name != ScheduleKind::OneForwardOneBackward.name())
    }

    /// Converts to a report plan.
    ///
    /// - `memory_gib`: peak memory per module, where it is known
    fn to_planned(&self, step_seconds: f64, memory_gib: &[f64]) -> PlannedParallelism {
        let module = |(place, module): (usize, &NamedModuleJson)| PlannedModule {
            name: module.name.to_owned(),
            tp: module.degrees.tp,
            pp: module.degrees.pp,
            dp: module.degrees.dp,
            layers: module.layers.clone(),
            gib: memory_gib.get(place).copied(),
        };
        PlannedParallelism {
            text: self.to_string(),
            step_seconds,
            step_seconds_p95: None,
            microbatches: self.microbatches,
            placement: self.placement.to_owned(),
            modules: self.modules.iter().enumerate().map(module).collect(),
        }
    }
}

impl From<ModuleBytes> for ModuleMemoryJson {
    fn from(bytes: ModuleBytes) -> Self {
        Self {
            gib: bytes.bytes as f64 / BYTES_PER_GIB,
            headroom_gib: bytes.headroom_bytes as f64 / BYTES_PER_GIB,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_shown_by_runs() {
        assert_eq!(format_layers(&[7, 7, 7, 6]), "3x7 1x6");
        assert_eq!(format_layers(&[28]), "1x28");
    }
}
