//! Normalizations, and learned scales of columns.

use dflop_device::ops::layer_norm::LayerNorm;
use dflop_device::ops::layer_scale::LayerScale;
use dflop_device::ops::rms_norm::RmsNorm;
use dflop_device::{Dtype, Result, Tensor};

use super::column_sums::Parts;
use super::{THREADS, same_type, width};
use crate::compiler::Source;
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};
use crate::kernels::Macros;

/// One block for every row, of as many whole warps as a row has work for.
fn by_rows(rows: usize, columns: usize, width: u32) -> Grid {
    let threads = columns.div_ceil(width as usize).next_multiple_of(32).min(THREADS as usize);
    Grid::blocks(rows, threads as u32)
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
        let dtype = same_type(&[dy, x, weight]);
        if let Some(dx) = dx {
            assert_eq!(dx.len(), x.len(), "shapes agree");
            let width = width(columns, &[dy, x, weight, dx]);
            let macros = Macros::types(&[dtype, dx.dtype()]).number("WIDTH", width);
            let arguments = Arguments::default().read(dy).read(x).read(weight).read(inverse).write(dx);
            let arguments = arguments.int(columns).float(offset as f32);
            let grid = by_rows(rows, columns, width);
            self.launch(Source::RmsNorm, "rms_norm_dx", macros, grid, arguments)?;
        }
        let Some(d_weight) = d_weight else { return Ok(()) };
        assert_eq!(d_weight.len(), columns, "shapes agree");
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts, columns)?;
        let macros = Macros::types(&[dtype, Dtype::F32]).number("WIDTH", 1);
        let arguments = Arguments::default().read(dy).read(x).read(inverse).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::RmsNorm, "rms_norm_dw", macros, parts.grid(columns), arguments)?;
        self.finish_sums(parts, (&sums, 0, columns), d_weight)
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
        let dtype = same_type(&[dy, x, weight]);
        if let Some(dx) = dx {
            assert_eq!(dx.len(), x.len(), "shapes agree");
            let width = width(columns, &[dy, x, weight, dx]);
            let macros = Macros::types(&[dtype, dx.dtype()]).number("WIDTH", width);
            let arguments = Arguments::default().read(dy).read(x).read(weight).read(statistics).write(dx);
            let (grid, arguments) = (by_rows(rows, columns, width), arguments.int(columns));
            self.launch(Source::LayerNorm, "layer_norm_dx", macros, grid, arguments)?;
        }
        let Some((d_weight, d_bias)) = parameters else { return Ok(()) };
        assert!(d_weight.len() == columns && d_bias.len() == columns, "shapes agree");
        let parts = Parts::of(rows);
        let mut sums = self.alloc_parts(parts, 2 * columns)?;
        let macros = Macros::types(&[dtype, Dtype::F32]).number("WIDTH", 1);
        let arguments = Arguments::default().read(dy).read(x).read(statistics).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::LayerNorm, "layer_norm_dw", macros, parts.grid(columns), arguments)?;
        self.finish_sums(parts, (&sums, 0, 2 * columns), d_weight)?;
        self.finish_sums(parts, (&sums, columns, 2 * columns), d_bias)
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
        let mut sums = self.alloc_parts(parts, columns)?;
        let macros = Macros::types(&[dtype, Dtype::F32]);
        let arguments = Arguments::default().read(x).read(dy).write(&mut sums);
        let arguments = arguments.long(rows).int(columns).int(parts.rows);
        self.launch(Source::LayerScale, "layer_scale_ds", macros, parts.grid(columns), arguments)?;
        self.finish_sums(parts, (&sums, 0, columns), d_scale)
    }
}
