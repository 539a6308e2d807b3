//! Routing and names for decoder experts, which are not part of the sizes.

use crate::layers::{ExpertGate, ExpertNames, ExpertsSpec, MlpNames, MlpSpec, RouterRule, SharedExpertsSpec};
use crate::parameters::weights::Init;
use dflop_costmodel::model::ExpertsSpec as ExpertSizes;
use dflop_device::ops::activation::Activation;
use dflop_device::ops::clamped_gate::GateBounds;

/// Routing and names for decoder experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlmExperts {
    /// Expert choice and weights.
    pub rule: RouterRule,
    /// Whether weights scale expert inputs instead of outputs.
    pub is_input_weighted: bool,
    /// Bounds for interleaved gates and ups; `None` for gates before ups.
    pub bounds: Option<GateBounds>,
    /// Tensor names.
    pub names: LlmExpertNames,
}

/// Tensor names for experts in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlmExpertNames {
    /// Module that contains the router and the experts.
    pub module: &'static str,
    /// Router name in the module.
    pub router: &'static str,
    /// Name of the choice correction in the module, if any.
    pub correction: Option<&'static str>,
    /// Expert matrices.
    pub matrices: MatrixNames,
    /// Shared experts name in the module.
    pub shared: &'static str,
    /// Gate name for shared experts in the module.
    pub shared_gate: &'static str,
    /// Expert width field, for errors.
    pub field: &'static str,
}

/// Expert matrix names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixNames {
    /// A tensor for each expert, with these gate, up and down names.
    Separate([&'static str; 3]),
    /// `experts.gate_up_proj` and `experts.down_proj` contain all experts.
    Fused,
}

impl LlmExpertNames {
    /// Names in the Qwen families.
    pub const QWEN: Self = Self {
        module: "mlp",
        router: "gate",
        correction: None,
        matrices: MatrixNames::Separate(["gate_proj", "up_proj", "down_proj"]),
        shared: "shared_expert",
        shared_gate: "shared_expert_gate",
        field: "moe_intermediate_size",
    };
}

impl LlmExperts {
    /// Returns the specification for the experts in a layer.
    ///
    /// - `prefix`: layer name prefix
    pub(super) fn layer(
        &self,
        prefix: &str,
        hidden: usize,
        sizes: &ExpertSizes,
        activation: Activation,
        init: Init,
    ) -> ExpertsSpec {
        let module = format!("{prefix}{}", self.names.module);
        let name = |rest: &str| format!("{module}.{rest}");
        let shared = (sizes.shared_ffn > 0).then(|| SharedExpertsSpec {
            mlp: MlpSpec {
                inputs: hidden,
                middle: sizes.shared_ffn as usize,
                outputs: hidden,
                names: MlpNames::Gated(
                    ["gate_proj", "up_proj", "down_proj"]
                        .map(|matrix| name(&format!("{}.{matrix}", self.names.shared))),
                    activation,
                ),
                has_bias: false,
                init,
            },
            gate: sizes.details.has_shared_gate.then(|| name(self.names.shared_gate)),
        });
        ExpertsSpec {
            hidden,
            middle: sizes.ffn as usize,
            rule: self.rule,
            router: name(self.names.router),
            correction: self.names.correction.map(name),
            names: match self.names.matrices {
                MatrixNames::Separate(matrices) => {
                    ExpertNames::Separate { prefix: name("experts."), matrices: matrices.map(str::to_owned) }
                }
                MatrixNames::Fused => ExpertNames::Fused {
                    gate_up: name("experts.gate_up_proj"),
                    down: name("experts.down_proj"),
                    biases: sizes
                        .details
                        .has_biases
                        .then(|| ["experts.gate_up_proj_bias", "experts.down_proj_bias"].map(name)),
                },
            },
            has_router_bias: sizes.details.has_router_bias,
            gate: match self.bounds {
                Some(bounds) => ExpertGate::Clamped(bounds),
                None => ExpertGate::Halves(activation),
            },
            is_input_weighted: self.is_input_weighted,
            shared,
            init,
        }
    }
}
