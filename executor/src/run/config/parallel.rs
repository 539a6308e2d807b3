//! Configuration table for parallelism: plan, degrees, and ranks per module.

use super::RunConfig;
use crate::pipeline::{JobLayout, ModuleParallelism, Placement};
use crate::run::compute_device::{AttentionName, ComputeDevice, TransportName};
use crate::{Error, Result};
use dflop_balancer::Strategy;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::ModelSpec;
use dflop_loader::settings::choice_for;
use dflop_models::ModuleKind;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum number of stages per module in a layout without a model.
const STAGES_MAX: usize = 4096;
/// Maximum number of layers per module in a layout without a model.
const LAYERS_MAX: usize = 1 << 20;

/// Distribution of a run over ranks and devices.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ParallelTable {
    /// Encoder placement.
    pub placement: PlacementName,
    /// Pipeline schedule: `gpipe`, `1f1b`, `zb-h1`, `1f1b-ahead:R` with encoders R rounds ahead, or
    /// `interleaved:N` with N LLM stages per rank, without encoders or with colocated encoders.
    pub schedule: String,
    /// Microbatches per DP rank in a step.
    pub microbatches: usize,
    /// Partition strategy: `search`, also named `balanced`; `multi_lpt`, `kk`, `lpt`, `random`; or
    /// `round_robin`, also named `data-blind`.
    #[serde(deserialize_with = "strategy", serialize_with = "write_strategy")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub strategy: Strategy,
    /// Search effort per step, in work units; the same units give the same plan on every machine.
    pub search_effort: u64,
    /// CPU compute threads per rank, 1 to 1024.
    pub threads: usize,
    /// Vision encoder layout.
    pub vision: ModuleTable,
    /// Audio encoder layout.
    pub audio: ModuleTable,
    /// LLM layout.
    pub llm: ModuleTable,
    /// Device that stages compute on: `cpu`; in builds with the feature `cuda` also `cuda:N`, or `cuda` for
    /// the device at the rank's position on the machine.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub compute_device: ComputeDevice,
    /// Attention engine on a CUDA device.
    pub attention: AttentionName,
    /// Transport for tensors between ranks.
    pub transport: TransportName,
    /// Device preset that predicts times before anything is measured, such as `h200`. Default: `cpu`; `h100`
    /// on CUDA devices.
    pub device: Option<String>,
    /// Measured profile that replaces the device preset: a CSV file or a directory with CSV files.
    pub profile: Option<PathBuf>,
    /// Maximum wait for a rank that is not busy, in seconds, above 0.
    pub timeout_seconds: f64,
    /// Maximum wait for a rank that is busy, such as with a slow store, in seconds, above 0.
    pub slow_seconds: f64,
    /// Maximum memory for a rank's weights, gradients, optimizer state and activations, in GiB, above 0.
    /// Default: the memory of the machine or the CUDA device.
    pub memory_gib: Option<f64>,
}

impl Default for ParallelTable {
    fn default() -> Self {
        Self {
            placement: PlacementName::default(),
            schedule: "1f1b".to_owned(),
            microbatches: 8,
            strategy: Strategy::SEARCH,
            search_effort: 20_000,
            threads: 1,
            vision: ModuleTable::default(),
            audio: ModuleTable::default(),
            llm: ModuleTable::default(),
            compute_device: ComputeDevice::default(),
            attention: AttentionName::default(),
            transport: TransportName::default(),
            device: None,
            profile: None,
            timeout_seconds: 120.0,
            slow_seconds: 1800.0,
            memory_gib: None,
        }
    }
}

impl ParallelTable {
    /// Returns the device preset: from the configuration, or the default for the device kind that computes.
    #[must_use]
    pub fn device_preset(&self) -> &str {
        let of_kind = match self.compute_device {
            ComputeDevice::Cpu => "cpu",
            ComputeDevice::Cuda(_) => "h100",
        };
        self.device.as_deref().unwrap_or(of_kind)
    }
}

/// Encoder placement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PlacementName {
    /// Every module has separate ranks, encoders before the LLM.
    #[default]
    Disaggregated,
    /// Encoders run on the LLM's ranks, before and after it.
    Colocated,
    /// Ranks hold layers from all modules, cut from a common chain.
    Joint,
}

impl<'de> Deserialize<'de> for PlacementName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let choices =
            [("disaggregated", Self::Disaggregated), ("colocated", Self::Colocated), ("joint", Self::Joint)];
        choice_for("placement", deserializer, &choices)
    }
}

impl From<PlacementName> for Placement {
    fn from(name: PlacementName) -> Self {
        match name {
            PlacementName::Disaggregated => Self::Disaggregated,
            PlacementName::Colocated => Self::Colocated,
            PlacementName::Joint => Self::Joint,
        }
    }
}

/// Module distribution over ranks.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ModuleTable {
    /// Number of pipeline stages.
    pub stages: usize,
    /// Number of layers in each stage, in place of `stages`; with joint placement an entry for each chain
    /// stage, 0 where the stage has no layer from the module. Default: as even as possible; with joint
    /// placement, all encoder layers in the first stage.
    pub layers: Option<Vec<usize>>,
    /// DP degree: the number of replicas.
    pub dp: usize,
    /// TP degree: the number of ranks that divide each layer.
    pub tp: usize,
    /// Layers whose activations the backward pass recomputes (activation checkpointing), not stored: 0 none,
    /// 1 every layer, 2 every second layer, and so on. Default: 1 with `model.recompute_layers`, else 0.
    pub recompute: Option<u32>,
}

impl Default for ModuleTable {
    fn default() -> Self {
        Self { stages: 1, layers: None, dp: 1, tp: 1, recompute: None }
    }
}

impl ModuleTable {
    /// Cuts a module's layers into stages.
    ///
    /// - `chain`: number of stages in a joint chain; by default, the first stage has all encoder layers
    pub(in crate::run) fn parallelism(
        &self,
        placement: Placement,
        (module, layers): (ModuleKind, usize),
        chain: usize,
    ) -> Result<ModuleParallelism> {
        let refuse = |reason: String| Err(Error::Config(format!("`parallel` of {module:?}: {reason}")));
        let is_joint = placement == Placement::Joint;
        let cut = match &self.layers {
            None if is_joint && module != ModuleKind::Llm => {
                let stages = (0..chain).map(|stage| if stage == 0 { 0..layers } else { layers..layers });
                ModuleParallelism::new(module, stages.collect())
            }
            None if self.stages == 0 || self.stages > layers => {
                return refuse(format!("{} stages for {layers} layers", self.stages));
            }
            None => ModuleParallelism::even(module, layers, self.stages),
            Some(lengths)
                if lengths.iter().sum::<usize>() != layers || (lengths.contains(&0) && !is_joint) =>
            {
                return refuse(format!("expected `layers` that add up to {layers}, found {lengths:?}"));
            }
            Some(lengths) => {
                let ends = lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end - length..*end)
                });
                ModuleParallelism::new(module, ends.collect())
            }
        };
        Ok(cut.dp_size(self.dp).tp_size(self.tp))
    }
}

/// Distributes modules over ranks without a model: a module has the layers in the table, or a layer per
/// stage.
///
/// # Errors
/// [`Error::Config`] if a module has no stage, or too many; [`Error::InvalidSetting`] from
/// [`JobLayout::new`].
pub fn job_layout(
    placement: PlacementName,
    modules: &BTreeMap<ModuleKind, ModuleTable>,
    schedule: ScheduleKind,
) -> Result<JobLayout> {
    let placement = Placement::from(placement);
    let stages = |table: &ModuleTable| table.layers.as_ref().map_or(table.stages, Vec::len);
    let chain = modules.get(&ModuleKind::Llm).map_or(0, stages);
    let cut = |(&module, table): (&ModuleKind, &ModuleTable)| {
        let layers = table
            .layers
            .as_ref()
            .map_or(table.stages, |lengths| lengths.iter().copied().fold(0, usize::saturating_add));
        if stages(table) > STAGES_MAX || chain > STAGES_MAX || layers > LAYERS_MAX {
            let most = format!("at most {STAGES_MAX} stages and {LAYERS_MAX} layers");
            return Err(Error::Config(format!("`parallel` of {module:?}: expected {most}")));
        }
        table.parallelism(placement, (module, layers), chain)
    };
    JobLayout::new(placement, modules.iter().map(cut).collect::<Result<_>>()?, schedule)
}

/// Reads a strategy name or alias.
fn strategy<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Strategy, D::Error> {
    let name = String::deserialize(deserializer)?;
    Strategy::from_str(&name).map_err(D::Error::custom)
}

fn write_strategy<S: Serializer>(strategy: &Strategy, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(strategy)
}

/// Returns a strategy's name in configuration spelling.
#[must_use]
pub fn strategy_name(strategy: Strategy) -> &'static str {
    if strategy == Strategy::ROUND_ROBIN {
        "data-blind"
    } else if strategy == Strategy::SEARCH {
        "balanced"
    } else {
        strategy.name()
    }
}

impl RunConfig {
    /// Returns the number of layers from a recomputed layer of a module to the next; `None` if none is
    /// recomputed.
    pub(in crate::run) fn recomputed(&self, module: ModuleKind) -> Option<NonZeroU32> {
        let table = match module {
            ModuleKind::Vision => &self.parallel.vision,
            ModuleKind::Audio => &self.parallel.audio,
            ModuleKind::Llm => &self.parallel.llm,
        };
        NonZeroU32::new(table.recompute.unwrap_or(u32::from(self.model.recompute_layers)))
    }

    /// Returns the number of ranks for the modules in a model, saturating.
    pub(in crate::run) fn ranks(&self, spec: &ModelSpec) -> u64 {
        let ranks = |table: &ModuleTable| {
            let stages = table.layers.as_ref().map_or(table.stages, Vec::len);
            let degrees = [stages, table.dp, table.tp].into_iter().map(|degree| degree as u64);
            degrees.fold(1, u64::saturating_mul)
        };
        let ParallelTable { vision, audio, llm, placement, .. } = &self.parallel;
        // An invalid name is rejected where the job is described.
        let chunks = self.schedule().map_or(1, |schedule| schedule.chunks().max(1));
        let llm_ranks = ranks(llm) / chunks as u64;
        if *placement != PlacementName::Disaggregated {
            return llm_ranks;
        }
        let encoders = [spec.vision.map(|_| ranks(vision)), spec.audio.map(|_| ranks(audio))];
        encoders.into_iter().flatten().fold(llm_ranks, u64::saturating_add)
    }

    /// Assigns a single stage to every module.
    pub fn one_stage_each(&mut self) {
        let ParallelTable { vision, audio, llm, .. } = &mut self.parallel;
        for table in [vision, audio, llm] {
            (table.stages, table.layers) = (1, None);
        }
    }

    /// Sets the number of pipeline stages for all modules together; encoders in the configuration keep their
    /// stages.
    ///
    /// # Errors
    /// [`Error::Config`] if the LLM would have no stage.
    pub fn pipeline_stages(&mut self, stages: usize) -> Result<()> {
        if self.parallel.placement != PlacementName::Disaggregated {
            // Encoders are on the LLM's ranks; encoder layers in a joint chain move to the first stage.
            let ParallelTable { vision, audio, llm, placement, .. } = &mut self.parallel;
            (llm.stages, llm.layers) = (stages, None);
            if *placement == PlacementName::Joint {
                (vision.layers, audio.layers) = (None, None);
            }
            return Ok(());
        }
        let has = |name: &str| {
            let config = self.model.config.as_ref();
            config.is_none_or(|config| config.get(name).is_some())
        };
        let mut encoders = 0;
        for (table, name) in
            [(&self.parallel.vision, "vision_config"), (&self.parallel.audio, "audio_config")]
        {
            encoders += if has(name) { table.stages } else { 0 };
        }
        let Some(llm) = stages.checked_sub(encoders).filter(|llm| *llm > 0) else {
            let reason =
                format!("invalid `stages` {stages}: encoders have {encoders}, the LLM needs one more");
            return Err(Error::Config(reason));
        };
        (self.parallel.llm.stages, self.parallel.llm.layers) = (llm, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_predicted_for_the_kind_of_device_that_computes() {
        for (text, preset) in [
            ("", "cpu"),
            ("compute_device = 'cuda'", "h100"),
            ("compute_device = 'cuda:1'\ndevice = 'h200'", "h200"),
        ] {
            let table: ParallelTable = toml::from_str(text).unwrap();
            assert_eq!(table.device_preset(), preset, "{text}");
        }
    }
}
