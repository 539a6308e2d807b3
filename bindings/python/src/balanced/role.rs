//! Reads the samples for a rank's role in a schedule, and builds microbatches and routes.

use std::sync::{Arc, Mutex, PoisonError};

use dflop_costmodel::Module;
use dflop_executor::inputs::{ReplicaShare, RoleInputs, RoleMicrobatch, RoleSamples};
use dflop_executor::models::ModuleKind;
use dflop_executor::pipeline::{RankRole, StepSchedule};
use dflop_loader::processors::Preparer;
use dflop_loader::settings::ProcessorSettings;
use dflop_loader::{Dataset, Share, Step, StepPlan, StepPlanner};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::loader_config::{LoaderConfig, RunningLoader};
use super::settings::RunSettings;
use crate::arrays::framework::Framework;
use crate::arrays::storage::Owner;
use crate::convert::tensors;
use crate::error::DflopError;
use crate::schedule::{PyRoute, PySchedule, below, class, module_name, refused};

/// Tensors for the text, which an encoder does not read.
const TEXT: [&str; 6] =
    ["input_ids", "labels", "position_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"];

/// Role of a rank in a schedule.
pub(super) struct Role {
    step: Arc<StepSchedule>,
    role: RankRole,
}

impl Role {
    /// Reads a `dflop.RankRole`.
    pub(super) fn new(role: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        let py = role.py();
        if !role.is_instance(&class(py, "RankRole")?)? {
            let reason = format!("expected a `RankRole` of a schedule, found {}", role.get_type().name()?);
            return Err(DflopError::config("role", reason).into());
        }
        let schedule = role.getattr("schedule")?.cast_into::<PySchedule>()?;
        let (rank, module): (usize, String) =
            (role.getattr("rank")?.extract()?, role.getattr("module")?.extract()?);
        let step = schedule.get().step().clone();
        let rank = below("rank", rank, step.layout().world_size())?;
        let roles = step.layout().roles(rank).map_err(refused)?;
        let found = roles.into_iter().find(|role| module_name(role.module) == module);
        let missing = || DflopError::config("role", format!("rank {rank} does not run `{module}`"));
        Ok(Arc::new(Self { step, role: found.ok_or_else(missing)? }))
    }

    /// Fills in ranks and microbatches from the schedule.
    pub(super) fn run(&self, run: RunSettings) -> Result<RunSettings, DflopError> {
        let microbatches = self.step.microbatches();
        let dp_size = self.step.layout().modules().last().map_or(1, |llm| llm.dp_size);
        for (setting, found, default, own) in [
            ("microbatches", run.microbatches, 1, microbatches),
            ("dp_size", run.dp_size, 1, dp_size),
            ("dp_rank", run.dp_rank, 0, 0),
        ] {
            if found != default && found != own {
                let reason = format!("follows from `role`: leave it out, found {found}");
                return Err(DflopError::config(setting, reason));
            }
        }
        // An encoder selects samples by share, for which the DP rank has no meaning.
        let dp_rank = if self.role.module == ModuleKind::Llm { self.role.replica } else { 0 };
        Ok(RunSettings { microbatches, dp_size, dp_rank, ..run })
    }

    /// Returns the encoders whose media are counted only: those that run in other roles.
    pub(super) fn counted_modules(&self) -> Vec<Module> {
        let own = cost_module(self.role.module);
        [Module::Vision, Module::Audio].into_iter().filter(|module| *module != own).collect()
    }

    /// Checks that microbatches can be built for roles.
    ///
    /// - `modules`: modules in the model
    pub(super) fn check(
        &self,
        has_preparer: bool,
        modules: &[Module],
        processor: &ProcessorSettings,
    ) -> Result<(), DflopError> {
        if !has_preparer {
            let reason = "needs the built-in processor and a tokenizer";
            return Err(DflopError::config("role", reason));
        }
        for layout in self.step.layout().modules() {
            if !modules.contains(&cost_module(layout.module)) {
                let name = module_name(layout.module);
                return Err(DflopError::config("role", format!("the model has no module `{name}`")));
            }
        }
        let settings = [
            ("layout", !processor.layout().is_packed()),
            ("pad_to_tokens", processor.pad_to_tokens.is_some()),
            ("length_buckets", processor.length_buckets.is_some()),
            ("media_buckets", processor.media_buckets.is_some()),
            ("sample_multiple_of", processor.sample_multiple_of != 1),
            ("skip_media_tensors", processor.skip_media_tensors),
        ];
        match settings.into_iter().find(|(_, is_set)| *is_set) {
            Some((setting, _)) => {
                let reason = "is not for a loader with `role`: microbatches are packed without padding";
                Err(DflopError::config(setting, reason))
            }
            None => Ok(()),
        }
    }

    /// Checks that some ranks encode each kind of media in the data.
    pub(super) fn check_media(&self, datasets: &[Dataset]) -> Result<(), DflopError> {
        let modules = self.step.layout().modules();
        for (kind, module) in [(ModuleKind::Vision, Module::Vision), (ModuleKind::Audio, Module::Audio)] {
            let is_run = modules.iter().any(|layout| layout.module == kind);
            if !is_run && datasets.iter().any(|dataset| dataset.index().has_media(module)) {
                let name = module_name(kind);
                let reason = format!("the schedule has no module `{name}`, and the data has media for it");
                return Err(DflopError::config("role", reason));
            }
        }
        Ok(())
    }

    /// Returns the share that an encoder reads; `None` for the LLM, which reads the replica's samples.
    pub(super) fn share(&self, planner: &StepPlanner) -> Option<Arc<dyn Share>> {
        let RankRole { module, replica, .. } = self.role;
        let share = || ReplicaShare::new(self.step.layout().clone(), planner.clone(), module, replica);
        (module != ModuleKind::Llm).then(|| -> Arc<dyn Share> { Arc::new(share()) })
    }
}

fn cost_module(module: ModuleKind) -> Module {
    match module {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}

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
        let (planner, plan, layout) = (running.planner.clone(), step.plan.clone(), role.step.layout());
        let samples = py.detach(|| RoleSamples::new(layout, role.role.clone(), &planner, step));
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
    ///     >>> settings = {"model": "model/", "global_batch_size": 4}
    ///     >>> loaders = [dflop.BalancedLoader("shards/", role=role, **settings) for role in schedule.roles(0)]
    ///     >>> steps = [next(iter(loader)) for loader in loaders]
    ///     >>> counts = sum(step.counts for step in steps)
    ///     >>> inputs = steps[1].inputs(counts)
    ///     >>> media = sum(routed.medium.rows for routed in inputs.route.media)
    ///     >>> media == len(inputs.microbatches[0].media_rows)
    ///     True
    fn inputs<'py>(&self, py: Python<'py>, counts: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let counts = numbers(counts)?;
        let layout = self.role.step.layout();
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
        let (target_tokens, step) = (plan.target_tokens(), self.role.step.clone());
        let key = |microbatch: usize, index: usize| self.key(media_samples[microbatch][index]);
        let route = Bound::new(py, PyRoute::from_plan(py, step, plan, key)?)?;
        class(py, "RoleInputs")?.call1((route, built, target_tokens, skipped))
    }

    fn __repr__(&self) -> String {
        format!("RoleStep(step={}, role='{}')", self.plan.step, module_name(self.role.role.module))
    }
}

impl RoleStep {
    /// Returns the key of a sample in the plan.
    fn key(&self, index: u32) -> String {
        self.planner.row(self.plan.samples[index as usize]).key().to_owned()
    }

    /// Creates a `dflop.schedule.RoleMicrobatch`.
    fn microbatch<'py>(&self, py: Python<'py>, of: RoleMicrobatch) -> PyResult<Bound<'py, PyAny>> {
        let is_llm = self.role.role.module == ModuleKind::Llm;
        let media_rows: Vec<i64> = of.media_places().into_iter().map(i64::from).collect();
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
        made.setattr("tokens", if is_llm { inputs.tokens } else { 0 })?;
        Ok(made)
    }
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
