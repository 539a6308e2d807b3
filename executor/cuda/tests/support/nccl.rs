//! Device that the suite runs on: CUDA devices that are connected by NCCL, on the stand-ins.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use dflop_comm::Comm;
use dflop_cuda::{NcclComm, SearchPath};
use dflop_device::{DeviceComm, Dtype};

#[path = "cuda.rs"]
mod cuda;

#[allow(unused_imports, reason = "each test binary uses its part")]
pub(crate) use cuda::{TestDevice, stand_in};

/// Devices of the machine, more than ranks run at a time.
const DEVICES: u32 = 16;

/// Lets streams run beside each other, and gives each rank a device; returns its number.
fn next_device() -> u32 {
    static CONNECTED: Once = Once::new();
    static NEXT: AtomicU32 = AtomicU32::new(0);
    CONNECTED.call_once(|| {
        stand_in().set_devices(u64::from(DEVICES));
        stand_in().set_stream_threads(true);
        // where tests share a process, ranks of two of them may have the same one
        stand_in().nccl().set_shares_devices(true);
    });
    NEXT.fetch_add(1, Ordering::Relaxed) % DEVICES
}

/// Makes a device that stores numbers of this type.
pub(crate) fn of_type(dtype: Dtype) -> TestDevice {
    cuda::numbered(next_device(), dtype)
}

/// Makes a device that stores `f32`.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn device(_threads: usize) -> TestDevice {
    of_type(Dtype::F32)
}

/// Makes a device that stores bf16.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn half_device(_threads: usize) -> TestDevice {
    of_type(Dtype::Bf16)
}

/// Makes a communicator of tensors.
pub(crate) fn tensors(
    device: &TestDevice,
    comm: Arc<dyn Comm>,
) -> dflop_device::Result<Arc<dyn DeviceComm<TestDevice>>> {
    let search = SearchPath::only(dflop_cuda_stand_in::library_dir().into_iter().collect());
    Ok(Arc::new(NcclComm::join_with(device, comm, &search, 32)?))
}

/// Makes another device of the same kind.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn on_same_threads(device: &TestDevice) -> TestDevice {
    of_type(dflop_device::Runtime::storage(device))
}
