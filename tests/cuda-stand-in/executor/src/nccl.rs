//! CUDA devices connected by NCCL, on the stand-ins.

use std::sync::{Arc, Mutex, PoisonError};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, NcclComm};
use dflop_device::{DeviceComm, Dtype, Result, Runtime};
use dflop_testing::TestBackend;

use crate::cuda::{numbered, search_path, stand_in, with_late_loads};

/// Suite backend: a device for each rank, connected by NCCL.
#[derive(Debug)]
pub struct OnNccl;

impl TestBackend for OnNccl {
    type Device = Cuda;

    fn open(_threads: usize) -> Cuda {
        with_storage(Dtype::F32)
    }

    fn open_half(_threads: usize) -> Cuda {
        with_storage(Dtype::Bf16)
    }

    fn on_same_threads(device: &Cuda) -> Cuda {
        with_storage(device.storage())
    }

    fn tensors(device: &Cuda, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Cuda>>> {
        Ok(Arc::new(NcclComm::join_with(device, comm, &search_path(), 32)?))
    }
}

/// [`OnNccl`] on devices that have this number of queues for streams, so that messages share lanes.
#[derive(Debug)]
pub struct OnQueues<const QUEUES: usize>;

impl<const QUEUES: usize> TestBackend for OnQueues<QUEUES> {
    type Device = Cuda;

    fn open(threads: usize) -> Cuda {
        OnNccl::open(threads)
    }

    fn open_half(threads: usize) -> Cuda {
        OnNccl::open_half(threads)
    }

    fn on_same_threads(device: &Cuda) -> Cuda {
        OnNccl::on_same_threads(device)
    }

    fn tensors(device: &Cuda, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Cuda>>> {
        Ok(Arc::new(NcclComm::join_with(device, comm, &search_path(), QUEUES)?))
    }
}

/// Devices of the machine, more than ranks run at a time.
const DEVICES: u64 = 64;

impl OnNccl {
    /// Opens a device whose loads wait for messages in flight.
    #[must_use]
    pub fn open_with_late_loads() -> Cuda {
        on_idle(|ordinal| with_late_loads(ordinal, Dtype::F32))
    }
}

fn with_storage(dtype: Dtype) -> Cuda {
    on_idle(|ordinal| numbered(ordinal, dtype))
}

/// Lets streams run beside each other, and gives each rank a device that no other one has.
fn on_idle(open: impl FnOnce(u32) -> Cuda) -> Cuda {
    static OPENED: Mutex<()> = Mutex::new(());
    let _turn = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    stand_in().set_devices(DEVICES);
    stand_in().set_stream_threads(true);
    stand_in().set_eager_loading(true);
    open(stand_in().idle_device().expect("there are more devices than ranks"))
}
