//! How a model is spread over ranks: layers of every stage, replicas of every module.

use std::ops::Range;

use dflop_balancer::schedule::ScheduleKind;

use crate::device::Cpu;
use crate::error::{Error, Result};
use crate::model::model_config::{FrozenModules, ModelConfig, ModuleKind, StageRange};

/// Stages and replicas of one module of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleLayout {
    /// The module.
    pub module: ModuleKind,
    /// Transformer layers of every stage, in order, at least one each; lengths may differ.
    pub stages: Vec<Range<usize>>,
    /// Replicas, at least 1.
    pub dp_size: usize,
    /// World ranks that share a pipeline rank by tensor parallelism, at least 1.
    pub tp_size: usize,
}

impl ModuleLayout {
    /// Describes one replica on ranks of their own.
    #[must_use]
    pub fn new(module: ModuleKind, stages: Vec<Range<usize>>) -> Self {
        Self { module, stages, dp_size: 1, tp_size: 1 }
    }

    /// Cuts `layers` into stages that differ by one layer at most, the longer ones first.
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
        Self::new(module, crate::comm::even_parts(layers, stages).into_iter().map(cut).collect())
    }

    /// Sets the replicas. Default: 1.
    #[must_use]
    pub fn dp_size(mut self, replicas: usize) -> Self {
        self.dp_size = replicas;
        self
    }

    /// Sets the world ranks of a pipeline rank. Default: 1.
    #[must_use]
    pub fn tp_size(mut self, ranks: usize) -> Self {
        self.tp_size = ranks;
        self
    }
}

/// A stage of a job and what its neighbors have to know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStage {
    /// Module and layers.
    pub range: StageRange,
    /// Whether something is trained in it or before it: whether it takes gradients of its output.
    pub has_backward: bool,
    /// Columns of the rows that it hands on; 0 of the last one, which has the loss.
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

/// A model, what of it is trained, and how its modules are spread over ranks. The same on all ranks.
///
/// Stages are numbered module by module, encoders first; *pipeline ranks* module by module, in a module replica by replica, in a
/// replica stage by stage ([`dflop_balancer::schedule::PipelineLayout`]); world ranks pipeline rank by pipeline rank, as many
/// each as the module's TP size.
#[derive(Debug, Clone)]
pub struct Job {
    pub(super) model: ModelConfig,
    pub(super) schedule: ScheduleKind,
    pub(super) modules: Vec<ModuleLayout>,
    pub(super) stages: Vec<JobStage>,
    /// Trained parameters that the first and the last stage of the LLM both have: a tied embedding.
    pub(super) tied: Vec<String>,
}

impl Job {
    /// Checks that the layout fits the model.
    ///
    /// - `modules`: encoders that run, then the LLM, each at most once
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if layers are missing or doubled, a number is 0, or the schedule cannot be run: one with split backwards,
    /// or several chunks a rank for a job with encoders.
    pub fn new(
        model: ModelConfig,
        frozen: FrozenModules,
        modules: Vec<ModuleLayout>,
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

    /// Returns the modules that run, the LLM last.
    #[must_use]
    pub fn modules(&self) -> &[ModuleLayout] {
        &self.modules
    }

    /// Returns the stages of all modules, in order.
    #[must_use]
    pub fn stages(&self) -> &[JobStage] {
        &self.stages
    }

    /// Returns the names of trained parameters of which the first and the last stage of the LLM hold a copy each. Both copies
    /// get the same gradient; a norm over all parameters counts those of the first stage alone.
    #[must_use]
    pub fn tied_parameters(&self) -> &[String] {
        &self.tied
    }

    /// The LLM, which every job has.
    pub(super) fn llm(&self) -> &ModuleLayout {
        &self.modules[self.modules.len() - 1]
    }

    /// First stage of a module.
    pub(super) fn first_stage(&self, module: usize) -> usize {
        self.modules[..module].iter().map(|module| module.stages.len()).sum()
    }

    /// First and last stage of the LLM, if they are two.
    pub(super) fn llm_ends(&self) -> Option<[u16; 2]> {
        let first = self.first_stage(self.modules.len() - 1);
        let last = self.stages.len() - 1;
        (first < last).then_some([first as u16, last as u16])
    }

    /// Index of a module that runs.
    pub(super) fn module_index(&self, module: ModuleKind) -> Option<usize> {
        self.modules.iter().position(|own| own.module == module)
    }
}

fn refuse<T>(setting: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidSetting { setting, reason: problem })
}

fn check_modules(model: &ModelConfig, modules: &[ModuleLayout]) -> Result<()> {
    let is_ordered = modules.windows(2).all(|pair| pair[0].module < pair[1].module);
    if !is_ordered || modules.last().is_none_or(|last| last.module != ModuleKind::Llm) {
        let named: Vec<ModuleKind> = modules.iter().map(|module| module.module).collect();
        return refuse("modules", format!("must be vision, audio, the LLM, the last at least: {named:?}"));
    }
    for layout in modules {
        let (module, layers) = (layout.module, model.layers(layout.module));
        let mut next = 0;
        for range in &layout.stages {
            if range.start != next || range.end <= range.start {
                return refuse(
                    "stages",
                    format!("of {module:?} must go on with layer {next}, not {range:?}"),
                );
            }
            next = range.end;
        }
        if next != layers || layers == 0 {
            return refuse("stages", format!("of {module:?} have {next} layers, the model {layers}"));
        }
        if layout.dp_size == 0 || layout.tp_size == 0 {
            return refuse("dp_size", format!("and `tp_size` of {module:?} must be above 0"));
        }
    }
    Ok(())
}

fn check_schedule(modules: &[ModuleLayout], schedule: ScheduleKind) -> Result<()> {
    if schedule == ScheduleKind::ZeroBubble {
        return refuse("schedule", format!("{schedule} splits backwards, which stages cannot"));
    }
    let chunks = schedule.chunks();
    let stages = modules.last().map_or(0, |llm| llm.stages.len());
    if matches!(schedule, ScheduleKind::Interleaved { .. }) && modules.len() > 1 {
        return refuse("schedule", format!("{schedule} is for an LLM alone"));
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
    layout: &ModuleLayout,
    layers: Range<usize>,
) -> Result<JobStage> {
    let is_last = layers.end == model.layers(layout.module);
    let range = StageRange { module: layout.module, layers };
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
