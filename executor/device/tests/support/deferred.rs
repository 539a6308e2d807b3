//! Device that the suite runs on: the test device that computes late and in another order.

use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::deferred::{Deferred, Order};
use dflop_device::{Cpu, DeviceComm, Dtype, Staged};

/// Device of every rank.
pub(crate) type TestDevice = Deferred<Cpu>;

/// Order of the work: `DFLOP_DEFERRED_ORDER`, or a random one.
fn order() -> Order {
    let number = std::env::var("DFLOP_DEFERRED_ORDER").ok().and_then(|number| number.parse().ok());
    Order::numbered(number.unwrap_or(3))
}

/// Makes a device that stores `f32`.
pub(crate) fn device(threads: usize) -> TestDevice {
    Deferred::new(Cpu::new(threads).unwrap(), order())
}

/// Makes a device that stores bf16.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn half_device(threads: usize) -> TestDevice {
    Deferred::new(Cpu::new(threads).unwrap().store(Dtype::Bf16).unwrap(), order())
}

/// Makes a device that computes on the threads of another one.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn on_same_threads(device: &TestDevice) -> TestDevice {
    Deferred::new(device.inner().clone(), order())
}

/// Makes a communicator of tensors.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn tensors(
    device: &TestDevice,
    comm: Arc<dyn Comm>,
) -> dflop_device::Result<Arc<dyn DeviceComm<TestDevice>>> {
    Ok(Arc::new(Staged::new(device.clone(), comm)))
}
