//! Row normalization, with parameters.
//!
//! Query and key normalization: `RMSNorm` for each head.
//!
//! Each tensor-parallel rank normalizes its heads, and has a copy of the weights; weight gradients are summed
//! over ranks.

use crate::block::{BackwardPass, ForwardPass, tensor_parallel};
use crate::error::Result;
use crate::parameters::weights::{Init, ParameterId};
use crate::parameters::{Declaration, Parameters};
use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::head_norm::HeadColumns;
use dflop_device::{Device, Dtype, Tensor};

/// Normalization kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Root-mean-square normalization (`RMSNorm`).
    Rms,
    /// `RMSNorm` with weights stored as `w - 1` (Gemma).
    RmsRelative,
    /// Layer norm: mean and standard deviation.
    Layer,
}

/// Norm with a weight and, for [`NormKind::Layer`], a bias.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    weight: ParameterId,
    bias: Option<ParameterId>,
    epsilon: f64,
    /// Offset added to `RMSNorm` weights.
    offset: f64,
    width: usize,
}

impl Norm {
    /// Declares `NAME.weight` and, for a layer norm, `NAME.bias`.
    pub fn declare(
        declaration: &mut Declaration,
        name: &str,
        kind: NormKind,
        width: usize,
        epsilon: f64,
    ) -> Self {
        let (init, offset) =
            if kind == NormKind::RmsRelative { (Init::Zeros, 1.0) } else { (Init::Ones, 0.0) };
        let weight = declaration.add(format!("{name}.weight"), &[width], init);
        let bias =
            (kind == NormKind::Layer).then(|| declaration.add(format!("{name}.bias"), &[width], Init::Zeros));
        Self { weight, bias, epsilon, offset, width }
    }

    /// Returns the normalized rows, and the statistics that backward needs.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let rows = x.len() / self.width;
        let mut y = pass.device.alloc(x.len())?;
        let weight = pass.parameters.value(self.weight);
        // mean and inverse deviation for every row, or the inverse root mean square
        let mut statistics =
            pass.device.alloc_as(Dtype::F32, if self.bias.is_some() { 2 * rows } else { rows })?;
        match self.bias.map(|bias| pass.parameters.value(bias)) {
            None => pass.device.rms_norm(x, (weight, self.offset), self.epsilon, &mut y, &mut statistics)?,
            Some(bias) => {
                pass.device.layer_norm(x, (weight, bias), self.epsilon, &mut y, &mut statistics)?;
            }
        }
        Ok((y, statistics))
    }

    /// Accumulates the gradients of the parameters and, if requested, of `x`.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        x: &Tensor<D>,
        statistics: &Tensor<D>,
        dx: Option<&mut Tensor<D>>,
    ) -> Result<()> {
        match self.bias {
            None => {
                let (weight, gradient) = pass.parameters.both(self.weight);
                let weight = (weight, self.offset);
                pass.device.rms_norm_backward(dy, x, weight, statistics, dx, gradient)?;
            }
            Some(bias) => {
                let (weight, gradients) = pass.parameters.norm(self.weight, bias);
                // both are computed if either is trained
                let mut unused = match gradients {
                    [Some(_), None] | [None, Some(_)] => Some(pass.device.zeros_as(Dtype::F32, self.width)?),
                    _ => None,
                };
                let gradients = match (gradients, unused.as_mut()) {
                    ([Some(d_weight), Some(d_bias)], _) => Some((d_weight, d_bias)),
                    ([Some(d_weight), None], Some(unused)) => Some((d_weight, unused)),
                    ([None, Some(d_bias)], Some(unused)) => Some((unused, d_bias)),
                    _ => None,
                };
                pass.device.layer_norm_backward(dy, x, weight, statistics, dx, gradients)?;
            }
        }
        Ok(())
    }
}

/// Names and constants for query and key norms.
#[derive(Debug, Clone, PartialEq)]
pub struct QkNormSpec {
    /// Names for the query norm and the key norm; `None` without weights.
    pub names: Option<[String; 2]>,
    /// Whether weights are stored as `w - 1`.
    pub is_relative: bool,
    /// Epsilon under the root.
    pub epsilon: f64,
    /// Whether heads are normalized after rotation, not before.
    pub is_after_rotation: bool,
}

/// Query and key norms.
#[derive(Debug)]
pub struct QkNorm {
    weights: Option<[ParameterId; 2]>,
    offset: f64,
    epsilon: f64,
    /// Query and key heads on this rank.
    heads: [HeadColumns; 2],
    is_after_rotation: bool,
}

impl QkNorm {
    /// Declares `NAME.weight` for queries and keys.
    pub fn declare(declaration: &mut Declaration, spec: &QkNormSpec, shape: &AttentionShape) -> Self {
        let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
        let init = if spec.is_relative { Init::Zeros } else { Init::Ones };
        // without weights, the factor is 1
        let offset = if spec.is_relative || spec.names.is_none() { 1.0 } else { 0.0 };
        let mut declare = |name: &String| declaration.add(format!("{name}.weight"), &[head_dim], init);
        let columns = |first, heads| HeadColumns { first, heads, head_dim, stride: shape.row() };
        Self {
            weights: spec.names.as_ref().map(|names| names.each_ref().map(&mut declare)),
            offset,
            epsilon: spec.epsilon,
            heads: [columns(0, heads), columns(heads * head_dim, kv_heads)],
            is_after_rotation: spec.is_after_rotation,
        }
    }

    /// Returns whether heads are normalized after rotation, not before.
    #[must_use]
    pub const fn is_after_rotation(&self) -> bool {
        self.is_after_rotation
    }

    /// Normalizes heads in place, and returns the inverse root mean squares for queries and keys.
    pub fn normalize<D: Device>(
        &self,
        device: &D,
        parameters: &Parameters<D>,
        qkv: &mut Tensor<D>,
    ) -> Result<[Tensor<D>; 2]> {
        let mut normalize = |part: usize| -> Result<Tensor<D>> {
            let heads = self.heads[part];
            let weight = self.weights.map(|weights| parameters.value(weights[part]));
            let mut inverse = device.alloc_as(Dtype::F32, heads.rows(qkv.len()) * heads.heads)?;
            device.head_norm(heads, (weight, self.offset), self.epsilon, qkv, &mut inverse)?;
            Ok(inverse)
        };
        Ok([normalize(0)?, normalize(1)?])
    }

    /// Turns the gradients of normalized heads into gradients of `qkv`, the norm input, in place, and
    /// accumulates weight gradients.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        qkv: &Tensor<D>,
        inverses: &[Tensor<D>; 2],
        d_qkv: &mut Tensor<D>,
    ) -> Result<()> {
        for (part, inverse) in inverses.iter().enumerate() {
            let (device, heads, saved) = (pass.device, self.heads[part], (qkv, inverse));
            let Some(weight) = self.weights.map(|weights| weights[part]) else {
                device.head_norm_backward(heads, (None, self.offset), saved, d_qkv, None)?;
                continue;
            };
            let (values, gradient) = pass.parameters.both(weight);
            let Some(gradient) = gradient else {
                device.head_norm_backward(heads, (Some(values), self.offset), saved, d_qkv, None)?;
                continue;
            };
            let values = (Some(values), self.offset);
            if pass.tensor.is_none() {
                device.head_norm_backward(heads, values, saved, d_qkv, Some(gradient))?;
                continue;
            }
            // remaining heads are on other ranks
            let mut own = device.zeros_as(Dtype::F32, heads.head_dim)?;
            device.head_norm_backward(heads, values, saved, d_qkv, Some(&mut own))?;
            tensor_parallel::all_reduce(pass.tensor, &mut own)?;
            device.add(&own, gradient)?;
        }
        Ok(())
    }
}
