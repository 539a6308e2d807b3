//! Rank role in a schedule: selects the samples that a loader reads.

use std::sync::Arc;

use dflop_costmodel::Module;
use dflop_executor::inputs::ReplicaShare;
use dflop_executor::models::ModuleKind;
use dflop_executor::pipeline::{RankRole, StepSchedule};
use dflop_loader::settings::{LayoutSetting, PixelTypeName, ProcessorSettings};
use dflop_loader::{Dataset, Share, StepPlanner};
use pyo3::prelude::*;

use crate::error::DflopError;
use crate::schedule::{PySchedule, below, class, module_name, refused};

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

    /// Returns the lists of all ranks.
    pub(super) fn schedule(&self) -> &Arc<StepSchedule> {
        &self.step
    }

    /// Returns the role in the layout.
    pub(super) fn rank_role(&self) -> &RankRole {
        &self.role
    }

    /// Returns whether the role is the LLM's.
    pub(super) fn is_llm(&self) -> bool {
        self.role.module == ModuleKind::Llm
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
            ("layout", processor.layout != LayoutSetting::default()),
            ("length_buckets", processor.length_buckets.is_some()),
            ("media_buckets", processor.media_buckets.is_some()),
            ("dtype", processor.dtype == PixelTypeName::None),
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
        (!self.is_llm()).then(|| -> Arc<dyn Share> { Arc::new(share()) })
    }
}

fn cost_module(module: ModuleKind) -> Module {
    match module {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}
