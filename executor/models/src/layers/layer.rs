//! Decoder and encoder transformer layer: `h = x + attention(norm(x))`, `y = h + mlp(norm(h))`.
//!
//! Families differ in norms, attention mask, rotation, biases, MLP kind and, for `InternViT`, a layer scale
//! on both branches. Gemma 3 has an additional norm after each branch, before the branch is added.
//! The second half of a layer is an MLP or a mixture of experts ([`FeedForwardSpec`]).

use super::attention::{Attention, AttentionSpec};
use super::experts::{Experts, ExpertsSpec};
use super::mlp::{Mlp, MlpSpec};
use super::norm::{Norm, NormKind};
use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{Init, ParameterId};
use dflop_device::{Device, Tensor};

/// Layer sizes and names.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Kind of both norms.
    pub norm: NormKind,
    /// Epsilon under the root in both norms.
    pub epsilon: f64,
    /// Names for both norms.
    pub norm_names: [String; 2],
    /// Names for the norms after attention and MLP, if any (same kind).
    pub post_norm_names: Option<[String; 2]>,
    /// Attention.
    pub attention: AttentionSpec,
    /// The MLP, or experts.
    pub mlp: FeedForwardSpec,
    /// Names for the layer scales on both branches and the initial value, if any.
    pub scales: Option<([String; 2], f64)>,
}

/// Transformer layer.
#[derive(Debug)]
pub struct Layer {
    norms: [Norm; 2],
    post_norms: Option<[Norm; 2]>,
    attention: Attention,
    mlp: FeedForward,
    scales: Option<[ParameterId; 2]>,
    hidden: usize,
}

impl Layer {
    /// Declares the parameters.
    pub fn declare(declaration: &mut Declaration, spec: &LayerSpec) -> Self {
        let hidden = spec.attention.hidden;
        let mut norm = |name: &String| Norm::declare(declaration, name, spec.norm, hidden, spec.epsilon);
        let norms = spec.norm_names.each_ref().map(&mut norm);
        let post_norms = spec.post_norm_names.as_ref().map(|names| names.each_ref().map(&mut norm));
        let attention = Attention::declare(declaration, &spec.attention);
        let mlp = FeedForward::declare(declaration, &spec.mlp);
        let scales = spec.scales.as_ref().map(|(names, value)| {
            names.each_ref().map(|name| declaration.add(name, &[hidden], Init::Constant(*value)))
        });
        Self { norms, post_norms, attention, mlp, scales, hidden }
    }

    /// Adds the residual to a branch; a branch that is normalized or scaled is saved.
    fn join<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        index: usize,
        mut branch: Tensor<D>,
        residual: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let device = pass.device;
        if let Some(norms) = &self.post_norms {
            let (normal, statistics) = norms[index].forward(pass, &branch)?;
            saved.keep(std::mem::replace(&mut branch, normal));
            saved.keep(statistics);
        }
        let Some(scales) = self.scales else {
            device.add(residual, &mut branch)?;
            return Ok(branch);
        };
        let mut sum = device.zeros(residual.len())?;
        device.add(residual, &mut sum)?;
        device.layer_scale(&branch, pass.parameters.value(scales[index]), &mut sum)?;
        saved.keep(branch);
        Ok(sum)
    }

    /// Returns the branch gradient if it differs from the gradient of the sum.
    fn split<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        index: usize,
        dy: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Option<Tensor<D>>> {
        let mut d_branch = None;
        if let Some(scales) = self.scales {
            let branch = saved.take();
            let mut scaled = pass.device.alloc(dy.len())?;
            let (scale, gradient) = pass.parameters.both(scales[index]);
            pass.device.layer_scale_backward(dy, &branch, scale, &mut scaled, gradient)?;
            d_branch = Some(scaled);
        }
        if let Some(norms) = &self.post_norms {
            let (statistics, branch) = (saved.take(), saved.take());
            let mut normal = pass.device.zeros(dy.len())?;
            let dy = d_branch.as_ref().unwrap_or(dy);
            norms[index].backward(pass, dy, &branch, &statistics, Some(&mut normal))?;
            d_branch = Some(normal);
        }
        Ok(d_branch)
    }
}

impl<D: Device> Block<D> for Layer {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let rows = pass.context.layers.rows;
        let x = expect_rows::<D>(input, rows, self.hidden)?;
        let (normal, statistics) = self.norms[0].forward(pass, &x)?;
        // saved after the input: recomputation keeps only the first buffer
        let mut inner = SavedActivations::default();
        let branch = self.attention.forward(pass, normal, &mut inner)?;
        let h = self.join(pass, 0, branch, &x, &mut inner)?;
        saved.keep(x);
        saved.keep(statistics);
        saved.append(inner);
        let (normal, statistics) = self.norms[1].forward(pass, &h)?;
        let mut inner = SavedActivations::default();
        let branch = self.mlp.forward(pass, normal, rows, &mut inner)?;
        let y = self.join(pass, 1, branch, &h, &mut inner)?;
        saved.keep(h);
        saved.keep(statistics);
        saved.append(inner);
        Ok(BlockOutput::Rows(y))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let rows = pass.context.layers.rows;
        let mut d = expect_rows::<D>(gradient, rows, self.hidden)?;
        // unless a branch is normalized or scaled, its gradient is the sum's gradient
        let d_branch = self.split(pass, 1, &d, saved)?;
        let d_normal = self.mlp.backward(pass, d_branch.as_ref().unwrap_or(&d), rows, saved)?;
        let (statistics, h) = (saved.take(), saved.take());
        self.norms[1].backward(pass, &d_normal, &h, &statistics, Some(&mut d))?;
        // frees memory before the attention allocates
        drop((d_branch, d_normal, h));
        let d_branch = self.split(pass, 0, &d, saved)?;
        let d_normal = self.attention.backward(pass, d_branch.as_ref().unwrap_or(&d), saved)?;
        let (statistics, x) = (saved.take(), saved.take());
        self.norms[0].backward(pass, &d_normal, &x, &statistics, Some(&mut d))?;
        Ok(Some(d))
    }

    fn is_recomputable(&self) -> bool {
        true
    }
}

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
