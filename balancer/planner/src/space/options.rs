//! Kinds of plans that a search covers, and assumptions about running plans.

use dflop_balancer::schedule::ScheduleKind;
use std::fmt;

/// Kinds of plans that are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each enables one kind of plan, by itself")]
pub struct SearchSpaceOptions {
    /// Whether encoder and LLM may have separate GPUs.
    pub is_disaggregated: bool,
    /// Whether the encoder may run on the LLM's GPUs, before and after it.
    pub is_colocated: bool,
    /// Whether every rank may hold layers of both modules.
    pub is_joint: bool,
    /// Whether stages may differ in layers beyond rounding.
    pub has_uneven_layers: bool,
    /// Whether the activations in all layers of a module may be recomputed in the backward pass.
    pub has_recomputation: bool,
    /// Whether encoders on GPUs of their own may run ahead of the LLM.
    pub has_encoder_ahead: bool,
    /// Whether a module's data-parallel ranks share optimizer state (`ZeRO` stage 1).
    pub has_sharded_optimizer: bool,
    /// Schedule for the plans: `gpipe`, `1f1b` or `1f1b-ahead`.
    pub schedule: ScheduleKind,
}

impl Default for SearchSpaceOptions {
    fn default() -> Self {
        Self {
            is_disaggregated: true,
            is_colocated: false,
            is_joint: false,
            has_uneven_layers: false,
            has_recomputation: false,
            has_encoder_ahead: false,
            has_sharded_optimizer: false,
            schedule: ScheduleKind::OneForwardOneBackward,
        }
    }
}

impl SearchSpaceOptions {
    /// Lists whether the layers of a module may be recomputed.
    pub(super) const fn recomputations(&self) -> &'static [bool] {
        if self.has_recomputation { &[false, true] } else { &[false] }
    }
}

impl fmt::Display for SearchSpaceOptions {
    /// Describes the searched plans, which lower bounds are about.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schedule = match self.schedule {
            ScheduleKind::OneForwardOneBackward => "1F1B".to_owned(),
            other => other.to_string(),
        };
        let layers = if self.has_uneven_layers { "even or uneven" } else { "even" };
        let places = [
            (self.is_disaggregated, "on separate GPUs"),
            (self.is_colocated, "on the GPUs of the LLM"),
            (self.is_joint, "in the LLM's stages"),
        ];
        let places: Vec<&str> = places.into_iter().filter(|place| place.0).map(|place| place.1).collect();
        let recomputed = if self.has_recomputation { ", with or without recomputation" } else { "" };
        let ahead = if self.has_encoder_ahead { ", with or without running ahead" } else { "" };
        let sharded = if self.has_sharded_optimizer { ", sharded optimizer state" } else { "" };
        let places = places.join(" or ");
        write!(formatter, "{schedule}, {layers} layers, encoder {places}{recomputed}{ahead}{sharded}")
    }
}

/// How encoder ranks split the media in a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum EncoderSplit {
    /// Tile by tile, across samples.
    #[default]
    Tile,
    /// Whole samples, by LPT.
    Sample,
}

impl EncoderSplit {
    /// Returns `tile` or `sample`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tile => "tile",
            Self::Sample => "sample",
        }
    }
}
