//! Normalizations and learned column scales.

use dflop_device::ops::layer_norm::LayerNorm;
use dflop_device::ops::layer_scale::LayerScale;
use dflop_device::ops::rms_norm::RmsNorm;
use dflop_device::{Dtype, Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, own_columns, same_type, width};
use crate::compiler::{Macros, Source};
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};

/// Maximum number of threads per block that walks over rows, and per multiprocessor with such blocks.
const WALK_THREADS_MAX: usize = 512;
/// Minimum number of rows per block that walks over rows, if there are enough rows: each block writes sums
/// for all columns.
const WALK_ROWS_MIN: usize = 8;

/// Returns the number of threads, in full warps, with a thread for every `own` columns.
fn row_threads(columns: usize, own: usize) -> usize {
    columns.div_ceil(own).next_multiple_of(32)
}

/// Returns a grid with a block per row, each with as many full warps as a row has work for.
fn by_rows(rows: usize, columns: usize, width: u32) -> Grid {
    let threads = row_threads(columns, width as usize).min(THREADS as usize);
    Grid::blocks(rows, threads as u32)
}

/// Returns the macros for a backward pass, from operands with the same type to the gradient for `x`, if
/// requested.
fn backward_macros(columns: usize, operands: &[&Tensor<Cuda>], dx: Option<&Tensor<Cuda>>) -> Macros {
    let dtype = same_type(operands);
    let all: Vec<_> = operands.iter().copied().chain(dx).collect();
    Macros::types(&[dtype, dx.map_or(dtype, Tensor::dtype)]).number("WIDTH", width(columns, &all))
}

impl Cuda {
    /// Returns a grid with as many blocks as run at once, each walking over a subset of rows; `None` if rows
    /// are too wide.
    fn walk(&self, rows: usize, columns: usize, macros: Macros) -> Option<Grid> {
        let threads = row_threads(columns, own_columns(macros)).max(32);
        let per_processor = WALK_THREADS_MAX.checked_div(threads).filter(|&blocks| blocks > 0)?;
        let at_once = self.shared().context.processors() as usize * per_processor;
        Some(Grid::blocks(at_once.min(rows.div_ceil(WALK_ROWS_MIN)), threads as u32))
    }

    /// Launches a backward pass with blocks that walk over rows. Returns the number of blocks and the column
    /// sums per block.
    ///
    /// - `arguments`: operands, then the gradient for `x`
    /// - `summed`: number of columns that each block sums; 0 if no sums are requested
    /// - `rest`: adds the arguments after the sums, the shape and the inverse shape
    fn walk_and_sum(
        &self,
        (source, name, macros, grid): (Source, &'static str, Macros, Grid),
        arguments: Arguments,
        (rows, columns): (usize, usize),
        summed: usize,
        rest: impl FnOnce(Arguments) -> Arguments,
    ) -> Result<Option<(usize, Tensor<Self>)>> {
        let parts = grid.blocks.0 as usize;
        let mut sums = (summed > 0).then(|| self.alloc_parts(parts, summed)).transpose()?;
        let arguments = arguments.write_if(sums.as_mut()).int(rows).int(columns);
        self.launch(source, name, macros, grid, rest(arguments.float(1.0 / columns as f32)))?;
        Ok(sums.map(|sums| (parts, sums)))
    }
}

impl RmsNorm for Cuda {
    fn rms_norm(
        &self,
        x: &Tensor<Self>,
        (weight, offset): (&Tensor<Self>, f64),
        epsilon: f64,
        y: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), inverse.len());
        assert!(x.len() == rows * columns && y.len() == x.len(), "shapes agree");
        let width = width(columns, &[x, weight, y]);
        let macros = Macros::types(&[same_type(&[x, weight]), y.dtype()]).number("WIDTH", width);
        let arguments = Arguments::default().read(x).read(weight).write(y).write(inverse);
        let arguments = arguments.int(columns).float(epsilon as f32).float(offset as f32);
        self.launch(Source::RmsNorm, "rms_norm", macros, by_rows(rows, columns, width), arguments)
    }

    fn rms_norm_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        (weight, offset): (&Tensor<Self>, f64),
        inverse: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), inverse.len());
        assert!(x.len() == rows * columns && dy.len() == x.len(), "shapes agree");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() == x.len()), "shapes agree");
        assert!(d_weight.as_ref().is_none_or(|d_weight| d_weight.len() == columns), "shapes agree");
        if dx.is_none() && d_weight.is_none() {
            return Ok(());
        }
        let macros = backward_macros(columns, &[dy, x, weight], dx.as_deref());
        let Some(grid) = self.walk(rows, columns, macros) else {
            return self.wide_rms_norm_backward((dy, x), (weight, offset), inverse, dx, d_weight);
        };
        let arguments = Arguments::default().read(dy).read(x).read(weight).read(inverse).write_if(dx);
        let kernel = (Source::RmsNorm, "rms_norm_backward", macros, grid);
        let summed = d_weight.as_ref().map_or(0, |_| columns);
        let rest = |arguments: Arguments| arguments.float(offset as f32);
        let sums = self.walk_and_sum(kernel, arguments, (rows, columns), summed, rest)?;
        let Some(((parts, sums), d_weight)) = sums.zip(d_weight) else { return Ok(()) };
        self.finish_sums(parts, &sums, d_weight)
    }
}

impl Cuda {
    /// Computes gradients for rows with more columns than fit in block registers: `dy` and `x` are read twice
    /// for `dx`, and once more for `d_weight`.
    fn wide_rms_norm_backward(
        &self,
        (dy, x): (&Tensor<Self>, &Tensor<Self>),
        (weight, offset): (&Tensor<Self>, f64),
        inverse: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), inverse.len());
        if let Some(dx) = dx {
            let width = width(columns, &[dy, x, weight, dx]);
            let macros = Macros::types(&[x.dtype(), dx.dtype()]).number("WIDTH", width);
            let arguments = Arguments::default().read(dy).read(x).read(weight).read(inverse).write(dx);
            let arguments = arguments.int(columns).float(offset as f32);
            let grid = by_rows(rows, columns, width);
            self.launch(Source::RmsNorm, "rms_norm_dx", macros, grid, arguments)?;
        }
        let Some(d_weight) = d_weight else { return Ok(()) };
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts.count, columns)?;
        let macros = Macros::types(&[x.dtype(), Dtype::F32]).number("WIDTH", 1);
        let arguments = Arguments::default().read(dy).read(x).read(inverse).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::RmsNorm, "rms_norm_dw", macros, parts.grid(columns), arguments)?;
        self.finish_sums(parts.count, &sums, d_weight)
    }
}

impl LayerNorm for Cuda {
    fn layer_norm(
        &self,
        x: &Tensor<Self>,
        (weight, bias): (&Tensor<Self>, &Tensor<Self>),
        epsilon: f64,
        y: &mut Tensor<Self>,
        statistics: &mut Tensor<Self>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), statistics.len() / 2);
        assert!(x.len() == rows * columns && y.len() == x.len() && bias.len() == columns, "shapes agree");
        let width = width(columns, &[x, weight, bias, y]);
        let macros = Macros::types(&[same_type(&[x, weight, bias]), y.dtype()]).number("WIDTH", width);
        let arguments = Arguments::default().read(x).read(weight).read(bias).write(y).write(statistics);
        let arguments = arguments.int(columns).float(epsilon as f32);
        self.launch(Source::LayerNorm, "layer_norm", macros, by_rows(rows, columns, width), arguments)
    }

    fn layer_norm_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        weight: &Tensor<Self>,
        statistics: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        parameters: Option<(&mut Tensor<Self>, &mut Tensor<Self>)>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), statistics.len() / 2);
        assert!(x.len() == rows * columns && dy.len() == x.len(), "shapes agree");
        assert!(dx.as_ref().is_none_or(|dx| dx.len() == x.len()), "shapes agree");
        let is_width = |tensor: &Tensor<Self>| tensor.len() == columns;
        assert!(parameters.as_ref().is_none_or(|(a, b)| is_width(a) && is_width(b)), "shapes agree");
        if dx.is_none() && parameters.is_none() {
            return Ok(());
        }
        let macros = backward_macros(columns, &[dy, x, weight], dx.as_deref());
        let Some(grid) = self.walk(rows, columns, macros) else {
            return self.wide_layer_norm_backward((dy, x), weight, statistics, dx, parameters);
        };
        let arguments = Arguments::default().read(dy).read(x).read(weight).read(statistics).write_if(dx);
        let kernel = (Source::LayerNorm, "layer_norm_backward", macros, grid);
        let summed = parameters.as_ref().map_or(0, |_| 2 * columns);
        let sums = self.walk_and_sum(kernel, arguments, (rows, columns), summed, |arguments| arguments)?;
        let Some(((parts, sums), parameters)) = sums.zip(parameters) else { return Ok(()) };
        self.finish_two_sums(parts, &sums, parameters)
    }
}

impl Cuda {
    /// Computes gradients for rows with more columns than fit in block registers: `dy` and `x` are read twice
    /// for `dx`, and once more for the parameters.
    fn wide_layer_norm_backward(
        &self,
        (dy, x): (&Tensor<Self>, &Tensor<Self>),
        weight: &Tensor<Self>,
        statistics: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        parameters: Option<(&mut Tensor<Self>, &mut Tensor<Self>)>,
    ) -> Result<()> {
        let (columns, rows) = (weight.len(), statistics.len() / 2);
        if let Some(dx) = dx {
            let width = width(columns, &[dy, x, weight, dx]);
            let macros = Macros::types(&[x.dtype(), dx.dtype()]).number("WIDTH", width);
            let arguments = Arguments::default().read(dy).read(x).read(weight).read(statistics).write(dx);
            let (grid, arguments) = (by_rows(rows, columns, width), arguments.int(columns));
            self.launch(Source::LayerNorm, "layer_norm_dx", macros, grid, arguments)?;
        }
        let Some(parameters) = parameters else { return Ok(()) };
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts.count, 2 * columns)?;
        let macros = Macros::types(&[x.dtype(), Dtype::F32]).number("WIDTH", 1);
        let arguments = Arguments::default().read(dy).read(x).read(statistics).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::LayerNorm, "layer_norm_dw", macros, parts.grid(columns), arguments)?;
        self.finish_two_sums(parts.count, &sums, parameters)
    }
}

impl LayerScale for Cuda {
    fn layer_scale(&self, x: &Tensor<Self>, scale: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        assert_eq!(x.len(), y.len(), "the residual has the shape of what is added");
        let macros = Macros::types(&[same_type(&[x, scale]), y.dtype()]);
        let arguments = Arguments::default().read(x).read(scale).write(y).long(x.len()).int(scale.len());
        self.launch(Source::LayerScale, "layer_scale", macros, Grid::elements(x.len(), 1), arguments)
    }

    fn layer_scale_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        scale: &Tensor<Self>,
        dx: &mut Tensor<Self>,
        d_scale: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        assert!(x.len() == dy.len() && dx.len() == dy.len(), "gradients have the shapes of what they are of");
        let (dtype, columns) = (same_type(&[dy, x, scale]), scale.len());
        let macros = Macros::types(&[dtype, dx.dtype()]);
        let arguments = Arguments::default().read(dy).read(scale).write(dx).long(dy.len()).int(columns);
        self.launch(Source::LayerScale, "layer_scale_dx", macros, Grid::elements(dy.len(), 1), arguments)?;
        let Some(d_scale) = d_scale else { return Ok(()) };
        assert_eq!(d_scale.len(), columns, "shapes agree");
        let rows = x.len() / columns.max(1);
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts.count, columns)?;
        let macros = Macros::types(&[dtype, Dtype::F32]);
        let arguments = Arguments::default().read(x).read(dy).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::LayerScale, "layer_scale_ds", macros, parts.grid(columns), arguments)?;
        self.finish_sums(parts.count, &sums, d_scale)
    }
}
