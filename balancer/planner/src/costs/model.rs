//! Model costs: stage times and memory for each module.

use super::experts::ExpertCosts;
use super::{ExpertLoads, ModuleCosts, StageBytes, StagePart};
use crate::cluster::Link;
use dflop_costmodel::memory::{ModuleMemory, SavedActivations, StageLayers};
use dflop_costmodel::{LayerTimes, Module};
use std::num::NonZeroU32;

/// Bytes per activation or gradient element.
pub(super) const BYTES: f64 = 2.0;
/// All-reduces per tensor-parallel layer, forward and backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3.
const REDUCES_PER_LAYER: f64 = 4.0;

/// Costs for all modules in a model.
#[derive(Debug, Clone)]
pub struct PlannedModel {
    /// Encoder costs, in [`ModelSpec::encoders`](dflop_costmodel::ModelSpec::encoders) order.
    pub encoders: Vec<ModelCosts>,
    /// LLM costs.
    pub llm: ModelCosts,
}

impl PlannedModel {
    /// Lists the encoder costs in the form that a problem requires.
    #[must_use]
    pub fn encoder_costs(&self) -> Vec<&dyn ModuleCosts> {
        self.encoders.iter().map(|encoder| encoder as &dyn ModuleCosts).collect()
    }
}

/// Costs for one module in a model.
#[derive(Debug, Clone)]
pub struct ModelCosts {
    pub(super) module: Module,
    pub(super) layers: u32,
    pub(super) degrees: Vec<Degree>,
    pub(super) memory: ModuleMemory,
    /// Tokens per unit inside the module: tokens per tile; 1 for patches and in an LLM.
    pub(super) unit_tokens: f64,
    pub(super) border_bytes: f64,
    pub(super) backward_ratios: [f64; 2],
    /// Share of the layer times that counts; less than 1 if they were measured with recomputation, which
    /// plans add again.
    pub(super) layer_share: f64,
    pub(super) units: Units,
    /// Experts, for an LLM with experts.
    pub(super) experts: Option<ExpertCosts>,
}

/// Work units in a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Units {
    /// Tiles or windows with a fixed size; their time includes attention.
    Tiles,
    /// Patches in media, with attention inside each medium.
    Patches,
    /// LLM positions, with attention inside each sample.
    Tokens,
}

/// Times for a module at one tensor-parallel degree.
#[derive(Debug, Clone)]
pub(super) struct Degree {
    pub(super) tp: u32,
    pub(super) times: LayerTimes,
    /// Link for tensor-parallel all-reduces, if times do not include them already.
    pub(super) link: Option<Link>,
}

impl ModelCosts {
    fn degree(&self, tp: u32) -> &Degree {
        let known = self.degrees.iter().find(|degree| degree.tp == tp);
        // The fallback is for degrees outside `tp_degrees` only; `build` ensures that there is one.
        known.unwrap_or(&self.degrees[0])
    }
}

impl ModuleCosts for ModelCosts {
    fn name(&self) -> &'static str {
        self.module.name()
    }

    fn layers(&self) -> u32 {
        self.layers
    }

    fn tp_degrees(&self) -> Vec<u32> {
        self.degrees.iter().map(|degree| degree.tp).collect()
    }

    fn layer_ns(&self, tp: u32, units: u64) -> f64 {
        let degree = self.degree(tp);
        let units = units as f64;
        let reduce = |link: &Link| REDUCES_PER_LAYER * link.all_reduce_ns(units * self.border_bytes, tp);
        let reduced_ns = degree.link.as_ref().map_or(0.0, reduce);
        if self.units != Units::Tiles {
            let experts = self.experts.as_ref();
            let experts_ns =
                experts.map_or(0.0, |experts| experts.additional_ns(&degree.times, tp, units as u64));
            return self.layer_share * (degree.times.layer_ns(1.0, units) + experts_ns) + reduced_ns;
        }
        let tile = self.unit_tokens;
        let measured_ns = degree.times.layer_ns(units, tile) + degree.times.attention_ns(units, tile);
        self.layer_share * measured_ns + reduced_ns
    }

    fn sample_ns(&self, tp: u32, units: u64) -> f64 {
        if self.units != Units::Tokens {
            return 0.0;
        }
        self.layer_share * self.degree(tp).times.attention_ns(1.0, units as f64)
    }

    fn media_attention_ns(&self, tp: u32, units: u64, pairs: u64) -> f64 {
        if self.units != Units::Patches || pairs == 0 {
            return 0.0;
        }
        // Equal sequences with the same patches and pairs, as in predictions.
        let length = pairs as f64 / units as f64;
        self.layer_share * self.degree(tp).times.attention_ns(units as f64 / length, length)
    }

    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64 {
        let times = &self.degree(tp).times;
        if self.units == Units::Tiles {
            times.outside_layers_ns(units as f64, self.unit_tokens)
        } else {
            times.outside_layers_ns(1.0, units as f64)
        }
    }

    fn backward_ratios(&self) -> [f64; 2] {
        self.backward_ratios
    }

    fn relative_half_width(&self, tp: u32, units: f64, samples: [f64; 2]) -> f64 {
        let times = &self.degree(tp).times;
        let tile = self.unit_tokens;
        let width = if self.units == Units::Tiles {
            times.relative_half_width(units, tile, [units, tile])
        } else {
            times.relative_half_width(1.0, units, samples)
        };
        width.unwrap_or(0.0)
    }

    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes {
        let tp = NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN);
        let saved = if is_recomputed { SavedActivations::LayerInputs } else { SavedActivations::All };
        // Degrees without memory are not in `tp_degrees`, so they are never requested.
        let nothing = || StageBytes { fixed: f64::INFINITY, ..StageBytes::default() };
        self.memory.stage(tp, part.into(), saved).map_or_else(
            |_| nothing(),
            |stage| StageBytes {
                fixed: stage.fixed_bytes - stage.optimizer_bytes - stage.expert_optimizer_bytes,
                optimizer: stage.optimizer_bytes,
                expert_optimizer: stage.expert_optimizer_bytes,
                expert_parallel: self.expert_parallel(),
                sums: stage.sum_bytes,
                shared_sums: stage.shared_sum_bytes,
                kept_per_unit: stage.saved_bytes_per_token * self.unit_tokens,
                working_per_unit: stage.working_bytes_per_token * self.unit_tokens,
            },
        )
    }

    fn border_bytes(&self) -> f64 {
        self.border_bytes
    }

    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        let all = self.memory.trained_parameters(NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN), part.into());
        all as f64 * BYTES - self.expert_gradient_bytes(tp, part)
    }

    fn expert_gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        if self.expert_parallel() < 2 {
            return 0.0;
        }
        let tp = NonZeroU32::new(tp).unwrap_or(NonZeroU32::MIN);
        self.memory.trained_expert_parameters(tp, part.into()) as f64 * BYTES
    }

    fn expert_parallel(&self) -> u32 {
        self.experts.map_or(1, |experts| experts.degree)
    }

    fn expert_parallel_degrees(&self, gpus: u32) -> Vec<u32> {
        self.experts.map_or_else(|| vec![1], |experts| experts.degrees(gpus))
    }

    fn at_expert_parallel(&self, degree: u32) -> Option<Box<dyn ModuleCosts>> {
        let experts = Some(self.experts?.at(degree)?);
        let memory = self.memory.clone().expert_parallel(NonZeroU32::new(degree)?);
        Some(Box::new(Self { memory, experts, ..self.clone() }))
    }

    fn expert_loads(&self, units: u64) -> Option<ExpertLoads> {
        self.experts.map(|experts| experts.loads(units))
    }
}

impl From<StagePart> for StageLayers {
    /// Converts a part whose first layer is unknown.
    fn from(StagePart { layers, is_first, is_last }: StagePart) -> Self {
        Self { layers, first_layer: None, is_first, is_last }
    }
}
