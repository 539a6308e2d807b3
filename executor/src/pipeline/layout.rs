//! Describes how modules are distributed over world ranks, without a model.

use std::ops::Range;

use dflop_balancer::schedule::ScheduleKind;
use dflop_models::ModuleKind;
use dflop_planner::Placement;
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};

/// Maximum number of ranks per module; actions count ranks in 16 bits.
const RANKS_MAX: usize = u16::MAX as usize;

/// Module distribution over ranks: stages, replicas, tensor parallelism, placement, schedule. The same on all
/// ranks.
///
/// Stages are numbered module by module, encoders first. *Pipeline ranks* are numbered module by module,
/// within a module replica by replica, within a replica stage by stage
/// ([`dflop_balancer::schedule::PipelineLayout`]). The placement determines how they map to world ranks, see
/// the constructors of [`Job`](super::Job). A layout does not know the model: any modules can run in it, such
/// as modules of another framework, for which [`StepSchedule`](super::StepSchedule) lists the actions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLayout {
    pub(super) schedule: ScheduleKind,
    pub(super) placement: Placement,
    /// Modules; no stage is empty.
    pub(super) modules: Vec<ModuleParallelism>,
    /// Chain stage that holds each stage; the stage within the module if placement is not joint.
    pub(super) chain_stages: Vec<usize>,
    pub(super) ranks: RankMap,
}

impl JobLayout {
    /// Distributes modules over ranks in a placement.
    ///
    /// - `modules`: encoders that run, then the LLM, each at most once
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if layers are missing or repeated, a number is 0, or the placement does not
    /// have such modules or the schedule, see the constructors of [`Job`](super::Job).
    pub fn new(
        placement: Placement,
        mut modules: Vec<ModuleParallelism>,
        schedule: ScheduleKind,
    ) -> Result<Self> {
        check_modules(placement, &modules)?;
        check_schedule(placement, &modules, schedule)?;
        let ranks = RankMap::new(placement, &mut modules, schedule.chunks())?;
        let mut chain_stages = Vec::new();
        for module in &mut modules {
            let held = module.stages.iter().enumerate().filter(|(_, layers)| !layers.is_empty());
            chain_stages.extend(held.map(|(chain_stage, _)| chain_stage));
            module.stages.retain(|layers| !layers.is_empty());
        }
        Ok(Self { schedule, placement, modules, chain_stages, ranks })
    }

    /// Returns the encoder placement relative to the LLM.
    #[must_use]
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> ScheduleKind {
        self.schedule
    }

    /// Returns the number of pools in which encoder replicas share media. With one pool, all encoder replicas
    /// share the media of all LLM replicas. Otherwise each LLM replica has a separate pool, over which the
    /// encoder replicas are divided in equal numbers, in order.
    #[must_use]
    pub fn media_pools(&self, module: usize) -> usize {
        let dp_size = self.llm().dp_size;
        let has_own = match self.placement {
            Placement::Disaggregated => self.modules[module].dp_size == dp_size,
            // Over a complete step, the media of all replicas are the most even.
            Placement::Colocated => false,
            Placement::Joint => true,
        };
        if has_own { dp_size } else { 1 }
    }

    /// Returns whether ranks read the samples of a module together with the samples of the LLM replica with
    /// the same number: the LLM itself, and an encoder that encodes the replica's media on the same ranks.
    pub(crate) fn reads_with_llm(&self, module: ModuleKind) -> bool {
        let is_paired = |index: usize| index + 1 == self.modules.len() || self.is_paired(index);
        module == ModuleKind::Llm
            || (self.placement == Placement::Joint && self.module_index(module).is_some_and(is_paired))
    }

    /// Returns whether every encoder replica encodes the media of the LLM replica with the same number.
    pub(super) fn is_paired(&self, module: usize) -> bool {
        let dp_size = self.llm().dp_size;
        self.modules[module].dp_size == dp_size && self.media_pools(module) == dp_size
    }

    /// Returns the modules that run, the LLM last.
    #[must_use]
    pub fn modules(&self) -> &[ModuleParallelism] {
        &self.modules
    }

    /// Returns the number of stages in all modules.
    #[must_use]
    pub fn stage_count(&self) -> usize {
        self.chain_stages.len()
    }

    /// Returns the index of the module that a stage belongs to.
    ///
    /// # Panics
    /// If there is no such stage.
    #[must_use]
    pub fn stage_module(&self, stage: u16) -> usize {
        let (mut module, mut inside) = (0, usize::from(stage));
        while inside >= self.modules[module].stages.len() {
            inside -= self.modules[module].stages.len();
            module += 1;
        }
        module
    }

    /// Returns the layers in every module by stage: by chain stage in joint placement, where some have none,
    /// and by module stage otherwise.
    #[must_use]
    pub fn chain_layers(&self) -> Vec<Vec<usize>> {
        let chain = self.chain_stages.iter().max().map_or(0, |last| last + 1);
        let of_module = |(index, module): (usize, &ModuleParallelism)| {
            let is_joint = self.placement == Placement::Joint;
            let mut layers = vec![0; if is_joint { chain } else { module.stages.len() }];
            let held = &self.chain_stages[self.first_stage(index)..];
            module.stages.iter().zip(held).for_each(|(own, &at)| layers[at] = own.len());
            layers
        };
        self.modules.iter().enumerate().map(of_module).collect()
    }

    /// Returns the LLM, which every job has.
    pub(super) fn llm(&self) -> &ModuleParallelism {
        &self.modules[self.modules.len() - 1]
    }

    /// Returns the first stage of a module.
    pub(super) fn first_stage(&self, module: usize) -> usize {
        self.modules[..module].iter().map(|module| module.stages.len()).sum()
    }

    /// Returns the first and last LLM stage, if they differ.
    pub(super) fn llm_ends(&self) -> Option<[u16; 2]> {
        let first = self.first_stage(self.modules.len() - 1);
        let last = self.chain_stages.len() - 1;
        (first < last).then_some([first as u16, last as u16])
    }

    /// Returns the index of a module; `None` if it does not run.
    pub(super) fn module_index(&self, module: ModuleKind) -> Option<usize> {
        self.modules.iter().position(|own| own.module == module)
    }

    /// Adds the layout to a digest that ranks compare.
    pub(super) fn add_to(&self, digest: &mut Xxh3) {
        let mut add = |word: u64| digest.update(&word.to_le_bytes());
        self.schedule.to_string().bytes().for_each(|byte| add(u64::from(byte)));
        self.placement.name().bytes().for_each(|byte| add(u64::from(byte)));
        self.chain_stages.iter().for_each(|&stage| add(stage as u64));
        for module in &self.modules {
            for word in [module.module as usize, module.dp_size, module.tp_size] {
                add(word as u64);
            }
            module.stages.iter().for_each(|layers| add(layers.end as u64));
        }
    }
}

/// Checks order, layers and degrees, without a model.
fn check_modules(placement: Placement, modules: &[ModuleParallelism]) -> Result<()> {
    let is_ordered = modules.windows(2).all(|pair| pair[0].module < pair[1].module);
    if !is_ordered || modules.last().is_none_or(|last| last.module != ModuleKind::Llm) {
        let named: Vec<ModuleKind> = modules.iter().map(|module| module.module).collect();
        return refuse(
            "modules",
            format!("must be encoders in the order vision, audio, then the LLM; found {named:?}"),
        );
    }
    for layout in modules {
        let (module, mut next) = (layout.module, 0);
        for range in &layout.stages {
            let is_skipped = placement == Placement::Joint && range.is_empty();
            if range.start != next || (range.end <= range.start && !is_skipped) {
                return refuse(
                    "stages",
                    format!("{module:?} must continue with layer {next}, found {range:?}"),
                );
            }
            next = range.end;
        }
        if next == 0 {
            return refuse("stages", format!("the stages of {module:?} have 0 layers"));
        }
        if layout.dp_size == 0 || layout.tp_size == 0 {
            return refuse("dp_size", format!("{module:?} needs `dp_size` and `tp_size` above 0"));
        }
        let degrees = [layout.stages.len(), layout.dp_size, layout.tp_size];
        let ranks = degrees.into_iter().fold(1, usize::saturating_mul);
        if ranks > RANKS_MAX {
            return refuse(
                "dp_size",
                format!("{module:?} takes {ranks} ranks, expected at most {RANKS_MAX}"),
            );
        }
    }
    Ok(())
}

fn check_schedule(placement: Placement, modules: &[ModuleParallelism], schedule: ScheduleKind) -> Result<()> {
    let is_interleaved = matches!(schedule, ScheduleKind::Interleaved { .. });
    let is_ahead = matches!(schedule, ScheduleKind::EncoderAhead { .. });
    let suitable = match placement {
        Placement::Disaggregated => None,
        Placement::Joint => (is_interleaved || is_ahead).then_some("`gpipe`, `1f1b` and `zb-h1`"),
        Placement::Colocated => is_ahead.then_some("`gpipe`, `1f1b`, `zb-h1` and `interleaved`"),
    };
    if let Some(suitable) = suitable {
        let name = placement.name();
        return refuse("schedule", format!("{schedule} is not for {name} placement; {suitable} are"));
    }
    let chunks = schedule.chunks();
    let stages = modules.last().map_or(0, |llm| llm.stages.len());
    if is_interleaved && placement == Placement::Disaggregated && modules.len() > 1 {
        let reason =
            format!("{schedule} is for a language model without encoders, or with colocated encoders");
        return refuse("schedule", reason);
    }
    if chunks == 0 || !stages.is_multiple_of(chunks) {
        return refuse("schedule", format!("{schedule} needs a multiple of {chunks} stages, found {stages}"));
    }
    Ok(())
}

pub(super) fn refuse<T>(setting: &'static str, problem: String) -> Result<T> {
    Err(Error::InvalidSetting { setting, reason: problem })
}

/// Parallelism for a module in a job: stages, replicas and tensor-parallel degree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleParallelism {
    /// The module.
    pub module: ModuleKind,
    /// Transformer layers in every stage, in order, at least one each; lengths may differ. In joint placement
    /// an entry without layers skips a chain stage.
    pub stages: Vec<Range<usize>>,
    /// Number of replicas, at least 1.
    pub dp_size: usize,
    /// Number of world ranks that share a pipeline rank by tensor parallelism, at least 1.
    pub tp_size: usize,
}

impl ModuleParallelism {
    /// Describes a single replica on separate ranks, without tensor parallelism.
    #[must_use]
    pub fn new(module: ModuleKind, stages: Vec<Range<usize>>) -> Self {
        Self { module, stages, dp_size: 1, tp_size: 1 }
    }

    /// Cuts `layers` into stages that differ by at most one layer, the longer stages first.
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

/// World ranks of all pipeline ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankMap {
    pub(super) world_size: usize,
    /// World ranks for every pipeline rank, by TP rank.
    pub(super) members: Vec<Vec<usize>>,
    /// Number of pipeline ranks in a replica of each module.
    pub(super) per_replica: Vec<usize>,
}

impl RankMap {
    /// Maps pipeline ranks for checked modules; in joint placement it sets the encoder replicas.
    pub(super) fn new(
        placement: Placement,
        modules: &mut [ModuleParallelism],
        chunks: usize,
    ) -> Result<Self> {
        if placement == Placement::Joint {
            check_joint(modules)?;
        }
        let Some((llm, encoders)) = modules.split_last_mut() else {
            return refuse("modules", "expected the LLM".to_owned());
        };
        let ranks_of = |module: &ModuleParallelism| module.stages.len() * module.dp_size * module.tp_size;
        let llm_ranks = ranks_of(llm) / chunks;
        if placement == Placement::Colocated
            && let Some(other) = encoders.iter().find(|encoder| ranks_of(encoder) != llm_ranks)
        {
            let (module, ranks) = (other.module, ranks_of(other));
            return refuse(
                "modules",
                format!(
                    "{module:?} takes {ranks} ranks, expected the LLM's {llm_ranks} in colocated placement"
                ),
            );
        }
        let chain = llm.stages.len();
        let (llm_dp, llm_tp) = (llm.dp_size, llm.tp_size);
        for encoder in encoders.iter_mut().filter(|_| placement == Placement::Joint) {
            encoder.dp_size = llm_dp * llm_tp;
        }
        let (mut members, mut per_replica, mut next) = (Vec::new(), Vec::new(), 0);
        // Only LLM ranks hold several chunks.
        for (module, chunks) in encoders.iter().map(|encoder| (encoder, 1)).chain([(&*llm, chunks)]) {
            let is_held = |stage: &usize| !module.stages[*stage].is_empty();
            let held: Vec<usize> = (0..module.stages.len() / chunks).filter(is_held).collect();
            let start = if placement == Placement::Disaggregated { next } else { 0 };
            for replica in 0..module.dp_size {
                for (index, &stage) in held.iter().enumerate() {
                    let first = if placement == Placement::Joint {
                        // An encoder replica is one rank in each chain stage.
                        let (of_llm, inside) =
                            (replica * module.tp_size / llm_tp, replica * module.tp_size % llm_tp);
                        (of_llm * chain + stage) * llm_tp + inside
                    } else {
                        start + (replica * held.len() + index) * module.tp_size
                    };
                    members.push((first..first + module.tp_size).collect());
                }
            }
            next = start + held.len() * module.dp_size * module.tp_size;
            per_replica.push(held.len());
        }
        let world_size = match placement {
            Placement::Disaggregated => next,
            Placement::Colocated | Placement::Joint => llm_ranks,
        };
        Ok(Self { world_size, members, per_replica })
    }
}

/// Checks that the modules form a single chain of nonempty stages.
fn check_joint(modules: &[ModuleParallelism]) -> Result<()> {
    let Some((llm, encoders)) = modules.split_last() else { return Ok(()) };
    let chain = llm.stages.len();
    let first = llm.stages.iter().position(|layers| !layers.is_empty()).unwrap_or(0);
    for encoder in encoders {
        let (module, replicas) = (encoder.module, llm.dp_size * llm.tp_size);
        if encoder.stages.len() != chain {
            let found = encoder.stages.len();
            return refuse("stages", format!("{module:?} has {found} entries, the LLM {chain}"));
        }
        let last = encoder.stages.iter().rposition(|layers| !layers.is_empty()).unwrap_or(0);
        if last > first {
            return refuse(
                "stages",
                format!("{module:?} ends in stage {last}, after the LLM's first, {first}"),
            );
        }
        if encoder.tp_size != 1 || (encoder.dp_size != 1 && encoder.dp_size != replicas) {
            let (dp, tp) = (encoder.dp_size, encoder.tp_size);
            return refuse(
                "dp_size",
                format!("{module:?} has DP {dp} and TP {tp}, expected {replicas} and 1 in joint placement"),
            );
        }
    }
    let is_empty = |stage: &usize| modules.iter().all(|module| module.stages[*stage].is_empty());
    match (0..chain).find(is_empty) {
        Some(stage) => refuse("stages", format!("stage {stage} has no layer")),
        None => Ok(()),
    }
}
