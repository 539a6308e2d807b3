//! Variables of the environment that the driver reads when a process first uses it.

use dflop_device::{Error, Result};

use super::session::QUEUES;
use crate::driver::Context;

/// Whether modules and libraries load all of their kernels at once.
const LOADING: &str = "CUDA_MODULE_LOADING";

/// Variables that a process needs whose device communicates over NCCL, before it first uses CUDA: queues for
/// all streams of a rank, and no load of a kernel at its first launch.
pub const NCCL_VARIABLES: [(&str, &str); 2] = [(QUEUES, "32"), (LOADING, "EAGER")];

/// Refuses kernels that load at their first launch: the load of one of cuBLASLt may wait for a message of
/// another rank that waits for this one.
pub(super) fn check_loading(ranks: usize) -> Result<()> {
    if ranks == 1 || Context::loads_eagerly()? {
        return Ok(());
    }
    let reason =
        "expected EAGER when the process first uses CUDA, found LAZY: a kernel that loads while ranks wait \
                  for each other may never be loaded"
            .to_owned();
    Err(Error::InvalidSetting { setting: LOADING, reason })
}
