//! Layer attention: query, key and value projections, query and key norms, rotation, attention, output
//! projection.
//!
//! Each rank in a tensor-parallel group owns some query heads and the key and value heads that these queries
//! read. If there are fewer key heads than ranks, several ranks share a key head: they sum the key head
//! gradients before computing weight gradients, so that weight copies have the same gradients.

use super::latent::{Latent, LatentSpec};
use super::linear::Linear;
use super::norm::{QkNorm, QkNormSpec};
use crate::block::{BackwardPass, ForwardPass, LayerContext, SavedActivations, tensor_parallel};
use crate::error::Result;
use crate::parameters::weights::{AxisPartition, Init, ParameterId};
use crate::parameters::{Declaration, Parameters};
use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::rope::{RopeShape, Rotation};
use dflop_device::{Device, Dtype, Segments, Tensor};

/// Tokens that a token attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// The token and earlier tokens in the same sample.
    Causal,
    /// All tokens in the same image or audio clip.
    Full,
    /// All tokens in the same window.
    Window,
    /// The token and earlier tokens in the same window.
    CausalWindow,
}

impl AttentionMask {
    /// Returns whether a token attends only to earlier tokens and to itself.
    #[must_use]
    pub const fn is_causal(self) -> bool {
        matches!(self, Self::Causal | Self::CausalWindow)
    }

    /// Returns whether tokens attend within windows.
    #[must_use]
    pub const fn has_windows(self) -> bool {
        matches!(self, Self::Window | Self::CausalWindow)
    }
}

/// Names and storage of query, key and value projections.
#[derive(Debug, Clone, PartialEq)]
pub enum QkvNames {
    /// Three layers, each with or without a bias.
    Separate([(String, bool); 3]),
    /// One layer, with a bias.
    Fused(String),
    /// Latent rows (multi-head latent attention), with as many key heads as query heads.
    Latent(Box<LatentSpec>),
}

/// Rotated columns in a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRotation {
    /// Number of rotated columns in a head, starting at the first column.
    pub width: usize,
    /// Whether neighboring columns are rotated together, instead of columns half a width apart.
    pub is_interleaved: bool,
}

impl HeadRotation {
    /// Rotates all columns in a head, in halves.
    #[must_use]
    pub const fn halves(width: usize) -> Self {
        Self { width, is_interleaved: false }
    }
}

/// Sizes, names and mask for attention.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Model width.
    pub hidden: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// Query, key and value projections.
    pub qkv: QkvNames,
    /// Output projection name, and whether the projection has a bias.
    pub output: (String, bool),
    /// Query and key norms, if any.
    pub qk_norm: Option<QkNormSpec>,
    /// Parameter name for attention sinks (one logit per query head that takes part in the softmax), if any.
    pub sinks: Option<String>,
    /// Score factor; `None` for 1 / square root of the head width.
    pub scale: Option<f64>,
    /// Tokens that a token attends to.
    pub mask: AttentionMask,
    /// Query and key rotation, if any.
    pub rotation: Option<HeadRotation>,
    /// Whether [`LayerContext::query_scales`] scales queries by position.
    pub has_query_scales: bool,
    /// Matrix initialization.
    pub init: Init,
}

/// Layer attention.
#[derive(Debug)]
pub struct Attention {
    /// Projections, each with the first output column in a query-key-value row.
    projections: Vec<(Linear, usize)>,
    /// Latent projections, which replace `projections`.
    latent: Option<Latent>,
    output: Linear,
    /// Head shape on this rank.
    shape: AttentionShape,
    /// Set if other ranks have the same key heads: index and number of the elements on this rank among all
    /// keys.
    replicated: Option<(usize, usize)>,
    qk_norm: Option<QkNorm>,
    sinks: Option<ParameterId>,
    mask: AttentionMask,
    rotation: Option<HeadRotation>,
    has_query_scales: bool,
}

impl Attention {
    /// Declares the parameters.
    pub fn declare(declaration: &mut Declaration, spec: &AttentionSpec) -> Self {
        let AttentionSpec { hidden, heads, kv_heads, head_dim, init, .. } = *spec;
        let tp_rank = declaration.tp_rank();
        let (queries, keys) = (
            AxisPartition::heads(heads, head_dim, tp_rank.size),
            AxisPartition::heads(kv_heads, head_dim, tp_rank.size),
        );
        let shape = AttentionShape {
            heads: queries.len(tp_rank.rank) / head_dim,
            kv_heads: keys.len(tp_rank.rank) / head_dim,
            head_dim,
            scale: spec.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt()),
            is_causal: spec.mask.is_causal(),
        };
        let mut latent = None;
        let projections = match &spec.qkv {
            QkvNames::Latent(spec) => {
                latent = Some(Latent::declare(declaration, spec, hidden, init));
                Vec::new()
            }
            // fused weight rows are all queries, all keys, all values, each sharded by heads
            QkvNames::Fused(name) => {
                let [q, kv] = [heads * head_dim, kv_heads * head_dim];
                let (parts, sizes) =
                    (AxisPartition::joined(&[(&queries, q), (&keys, kv), (&keys, kv)]), [q + 2 * kv, hidden]);
                vec![(Linear::declare_column_parallel(declaration, name, sizes, true, init, &parts), 0)]
            }
            QkvNames::Separate(names) => {
                let mut first = 0;
                let widths = [(heads, &queries), (kv_heads, &keys), (kv_heads, &keys)];
                let mut declare =
                    |((name, has_bias), (heads, parts)): (&(String, bool), (usize, &AxisPartition))| {
                        let sizes = [heads * head_dim, hidden];
                        let layer =
                            Linear::declare_column_parallel(declaration, name, sizes, *has_bias, init, parts);
                        first += layer.outputs();
                        (layer, first - layer.outputs())
                    };
                names.iter().zip(widths).map(&mut declare).collect()
            }
        };
        let value_dim = latent.as_ref().map_or(head_dim, |latent| latent.shape().value);
        let values = AxisPartition::heads(heads, value_dim, tp_rank.size);
        let ((name, has_bias), sizes) = (&spec.output, [hidden, heads * value_dim]);
        let output = Linear::declare_row_parallel(declaration, name, sizes, *has_bias, init, &values);
        let qk_norm = spec.qk_norm.as_ref().map(|norm| QkNorm::declare(declaration, norm, &shape));
        let of_heads = (0, &AxisPartition::heads(heads, 1, tp_rank.size));
        let sinks = spec.sinks.as_ref().map(|name| declaration.add_cut(name, &[heads], init, of_heads));
        // several ranks share a key head only if there are fewer heads than ranks
        let replicated = (tp_rank.size > kv_heads).then(|| (keys.first(tp_rank.rank), kv_heads * head_dim));
        let AttentionSpec { mask, rotation, has_query_scales, .. } = *spec;
        Self {
            projections,
            latent,
            output,
            shape,
            replicated,
            qk_norm,
            sinks,
            mask,
            rotation,
            has_query_scales,
        }
    }

    /// Rotates queries and keys and scales queries, if configured; scales query gradients in the same way.
    fn rotate<D: Device>(
        &self,
        device: &D,
        context: &LayerContext<D>,
        rotation: Rotation,
        qkv: &mut Tensor<D>,
    ) -> Result<()> {
        let (AttentionShape { heads, kv_heads, head_dim, .. }, stride) = (self.shape, self.shape.row());
        if let Some(HeadRotation { width, is_interleaved }) = self.rotation {
            let shape =
                RopeShape { heads: heads + kv_heads, head_dim, rotated: width, is_interleaved, stride };
            device.rope(rotation, shape, context.angles(self.mask.has_windows())?, qkv)?;
        }
        if let Some((scales, zeros)) = context.query_scales.as_ref().filter(|_| self.has_query_scales) {
            // a rotation without an angle, of all pairs of columns by one factor
            let shape = RopeShape {
                heads: heads * head_dim / 2,
                head_dim: 2,
                rotated: 2,
                is_interleaved: true,
                stride,
            };
            device.rope(rotation, shape, (scales, zeros), qkv)?;
        }
        Ok(())
    }

    fn segments<'a, D: Device>(&self, context: &'a LayerContext<D>) -> &'a Segments<D> {
        match &context.windows {
            Some(windows) if self.mask.has_windows() => windows,
            _ => &context.segments,
        }
    }

    /// Computes attention over rows, which are saved.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, context) = (pass.device, &pass.context.layers);
        let rows = context.rows;
        let mut qkv = self.project(pass, &x, saved)?;
        if self.qk_norm.as_ref().is_none_or(QkNorm::is_after_rotation) {
            self.rotate(device, context, Rotation::Forward, &mut qkv)?;
        }
        let normal = match &self.qk_norm {
            Some(norm) => Some(self.normalize(norm, (device, &pass.parameters), context, &qkv)?.0),
            None => None,
        };
        let mut output = device.alloc(rows * self.shape.output())?;
        let mut log_sums = device.alloc_as(Dtype::F32, rows * self.shape.heads)?;
        let heads = normal.as_ref().unwrap_or(&qkv);
        device.attention(&self.shape, self.segments(context), heads, &mut output, &mut log_sums)?;
        if let Some(sinks) = self.sinks {
            let sinks = pass.parameters.value(sinks);
            device.attention_sinks(&self.shape, sinks, &mut output, &mut log_sums)?;
        }
        let y = match &self.latent {
            Some(latent) => self.output.forward(pass, &latent.narrow(device, &output)?, rows)?,
            None => self.output.forward(pass, &output, rows)?,
        };
        // normalized heads are computed again in backward
        for buffer in [x, qkv, output, log_sums] {
            saved.keep(buffer);
        }
        Ok(y)
    }

    /// Computes queries, keys and values; latent projections also rotate them.
    fn project<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        if let Some(latent) = &self.latent {
            return latent.forward(pass, x, saved);
        }
        let rows = pass.context.layers.rows;
        let mut qkv = pass.device.alloc(rows * self.shape.row())?;
        for (layer, first) in &self.projections {
            let columns = Columns { first: *first, stride: self.shape.row() };
            layer.forward_into(pass, x, rows, &mut qkv, columns)?;
        }
        Ok(qkv)
    }

    /// Returns normalized heads, rotated unless already rotated, and inverse root mean squares.
    fn normalize<D: Device>(
        &self,
        norm: &QkNorm,
        (device, parameters): (&D, &Parameters<D>),
        context: &LayerContext<D>,
        qkv: &Tensor<D>,
    ) -> Result<(Tensor<D>, [Tensor<D>; 2])> {
        let mut normal = device.copy(qkv)?;
        let inverses = norm.normalize(device, parameters, &mut normal)?;
        if !norm.is_after_rotation() {
            self.rotate(device, context, Rotation::Forward, &mut normal)?;
        }
        Ok((normal, inverses))
    }

    /// Accumulates parameter gradients and returns the row gradient.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, context) = (pass.device, &pass.context.layers);
        let rows = context.rows;
        let (log_sums, output) = (saved.take(), saved.take());
        let (qkv, x) = (saved.take(), saved.take());
        let mut d_output = self.output.backward_input(pass, dy, rows)?;
        if let Some(latent) = &self.latent {
            d_output = latent.widen(device, &d_output)?;
        }
        let forward = (&output, &log_sums);
        if let Some((sinks, Some(gradient))) = self.sinks.map(|sinks| pass.parameters.both(sinks)) {
            device.attention_sinks_backward(&self.shape, sinks, forward, &d_output, gradient)?;
        }
        let segments = self.segments(context);
        let normal = match &self.qk_norm {
            Some(norm) => Some(self.normalize(norm, (device, pass.parameters), context, &qkv)?),
            None => None,
        };
        let heads = normal.as_ref().map_or(&qkv, |(normal, _)| normal);
        let mut d_qkv = device.attention_backward(&self.shape, segments, heads, forward, &d_output)?;
        let output = match &self.latent {
            Some(latent) => latent.narrow(device, &output)?,
            None => output,
        };
        self.output.backward_weight(pass, output, dy, rows)?;
        if let Some(latent) = &self.latent {
            return latent.backward(pass, x, &d_qkv, saved);
        }
        let is_rotated_last = self.qk_norm.as_ref().is_none_or(|norm| !norm.is_after_rotation());
        if is_rotated_last {
            self.rotate(device, context, Rotation::Backward, &mut d_qkv)?;
        }
        if let (Some(norm), Some((_, inverses))) = (&self.qk_norm, &normal) {
            norm.backward(pass, &qkv, inverses, &mut d_qkv)?;
        }
        drop(normal);
        if !is_rotated_last {
            self.rotate(device, context, Rotation::Backward, &mut d_qkv)?;
        }
        // reuses the buffer if all heads together are as wide as the model
        let mut dx = d_output;
        if dx.len() != x.len() {
            dx = device.alloc(x.len())?;
        }
        let columns = |first: usize| Columns { first, stride: self.shape.row() };
        for (index, (layer, first)) in self.projections.iter().enumerate() {
            layer.backward_into(pass, &d_qkv, rows, columns(*first), index > 0, &mut dx)?;
        }
        tensor_parallel::all_reduce(pass.tensor, &mut dx)?;
        // Only after the input gradient, which sums over ranks: summing keys and values first would count
        // copied heads several times.
        self.sum_replicas(pass, &mut d_qkv)?;
        let layers = self.projections.iter().map(|(layer, first)| layer.weights(columns(*first))).collect();
        Linear::backward_weights(layers, pass, (x, d_qkv), rows)?;
        Ok(dx)
    }

    /// Sums key and value gradients over the ranks that have the same heads.
    fn sum_replicas<D: Device>(&self, pass: &BackwardPass<'_, D>, d_qkv: &mut Tensor<D>) -> Result<()> {
        let (Some((first, keys)), Some(tensor)) = (self.replicated, pass.tensor) else { return Ok(()) };
        if d_qkv.is_empty() {
            return Ok(());
        }
        let (device, rows) = (pass.device, pass.context.layers.rows);
        let (row, own) = (self.shape.row(), self.shape.kv_heads * self.shape.head_dim);
        // first key and value columns on this rank, in a row of this rank and in a row of all heads
        let places = [(row - 2 * own, first), (row - own, keys + first)];
        let columns = |first, stride| Columns { first, stride };
        let mut all = device.alloc_as(Dtype::F32, rows * 2 * keys)?;
        device.zero(&mut all)?;
        for (here, there) in places {
            device.copy_columns(d_qkv, columns(here, row), own, &mut all, columns(there, 2 * keys))?;
        }
        tensor.group.all_reduce(tensor.at, &mut all)?;
        for (here, there) in places {
            device.copy_columns(&all, columns(there, 2 * keys), own, d_qkv, columns(here, row))?;
        }
        Ok(())
    }
}
