//! Sums, scalings, copies and transposes of complete tensors, and column biases.

#![expect(unsafe_code, reason = "zeros and copies take addresses")]

use dflop_device::ops::bias::{Biases, Columns};
use dflop_device::ops::elementwise::{CopyRange, Elementwise};
use dflop_device::ops::transpose::Transpose;
use dflop_device::{Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, same_type, width};
use crate::compiler::{Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Maximum number of ranges that are copied separately; more ranges are copied by a single kernel.
const SINGLE_COPIES_MAX: usize = 4;

impl Elementwise for Cuda {
    fn zero(&self, y: &mut Tensor<Self>) -> Result<()> {
        // SAFETY: the tensor has this many bytes, and is freed in the order of the same stream.
        Ok(unsafe { self.shared().compute.zero(y.address(), y.bytes() as usize) }?)
    }

    fn add(&self, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        assert_eq!(x.len(), y.len(), "summands have the same shape");
        let width = width(x.len(), &[x, y]);
        let macros = Macros::types(&[x.dtype(), y.dtype()]).number("WIDTH", width);
        let arguments = Arguments::default().read(x).write(y).long(x.len());
        self.launch(Source::Elementwise, "add", macros, Grid::elements(x.len(), width), arguments)
    }

    fn scale(&self, factor: f32, y: &mut Tensor<Self>) -> Result<()> {
        let width = width(y.len(), &[y]);
        let macros = Macros::types(&[y.dtype(), y.dtype()]).number("WIDTH", width);
        let arguments = Arguments::default().write(y).long(y.len()).float(factor);
        self.launch(Source::Elementwise, "scale", macros, Grid::elements(y.len(), width), arguments)
    }

    fn copy_ranges(&self, ranges: &[CopyRange], x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let dtype = same_type(&[x, y]);
        let is_inside =
            |range: &CopyRange| range.from + range.len <= x.len() && range.to + range.len <= y.len();
        assert!(ranges.iter().all(is_inside), "ranges lie in their tensors");
        if ranges.len() <= SINGLE_COPIES_MAX {
            let bytes = dtype.bytes();
            return ranges.iter().try_for_each(|&CopyRange { from, to, len }| {
                let (from, to) = (x.address() + (from * bytes) as u64, y.address() + (to * bytes) as u64);
                // SAFETY: the ranges are inside the tensors, as checked, and tensors never overlap.
                Ok(unsafe { self.shared().compute.copy(from, to, len * bytes) }?)
            });
        }
        let list: Vec<u64> = ranges
            .iter()
            .flat_map(|range| [range.from, range.to, range.len])
            .map(|place| place as u64)
            .collect();
        let longest = ranges.iter().map(|range| range.len).max().unwrap_or(0);
        let list = self.upload_longs(&list)?;
        let chunks = longest.div_ceil(THREADS as usize).clamp(1, 64);
        let grid = Grid::blocks(ranges.len(), THREADS).by(chunks);
        let arguments = Arguments::default().read(&list).read(x).write(y);
        self.launch(Source::CopyRanges, "copy_ranges", Macros::types(&[dtype]), grid, arguments)
    }
}

impl Biases for Cuda {
    fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()> {
        let Columns { first, stride } = columns;
        let is_inside = first + bias.len() <= stride && y.len().is_multiple_of(stride);
        assert!(is_inside, "columns lie in the rows");
        let rows = y.len() / stride;
        let macros = Macros::types(&[bias.dtype(), y.dtype()]);
        let arguments = Arguments::default().read(bias).write(y);
        let arguments = arguments.long(rows).int(bias.len()).int(first).int(stride);
        self.launch(Source::Bias, "bias_fill", macros, Grid::elements(rows * bias.len(), 1), arguments)
    }

    fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()> {
        let Columns { first, stride } = columns;
        let width = d_bias.len();
        assert!(first + width <= stride && dy.len().is_multiple_of(stride), "columns lie in the rows");
        let rows = dy.len() / stride;
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts.count, width)?;
        let macros = Macros::types(&[dy.dtype(), d_bias.dtype()]);
        let arguments = Arguments::default().read(dy).write(&mut sums);
        let arguments = arguments.long(rows).int(width).int(first).int(stride).int(parts.rows);
        self.launch(Source::ColumnSums, "column_sums", macros, parts.grid(width), arguments)?;
        self.finish_sums(parts.count, &sums, d_bias)
    }

    fn copy_columns(
        &self,
        x: &Tensor<Self>,
        from: Columns,
        width: usize,
        y: &mut Tensor<Self>,
        to: Columns,
    ) -> Result<()> {
        assert!(
            from.first + width <= from.stride && to.first + width <= to.stride,
            "columns lie in the rows"
        );
        let rows = (x.len() / from.stride).min(y.len() / to.stride);
        let macros = Macros::types(&[x.dtype(), y.dtype()]);
        let arguments = Arguments::default().read(x).int(from.first).int(from.stride);
        let arguments = arguments.write(y).int(to.first).int(to.stride).long(rows).int(width);
        self.launch(Source::Bias, "copy_columns", macros, Grid::elements(rows * width, 1), arguments)
    }
}

impl Transpose for Cuda {
    fn transpose(
        &self,
        x: &Tensor<Self>,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        assert!(x.len() == y.len() && x.len().is_multiple_of((rows * columns).max(1)), "shapes agree");
        let macros = Macros::types(&[x.dtype(), y.dtype()]);
        let arguments = Arguments::default().read(x).write(y);
        let arguments = arguments.int(rows).int(columns).int(usize::from(is_added)).long(x.len());
        self.launch(Source::Transpose, "transpose", macros, Grid::elements(x.len(), 1), arguments)
    }
}
