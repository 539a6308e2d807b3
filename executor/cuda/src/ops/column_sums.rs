//! Sums over rows, in two passes: rows of a part one after another, then parts.

use dflop_device::{Dtype, Result, Tensor};

use super::THREADS;
use crate::compiler::Source;
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};
use crate::kernels::Macros;

/// Most parts of rows that are summed beside each other.
const PARTS_MAX: usize = 256;
/// Rows of a part, unless there are too many parts.
const ROWS_PER_PART: usize = 32;

/// Parts of rows.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// Number of parts.
    pub(super) count: usize,
    /// Rows of each.
    pub(super) rows: usize,
}

impl Parts {
    /// Cuts rows into parts, by their number alone.
    pub(super) fn of(rows: usize) -> Self {
        let per_part = rows.div_ceil(PARTS_MAX).max(ROWS_PER_PART);
        Self { count: rows.div_ceil(per_part), rows: per_part }
    }

    /// One thread for every column and part.
    pub(super) fn grid(self, columns: usize) -> Grid {
        Grid::blocks(columns.div_ceil(THREADS as usize), THREADS).by(self.count)
    }
}

impl Cuda {
    /// Allocates the sums of parts, `[parts, width]`.
    pub(super) fn alloc_parts(&self, parts: Parts, width: usize) -> Result<Tensor<Self>> {
        Ok(self.allocate(Dtype::F32, parts.count * width)?)
    }

    /// Adds the sums of columns of all parts to a tensor.
    ///
    /// - `sums`: `[parts, stride]`, from this column on
    pub(super) fn finish_sums(
        &self,
        parts: Parts,
        (sums, first, stride): (&Tensor<Self>, usize, usize),
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        let columns = into.len();
        let grid = Grid::blocks(columns.div_ceil(THREADS as usize), THREADS);
        let address = crate::address::Address::address(sums) + (first * Dtype::F32.bytes()) as u64;
        let arguments = Arguments::default().address(address).write(into);
        let arguments = arguments.int(columns).int(stride).int(parts.count);
        let macros = Macros::types(&[Dtype::F32, into.dtype()]);
        self.launch(Source::ColumnSums, "column_sums_finish", macros, grid, arguments)
    }
}
