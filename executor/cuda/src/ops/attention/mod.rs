//! Attention over packed sequences, by two engines.
//!
//! The kernels of this crate ([`own`]) compute every shape, with the same bits in every run. If the setting
//! allows ([`AttentionEngines::Fastest`]), cuDNN computes the shapes that it is faster on, by measured time.

mod cudnn_engine;
mod engine_choice;
mod own;

use dflop_device::ops::attention::{Attend, AttentionShape};
use dflop_device::{Result, Segments, Tensor};

use crate::cudnn::Gradients;
use crate::device::Cuda;
use crate::memory::Address;
pub(crate) use cudnn_engine::CudnnEngine;

/// Engines that compute attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AttentionEngines {
    /// Kernels of this crate alone: the same bits in every run.
    #[default]
    Own,
    /// The faster one of these kernels and cuDNN on each shape, by measured time. The last digits of results
    /// depend on what is chosen, and on when.
    Fastest,
}

impl Attend for Cuda {
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let checked = own::check(shape, segments, qkv, output, log_sums);
        match &self.shared().cudnn {
            None => self.own_attention(checked, shape, segments, qkv, output, log_sums),
            Some(engine) => {
                let addresses = [qkv, &*output, &*log_sums].map(Address::address);
                engine.forward(self, shape, segments, (checked, addresses), || {
                    self.own_attention(checked, shape, segments, qkv, output, log_sums)
                })
            }
        }
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
    ) -> Result<Tensor<Self>> {
        let dtype = own::check(shape, segments, qkv, output, log_sums);
        assert_eq!(d_output.len(), output.len(), "gradients have the shapes of forward");
        assert_eq!(dtype, super::same_type(&[output, d_output]), "operands have one type");
        let mut d_qkv = self.allocate(dtype, qkv.len())?;
        let forward = (qkv, output, log_sums);
        match &self.shared().cudnn {
            None => self.own_attention_backward(dtype, shape, segments, forward, d_output, &mut d_qkv)?,
            Some(engine) => {
                let addresses = [qkv, output, log_sums].map(Address::address);
                let gradients = Gradients { d_output: d_output.address(), d_qkv: d_qkv.address() };
                engine.backward(self, shape, segments, (dtype, addresses), gradients, || {
                    self.own_attention_backward(dtype, shape, segments, forward, d_output, &mut d_qkv)
                })?;
            }
        }
        Ok(d_qkv)
    }
}
