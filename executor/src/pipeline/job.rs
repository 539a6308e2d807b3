//! Describes a job: the layers of every stage and the replicas of every module.

use std::ops::Range;

use dflop_balancer::schedule::ScheduleKind;

use crate::error::{Error, Result};
use dflop_device::Cpu;
use dflop_models::{FrozenModules, ModelConfig, ModuleKind, StageRange};

/// Parallelism of one module of a job: its stages, replicas and tensor-parallel degree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleParallelism {
    /// The module.
    pub module: ModuleKind,
    /// Transformer layers of every stage, in order, at least one each; lengths may differ.
    pub stages: Vec<Range<usize>>,
    /// Replicas, at least 1.
    pub dp_size: usize,
    /// World ranks that share a pipeline rank by tensor parallelism, at least 1.
    pub tp_size: usize,
}

impl ModuleParallelism {
    /// Describes one replica on ranks of their own, without tensor parallelism.
    #[must_use]
    pub fn new(module: ModuleKind, stages: Vec<Range<usize>>) -> Self {
        Self { module, stages, dp_size: 1, tp_size: 1 }
    }

    /// Cuts `layers` into stages that differ by at most one layer, the longer ones first.
    ///
    /// # Panics
    /// If there is no stage.
    #[must_use]
    pub fn even(module: ModuleKind, layers: usize, stages: usize) -> Self {
        let mut start = 0;
        let cut = |length: usize| {
            start += length;
            start - length..start
        };
        Self::new(module, dflop_comm::even_parts(layers, stages).into_iter().map(cut).collect())
    }

    /// Sets the number of replicas. Default: 1.
    #[must_use]
    pub fn dp_size(mut self, replicas: usize) -> Self {
        self.dp_size = replicas;
        self
    }

    /// Sets the number of world ranks per pipeline rank. Default: 1.
    #[must_use]
    pub fn tp_size(mut self, ranks: usize) -> Self {
        self.tp_size = ranks;
        self
    }
}

/// A stage of a job, with the facts that its neighbors need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStage {
    /// Module and layers.
    pub range: StageRange,
    /// Whether it takes gradients of its output: something is trained in it or before it.
    pub has_backward: bool,
    /// Columns of its output rows; 0 for the last stage, whose output is the loss.
    pub output_width: usize,
    /// Index of the module in the job.
    pub(super) module: usize,
}

impl JobStage {
    /// Returns the index of the stage's module in the job.
    #[must_use]
    pub fn module(&self) -> usize {
        self.module
    }
}

/// A model, its frozen parts, and its distribution over ranks. The same on all ranks.
///
/// Stages are numbered module by module, encoders first. *Pipeline ranks* are numbered module by module,
/// within a module replica by replica, within a replica stage by stage
/// ([`dflop_balancer::schedule::PipelineLayout`]). World ranks are numbered pipeline rank by pipeline rank,
/// with the module's TP size of each.
#[derive(Debug, Clone)]
pub struct Job {
    pub(super) model: ModelConfig,
    pub(super) schedule: ScheduleKind,
    pub(super) modules: Vec<ModuleParallelism>,
    pub(super) stages: Vec<JobStage>,
    /// Trained parameters that both the first and the last stage of the LLM have: a tied embedding.
    pub(super) tied: Vec<String>,
}

impl Job {
    /// Creates a job after checking that the layout fits the model.
    ///
    /// - `modules`: encoders that run, then the LLM, each at most once
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if layers are missing or repeated, a number is 0, or the schedule is not
    /// supported: several chunks per rank in a job with encoders.
    pub fn new(
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        check_modules(&model, &modules)?;
        check_schedule(&modules, schedule)?;
        let mut stages = Vec::new();
        for (index, module) in modules.iter().enumerate() {
            for layers in &module.stages {
                stages.push(describe(&model, frozen, index, module, layers.clone())?);
            }
        }
        let tied = tied(&model, frozen, &stages)?;
        Ok(Self { model, schedule, modules, stages, tied })
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> ScheduleKind {
        self.schedule
    }

    /// Whether the replicas of an encoder share the media of all replicas of the LLM; with equally many, each
    /// encodes the media of its own.
    #[must_use]
    pub fn shares_media(&self, module: usize) -> bool {
        self.modules[module].dp_size != self.llm().dp_size
    }

    /// Returns the modules that run, the LLM last.
    #[must_use]
    pub fn modules(&self) -> &[ModuleParallelism] {
        &self.modules
    }

    /// Returns the stages of all modules, in order.
    #[must_use]
    pub fn stages(&self) -> &[JobStage] {
        &self.stages
    }

    /// Returns the LLM, which every job has.
    pub(super) fn llm(&self) -> &ModuleParallelism {
        &self.modules[self.modules.len() - 1]
    }

    /// Returns the first stage of a module.
    pub(super) fn first_stage(&self, module: usize) -> usize {
        self.modules[..module].iter().map(|module| module.stages.len()).sum()
    }

    /// Returns the first and last stage of the LLM, if they are two.
    pub(super) fn llm_ends(&self) -> Option<[u16; 2]> {
        let first = self.first_stage(self.modules.len() - 1);
        let last = self.stages.len() - 1;
        (first < last).then_some([first as u16, last as u16])
    }

    /// Returns the index of a module; `None` if it does not run.
    pub(super) fn module_index(&self, module: ModuleKind) -> Option<usize> {
        self.modules.iter().position(|own| own.module == module)
    }
}

fn refuse<T>(setting: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidSetting { setting, reason: problem })
}

fn check_modules(model: &ModelConfig, modules: &[ModuleParallelism]) -> Result<()> {
    let is_ordered = modules.windows(2).all(|pair| pair[0].module < pair[1].module);
    if !is_ordered || modules.last().is_none_or(|last| last.module != ModuleKind::Llm) {
        let named: Vec<ModuleKind> = modules.iter().map(|module| module.module).collect();
        return refuse(
            "modules",
            format!("must be encoders in the order vision, audio, then the LLM; found {named:?}"),
        );
    }
    for layout in modules {
        let (module, layers) = (layout.module, model.layers(layout.module));
        let mut next = 0;
        for range in &layout.stages {
            if range.start != next || range.end <= range.start {
                return refuse(
                    "stages",
                    format!("{module:?} must continue with layer {next}, found {range:?}"),
                );
            }
            next = range.end;
        }
        if next != layers || layers == 0 {
            return refuse(
                "stages",
                format!("the stages of {module:?} have {next} layers, the model has {layers}"),
            );
        }
        if layout.dp_size == 0 || layout.tp_size == 0 {
            return refuse("dp_size", format!("{module:?} needs `dp_size` and `tp_size` above 0"));
        }
    }
    Ok(())
}

fn check_schedule(modules: &[ModuleParallelism], schedule: ScheduleKind) -> Result<()> {
    let chunks = schedule.chunks();
    let stages = modules.last().map_or(0, |llm| llm.stages.len());
    if matches!(schedule, ScheduleKind::Interleaved { .. }) && modules.len() > 1 {
        return refuse("schedule", format!("{schedule} is for a language model without encoders"));
    }
    if chunks == 0 || !stages.is_multiple_of(chunks) {
        return refuse("schedule", format!("{schedule} needs a multiple of {chunks} stages, found {stages}"));
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
    let is_last = layers.end == model.layers(layout.module);
    let range = StageRange { module: layout.module, layers };
    // A stage without trained parameters still passes gradients back to a trained stage before it.
    let is_trained = model.stage_blocks::<Cpu>(&range, frozen, None)?.is_trained();
    let has_backward = is_trained || model.is_input_trained(&range, frozen);
    let encoder = match layout.module {
        ModuleKind::Vision => model.vision.as_ref(),
        ModuleKind::Audio => model.audio.as_ref(),
        ModuleKind::Llm => None,
    };
    let output_width = match (encoder, is_last) {
        (Some(encoder), false) => encoder.hidden(),
        (Some(_), true) | (None, false) => model.llm.hidden(),
        (None, true) => 0,
    };
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
