//! Device that the suite runs on: CUDA devices that are connected by NCCL, on the stand-ins.

use std::sync::{Arc, Once};

use dflop_comm::Comm;
use dflop_cuda::{NcclComm, SearchPath};
use dflop_device::{DeviceComm, Dtype};

#[path = "cuda.rs"]
mod cuda;

#[allow(unused_imports, reason = "each test binary uses its part")]
pub(crate) use cuda::{TestDevice, on_same_threads, stand_in};

/// Lets streams run beside each other, and ranks share a device.
fn connect() {
    static CONNECTED: Once = Once::new();
    CONNECTED.call_once(|| {
        stand_in().set_stream_threads(true);
        stand_in().nccl().set_shares_devices(true);
    });
}

/// Makes a device that stores numbers of this type.
pub(crate) fn of_type(dtype: Dtype) -> TestDevice {
    connect();
    cuda::of_type(dtype)
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
    Ok(Arc::new(NcclComm::join(device, comm, &search)?))
}
