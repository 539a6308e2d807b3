//! Attention sinks.

use dflop_device::ops::attention::AttentionShape;
use dflop_device::ops::attention_sinks::AttentionSinks;
use dflop_device::{Dtype, Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, same_type};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Number of warps in a block.
const WARPS: usize = THREADS as usize / 32;

/// Checks the shapes in a forward pass.
fn check(shape: &AttentionShape, sinks: &Tensor<Cuda>, output: &Tensor<Cuda>, log_sums: &Tensor<Cuda>) {
    assert_eq!(sinks.len(), shape.heads, "every head has a sink");
    assert_eq!(output.len(), log_sums.len() * shape.head_dim, "every row of every head has its sum");
    assert_eq!(log_sums.dtype(), Dtype::F32, "sums are `f32`");
}

impl AttentionSinks for Cuda {
    fn attention_sinks(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        check(shape, sinks, output, log_sums);
        let macros = Macros::types(&[same_type(&[sinks, output])]);
        let grid = Grid::blocks(log_sums.len().div_ceil(WARPS), THREADS);
        let arguments = Arguments::default().read(sinks).write(output).write(log_sums);
        let arguments = arguments.long(log_sums.len()).int(shape.heads).int(shape.head_dim);
        self.launch(Source::AttentionSinks, "attention_sinks", macros, grid, arguments)
    }

    fn attention_sinks_backward(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()> {
        check(shape, sinks, output, log_sums);
        assert!(d_output.len() == output.len() && d_sinks.len() == sinks.len(), "shapes agree");
        let tokens = log_sums.len() / shape.heads;
        let parts = Parts::of(tokens);
        let mut sums = self.alloc_parts(parts.count, shape.heads)?;
        let macros = Macros::types(&[same_type(&[sinks, output, d_output])]);
        let grid = Grid::blocks(shape.heads.div_ceil(WARPS), THREADS).by(parts.count);
        let arguments = Arguments::default().read(sinks).read(output).read(log_sums).read(d_output);
        let arguments = arguments.write(&mut sums).long(tokens).int(shape.heads).int(shape.head_dim);
        let name = "attention_sinks_backward";
        self.launch(Source::AttentionSinks, name, macros, grid, arguments.int(parts.rows))?;
        self.finish_sums(parts.count, &sums, d_sinks)
    }
}
