//! Environment variables that the driver reads when a process first uses CUDA.

use dflop_device::{Error, Result};

use crate::driver::Context;

/// Variable with the number of device queues, over which the driver spreads streams.
pub(super) const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Default number of queues.
const QUEUES_DEFAULT: usize = 8;
/// Maximum number of queues that the driver creates.
pub(super) const QUEUES_MAX: usize = 32;

/// Variable that sets whether modules and libraries load all kernels at once.
const LOADING: &str = "CUDA_MODULE_LOADING";

/// Variables that a process with NCCL communication must set before the first CUDA use: queues for all
/// streams on a rank, and no kernel load at first launch.
pub const NCCL_VARIABLES: [(&str, &str); 2] = [(QUEUES, "32"), (LOADING, "EAGER")];

/// Rejects kernels that load at first launch: a cuBLASLt kernel load may wait for a message from a rank that
/// itself waits for this rank.
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

/// Returns the number of queues per device in this process.
///
/// # Source
/// NVIDIA: "CUDA C++ Programming Guide", environment variables, `CUDA_DEVICE_MAX_CONNECTIONS`.
pub(super) fn queues() -> usize {
    queues_from_text(std::env::var(QUEUES).ok().as_deref())
}

fn queues_from_text(set: Option<&str>) -> usize {
    let set = set.and_then(|text| text.trim().parse().ok());
    set.unwrap_or(QUEUES_DEFAULT).clamp(1, QUEUES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_queues_that_the_driver_makes_of_the_variable() {
        for (set, queues) in
            [(None, 8), (Some("32"), 32), (Some(" 4 "), 4), (Some("100"), 32), (Some("0"), 1)]
        {
            assert_eq!(queues_from_text(set), queues, "{set:?}");
        }
        assert_eq!(queues_from_text(Some("many")), 8, "the driver takes no other text");
    }
}
