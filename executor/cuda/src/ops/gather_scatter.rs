//! Row selection and weighted row sums.

use dflop_device::ops::gather_scatter::GatherScatter;
use dflop_device::{Result, SparseBuffers, Tensor};

use super::THREADS;
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

impl GatherScatter for Cuda {
    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &Tensor<Self>,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        let SparseBuffers { targets, starts, sources, weights } = matrix;
        let threads = columns.next_multiple_of(32).clamp(32, THREADS as usize);
        let grid = Grid::blocks(targets.len(), threads as u32).by(columns.div_ceil(threads).clamp(1, 64));
        let weights = if weights.is_empty() { 0 } else { weights.address() };
        let arguments = Arguments::default().read(targets).read(starts).read(sources).address(weights);
        let arguments = arguments.read(x).write(y).int(columns);
        let macros = Macros::types(&[x.dtype(), y.dtype()]);
        self.launch(Source::GatherScatter, "gather_scatter", macros, grid, arguments)
    }
}
