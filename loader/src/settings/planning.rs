//! Settings of planning: costs, the cut of a global batch, the order of samples.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::flops::Recomputation;
use dflop_costmodel::{
    CostModel, DevicePreset, DeviceRate, FrozenParts, KeyExchange, KeyExchangeKind, ModelSpec, ProfileOptions,
};
use serde::{Deserialize, Serialize};

use super::spelling::{choices, optional_text, text};
use crate::deliver::LoaderBuilder;
use crate::error::{Error, Result};
use crate::model::{model_profile, profile_options};
use crate::order::{Shuffle, Tail};
use crate::plan::{ContextGroups, StepPlannerBuilder, Synchronization};

/// Device and training setup that costs are predicted for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CostSettings {
    /// Tensor-parallel degrees to read from a measured profile: of encoders and LLM, or one for both.
    /// Default: 1 each.
    pub profile_tp: Option<Vec<u32>>,
    /// Refuses a profile that does not predict the microbatches held out when it was measured.
    pub profile_check: bool,
    /// Modules that are not trained, any of `vision,audio,projector,llm`. Default: all are trained.
    #[serde(with = "optional_text")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub freeze: Option<FrozenParts>,
    /// Activation checkpointing, recomputed in the backward pass: `none`, attention `scores`, or whole
    /// `layers`.
    pub recompute: RecomputationName,
}

impl Default for CostSettings {
    fn default() -> Self {
        Self { profile_tp: None, profile_check: true, freeze: None, recompute: RecomputationName::default() }
    }
}

choices! {
    /// Names of [`Recomputation`].
    RecomputationName for Recomputation {
        #[default]
        None, "none" => Recomputation::None;
        Scores, "scores" => Recomputation::Scores;
        Layers, "layers" => Recomputation::Layers;
    }
}

impl CostSettings {
    /// Builds the cost model of a device preset, or of a measured profile: a CSV file, a directory with CSV
    /// files, or a profile that comes with dflop.
    ///
    /// # Errors
    /// [`Error::Model`] for an unknown preset and for parts that the model does not have; those of
    /// [`model_profile`] and [`profile_options`].
    pub fn cost_model(&self, spec: ModelSpec, device: &str, profile: Option<&Path>) -> Result<CostModel> {
        let model = match profile {
            Some(path) => {
                let measured = model_profile(path, &spec)?;
                CostModel::from_profile(spec, &measured, self.profile_options()?).map_err(Error::Model)?
            }
            None => CostModel::new(spec, DeviceRate::preset(device).map_err(Error::Model)?),
        };
        let model = model.recomputation(self.recompute.into());
        model.frozen(self.frozen()).map_err(Error::Model)
    }

    /// Returns the modules that are not trained.
    #[must_use]
    pub fn frozen(&self) -> FrozenParts {
        self.freeze.unwrap_or_default()
    }

    /// Returns the options for reading a profile.
    ///
    /// # Errors
    /// [`Error::Config`] for a degree of 0 and for more than two degrees.
    pub fn profile_options(&self) -> Result<ProfileOptions> {
        // One degree is for both; with two, the encoders come first.
        let degrees = match self.profile_tp.as_deref() {
            None => None,
            Some(&[both]) => Some([both; 2]),
            Some(&[encoders, llm]) => Some([encoders, llm]),
            Some(_) => {
                let reason = "expected one degree, or two: of the encoders and of the LLM".into();
                return Err(Error::Config { setting: "profile_tp", reason });
            }
        };
        profile_options(degrees, self.profile_check)
    }
}

/// Strategy, and the work units that its search spends per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StrategyEffort {
    /// Assignment of samples.
    pub strategy: Strategy,
    /// Work units per step; without effect for strategies that do not search.
    pub work: u64,
}

/// Default work units of a search per step: a few milliseconds.
const WORK: u64 = 20_000;
/// Strategies that spend work units.
const SEARCHES: [Strategy; 2] = [Strategy::SEARCH, Strategy::EXACT];

impl From<Strategy> for StrategyEffort {
    fn from(strategy: Strategy) -> Self {
        Self { strategy, work: WORK }
    }
}

impl fmt::Display for StrategyEffort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.work == WORK {
            write!(f, "{}", self.strategy)
        } else {
            write!(f, "{}:{}", self.strategy, self.work)
        }
    }
}

impl FromStr for StrategyEffort {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, units) = match text.split_once(':') {
            Some((name, units)) => (name, Some(units)),
            None => (text, None),
        };
        let strategy = name.parse::<Strategy>().map_err(|_| {
            let known = Strategy::describe(Strategy::ALL.iter().copied());
            format!("expected {known}, or `search:UNITS`, found `{text}`")
        })?;
        match units {
            None => Ok(strategy.into()),
            Some(units) if SEARCHES.contains(&strategy) => {
                let work = units.parse::<u64>();
                let work = work.map_err(|_| format!("expected `{name}:UNITS`, found `{text}`"))?;
                Ok(Self { strategy, work })
            }
            Some(units) => Err(format!("`{name}` spends no work units: leave out `:{units}`")),
        }
    }
}

/// Schedule of a step: a pipeline's, or of ranks that run all modules one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepSchedule {
    /// Schedule of pipeline stages.
    Pipeline(ScheduleKind),
    /// Point at which ranks without a pipeline wait for each other.
    Ranks(Synchronization),
}

impl fmt::Display for StepSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pipeline(schedule) => write!(f, "{schedule}"),
            Self::Ranks(synchronization) => write!(f, "{synchronization}"),
        }
    }
}

impl FromStr for StepSchedule {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if let Ok(synchronization) = text.parse::<Synchronization>() {
            return Ok(Self::Ranks(synchronization));
        }
        text.parse::<ScheduleKind>().map(Self::Pipeline).map_err(|_| {
            let known = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
            format!(
                "expected {known}, or without stages step, microbatch or microbatch:RANKS, found `{text}`"
            )
        })
    }
}

/// Assignment of the samples of a global batch to ranks and microbatches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PlanSettings {
    /// `search`, `multi_lpt`, `kk`, `lpt`, `random`, or `data-blind`. `search:UNITS` sets the work units per
    /// step, 20,000 unless they are given; the same units give the same plan on every machine.
    #[serde(with = "text")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub strategy: StrategyEffort,
    /// Pipeline stages of every module, in the order of the modules of the model. Default: no pipeline; all
    /// modules of a rank run one after the other on its device, as with DDP and FSDP.
    pub stages: Option<Vec<usize>>,
    /// Schedule of a step. With `stages`, that of the pipeline: `gpipe`, `1f1b`, `zb-h1`, `1f1b-ahead:R` with
    /// encoders R rounds ahead, or `interleaved:V` with V stages per pipeline rank. Without, when ranks wait
    /// for each other: at the end of a `step`, as in DDP with accumulated gradients; in every `microbatch`,
    /// as in FSDP; or in every microbatch within groups of N ranks, `microbatch:N`, as in HSDP. Default:
    /// `1f1b` with stages, `step` without.
    #[serde(with = "optional_text")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub schedule: Option<StepSchedule>,
    /// Maximum number of ranks that share a sample (context parallelism), a power of two. A long sample is
    /// split over 2, 4, 8, … ranks where that shortens the step, or where it is above `tokens_max`; messages
    /// count as a ring over the `NVLink` of an H100. Default: every sample is whole on one rank.
    pub context: Option<usize>,
    /// Maximum tokens of a microbatch. Default: about a quarter above the mean of the step.
    pub tokens_max: Option<u64>,
    /// Maximum payload bytes of a microbatch. Default: no limit.
    pub bytes_max: Option<u64>,
}

impl Default for PlanSettings {
    fn default() -> Self {
        Self {
            strategy: Strategy::SEARCH.into(),
            stages: None,
            schedule: None,
            context: None,
            tokens_max: None,
            bytes_max: None,
        }
    }
}

impl PlanSettings {
    /// Returns the schedule of pipeline stages: 1F1B unless another is set.
    #[must_use]
    pub fn pipeline_schedule(&self) -> ScheduleKind {
        match self.schedule {
            Some(StepSchedule::Pipeline(schedule)) => schedule,
            _ => ScheduleKind::OneForwardOneBackward,
        }
    }

    /// Returns the point at which ranks without a pipeline wait for each other, if it is set.
    #[must_use]
    pub fn synchronization(&self) -> Option<Synchronization> {
        match self.schedule {
            Some(StepSchedule::Ranks(synchronization)) => Some(synchronization),
            _ => None,
        }
    }

    /// Checks that the schedule is that of a pipeline if there are stages.
    ///
    /// # Errors
    /// [`Error::Config`] for a schedule of ranks without a pipeline.
    pub fn check(&self) -> Result<()> {
        match (&self.stages, self.synchronization()) {
            (Some(_), Some(synchronization)) => {
                let reason =
                    format!("`{synchronization}` is for ranks without a pipeline: leave out `stages`");
                Err(Error::Config { setting: "schedule", reason })
            }
            _ => Ok(()),
        }
    }

    /// Applies the settings to a planner builder, except for the point at which ranks without a pipeline wait
    /// for each other: see [`StepPlannerBuilder::one_device`].
    #[must_use]
    pub fn apply(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let StrategyEffort { strategy, work } = self.strategy;
        let caps = Caps { tokens_max: self.tokens_max, bytes_max: self.bytes_max };
        let builder = builder.strategy(strategy).work(work).schedule(self.pipeline_schedule()).caps(caps);
        let builder = match self.context {
            Some(most) => builder.context(ContextGroups { ranks: [1, most], exchange: key_exchange() }),
            None => builder,
        };
        match &self.stages {
            Some(stages) => builder.stages(stages.clone()),
            None => builder,
        }
    }
}

/// Returns the exchange of keys and values that plans count on.
fn key_exchange() -> KeyExchange {
    let links = DevicePreset::named("h100").ok().and_then(|device| device.links());
    KeyExchange { kind: KeyExchangeKind::Ring, link: links.map(|links| links.nvlink), element_bytes: 2 }
}

/// Order of the samples of a run, and the ends of its epochs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct OrderSettings {
    /// Shuffle in an epoch: `global`; `blocks`, which permutes runs of at most 1,024 neighbors and shuffles
    /// 64 runs with each other, or `blocks:SAMPLES:RUNS`, for media that are slow to seek; or `none`.
    #[serde(with = "shuffle")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub shuffle: Shuffle,
    /// Treatment of the samples at the end of an epoch that do not fill a global batch: `carry` starts the
    /// batch that the next epoch fills, `repeat` does so even if a global batch is larger than the data and
    /// has samples several times, `drop` leaves them out, `short` makes a short batch. With `shuffle` none
    /// and one epoch, `short` reads every sample exactly once, in order, as validation does.
    pub tail: TailName,
    /// Epoch whose first sample starts step 0.
    pub first_epoch: u64,
    /// Resumes a state even if a dataset has changed; that dataset continues with its next epoch.
    pub accept_changed_data: bool,
}

choices! {
    /// Names of [`Tail`], and of a tail whose global batches may be larger than the data.
    TailName for (Tail, bool) {
        #[default]
        Carry, "carry" => (Tail::Carry, false);
        Repeat, "repeat" => (Tail::Carry, true);
        Drop, "drop" => (Tail::Drop, false);
        Short, "short" => (Tail::Short, false);
    }
}

/// Text form of a shuffle.
mod shuffle {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::order::Shuffle;

    /// Default sizes of blocks: samples of a run of neighbors, and runs in a window.
    const BLOCKS: Shuffle = Shuffle::Blocks { block_samples: 1024, open_blocks: 64 };

    pub(super) fn serialize<S: Serializer>(shuffle: &Shuffle, serializer: S) -> Result<S::Ok, S::Error> {
        match *shuffle {
            Shuffle::Global => serializer.serialize_str("global"),
            Shuffle::None => serializer.serialize_str("none"),
            BLOCKS => serializer.serialize_str("blocks"),
            Shuffle::Blocks { block_samples, open_blocks } => {
                serializer.collect_str(&format_args!("blocks:{block_samples}:{open_blocks}"))
            }
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Shuffle, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse(&text).ok_or_else(|| {
            let known = "global, blocks, blocks:SAMPLES:RUNS or none";
            D::Error::custom(format!("expected {known}, found `{text}`"))
        })
    }

    fn parse(text: &str) -> Option<Shuffle> {
        match text {
            "global" => Some(Shuffle::Global),
            "none" => Some(Shuffle::None),
            "blocks" => Some(BLOCKS),
            _ => {
                let (samples, runs) = text.strip_prefix("blocks:")?.split_once(':')?;
                let positive = |text: &str| text.parse().ok().filter(|number: &u64| *number > 0);
                Some(Shuffle::Blocks { block_samples: positive(samples)?, open_blocks: positive(runs)? })
            }
        }
    }
}

impl OrderSettings {
    /// Applies the settings to a planner builder, which may restore a state.
    #[must_use]
    pub fn apply(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let (tail, repeats_samples): (Tail, bool) = self.tail.into();
        let mut builder = builder.first_epoch(self.first_epoch).tail(tail).shuffle(self.shuffle);
        if repeats_samples {
            builder = builder.repeat_samples();
        }
        if self.accept_changed_data { builder.accept_changed_data() } else { builder }
    }

    /// Applies the settings to a loader builder whose samples are drawn through an index; `repeat` is
    /// `carry` there.
    #[must_use]
    pub fn apply_to_draws(&self, builder: LoaderBuilder) -> LoaderBuilder {
        let (tail, _): (Tail, bool) = self.tail.into();
        let builder = builder.first_epoch(self.first_epoch).tail(tail).order(self.shuffle);
        if self.accept_changed_data { builder.accept_changed_data() } else { builder }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_read_as_it_is_written() {
        for text in ["global", "none", "blocks", "blocks:8:2"] {
            let settings: OrderSettings =
                serde_json::from_str(&format!("{{\"shuffle\":\"{text}\"}}")).unwrap();
            assert!(serde_json::to_string(&settings).unwrap().contains(&format!("\"{text}\"")));
        }
        for text in ["block", "blocks:", "blocks:8", "blocks:0:2", "blocks:8:0", "blocks:8:2:1"] {
            let read = serde_json::from_str::<OrderSettings>(&format!("{{\"shuffle\":\"{text}\"}}"));
            assert!(read.unwrap_err().to_string().contains("blocks:SAMPLES:RUNS"), "{text}");
        }
    }

    #[test]
    fn a_strategy_and_a_schedule_are_read_as_they_are_written() {
        let read = |key: &str, text: &str| {
            let read = serde_json::from_str::<PlanSettings>(&format!("{{\"{key}\":\"{text}\"}}"));
            read.map_err(|error| error.to_string())
        };
        for text in ["search", "search:0", "search:50000", "lpt", "exact:7"] {
            assert_eq!(read("strategy", text).unwrap().strategy.to_string(), text);
        }
        assert_eq!(read("strategy", "search:20000").unwrap(), PlanSettings::default());
        for (text, reason) in [
            ("best", "`search:UNITS`, found `best`"),
            ("lpt:5", "spends no work units"),
            ("search:many", "expected `search:UNITS`"),
            ("search:", "expected `search:UNITS`"),
        ] {
            let refused = read("strategy", text).unwrap_err();
            assert!(refused.contains(reason), "{refused}");
        }
        for text in ["gpipe", "1f1b-ahead:3", "interleaved:2", "step", "microbatch", "microbatch:4"] {
            let settings = read("schedule", text).unwrap();
            assert_eq!(settings.schedule.unwrap().to_string(), text);
            let staged = PlanSettings { stages: Some(vec![1]), ..settings.clone() };
            assert!(settings.check().is_ok());
            assert_eq!(staged.check().is_err(), settings.synchronization().is_some(), "{text}");
        }
        for text in ["never", "microbatch:0", "2f2b", ""] {
            assert!(read("schedule", text).unwrap_err().contains("expected gpipe"), "{text}");
        }
    }

    #[test]
    fn one_degree_of_a_profile_is_for_encoders_and_llm() {
        let degrees = |tp: &[u32]| {
            let settings = CostSettings { profile_tp: Some(tp.to_vec()), ..CostSettings::default() };
            settings.profile_options().map(|options| format!("{options:?}"))
        };
        assert_eq!(degrees(&[4]).unwrap(), degrees(&[4, 4]).unwrap());
        assert_ne!(degrees(&[1, 4]).unwrap(), degrees(&[4]).unwrap());
        assert!(degrees(&[1, 2, 4]).is_err() && degrees(&[]).is_err() && degrees(&[0]).is_err());
    }
}
