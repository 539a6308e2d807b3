//! Queues operations on elements, columns and rows.

use super::super::Deferred;
use super::Written;
use crate::device::Device;
use crate::error::Result;
use crate::ops::bias::{Biases, Columns};
use crate::ops::elementwise::{CopyRange, Elementwise};
use crate::ops::gather_scatter::GatherScatter;
use crate::ops::layer_scale::LayerScale;
use crate::ops::sparse_rows::SparseBuffers;
use crate::ops::transpose::Transpose;
use crate::runtime::Tensor;

impl<D: Device> Elementwise for Deferred<D> {
    fn zero(&self, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([], [y], |inner, [], [y]| inner.zero(y))
    }

    fn add(&self, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([x], [y], |inner, [x], [y]| inner.add(x, y))
    }

    fn scale(&self, factor: f32, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([], [y], move |inner, [], [y]| inner.scale(factor, y))
    }

    fn copy_ranges(&self, ranges: &[CopyRange], x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let ranges = ranges.to_vec();
        self.enqueue([x], [y], move |inner, [x], [y]| inner.copy_ranges(&ranges, x, y))
    }
}

impl<D: Device> Biases for Deferred<D> {
    fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()> {
        self.enqueue([bias], [y], move |inner, [bias], [y]| inner.bias(bias, y, columns))
    }

    fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([dy], [d_bias], move |inner, [dy], [d_bias]| inner.bias_backward(dy, columns, d_bias))
    }

    fn copy_columns(
        &self,
        x: &Tensor<Self>,
        from: Columns,
        width: usize,
        y: &mut Tensor<Self>,
        to: Columns,
    ) -> Result<()> {
        self.enqueue([x], [y], move |inner, [x], [y]| inner.copy_columns(x, from, width, y, to))
    }
}

impl<D: Device> LayerScale for Deferred<D> {
    fn layer_scale(&self, x: &Tensor<Self>, scale: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue([x, scale], [y], |inner, [x, scale], [y]| inner.layer_scale(x, scale, y))
    }

    fn layer_scale_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        scale: &Tensor<Self>,
        dx: &mut Tensor<Self>,
        d_scale: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let has_scale = d_scale.is_some();
        let writes: Vec<&Tensor<Self>> = [&*dx].into_iter().chain(d_scale.as_deref()).collect();
        self.enqueue_lists(&[dy, x, scale], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = written.next();
            let d_scale = has_scale.then(|| written.next());
            inner.layer_scale_backward(reads[0], reads[1], reads[2], dx, d_scale)
        })
    }
}

impl<D: Device> Transpose for Deferred<D> {
    fn transpose(
        &self,
        x: &Tensor<Self>,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([x], [y], move |inner, [x], [y]| inner.transpose(x, rows, columns, is_added, y))
    }
}

impl<D: Device> GatherScatter for Deferred<D> {
    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &Tensor<Self>,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        let SparseBuffers { targets, starts, sources, weights } = matrix;
        self.enqueue([targets, starts, sources, weights, x], [y], move |inner, [t, s, i, w, x], [y]| {
            let (targets, starts) = (inner.copy(t)?, inner.copy(s)?);
            let (sources, weights) = (inner.copy(i)?, inner.copy(w)?);
            let matrix = SparseBuffers { targets, starts, sources, weights };
            inner.gather_scatter(&matrix, columns, x, y)
        })
    }
}
