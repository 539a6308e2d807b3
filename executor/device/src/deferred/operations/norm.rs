//! Queues normalizations.

use super::super::Deferred;
use super::Written;
use crate::device::Device;
use crate::error::Result;
use crate::ops::head_norm::{HeadColumns, HeadNorm};
use crate::ops::layer_norm::LayerNorm;
use crate::ops::rms_norm::RmsNorm;
use crate::runtime::Tensor;

impl<D: Device> RmsNorm for Deferred<D> {
    fn rms_norm(
        &self,
        x: &Tensor<Self>,
        (weight, offset): (&Tensor<Self>, f64),
        epsilon: f64,
        y: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([x, weight], [y, inverse], move |inner, [x, weight], [y, inverse]| {
            inner.rms_norm(x, (weight, offset), epsilon, y, inverse)
        })
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
        let (has_dx, has_weight) = (dx.is_some(), d_weight.is_some());
        let writes: Vec<&Tensor<Self>> = dx.as_deref().into_iter().chain(d_weight.as_deref()).collect();
        self.enqueue_lists(&[dy, x, weight, inverse], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = has_dx.then(|| written.next());
            let d_weight = has_weight.then(|| written.next());
            inner.rms_norm_backward(reads[0], reads[1], (reads[2], offset), reads[3], dx, d_weight)
        })
    }
}

impl<D: Device> LayerNorm for Deferred<D> {
    fn layer_norm(
        &self,
        x: &Tensor<Self>,
        (weight, bias): (&Tensor<Self>, &Tensor<Self>),
        epsilon: f64,
        y: &mut Tensor<Self>,
        statistics: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue([x, weight, bias], [y, statistics], move |inner, [x, weight, bias], [y, statistics]| {
            inner.layer_norm(x, (weight, bias), epsilon, y, statistics)
        })
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
        let (has_dx, has_parameters) = (dx.is_some(), parameters.is_some());
        let mut writes: Vec<&Tensor<Self>> = dx.as_deref().into_iter().collect();
        if let Some((d_weight, d_bias)) = &parameters {
            writes.extend([&**d_weight, &**d_bias]);
        }
        self.enqueue_lists(&[dy, x, weight, statistics], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = has_dx.then(|| written.next());
            let parameters = has_parameters.then(|| (written.next(), written.next()));
            inner.layer_norm_backward(reads[0], reads[1], reads[2], reads[3], dx, parameters)
        })
    }
}

impl<D: Device> HeadNorm for Deferred<D> {
    fn head_norm(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        epsilon: f64,
        x: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        let reads: Vec<&Tensor<Self>> = weight.into_iter().collect();
        self.enqueue_lists(&reads, &[x, inverse], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (x, inverse) = (written.next(), written.next());
            inner.head_norm(heads, (reads.first().copied(), offset), epsilon, x, inverse)
        })
    }

    fn head_norm_backward(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        (x, inverse): (&Tensor<Self>, &Tensor<Self>),
        d: &mut Tensor<Self>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let reads: Vec<&Tensor<Self>> = [x, inverse].into_iter().chain(weight).collect();
        let writes: Vec<&Tensor<Self>> = std::iter::once(&*d).chain(d_weight.as_deref()).collect();
        let has_weight = d_weight.is_some();
        self.enqueue_lists(&reads, &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let d = written.next();
            let d_weight = has_weight.then(|| written.next());
            let weight = (reads.get(2).copied(), offset);
            inner.head_norm_backward(heads, weight, (reads[0], reads[1]), d, d_weight)
        })
    }
}
