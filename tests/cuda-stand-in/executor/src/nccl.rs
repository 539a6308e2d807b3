//! CUDA devices that are connected by NCCL, on the stand-ins.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, NcclComm};
use dflop_device::{DeviceComm, Dtype, Result};

use crate::cuda::{numbered, search_path, stand_in};

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

/// Opens the next device, which stores numbers of this type.
///
/// # Panics
/// If the device cannot be opened.
#[must_use]
pub fn of_type(dtype: Dtype) -> Cuda {
    numbered(next_device(), dtype)
}

/// Connects the devices of a job.
///
/// # Errors
/// If ranks cannot connect.
pub fn tensors(device: &Cuda, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Cuda>>> {
    Ok(Arc::new(NcclComm::join_with(device, comm, &search_path(), 32)?))
}
