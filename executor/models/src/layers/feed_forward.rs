//! Second half of a layer: an MLP or a mixture of experts.

use super::experts::{Experts, ExpertsSpec};
use super::mlp::{Mlp, MlpSpec};
use crate::block::{BackwardPass, ForwardPass, SavedActivations};
use crate::error::Result;
use crate::parameters::Declaration;
use dflop_device::{Device, Tensor};

/// Sizes and names for the second half of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForwardSpec {
    /// An MLP.
    Mlp(MlpSpec),
    /// A mixture of experts.
    Experts(Box<ExpertsSpec>),
}

impl FeedForwardSpec {
    /// Returns the width between the matrices, which tensor-parallel ranks divide.
    #[must_use]
    pub fn middle(&self) -> usize {
        match self {
            Self::Mlp(mlp) => mlp.middle,
            Self::Experts(experts) => experts.middle,
        }
    }
}

impl From<MlpSpec> for FeedForwardSpec {
    fn from(mlp: MlpSpec) -> Self {
        Self::Mlp(mlp)
    }
}

impl From<ExpertsSpec> for FeedForwardSpec {
    fn from(experts: ExpertsSpec) -> Self {
        Self::Experts(Box::new(experts))
    }
}

/// Second half of a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    /// An MLP.
    Mlp(Mlp),
    /// A mixture of experts.
    Experts(Box<Experts>),
}

impl FeedForward {
    /// Declares the parameters.
    pub(crate) fn declare(declaration: &mut Declaration, spec: &FeedForwardSpec) -> Self {
        match spec {
            FeedForwardSpec::Mlp(mlp) => Self::Mlp(Mlp::declare(declaration, mlp)),
            FeedForwardSpec::Experts(spec) => Self::Experts(Box::new(Experts::declare(declaration, spec))),
        }
    }

    /// Computes rows, and saves the buffers that backward reads.
    pub(crate) fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        match self {
            Self::Mlp(mlp) => mlp.forward(pass, x, rows, saved),
            Self::Experts(experts) => experts.forward(pass, x, rows, saved),
        }
    }

    /// Accumulates parameter gradients and returns the row gradient.
    pub(crate) fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        match self {
            Self::Mlp(mlp) => mlp.backward(pass, dy, rows, saved),
            Self::Experts(experts) => experts.backward(pass, dy, rows, saved),
        }
    }
}
