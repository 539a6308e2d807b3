//! Operations of the test device: each is queued with the ranges that it reads and writes.

use std::ops::Range;

use super::Deferred;
use super::slot::overwrite;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::ops::activation::{Activate, Activation};
use crate::ops::adamw::{AdamW, AdamWState, DecayRange, Update};
use crate::ops::attention::{Attend, AttentionShape};
use crate::ops::bias::{Biases, Columns};
use crate::ops::cross_entropy::CrossEntropy;
use crate::ops::elementwise::{CopyRange, Elementwise};
use crate::ops::gather_scatter::GatherScatter;
use crate::ops::gemm::{Epilogue, Gemm, GemmShape, MatrixLayout};
use crate::ops::layer_norm::LayerNorm;
use crate::ops::layer_scale::LayerScale;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rope::{RopeShape, RopeTable, Rotate, Rotation};
use crate::ops::silu_gate::SiluGate;
use crate::ops::sparse_rows::SparseBuffers;
use crate::ops::transpose::Transpose;
use crate::ops::vocab_parallel_cross_entropy::{VocabParallelCrossEntropy, VocabularyPart};
use crate::runtime::Runtime;
use crate::runtime::Tensor;
use crate::segments::Segments;

/// Written operands of an operation, taken in the order in which they were queued.
pub(super) struct Written<'a, 'b, D: Device>(std::slice::IterMut<'a, &'b mut Tensor<D>>);

impl<'a, 'b, D: Device> Written<'a, 'b, D> {
    fn of(writes: &'a mut [&'b mut Tensor<D>]) -> Self {
        Self(writes.iter_mut())
    }

    fn next(&mut self) -> &'a mut Tensor<D> {
        self.0.next().expect("as many operands as were queued")
    }
}

impl<D: Device> Elementwise for Deferred<D> {
    fn zero(&self, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[], &[y], |inner, _, writes| inner.zero(writes[0]));
        Ok(())
    }

    fn add(&self, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[x], &[y], |inner, reads, writes| inner.add(reads[0], writes[0]));
        Ok(())
    }

    fn scale(&self, factor: f32, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[], &[y], move |inner, _, writes| inner.scale(factor, writes[0]));
        Ok(())
    }

    fn copy_ranges(&self, ranges: &[CopyRange], x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let ranges = ranges.to_vec();
        self.enqueue(&[x], &[y], move |inner, reads, writes| inner.copy_ranges(&ranges, reads[0], writes[0]));
        Ok(())
    }
}

impl<D: Device> Biases for Deferred<D> {
    fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()> {
        self.enqueue(&[bias], &[y], move |inner, reads, writes| inner.bias(reads[0], writes[0], columns));
        Ok(())
    }

    fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[dy], &[d_bias], move |inner, reads, writes| {
            inner.bias_backward(reads[0], columns, writes[0])
        });
        Ok(())
    }

    fn copy_columns(
        &self,
        x: &Tensor<Self>,
        from: Columns,
        width: usize,
        y: &mut Tensor<Self>,
        to: Columns,
    ) -> Result<()> {
        self.enqueue(&[x], &[y], move |inner, reads, writes| {
            inner.copy_columns(reads[0], from, width, writes[0], to)
        });
        Ok(())
    }
}

impl<D: Device> LayerScale for Deferred<D> {
    fn layer_scale(&self, x: &Tensor<Self>, scale: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[x, scale], &[y], |inner, reads, writes| {
            inner.layer_scale(reads[0], reads[1], writes[0])
        });
        Ok(())
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
        self.enqueue(&[dy, x, scale], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = written.next();
            let d_scale = has_scale.then(|| written.next());
            inner.layer_scale_backward(reads[0], reads[1], reads[2], dx, d_scale)
        });
        Ok(())
    }
}

impl<D: Device> RmsNorm for Deferred<D> {
    fn rms_norm(
        &self,
        x: &Tensor<Self>,
        weight: &Tensor<Self>,
        epsilon: f64,
        y: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[x, weight], &[y, inverse], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (y, inverse) = (written.next(), written.next());
            inner.rms_norm(reads[0], reads[1], epsilon, y, inverse)
        });
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        weight: &Tensor<Self>,
        inverse: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (has_dx, has_weight) = (dx.is_some(), d_weight.is_some());
        let writes: Vec<&Tensor<Self>> = dx.as_deref().into_iter().chain(d_weight.as_deref()).collect();
        self.enqueue(&[dy, x, weight, inverse], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = has_dx.then(|| written.next());
            let d_weight = has_weight.then(|| written.next());
            inner.rms_norm_backward(reads[0], reads[1], reads[2], reads[3], dx, d_weight)
        });
        Ok(())
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
        self.enqueue(&[x, weight, bias], &[y, statistics], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (y, statistics) = (written.next(), written.next());
            inner.layer_norm(reads[0], (reads[1], reads[2]), epsilon, y, statistics)
        });
        Ok(())
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
        self.enqueue(&[dy, x, weight, statistics], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let dx = has_dx.then(|| written.next());
            let parameters = has_parameters.then(|| (written.next(), written.next()));
            inner.layer_norm_backward(reads[0], reads[1], reads[2], reads[3], dx, parameters)
        });
        Ok(())
    }
}

impl<D: Device> Activate for Deferred<D> {
    fn activate(&self, activation: Activation, x: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[x], &[y], move |inner, reads, writes| inner.activate(activation, reads[0], writes[0]));
        Ok(())
    }

    fn activate_backward(
        &self,
        activation: Activation,
        x: &Tensor<Self>,
        d: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[x], &[d], move |inner, reads, writes| {
            inner.activate_backward(activation, reads[0], writes[0])
        });
        Ok(())
    }
}

impl<D: Device> SiluGate for Deferred<D> {
    fn silu_gate(&self, gate_up: &Tensor<Self>, columns: usize, y: &mut Tensor<Self>) -> Result<()> {
        self.enqueue(&[gate_up], &[y], move |inner, reads, writes| {
            inner.silu_gate(reads[0], columns, writes[0])
        });
        Ok(())
    }

    fn silu_gate_backward(
        &self,
        dy: &Tensor<Self>,
        gate_up: &Tensor<Self>,
        columns: usize,
        d_gate_up: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[dy, gate_up], &[d_gate_up], move |inner, reads, writes| {
            inner.silu_gate_backward(reads[0], reads[1], columns, writes[0])
        });
        Ok(())
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
        self.enqueue(&[x], &[y], move |inner, reads, writes| {
            inner.transpose(reads[0], rows, columns, is_added, writes[0])
        });
        Ok(())
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
        self.enqueue(&[targets, starts, sources, weights, x], &[y], move |inner, reads, writes| {
            let [targets, starts, sources, weights] = [0, 1, 2, 3].map(|index| inner.copy(reads[index]));
            let (targets, starts, sources, weights) = (targets?, starts?, sources?, weights?);
            let matrix = SparseBuffers { targets, starts, sources, weights };
            inner.gather_scatter(&matrix, columns, reads[4], writes[0])
        });
        Ok(())
    }
}

impl<D: Device> Gemm for Deferred<D> {
    fn gemm(
        &self,
        shape: GemmShape,
        (a, a_layout): (&Tensor<Self>, MatrixLayout),
        (b, b_layout): (&Tensor<Self>, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
        epilogue: Epilogue<'_, Self>,
    ) -> Result<()> {
        let (mut reads, mut writes) = (vec![a, b], vec![&*c]);
        let kind = match &epilogue {
            Epilogue::None => Queued::None,
            Epilogue::Bias(bias) => {
                reads.push(bias);
                Queued::Bias
            }
            Epilogue::Activation(bias, activation, y) => {
                reads.extend(*bias);
                writes.push(y);
                Queued::Activation(bias.is_some(), *activation)
            }
            Epilogue::BiasGradient(d_bias) => {
                writes.push(d_bias);
                Queued::BiasGradient
            }
        };
        self.enqueue(&reads, &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let c = (written.next(), c_layout);
            let epilogue = match kind {
                Queued::None => Epilogue::None,
                Queued::Bias => Epilogue::Bias(reads[2]),
                Queued::Activation(has_bias, activation) => {
                    Epilogue::Activation(has_bias.then(|| reads[2]), activation, written.next())
                }
                Queued::BiasGradient => Epilogue::BiasGradient(written.next()),
            };
            inner.gemm(shape, (reads[0], a_layout), (reads[1], b_layout), is_added, c, epilogue)
        });
        Ok(())
    }
}

/// Epilogue of a queued product.
enum Queued {
    None,
    Bias,
    Activation(bool, Activation),
    BiasGradient,
}

impl<D: Device> Rotate for Deferred<D> {
    fn rope_angles(
        &self,
        table: &RopeTable,
        positions: &Tensor<Self>,
        tokens: usize,
    ) -> Result<(Tensor<Self>, Tensor<Self>)> {
        let len = tokens * table.frequencies.len();
        let (cos, sin) = (self.alloc_as(Dtype::F32, len)?, self.alloc_as(Dtype::F32, len)?);
        let table = table.clone();
        self.enqueue(&[positions], &[&cos, &sin], move |inner, reads, writes| {
            let (cos, sin) = inner.rope_angles(&table, reads[0], tokens)?;
            overwrite(inner, &cos, writes[0])?;
            overwrite(inner, &sin, writes[1])
        });
        Ok((cos, sin))
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        x: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[cos, sin], &[x], move |inner, reads, writes| {
            inner.rope(rotation, shape, (reads[0], reads[1]), writes[0])
        });
        Ok(())
    }
}

impl<D: Device> Attend for Deferred<D> {
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let (shape, host) = (*shape, segments.host().clone());
        self.enqueue(&[qkv, segments.starts()], &[output, log_sums], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let segments = Segments::new(inner, host.starts())?;
            let (output, log_sums) = (written.next(), written.next());
            inner.attention(&shape, &segments, reads[0], output, log_sums)
        });
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
    ) -> Result<Tensor<Self>> {
        let d_qkv = self.alloc(qkv.len())?;
        let (shape, host) = (*shape, segments.host().clone());
        let reads = [qkv, output, log_sums, d_output, segments.starts()];
        self.enqueue(&reads, &[&d_qkv], move |inner, reads, writes| {
            let segments = Segments::new(inner, host.starts())?;
            let saved = (reads[1], reads[2]);
            let d_qkv = inner.attention_backward(&shape, &segments, reads[0], saved, reads[3])?;
            overwrite(inner, &d_qkv, writes[0])
        });
        Ok(d_qkv)
    }
}

impl<D: Device> CrossEntropy for Deferred<D> {
    fn cross_entropy(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[targets], &[logits, loss], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (logits, loss) = (written.next(), written.next());
            inner.cross_entropy(logits, (reads[0], range), scale, loss)
        });
        Ok(())
    }
}

impl<D: Device> VocabParallelCrossEntropy for Deferred<D> {
    fn partial_softmax(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &mut Tensor<Self>,
    ) -> Result<()> {
        let part = part.clone();
        self.enqueue(&[targets], &[logits, parts], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (logits, parts) = (written.next(), written.next());
            inner.partial_softmax(logits, (reads[0], range), &part, parts)
        });
        Ok(())
    }

    fn join_softmax(
        &self,
        exponentials: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        part: &VocabularyPart,
        parts: &Tensor<Self>,
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let part = part.clone();
        self.enqueue(&[targets, parts], &[exponentials, loss], move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (exponentials, loss) = (written.next(), written.next());
            inner.join_softmax(exponentials, (reads[0], range), &part, reads[1], scale, loss)
        });
        Ok(())
    }
}

impl<D: Device> Update for Deferred<D> {
    fn sums_of_squares(&self, tensors: &[(&Tensor<Self>, usize)], into: &mut Tensor<Self>) -> Result<()> {
        let (reads, places): (Vec<&Tensor<Self>>, Vec<usize>) = tensors.iter().copied().unzip();
        self.enqueue(&reads, &[into], move |inner, reads, writes| {
            let tensors: Vec<(&Tensor<D>, usize)> = reads.iter().copied().zip(places).collect();
            inner.sums_of_squares(&tensors, writes[0])
        });
        Ok(())
    }

    fn clip_factor(
        &self,
        figures: &Tensor<Self>,
        squares: Range<usize>,
        norm_max: Option<f64>,
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        self.enqueue(&[figures], &[into], move |inner, reads, writes| {
            inner.clip_factor(reads[0], squares, norm_max, writes[0])
        });
        Ok(())
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        decays: &[DecayRange],
        clip: &Tensor<Self>,
        weights: &mut Tensor<Self>,
        gradients: &Tensor<Self>,
        state: AdamWState<'_, Self>,
    ) -> Result<()> {
        let AdamWState { master, mean, square } = state;
        let has_master = master.is_some();
        let writes: Vec<&Tensor<Self>> =
            [&*weights, &*mean, &*square].into_iter().chain(master.as_deref()).collect();
        let (adamw, decays) = (*adamw, decays.to_vec());
        self.enqueue(&[clip, gradients], &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            let (weights, mean, square) = (written.next(), written.next(), written.next());
            let master = has_master.then(|| written.next());
            let state = AdamWState { master, mean, square };
            inner.adamw(&adamw, &decays, reads[0], weights, reads[1], state)
        });
        Ok(())
    }
}
