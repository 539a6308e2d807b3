//! Projections for multi-head latent attention: queries, keys and values through narrow latent rows.
//!
//! Each tensor-parallel rank has some heads, and computes latent rows for all heads; latent gradients are
//! summed over ranks.
//!
//! # Source
//! DeepSeek-AI: "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1.

use super::linear::Linear;
use super::norm::{Norm, NormKind};
use crate::block::{BackwardPass, ForwardPass, SavedActivations, tensor_parallel};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{AxisPartition, Init};
use dflop_device::ops::bias::Columns;
use dflop_device::ops::latent_heads::LatentShape;
use dflop_device::{Device, Tensor};

/// Projection sizes and names.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentSpec {
    /// Sizes for all heads.
    pub shape: LatentShape,
    /// Query projections.
    pub queries: LatentQueries,
    /// Names for the key and value projections.
    pub keys_values: LatentNames,
    /// Width of the latent key and value rows.
    pub rank: usize,
    /// Epsilon under the root in the norms.
    pub epsilon: f64,
    /// Whether the projections to latent rows have biases.
    pub has_bias: bool,
}

/// Query projections.
#[derive(Debug, Clone, PartialEq)]
pub enum LatentQueries {
    /// A single projection with this name.
    Direct(String),
    /// Projection through latent rows with this width.
    Latent(LatentNames, usize),
}

/// Names for projections through latent rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LatentNames {
    /// Projection to the latent rows.
    pub down: String,
    /// Latent row norm.
    pub norm: String,
    /// Projection to the heads.
    pub up: String,
}

/// Norm and projection for latent rows.
#[derive(Debug)]
struct Up {
    norm: Norm,
    linear: Linear,
    rank: usize,
}

impl Up {
    fn declare(
        declaration: &mut Declaration,
        names: &LatentNames,
        [outputs, rank]: [usize; 2],
        spec: &LatentSpec,
        (init, parts): (Init, &AxisPartition),
    ) -> Self {
        let norm = Norm::declare(declaration, &names.norm, NormKind::Rms, rank, spec.epsilon);
        let linear =
            Linear::declare_column_parallel(declaration, &names.up, [outputs, rank], false, init, parts);
        Self { norm, linear, rank }
    }

    /// Computes heads from latent rows, which are saved.
    fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        low: Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (normal, statistics) = self.norm.forward(pass, &low)?;
        let heads = self.linear.forward(pass, &normal, rows)?;
        for buffer in [low, statistics, normal] {
            saved.keep(buffer);
        }
        Ok(heads)
    }

    /// Returns the latent row gradient.
    fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        d_heads: &Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (normal, statistics, low) = (saved.take(), saved.take(), saved.take());
        let mut d_normal = self.linear.backward(pass, normal, d_heads, rows)?;
        tensor_parallel::all_reduce(pass.tensor, &mut d_normal)?;
        let mut d_low = pass.device.zeros(rows * self.rank)?;
        self.norm.backward(pass, &d_normal, &low, &statistics, Some(&mut d_low))?;
        Ok(d_low)
    }
}

/// Query projections.
#[derive(Debug)]
enum Queries {
    Direct(Linear),
    Latent(Linear, Up),
}

/// Latent attention projections.
#[derive(Debug)]
pub(crate) struct Latent {
    queries: Queries,
    /// Projection to the latent rows, followed by the rotated key part.
    down: Linear,
    up: Up,
    /// Head sizes on this rank.
    shape: LatentShape,
    rank: usize,
    hidden: usize,
}

impl Latent {
    /// Declares the parameters.
    pub(crate) fn declare(
        declaration: &mut Declaration,
        spec: &LatentSpec,
        hidden: usize,
        init: Init,
    ) -> Self {
        let LatentSpec { shape, rank, has_bias, .. } = *spec;
        let tp_rank = declaration.tp_rank();
        let heads = |width: usize| AxisPartition::heads(shape.heads, width, tp_rank.size);
        let (width, parts) = (shape.heads * shape.head_dim(), heads(shape.head_dim()));
        let queries = match &spec.queries {
            LatentQueries::Direct(name) => {
                let sizes = [width, hidden];
                Queries::Direct(Linear::declare_column_parallel(
                    declaration,
                    name,
                    sizes,
                    false,
                    init,
                    &parts,
                ))
            }
            LatentQueries::Latent(names, rank) => {
                let down = Linear::declare(declaration, &names.down, [*rank, hidden], has_bias, init);
                let up = Up::declare(declaration, names, [width, *rank], spec, (init, &parts));
                Queries::Latent(down, up)
            }
        };
        let names = &spec.keys_values;
        let sizes = [rank + shape.rotated, hidden];
        let down = Linear::declare(declaration, &names.down, sizes, has_bias, init);
        let (width, parts) = (shape.keys_values(), heads(shape.plain + shape.value));
        let up = Up::declare(declaration, names, [width, rank], spec, (init, &parts));
        let held = heads(1).len(tp_rank.rank);
        Self { queries, down, up, shape: LatentShape { heads: held, ..shape }, rank, hidden }
    }

    /// Returns the head sizes on this rank.
    pub(crate) const fn shape(&self) -> &LatentShape {
        &self.shape
    }

    /// Returns the latent row columns and the rotated key columns in the projected rows.
    fn columns(&self) -> [Columns; 2] {
        let stride = self.rank + self.shape.rotated;
        [Columns { first: 0, stride }, Columns { first: self.rank, stride }]
    }

    /// Computes rotated queries and keys, and values.
    pub(crate) fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, rows) = (pass.device, pass.context.layers.rows);
        let queries = match &self.queries {
            Queries::Direct(linear) => linear.forward(pass, x, rows)?,
            Queries::Latent(down, up) => up.forward(pass, down.forward(pass, x, rows)?, rows, saved)?,
        };
        let [latent, rotated] = self.columns();
        let joined = self.down.forward(pass, x, rows)?;
        let mut low = device.alloc(rows * self.rank)?;
        device.copy_columns(&joined, latent, self.rank, &mut low, Columns::all(self.rank))?;
        let keys_values = self.up.forward(pass, low, rows, saved)?;
        let mut qkv = device.alloc(rows * self.shape.row())?;
        let angles = pass.context.layers.angles(false)?;
        device.latent_heads(&self.shape, [&queries, &keys_values], (&joined, rotated), angles, &mut qkv)?;
        Ok(qkv)
    }

    /// Accumulates parameter gradients and returns the row gradient, summed over ranks.
    pub(crate) fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        x: Tensor<D>,
        d_qkv: &Tensor<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, rows, shape) = (pass.device, pass.context.layers.rows, &self.shape);
        let mut d_queries = device.alloc(rows * shape.heads * shape.head_dim())?;
        let mut d_keys_values = device.alloc(rows * shape.keys_values())?;
        let (mut d_rotated, all) = (device.alloc(rows * shape.rotated)?, Columns::all(shape.rotated));
        let d_inputs = [&mut d_queries, &mut d_keys_values];
        let angles = pass.context.layers.angles(false)?;
        device.latent_heads_backward(shape, d_qkv, angles, d_inputs, (&mut d_rotated, all))?;
        tensor_parallel::all_reduce(pass.tensor, &mut d_rotated)?;
        let d_low = self.up.backward(pass, &d_keys_values, rows, saved)?;
        drop(d_keys_values);
        let [latent, rotated] = self.columns();
        let mut d_joined = device.alloc(rows * latent.stride)?;
        device.copy_columns(&d_low, Columns::all(self.rank), self.rank, &mut d_joined, latent)?;
        device.copy_columns(&d_rotated, all, shape.rotated, &mut d_joined, rotated)?;
        let mut dx = device.alloc(rows * self.hidden)?;
        match &self.queries {
            Queries::Direct(linear) => {
                linear.backward_into(
                    pass,
                    &d_queries,
                    rows,
                    Columns::all(linear.outputs()),
                    false,
                    &mut dx,
                )?;
                // each rank has a part of all queries
                tensor_parallel::all_reduce(pass.tensor, &mut dx)?;
                linear.backward_weight(pass, device.copy(&x)?, &d_queries, rows)?;
            }
            Queries::Latent(down, up) => {
                let d_low = up.backward(pass, &d_queries, rows, saved)?;
                down.backward_into(pass, &d_low, rows, Columns::all(up.rank), false, &mut dx)?;
                down.backward_weight(pass, device.copy(&x)?, &d_low, rows)?;
            }
        }
        self.down.backward_into(pass, &d_joined, rows, Columns::all(latent.stride), true, &mut dx)?;
        self.down.backward_weight(pass, x, &d_joined, rows)?;
        Ok(dx)
    }

    /// Cuts the zeros off the values of each head.
    pub(crate) fn narrow<D: Device>(&self, device: &D, output: &Tensor<D>) -> Result<Tensor<D>> {
        let (wide, narrow) = (Columns::all(self.shape.head_dim()), Columns::all(self.shape.value));
        let mut values = device.alloc(output.len() / wide.stride * narrow.stride)?;
        device.copy_columns(output, wide, narrow.stride, &mut values, narrow)?;
        Ok(values)
    }

    /// Pads the value gradients of each head with zeros.
    pub(crate) fn widen<D: Device>(&self, device: &D, d_values: &Tensor<D>) -> Result<Tensor<D>> {
        let (wide, narrow) = (Columns::all(self.shape.head_dim()), Columns::all(self.shape.value));
        let mut d_output = device.zeros(d_values.len() / narrow.stride * wide.stride)?;
        device.copy_columns(d_values, narrow, narrow.stride, &mut d_output, wide)?;
        Ok(d_output)
    }
}
