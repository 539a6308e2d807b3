//! Sizes and names of a mixture of experts.

use super::{ExpertGate, RouterRule};
use crate::mlp::MlpSpec;
use crate::weights::Init;

/// Sizes, names and routing of a mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsSpec {
    /// Width of the model.
    pub hidden: usize,
    /// Width between the matrices of an expert.
    pub middle: usize,
    /// Choice and weights of experts.
    pub rule: RouterRule,
    /// Name of the router.
    pub router: String,
    /// Whether the router has a bias.
    pub has_router_bias: bool,
    /// Name of the correction of the choice, which no gradient reaches, if there is one.
    pub correction: Option<String>,
    /// Names of the matrices.
    pub names: ExpertNames,
    /// Gate between the matrices.
    pub gate: ExpertGate,
    /// Whether weights are of the inputs of experts instead of their outputs.
    pub is_input_weighted: bool,
    /// MLP that every token goes through besides, if there is one.
    pub shared: Option<SharedExpertsSpec>,
    /// Initialization of the matrices.
    pub init: Init,
}

/// Names and storage of the matrices of experts.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertNames {
    /// A tensor per expert and matrix, `[outputs, inputs]`: prefix, number of the expert, and gate, up or
    /// down.
    Separate {
        /// Name before the number of the expert.
        prefix: String,
        /// Names of gate, up and down, without `.weight`.
        matrices: [String; 3],
    },
    /// Two tensors of all experts, `[experts, inputs, outputs]`.
    Fused {
        /// Name of gates and ups, in the order that the gate asks for.
        gate_up: String,
        /// Name of the matrices after them.
        down: String,
        /// Names of the biases of both, `[experts, outputs]`, if there are any.
        biases: Option<[String; 2]>,
    },
}

/// MLP that every token goes through.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpertsSpec {
    /// Sizes and names.
    pub mlp: MlpSpec,
    /// Name of the matrix of width 1 whose logistic function scales the output, if there is one.
    pub gate: Option<String>,
}
