//! CUDA devices that are connected by NCCL, on the stand-ins.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, NcclComm};
use dflop_device::{DeviceComm, Dtype, Result, Runtime};
use dflop_testing::TestBackend;

use crate::cuda::{numbered, search_path, stand_in};

/// Backend of suites: a device for each rank, connected by NCCL.
#[derive(Debug)]
pub struct OnNccl;

impl TestBackend for OnNccl {
    type Device = Cuda;

    fn open(_threads: usize) -> Cuda {
        of_type(Dtype::F32)
    }

    fn open_half(_threads: usize) -> Cuda {
        of_type(Dtype::Bf16)
    }

    fn on_same_threads(device: &Cuda) -> Cuda {
        of_type(device.storage())
    }

    fn tensors(device: &Cuda, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Cuda>>> {
        Ok(Arc::new(NcclComm::join_with(device, comm, &search_path(), 32)?))
    }
}

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

fn of_type(dtype: Dtype) -> Cuda {
    numbered(next_device(), dtype)
}
