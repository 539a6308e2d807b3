//! Samples for a rank role in a step, which become microbatches and a route.

use std::sync::{Arc, Mutex, PoisonError};

use dflop_executor::inputs::{RoleInputs, RoleMicrobatch, RoleSamples};
use dflop_executor::models::ModuleKind;
use dflop_loader::inputs::PreparedSample;
use dflop_loader::media::Modality;
use dflop_loader::processors::Preparer;
use dflop_loader::{Step, StepPlan, StepPlanner};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::loader_config::{LoaderConfig, RunningLoader};
use super::role::Role;
use crate::arrays::framework::Framework;
use crate::arrays::storage::Owner;
use crate::convert::tensors;
use crate::error::DflopError;
use crate::schedule::{PyRoute, class, module_name, refused};

/// Tensors for the text, which an encoder does not read.
const TEXT: [&str; 6] =
    ["input_ids", "labels", "position_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"];

/// Samples that a rank has read for a role in a step. A `BalancedLoader` with a ``role`` delivers it.
///
/// An encoder rank has the samples whose media it encodes, from all LLM replicas that it serves; an LLM rank
/// has the texts, without pixels. Only all ranks together know how many tokens each sample has, and whether
/// each could be prepared. So ranks sum ``counts``, and ``inputs`` leaves out the same samples everywhere.
///
/// Examples:
///     One encoder rank and two LLM ranks, here in a single process:
///
///     >>> schedule = dflop.Schedule({"vision": {}, "llm": {"dp": 2}}, microbatches=2)
///     >>> roles = [role for rank in range(3) for role in schedule.roles(rank)]
///     >>> settings = {"model": "model/", "global_batch_size": 8}
///     >>> loaders = [dflop.BalancedLoader("shards/", role=role, **settings) for role in roles]
///     >>> steps = [next(iter(loader)) for loader in loaders]
///     >>> counts = sum(step.counts for step in steps)  # in a job, ``torch.distributed.all_reduce(counts)``
///     >>> vision, first, second = [step.inputs(counts) for step in steps]
///     >>> list(vision.microbatches[0]), list(first.microbatches[0])[:2]
///     (['image_grid_thw', 'pixel_values'], ['input_ids', 'labels'])
///     >>> vision.route.digest == first.route.digest == second.route.digest
///     True
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct RoleStep {
    role: Arc<Role>,
    planner: StepPlanner,
    preparer: Arc<Preparer>,
    framework: Framework,
    plan: Arc<StepPlan>,
    counts: Vec<i64>,
    samples: Mutex<Option<RoleSamples>>,
}

impl RoleStep {
    /// Collects the samples in a step.
    pub(super) fn new(
        py: Python<'_>,
        config: &LoaderConfig,
        running: &RunningLoader,
        role: &Arc<Role>,
        step: Step,
    ) -> PyResult<Self> {
        let Some(preparer) = config.preparer.clone() else {
            return Err(DflopError::config("role", "needs the built-in processor").into());
        };
        let framework = config.read.delivery.resolved(py)?.framework;
        let (planner, plan, layout) = (running.planner.clone(), step.plan.clone(), role.schedule().layout());
        let samples = py.detach(|| RoleSamples::new(layout, role.rank_role().clone(), &planner, step));
        let counts = samples.counts(layout).into_iter().map(|count| count as i64).collect();
        let (role, samples) = (role.clone(), Mutex::new(Some(samples)));
        Ok(Self { role, planner, preparer, framework, plan, counts, samples })
    }
}

#[pymethods]
impl RoleStep {
    /// Step number, from 0.
    #[getter]
    fn step(&self) -> u64 {
        self.plan.step
    }

    /// Digest of the loader's plan, equal on all ranks.
    #[getter]
    fn digest(&self) -> String {
        self.plan.digest.to_string()
    }

    /// This rank's counts, int64 ``[numbers]``: a new array, to be summed over all roles on all ranks.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.framework.array(py, Owner::I64(self.counts.clone()), &[self.counts.len()])
    }

    /// Builds the microbatches and the route; the samples are handed over, so a second call fails.
    ///
    /// Args:
    ///     counts (array): ``counts`` summed over all roles on all ranks.
    ///
    /// Returns:
    ///     RoleInputs: microbatches by number, the route, and samples left out.
    ///
    /// Raises:
    ///     ConfigError: the counts are not that sum, or ranks have different plans.
    ///     Error: the inputs were built before, or this rank lacks a sample.
    ///
    /// Examples:
    ///     >>> schedule = dflop.Schedule({"vision": {}, "llm": {}}, microbatches=1, placement="colocated")
    ///     >>> settings, roles = {"model": "model/", "global_batch_size": 4}, schedule.roles(0)
    ///     >>> loaders = [dflop.BalancedLoader("shards/", role=role, **settings) for role in roles]
    ///     >>> steps = [next(iter(loader)) for loader in loaders]
    ///     >>> counts = sum(step.counts for step in steps)
    ///     >>> inputs = steps[1].inputs(counts)
    ///     >>> media = sum(routed.medium.rows for routed in inputs.route.media)
    ///     >>> media == len(inputs.microbatches[0].media_rows)
    ///     True
    fn inputs<'py>(&self, py: Python<'py>, counts: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let counts = numbers(counts)?;
        let layout = self.role.schedule().layout();
        let Some(samples) = self.samples.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Err(
                DflopError::command("the inputs of this step were built before".to_owned(), false).into()
            );
        };
        let inputs = py.detach(|| samples.inputs(layout, counts)).map_err(refused)?;
        let RoleInputs { plan, media_samples, microbatches, skipped } = inputs;
        let built = PyDict::new(py);
        for microbatch in microbatches.into_iter().filter(|microbatch| !microbatch.samples.is_empty()) {
            built.set_item(microbatch.microbatch, self.microbatch(py, microbatch)?)?;
        }
        let skipped: Vec<_> =
            skipped.into_iter().map(|skipped| (self.key(skipped.index), skipped.reason)).collect();
        let (target_tokens, step) = (plan.target_tokens(), self.role.schedule().clone());
        let key = |microbatch: usize, index: usize| self.key(media_samples[microbatch][index]);
        let route = Bound::new(py, PyRoute::from_plan(py, step, plan, key)?)?;
        class(py, "RoleInputs")?.call1((route, built, target_tokens, skipped))
    }

    fn __repr__(&self) -> String {
        format!("RoleStep(step={}, role='{}')", self.plan.step, module_name(self.role.rank_role().module))
    }
}

impl RoleStep {
    /// Returns the key of a sample in the plan.
    fn key(&self, index: u32) -> String {
        self.planner.row(self.plan.samples[index as usize]).key().to_owned()
    }

    /// Creates a `dflop.schedule.RoleMicrobatch`.
    fn microbatch<'py>(&self, py: Python<'py>, of: RoleMicrobatch) -> PyResult<Bound<'py, PyAny>> {
        let is_llm = self.role.is_llm();
        let media_rows: Vec<i64> = of.media_places().into_iter().map(i64::from).collect();
        let runs = media_runs(self.role.rank_role().module, &of.samples);
        let keys: Vec<String> = of.plan_indices.iter().map(|&index| self.key(index)).collect();
        let (preparer, samples) = (self.preparer.clone(), of.samples);
        let made = class(py, "RoleMicrobatch")?.call0()?;
        made.setattr("sample_keys", keys)?;
        let inputs = py.detach(|| preparer.pack(samples));
        let Some(mut inputs) = inputs else {
            return Err(DflopError::command("a microbatch has no samples".to_owned(), false).into());
        };
        if !is_llm {
            inputs.tensors.retain(|tensor| !TEXT.contains(&tensor.name));
        }
        tensors(&made, inputs.tensors, self.framework)?;
        let (none, lengths) = (py.None().into_bound(py), [inputs.cu_seqlens.len()]);
        let media = [media_rows.len()];
        let (cu_seqlens, media_rows) = if is_llm {
            made.set_item("use_cache", false)?;
            let cu_seqlens = self.framework.array(py, Owner::I32(inputs.cu_seqlens), &lengths)?;
            (cu_seqlens, self.framework.array(py, Owner::I64(media_rows), &media)?)
        } else {
            (none.clone(), none)
        };
        made.setattr("cu_seqlens", cu_seqlens)?;
        made.setattr("max_seqlen", if is_llm { inputs.max_seqlen } else { 0 })?;
        made.setattr("media_rows", media_rows)?;
        made.setattr("media_runs", runs)?;
        made.setattr("tokens", if is_llm { inputs.tokens } else { 0 })?;
        Ok(made)
    }
}

/// Returns kind and rows of the media that a module reads, in route order: for each sample images, then
/// videos, then audio clips.
fn media_runs(module: ModuleKind, samples: &[PreparedSample]) -> Vec<(&'static str, usize)> {
    let kinds: &[Modality] = match module {
        ModuleKind::Vision => &[Modality::Image, Modality::Video],
        ModuleKind::Audio => &[Modality::Audio],
        ModuleKind::Llm => &[Modality::Image, Modality::Video, Modality::Audio],
    };
    let mut found = Vec::new();
    for sample in samples {
        for &kind in kinds {
            let runs = sample.runs.iter().filter(|run| run.modality == kind);
            found.extend(runs.map(|run| (kind.name(), run.tokens)));
        }
    }
    found
}

/// Extracts counts from an array or a sequence.
fn numbers(counts: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let list = if counts.hasattr("tolist")? { counts.call_method0("tolist")? } else { counts.clone() };
    let numbers: Option<Vec<u64>> = list.extract().ok();
    numbers.ok_or_else(|| {
        let reason = "expected a list of whole numbers, at least 0, as in `counts`";
        DflopError::config("counts", reason).into()
    })
}
