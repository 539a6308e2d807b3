//! Queues matrix products, with their epilogues.

use super::super::Deferred;
use super::Written;
use crate::device::Device;
use crate::error::Result;
use crate::ops::activation::Activation;
use crate::ops::gemm::{Epilogue, Gemm, GemmShape, MatrixLayout};
use crate::runtime::Tensor;

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
        self.enqueue_lists(&reads, &writes, move |inner, reads, writes| {
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
        })
    }
}

/// Epilogue of a queued product.
enum Queued {
    None,
    Bias,
    Activation(bool, Activation),
    BiasGradient,
}
