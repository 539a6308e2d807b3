//! Sums over rows, in two passes: sequentially over the rows in each part, then over parts.

use dflop_device::{Dtype, Result, Tensor};

use super::THREADS;
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Maximum number of row parts that are summed in parallel.
const PARTS_MAX: usize = 256;
/// Number of rows in a part, unless there are too many parts.
const ROWS_PER_PART: usize = 32;

/// Row parts.
#[derive(Clone, Copy)]
pub(super) struct Parts {
    /// Number of parts.
    pub(super) count: usize,
    /// Number of rows per part.
    pub(super) rows: usize,
}

impl Parts {
    /// Cuts rows into parts, based only on the number of rows.
    pub(super) fn of(rows: usize) -> Self {
        let per_part = rows.div_ceil(PARTS_MAX).max(ROWS_PER_PART);
        Self { count: rows.div_ceil(per_part), rows: per_part }
    }

    /// Returns a grid with a thread for every column and part.
    pub(super) fn grid(self, columns: usize) -> Grid {
        Grid::blocks(columns.div_ceil(THREADS as usize), THREADS).by(self.count)
    }
}

impl Cuda {
    /// Allocates part sums, `[parts, width]`.
    pub(super) fn alloc_parts(&self, parts: usize, width: usize) -> Result<Tensor<Self>> {
        Ok(self.allocate(Dtype::F32, parts * width)?)
    }

    /// Adds the column sums in all parts to a tensor.
    ///
    /// - `sums`: `[parts, columns]`
    pub(super) fn finish_sums(
        &self,
        parts: usize,
        sums: &Tensor<Self>,
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        let columns = into.len();
        self.finish_columns(parts, (sums, 0, columns), into, None)
    }

    /// Adds the column sums for the first columns in all parts to a tensor, and the sums for the remaining
    /// columns to a second tensor.
    ///
    /// - `sums`: `[parts, columns]`, with as many columns as both tensors have elements
    pub(super) fn finish_two_sums(
        &self,
        parts: usize,
        sums: &Tensor<Self>,
        (into, others): (&mut Tensor<Self>, &mut Tensor<Self>),
    ) -> Result<()> {
        let (columns, stride) = (into.len(), into.len() + others.len());
        if into.dtype() == others.dtype() {
            return self.finish_columns(parts, (sums, 0, stride), into, Some(others));
        }
        self.finish_columns(parts, (sums, 0, stride), into, None)?;
        self.finish_columns(parts, (sums, columns, stride), others, None)
    }

    /// Adds the column sums from `first` on, in parts with `stride` columns.
    fn finish_columns(
        &self,
        parts: usize,
        (sums, first, stride): (&Tensor<Self>, usize, usize),
        into: &mut Tensor<Self>,
        others: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (columns, others_columns) = (into.len(), others.as_ref().map_or(0, |others| others.len()));
        let macros = Macros::types(&[Dtype::F32, into.dtype()]);
        // a warp for every part, up to the number of warps in a block
        let threads = 32 * parts.clamp(1, 32) as u32;
        let grid = Grid::blocks((columns + others_columns).div_ceil(32), threads);
        let address = sums.address() + (first * Dtype::F32.bytes()) as u64;
        let arguments = Arguments::default().address(address).write(into).write_if(others);
        let arguments = arguments.int(columns).int(others_columns).int(stride).int(parts);
        self.launch(Source::ColumnSums, "column_sums_finish", macros, grid, arguments)
    }
}
