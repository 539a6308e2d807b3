//! Settings of the search for a parallelism plan.

use serde::{Deserialize, Serialize};

use super::spelling::choices;

/// Kinds of parallelism plans that are searched, and what ranks share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "one for each kind of plan")]
pub struct SpaceSettings {
    /// Kinds of plans and costs: `basic`, even layers, stated rates alike for all widths, transfers free
    /// unless links are given; `full`, uneven layers, recomputation and encoders that run ahead as well, with
    /// links and matrix-width rates from the device preset. Default: `full` with a device preset, `basic`
    /// with a profile.
    pub kinds: Option<SpaceKinds>,
    /// Encoder placement: `disaggregated`, on separate GPUs; `colocated`, on the GPUs of the LLM, before and
    /// after it; `joint`, in the stages of the LLM, so that every rank holds layers from both; or `any`,
    /// whichever is fastest.
    pub placement: SpacePlacement,
    /// Allows fewer layers in the stage with the LM head.
    pub uneven_layers: bool,
    /// Allows an encoder on separate GPUs to run some rounds ahead, so that LLM ranks wait less.
    pub encoder_ahead: bool,
    /// Allows more activation checkpointing than was profiled; the full space always does.
    pub recompute: bool,
    /// Shares optimizer state over the data-parallel ranks of a module (ZeRO stage 1).
    pub zero1: bool,
    /// Splits norms and inputs of layers over the tensor-parallel ranks (sequence parallelism); measured
    /// memory stays as it is.
    pub sequence_parallel: bool,
    /// Unit in which encoder ranks share the media in concurrent microbatches, `tile` or `sample`; a
    /// colocated encoder processes the media of the whole batch at once. Default: `tile`, or `sample` for
    /// images in native resolution.
    pub encoder_share: Option<EncoderShare>,
    /// Expert parallelism degree: the number of LLM DP ranks that divide the experts. The executor does not
    /// run degrees above 1 yet. Default: the fastest.
    pub expert_parallel: Option<u32>,
    /// Maximum rank load over the mean, where ranks share experts: a number, or `uniform` routing.
    pub expert_imbalance: String,
    /// Factor from counted to allocated memory, for fragmentation and communication buffers.
    pub memory_margin: f64,
}

impl Default for SpaceSettings {
    fn default() -> Self {
        Self {
            kinds: None,
            placement: SpacePlacement::default(),
            uneven_layers: false,
            encoder_ahead: false,
            recompute: false,
            zero1: false,
            sequence_parallel: false,
            encoder_share: None,
            expert_parallel: None,
            expert_imbalance: "uniform".to_owned(),
            memory_margin: 1.1,
        }
    }
}

choices! {
    /// Names of the kinds of plans: whether all are searched.
    SpaceKinds for bool {
        #[default]
        Basic, "basic" => false;
        Full, "full" => true;
    }
}

choices! {
    /// Encoder placements to search: separate GPUs, the GPUs of the LLM, its stages.
    SpacePlacement for [bool; 3] {
        #[default]
        Disaggregated, "disaggregated" => [true, false, false];
        Colocated, "colocated" => [false, true, false];
        Joint, "joint" => [false, false, true];
        Any, "any" => [true; 3];
    }
}

choices! {
    /// Names of the units in which encoder ranks share media: whether it is a whole sample.
    EncoderShare for bool {
        #[default]
        Tile, "tile" => false;
        Sample, "sample" => true;
    }
}

impl SpaceSettings {
    /// Returns whether the full space is searched.
    #[must_use]
    pub fn is_full(&self, has_profile: bool) -> bool {
        self.kinds.map_or(!has_profile, bool::from)
    }
}
