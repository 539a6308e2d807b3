//! Tensor-parallel ranks compute the same results as a single rank, and as PyTorch: losses, logits,
//! gradients.

pub mod counted;
pub mod decoders;
pub mod failures;
mod job;
pub mod media;
pub mod weights;

use dflop_device::Cpu;

use crate::claim::Claim;
use crate::device::TestBackend;

/// Lists the claims that hold on every device.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let files =
        [counted::claims::<B>(), decoders::claims::<B>(), media::claims::<B>(), weights::claims::<B>()];
    files.into_iter().flatten().collect()
}

/// Lists the claims that only the CPU device checks.
pub fn on_cpu() -> Vec<Claim> {
    failures::claims::<Cpu>()
}
