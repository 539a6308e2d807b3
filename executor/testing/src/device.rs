//! Devices that the suites run on, and backends that open them.

use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::deferred::{Deferred, Order};
use dflop_device::{Cpu, Device, DeviceComm, Dtype, Result, Staged};

/// Device that the suites run on.
pub trait TestDevice: Device {
    /// Opens a device that stores `f32`.
    fn open(threads: usize) -> Self;
    /// Opens a device that stores bf16.
    fn open_half(threads: usize) -> Self;
    /// Opens a device that computes on the threads of this device.
    #[must_use]
    fn on_same_threads(&self) -> Self;
    /// Creates a tensor communicator.
    fn tensors(&self, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Self>>>;
}

/// Device with a tensor transport.
///
/// Every [`TestDevice`] is also a backend for itself. A crate that tests a device from another crate, or one
/// device over several transports, implements this trait for separate types.
pub trait TestBackend: 'static {
    /// Device for every rank.
    type Device: Device;
    /// Opens a device that stores `f32`.
    fn open(threads: usize) -> Self::Device;
    /// Opens a device that stores bf16.
    fn open_half(threads: usize) -> Self::Device;
    /// Opens a device that computes on the threads of another device.
    fn on_same_threads(device: &Self::Device) -> Self::Device;
    /// Creates a tensor communicator.
    fn tensors(device: &Self::Device, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Self::Device>>>;
}

impl<D: TestDevice> TestBackend for D {
    type Device = D;

    fn open(threads: usize) -> D {
        <D as TestDevice>::open(threads)
    }

    fn open_half(threads: usize) -> D {
        <D as TestDevice>::open_half(threads)
    }

    fn on_same_threads(device: &D) -> D {
        <D as TestDevice>::on_same_threads(device)
    }

    fn tensors(device: &D, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<D>>> {
        <D as TestDevice>::tensors(device, comm)
    }
}

impl TestDevice for Cpu {
    fn open(threads: usize) -> Self {
        Self::new(threads).unwrap()
    }

    fn open_half(threads: usize) -> Self {
        Self::new(threads).unwrap().store(Dtype::Bf16).unwrap()
    }

    fn on_same_threads(&self) -> Self {
        self.clone()
    }

    fn tensors(&self, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Self>>> {
        Ok(Arc::new(Staged::new(self.clone(), comm)))
    }
}

/// Returns the order for deferred work: `DFLOP_DEFERRED_ORDER`, or a random order.
fn order() -> Order {
    let number = std::env::var("DFLOP_DEFERRED_ORDER").ok().and_then(|number| number.parse().ok());
    Order::numbered(number.unwrap_or(3))
}

impl TestDevice for Deferred<Cpu> {
    fn open(threads: usize) -> Self {
        Self::new(<Cpu as TestDevice>::open(threads), order())
    }

    fn open_half(threads: usize) -> Self {
        Self::new(<Cpu as TestDevice>::open_half(threads), order())
    }

    fn on_same_threads(&self) -> Self {
        Self::new(self.inner().clone(), order())
    }

    fn tensors(&self, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Self>>> {
        Ok(Arc::new(Staged::new(self.clone(), comm)))
    }
}
