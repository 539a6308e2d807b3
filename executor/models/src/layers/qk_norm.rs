//! Query and key normalization: `RMSNorm` for each head.
//!
//! Each tensor-parallel rank normalizes its heads, and has a copy of the weights; weight gradients are summed
//! over ranks.

use crate::block::{BackwardPass, tensor_parallel};
use crate::error::Result;
use crate::parameters::weights::{Init, ParameterId};
use crate::parameters::{Declaration, Parameters};
use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::head_norm::HeadColumns;
use dflop_device::{Device, Dtype, Tensor};

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
