//! Optimizer and checkpoints: updates over ranks, saving and loading, bf16.

pub mod bf16;
pub mod checkpoint;
pub mod killed;
mod model;
pub mod saver;
pub mod tensor_parallel;
pub mod update;

use crate::claim::Claim;
use crate::device::TestBackend;

/// Lists the claims that hold on every device.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let files = [
        bf16::claims::<B>(),
        checkpoint::claims::<B>(),
        tensor_parallel::claims::<B>(),
        update::claims::<B>(),
    ];
    files.into_iter().flatten().collect()
}

/// Lists the claims that only the CPU device checks.
pub fn on_cpu() -> Vec<Claim> {
    [killed::claims(), saver::claims()].into_iter().flatten().collect()
}
