//! Describes a job: a model, its distribution over ranks, and what neighboring stages need to know.

use std::ops::{Deref, Range};

use dflop_balancer::schedule::ScheduleKind;
use dflop_device::Cpu;
use dflop_models::{FrozenModules, ModelConfig, ModuleKind, StageRange};
use dflop_planner::Placement;

use super::layout::{JobLayout, ModuleParallelism, refuse};
use super::topology::RankRole;
use crate::error::Result;

/// Job stage, with the facts that neighboring stages need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStage {
    /// Module and layers.
    pub range: StageRange,
    /// Whether the stage receives output gradients: something is trained in it or before it.
    pub has_backward: bool,
    /// Number of output columns; 0 for the last stage, whose output is the loss.
    pub output_width: usize,
    /// Module index in the job.
    pub(super) module: usize,
}

impl JobStage {
    /// Returns the module index of the stage in the job.
    #[must_use]
    pub fn module(&self) -> usize {
        self.module
    }
}

/// Model, frozen parts, and distribution over ranks. The same on all ranks.
///
/// Dereferences to its [`JobLayout`], which numbers stages and ranks. Modules have separate world ranks
/// ([`Job::new`]) or share them ([`Job::joint`], [`Job::colocated`]).
#[derive(Debug, Clone)]
pub struct Job {
    pub(super) model: ModelConfig,
    layout: JobLayout,
    pub(super) stages: Vec<JobStage>,
    /// Trained parameters that both the first and the last LLM stage have: a tied embedding.
    pub(super) tied: Vec<String>,
}

impl Job {
    /// Creates a job whose modules have separate world ranks, after checking that the layout matches the
    /// model. World ranks are numbered pipeline rank by pipeline rank, each with the module's TP size.
    ///
    /// - `modules`: encoders that run, then the LLM, each at most once
    ///
    /// # Errors
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) if layers are missing or repeated, a number is
    /// 0, or the schedule is not supported: several chunks per rank beside encoders.
    pub fn new(
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        Self::placed(Placement::Disaggregated, model, frozen, modules, schedule)
    }

    /// Creates a job whose ranks hold layers from all modules: encoder and LLM layers are one chain, which is
    /// cut into stages anywhere. World ranks are numbered by LLM replica, within a replica by chain stage,
    /// within a stage by TP rank.
    ///
    /// Each world rank in a stage holds the complete encoder layers of the stage and encodes a share of the
    /// media in the microbatches of its replica; the LLM layers are tensor-parallel.
    ///
    /// - `modules`: same as for [`Job::new`]; all have an entry for every chain stage, which may be empty.
    ///   Encoders have `tp_size` 1; encoder replicas are the ranks in a stage, so `dp_size` is left at 1 or
    ///   equals the LLM's `dp_size` times `tp_size`
    ///
    /// # Errors
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) as in [`Job::new`], and if an encoder ends
    /// after the first LLM stage, a chain stage has no layer, or the schedule is not `gpipe`, `1f1b` or
    /// `zb-h1`.
    pub fn joint(
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        Self::placed(Placement::Joint, model, frozen, modules, schedule)
    }

    /// Creates a job whose encoders run on the LLM ranks: first all encoder forward passes, then the LLM,
    /// then all encoder backward passes. World ranks are the LLM world ranks as in [`Job::new`]; the pipeline
    /// ranks of every encoder use them in the same order.
    ///
    /// - `modules`: same as for [`Job::new`]; each encoder uses as many ranks as the LLM
    ///
    /// # Errors
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) as in [`Job::new`], and if an encoder uses a
    /// different number of ranks than the LLM, or the schedule is `1f1b-ahead`.
    pub fn colocated(
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        Self::placed(Placement::Colocated, model, frozen, modules, schedule)
    }

    /// Creates a job in a placement.
    ///
    /// # Errors
    /// Errors from [`Job::new`], [`Job::joint`] or [`Job::colocated`].
    pub fn placed(
        placement: Placement,
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        let layout = JobLayout::new(placement, modules, schedule)?;
        check_layers(&model, &layout)?;
        let mut stages = Vec::new();
        for (index, module) in layout.modules.iter().enumerate() {
            for layers in &module.stages {
                stages.push(describe(&model, frozen, index, module, layers.clone())?);
            }
        }
        let tied = tied(&model, frozen, &stages)?;
        Ok(Self { model, layout, stages, tied })
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns the stages in all modules, in order.
    #[must_use]
    pub fn stages(&self) -> &[JobStage] {
        &self.stages
    }

    /// Returns the layer ranges for the stages of a role, to build them from.
    #[must_use]
    pub fn ranges(&self, role: &RankRole) -> Vec<StageRange> {
        role.stages.iter().map(|&stage| self.stages[usize::from(stage)].range.clone()).collect()
    }
}

impl Deref for Job {
    type Target = JobLayout;

    fn deref(&self) -> &JobLayout {
        &self.layout
    }
}

/// Checks that the modules have all layers of the model.
fn check_layers(model: &ModelConfig, layout: &JobLayout) -> Result<()> {
    for module in &layout.modules {
        let (kind, layers) = (module.module, model.layers(module.module));
        let cut = module.stages.last().map_or(0, |last| last.end);
        if cut != layers {
            let reason = format!("the stages of {kind:?} have {cut} layers, the model has {layers}");
            return refuse("stages", reason);
        }
    }
    Ok(())
}

fn describe(
    model: &ModelConfig,
    frozen: FrozenModules,
    module: usize,
    layout: &ModuleParallelism,
    layers: Range<usize>,
) -> Result<JobStage> {
    let range = StageRange { module: layout.module, layers };
    // A stage without trained parameters still passes gradients back to a trained stage before it.
    let is_trained = model.stage_blocks::<Cpu>(&range, frozen, None)?.is_trained();
    let has_backward = is_trained || model.is_input_trained(&range, frozen);
    let output_width = model.output_width(&range);
    Ok(JobStage { range, has_backward, output_width, module })
}

fn tied(model: &ModelConfig, frozen: FrozenModules, stages: &[JobStage]) -> Result<Vec<String>> {
    let llm: Vec<&JobStage> = stages.iter().filter(|stage| stage.range.module == ModuleKind::Llm).collect();
    let [first, .., last] = llm.as_slice() else { return Ok(Vec::new()) };
    let specs = |stage: &JobStage| -> Result<Vec<_>> {
        Ok(model.stage_blocks::<Cpu>(&stage.range, frozen, None)?.into_declaration().into_specs())
    };
    let (first, last) = (specs(first)?, specs(last)?);
    let is_shared = |name: &str| last.iter().any(|spec| spec.name == name);
    let common = first.into_iter().filter(|spec| spec.is_trained && is_shared(&spec.name));
    Ok(common.map(|spec| spec.name).collect())
}
