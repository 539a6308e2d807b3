//! The attention of a layer: projections, rotation, attention, output projection.

use super::context::LayerContext;
use super::linear::Linear;
use super::parameters::{Declaration, Init};
use super::{BackwardPass, Pass, Saved};
use crate::device::Device;
use crate::error::Result;
use crate::ops::attention::AttentionShape;
use crate::ops::bias::Columns;
use crate::ops::rope::{RopeShape, Turn};

/// Which tokens a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// Itself and those before it in its sample.
    Causal,
    /// All of its picture or clip.
    Full,
    /// All of its window.
    Window,
}

/// How queries, keys and values are named and stored.
#[derive(Debug, Clone, PartialEq)]
pub enum QkvNames {
    /// Three layers, each with or without a bias.
    Apart([(String, bool); 3]),
    /// One layer, with a bias.
    Together(String),
}

/// What an attention is made of.
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
    /// Who sees whom.
    pub sight: Sight,
    /// Whether queries and keys are rotated.
    pub is_rotated: bool,
    /// Beginning of the matrices.
    pub init: Init,
}

/// The attention of a layer.
#[derive(Debug)]
pub struct Attention {
    /// Each with its first column in a row of queries, keys and values.
    projections: Vec<(Linear, usize)>,
    output: Linear,
    shape: AttentionShape,
    sight: Sight,
    is_rotated: bool,
}

impl Attention {
    /// Declares the parameters.
    pub fn declare(declaration: &mut Declaration, spec: &AttentionSpec) -> Self {
        let AttentionSpec { hidden, heads, kv_heads, head_dim, .. } = *spec;
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            is_causal: spec.sight == Sight::Causal,
        };
        let projections = match &spec.qkv {
            QkvNames::Together(name) => {
                vec![(Linear::declare(declaration, name, [shape.row(), hidden], true, spec.init), 0)]
            }
            QkvNames::Apart(names) => {
                let mut first = 0;
                let widths = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
                let mut declare = |((name, has_bias), width): (&(String, bool), usize)| {
                    let layer = Linear::declare(declaration, name, [width, hidden], *has_bias, spec.init);
                    first += width;
                    (layer, first - width)
                };
                names.iter().zip(widths).map(&mut declare).collect()
            }
        };
        let (name, has_bias) = &spec.output;
        let output = Linear::declare(declaration, name, [hidden, shape.output()], *has_bias, spec.init);
        Self { projections, output, shape, sight: spec.sight, is_rotated: spec.is_rotated }
    }

    fn rope(&self) -> RopeShape {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        RopeShape { heads: heads + kv_heads, head_dim, stride: self.shape.row() }
    }

    fn segments<'a, D: Device>(&self, context: &'a LayerContext<D>) -> &'a [u32] {
        if self.sight == Sight::Window { &context.windows } else { &context.segments }
    }

    /// Computes the attention of rows, which are kept.
    pub fn forward<D: Device>(
        &self,
        pass: &Pass<'_, D>,
        x: D::Floats,
        saved: &mut Saved<D>,
    ) -> Result<D::Floats> {
        let (device, context) = (pass.device, &pass.context.layers);
        let rows = context.rows;
        let mut qkv = device.alloc(rows * self.shape.row())?;
        for (layer, first) in &self.projections {
            let columns = Columns { first: *first, stride: self.shape.row() };
            layer.forward_into(pass, &x, rows, &mut qkv, columns)?;
        }
        if self.is_rotated {
            device.rope(Turn::Forward, self.rope(), context.angles()?, &mut qkv)?;
        }
        let mut output = device.alloc(rows * self.shape.output())?;
        let mut log_sums = device.alloc(rows * self.shape.heads)?;
        device.attention(&self.shape, self.segments(context), &qkv, &mut output, &mut log_sums)?;
        let y = self.output.forward(pass, &output, rows)?;
        for buffer in [x, qkv, output, log_sums] {
            saved.keep(buffer);
        }
        Ok(y)
    }

    /// Adds the gradients of the parameters and returns that of the rows.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &D::Floats,
        saved: &mut Saved<D>,
    ) -> Result<D::Floats> {
        let (device, context) = (pass.device, &pass.context.layers);
        let rows = context.rows;
        let (log_sums, output) = (saved.take(), saved.take());
        let (qkv, x) = (saved.take(), saved.take());
        let d_output = self.output.backward(pass, &output, dy, rows)?;
        let forward = (&output, &log_sums);
        let segments = self.segments(context);
        let mut d_qkv = device.attention_backward(&self.shape, segments, &qkv, forward, &d_output)?;
        if self.is_rotated {
            device.rope(Turn::Backward, self.rope(), context.angles()?, &mut d_qkv)?;
        }
        let mut dx = d_output;
        if crate::device::Buffer::len(&dx) != crate::device::Buffer::len(&x) {
            dx = device.alloc(crate::device::Buffer::len(&x))?;
        }
        for (index, (layer, first)) in self.projections.iter().enumerate() {
            let columns = Columns { first: *first, stride: self.shape.row() };
            layer.backward_weights(device, pass.parameters, &x, &d_qkv, rows, columns)?;
            layer.backward_into(pass, &d_qkv, rows, columns, index > 0, &mut dx)?;
        }
        Ok(dx)
    }
}
