//! Attention of a layer: query, key and value projections, norms of queries and keys, rotation, attention,
//! output projection.
//!
//! Each rank of a tensor-parallel group has some query heads, and the key and value heads that these read. If
//! there are fewer key heads than ranks, several ranks share one: they sum its gradients before computing
//! those of the weights, so that copies of weights have the same gradients.

use super::context::LayerContext;
use super::declaration::Declaration;
use super::latent::{Latent, LatentSpec};
use super::linear::Linear;
use super::parameters::Parameters;
use super::qk_norm::{QkNorm, QkNormSpec};
use crate::block::{BackwardPass, ForwardPass, SavedActivations};
use crate::error::Result;
use crate::tensor_parallel;
use crate::weights::{AxisPartition, Init, ParameterId};
use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::rope::{RopeShape, Rotation};
use dflop_device::{Device, Dtype, Segments, Tensor};

/// Tokens that a token attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// Itself and earlier tokens of its sample.
    Causal,
    /// All tokens of its image or audio clip.
    Full,
    /// All tokens of its window.
    Window,
    /// Itself and earlier tokens of its window.
    CausalWindow,
}

impl AttentionMask {
    /// Returns whether tokens attend to themselves and earlier tokens alone.
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

/// Names and storage of queries, keys and values.
#[derive(Debug, Clone, PartialEq)]
pub enum QkvNames {
    /// Three layers, each with or without a bias.
    Separate([(String, bool); 3]),
    /// One layer, with a bias.
    Fused(String),
    /// Through latent rows, for as many key heads as query heads.
    Latent(Box<LatentSpec>),
}

/// Columns of a head that are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRotation {
    /// Number of rotated columns of a head, from its first on.
    pub width: usize,
    /// Whether neighboring columns are rotated together, instead of columns half of the width apart.
    pub is_interleaved: bool,
}

impl HeadRotation {
    /// All columns of a head, in halves.
    #[must_use]
    pub const fn halves(width: usize) -> Self {
        Self { width, is_interleaved: false }
    }
}

/// Sizes, names and mask of an attention.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Width of the model.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Names of queries, keys and values.
    pub qkv: QkvNames,
    /// Name of the output projection, and whether it has a bias.
    pub output: (String, bool),
    /// Normalization of queries and keys, if there is any.
    pub qk_norm: Option<QkNormSpec>,
    /// Name of the sinks, a logit per query head that takes part in its softmax, if there are any.
    pub sinks: Option<String>,
    /// Factor on the scores; `None` for 1 / square root of the width of a head.
    pub scale: Option<f64>,
    /// Tokens that a token attends to.
    pub mask: AttentionMask,
    /// Rotation of queries and keys, if there is any.
    pub rotation: Option<HeadRotation>,
    /// Whether queries are scaled by their position, as [`LayerContext::query_scales`] has it.
    pub has_query_scales: bool,
    /// Initialization of the matrices.
    pub init: Init,
}

/// Attention of a layer.
#[derive(Debug)]
pub struct Attention {
    /// Projections, each with its first column in a row of queries, keys and values.
    projections: Vec<(Linear, usize)>,
    /// Projections through latent rows, in place of the others.
    latent: Option<Latent>,
    output: Linear,
    /// Shape of the heads on this rank.
    shape: AttentionShape,
    /// Set if other ranks have the same key heads: first element among all keys, and the number of these.
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
            // rows of the fused weight are all queries, all keys, all values, each sharded by heads
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

    /// Rotates queries and keys and scales queries, if the layer does; the gradient of a scaled query is
    /// scaled alike.
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

    /// Computes the attention of rows, which are saved.
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

    /// Computes queries, keys and values; those through latent rows are rotated.
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

    /// Returns normalized heads, rotated unless they were before, and their inverse root mean squares.
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

    /// Accumulates the gradients of the parameters and returns the gradient of the rows.
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
        // reuses the buffer where the width of the heads equals the width of the model
        let mut dx = d_output;
        if dx.len() != x.len() {
            dx = device.alloc(x.len())?;
        }
        let columns = |first: usize| Columns { first, stride: self.shape.row() };
        for (index, (layer, first)) in self.projections.iter().enumerate() {
            layer.backward_into(pass, &d_qkv, rows, columns(*first), index > 0, &mut dx)?;
        }
        tensor_parallel::all_reduce(pass.tensor, &mut dx)?;
        // Only after the input gradient, which sums the share of each rank: summing keys and values first
        // would count the shares of copied heads several times.
        self.sum_replicas(pass, &mut d_qkv)?;
        let layers = self.projections.iter().map(|(layer, first)| layer.weights(columns(*first))).collect();
        Linear::backward_weights(layers, pass, (x, d_qkv), rows)?;
        Ok(dx)
    }

    /// Sums the gradients of keys and values over the ranks that have the same heads.
    fn sum_replicas<D: Device>(&self, pass: &BackwardPass<'_, D>, d_qkv: &mut Tensor<D>) -> Result<()> {
        let (Some((first, keys)), Some(tensor)) = (self.replicated, pass.tensor) else { return Ok(()) };
        if d_qkv.is_empty() {
            return Ok(());
        }
        let (device, rows) = (pass.device, pass.context.layers.rows);
        let (row, own) = (self.shape.row(), self.shape.kv_heads * self.shape.head_dim);
        // first columns of own keys and values, in a row of this rank and in a row of all heads
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
