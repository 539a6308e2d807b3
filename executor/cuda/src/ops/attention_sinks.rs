//! Sinks of attention.

use dflop_device::ops::attention_sinks::AttentionSinks;
use dflop_device::ops::bias::{Biases, Columns};
use dflop_device::{Dtype, Result, Tensor};

use super::{THREADS, same_type};
use crate::compiler::Source;
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};
use crate::kernels::Macros;

/// Checks shapes, and returns the width of a head.
fn head_dim(sinks: &Tensor<Cuda>, output: &Tensor<Cuda>, log_sums: &Tensor<Cuda>) -> usize {
    let (rows, heads) = (log_sums.len(), sinks.len());
    let head_dim = output.len() / rows.max(1);
    let fits = rows.is_multiple_of(heads.max(1)) && output.len() == rows * head_dim;
    assert!(fits && log_sums.dtype() == Dtype::F32, "every head has a sum");
    head_dim
}

/// One warp for every row.
fn by_warps(rows: usize) -> Grid {
    Grid::blocks((32 * rows).div_ceil(THREADS as usize), THREADS)
}

impl AttentionSinks for Cuda {
    fn attention_sinks(
        &self,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let head_dim = head_dim(sinks, output, log_sums);
        let (rows, macros) = (log_sums.len(), Macros::types(&[same_type(&[sinks, output])]));
        let arguments = Arguments::default().read(sinks).write(output).write(log_sums);
        let arguments = arguments.long(rows).int(sinks.len()).int(head_dim);
        self.launch(Source::AttentionSinks, "attention_sinks", macros, by_warps(rows), arguments)
    }

    fn attention_sinks_backward(
        &self,
        sinks: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()> {
        let head_dim = head_dim(sinks, output, log_sums);
        assert!(output.len() == d_output.len() && sinks.len() == d_sinks.len(), "shapes agree");
        let (rows, macros) = (log_sums.len(), Macros::types(&[same_type(&[sinks, output, d_output])]));
        let mut terms = self.allocate(Dtype::F32, rows)?;
        let arguments = Arguments::default().read(sinks).read(output).read(log_sums).read(d_output);
        let arguments = arguments.write(&mut terms).long(rows).int(sinks.len()).int(head_dim);
        self.launch(Source::AttentionSinks, "attention_sinks_backward", macros, by_warps(rows), arguments)?;
        self.bias_backward(&terms, Columns::all(sinks.len()), d_sinks)
    }
}
