//! Device that the suite runs on.

use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::{Cpu, DeviceComm, Dtype, Staged};

/// Device of every rank.
pub(crate) type TestDevice = Cpu;

/// Makes a device that stores `f32`.
pub(crate) fn device(threads: usize) -> TestDevice {
    Cpu::new(threads).unwrap()
}

/// Makes a device that stores bf16.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn half_device(threads: usize) -> TestDevice {
    Cpu::new(threads).unwrap().store(Dtype::Bf16).unwrap()
}

/// Makes a device that computes on the threads of another one.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn on_same_threads(device: &TestDevice) -> TestDevice {
    device.clone()
}

/// Makes a communicator of tensors.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn tensors(
    device: &TestDevice,
    comm: Arc<dyn Comm>,
) -> dflop_device::Result<Arc<dyn DeviceComm<TestDevice>>> {
    Ok(Arc::new(Staged::new(device.clone(), comm)))
}
