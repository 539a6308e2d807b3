//! Attention over packed sequences, with the engine that the setting allows and that is chosen.

mod own;

use dflop_device::ops::attention::{Attend, AttentionShape};
use dflop_device::{Result, Segments, Tensor};

use crate::attention::Call;
use crate::cudnn::Gradients;
use crate::device::{Address, Cuda};

impl Attend for Cuda {
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let dtype = own::check(shape, segments, qkv, output, log_sums);
        match &self.shared().cudnn {
            None => self.own_attention(dtype, shape, segments, qkv, output, log_sums),
            Some(engine) => {
                let addresses = [qkv, &*output, &*log_sums].map(Address::address);
                let call = Call { shape, segments: segments.host(), dtype, addresses, gradients: None };
                let own = || self.own_attention(dtype, shape, segments, qkv, output, log_sums);
                self.timed("attention by the engine that is chosen", || engine.run(&call, own))
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
                let gradients = Some(Gradients { d_output: d_output.address(), d_qkv: d_qkv.address() });
                let call = Call { shape, segments: segments.host(), dtype, addresses, gradients };
                let own =
                    || self.own_attention_backward(dtype, shape, segments, forward, d_output, &mut d_qkv);
                self.timed("attention backward by the engine that is chosen", || engine.run(&call, own))?;
            }
        }
        Ok(d_qkv)
    }
}

impl Cuda {
    /// Records the time for a pass that an engine queues; kernels in this crate are included, and also
    /// recorded separately.
    fn timed(&self, name: &'static str, pass: impl FnOnce() -> Result<()>) -> Result<()> {
        let shared = self.shared();
        shared.times.time(&shared.compute, || name.to_owned(), pass)
    }
}
