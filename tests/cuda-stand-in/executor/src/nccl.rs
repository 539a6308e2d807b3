//! CUDA devices connected by NCCL, on the stand-ins.

use std::sync::{Arc, Mutex, PoisonError};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, NcclComm};
use dflop_device::{DeviceComm, Dtype, Result, Runtime};
use dflop_testing::TestBackend;

use crate::cuda::{numbered, search_path, stand_in};

/// Suite backend: a device for each rank, connected by NCCL.
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

/// Number of devices on the machine, more than the number of concurrent ranks.
const DEVICES: u64 = 64;

/// Lets streams run concurrently, and assigns an exclusive device to each rank.
fn of_type(dtype: Dtype) -> Cuda {
    static OPENED: Mutex<()> = Mutex::new(());
    let _turn = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    stand_in().set_devices(DEVICES);
    stand_in().set_stream_threads(true);
    stand_in().set_eager_loading(true);
    numbered(stand_in().idle_device().expect("there are more devices than ranks"), dtype)
}
