//! Mixture-of-experts sizes and names.

use super::{ExpertGate, RouterRule};
use crate::layers::mlp::MlpSpec;
use crate::parameters::weights::Init;

/// Sizes, names and routing for a mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsSpec {
    /// Model width.
    pub hidden: usize,
    /// Width between the matrices in an expert.
    pub middle: usize,
    /// Expert choice and weights.
    pub rule: RouterRule,
    /// Router name.
    pub router: String,
    /// Whether the router has a bias.
    pub has_router_bias: bool,
    /// Name of the choice correction, which receives no gradient, if any.
    pub correction: Option<String>,
    /// Matrix names.
    pub names: ExpertNames,
    /// Gate between the matrices.
    pub gate: ExpertGate,
    /// Whether weights scale expert inputs instead of outputs.
    pub is_input_weighted: bool,
    /// MLP that every token also goes through, if any.
    pub shared: Option<SharedExpertsSpec>,
    /// Matrix initialization.
    pub init: Init,
}

/// Names and storage of expert matrices.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertNames {
    /// A tensor per expert and matrix, `[outputs, inputs]`, named by prefix, expert number, and gate, up or
    /// down.
    Separate {
        /// Name before the expert number.
        prefix: String,
        /// Gate, up and down names, without `.weight`.
        matrices: [String; 3],
    },
    /// Two tensors for all experts, `[experts, inputs, outputs]`.
    Fused {
        /// Gate and up tensor name; the gate determines the column order.
        gate_up: String,
        /// Down tensor name.
        down: String,
        /// Bias names for both tensors, `[experts, outputs]`, if any.
        biases: Option<[String; 2]>,
    },
}

/// MLP that every token goes through.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpertsSpec {
    /// Sizes and names.
    pub mlp: MlpSpec,
    /// Name of the width-1 matrix whose logistic function scales the output, if any.
    pub gate: Option<String>,
}
