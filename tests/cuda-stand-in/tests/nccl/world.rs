//! Ranks that are threads in this process, each with a separate device.

use super::library::{Handle, Operation, SUCCESS, UniqueId, init, issue, unique_id};
use crate::support::{Cuda, cuda, raw};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use std::{
    ffi::c_int,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

pub(crate) const FLOAT32: c_int = 7;
pub(crate) const SUM: c_int = 0;

/// Lets a number of threads pass together; panics if one lacks for long, where a barrier would hang.
pub(crate) struct Gate {
    threads: usize,
    arrived: Mutex<usize>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads, arrived: Mutex::new(0), changed: Condvar::new() }
    }

    pub(crate) fn wait(&self) {
        let mut arrived = self.arrived.lock().expect("no thread panics with the lock");
        *arrived += 1;
        let last = arrived.div_ceil(self.threads) * self.threads;
        self.changed.notify_all();
        let lacks = |arrived: &mut usize| *arrived < last;
        let wait = self.changed.wait_timeout_while(arrived, Duration::from_secs(20), lacks);
        assert!(!wait.expect("no thread panics with the lock").1.timed_out(), "a thread lacks");
    }
}

/// A rank, on the thread that created it.
#[expect(clippy::struct_field_names, reason = "NCCL's word")]
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) comm: Handle,
}

/// A stand-in whose streams have threads, and a device for each rank; `None` without a compiler.
pub(crate) fn threaded(ranks: usize) -> Option<Cuda> {
    let cuda = cuda()?;
    cuda.set_devices(ranks as u64);
    cuda.set_stream_threads(true);
    Some(cuda)
}

/// Runs a function on each rank in a communicator, and destroys the leftovers.
pub(crate) fn run_ranks<T: Send>(ranks: usize, run: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let id = unique_id();
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let rank = Rank::new(ranks, rank, id);
                    let value = run(&rank);
                    rank.comm.destroy();
                    value
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("the rank works")).collect()
    })
}

impl Rank {
    pub(crate) fn new(ranks: usize, rank: usize, id: UniqueId) -> Self {
        let context = CudaContext::new(rank).expect("there are devices");
        raw::without_event_tracking(&context);
        let stream = context.new_stream().expect("the device works");
        let comm = init(ranks as c_int, id, rank as c_int).expect("the ranks come");
        Self { rank, context, stream, comm }
    }

    pub(crate) fn upload<T: DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).expect("the device has memory")
    }

    pub(crate) fn download<T: DeviceRepr + Default + Clone>(&self, values: &CudaSlice<T>) -> Vec<T> {
        self.stream.clone_dtoh(values).expect("the device works")
    }

    /// New memory.
    pub(crate) fn buffer<T: DeviceRepr>(&self, length: usize) -> CudaSlice<T> {
        raw::alloc(&self.stream, length).expect("the device has memory")
    }

    pub(crate) fn issue(&self, operation: Operation) {
        assert_eq!(issue(operation, self.comm, stream_handle(&self.stream)), SUCCESS);
    }

    pub(crate) fn issue_on(&self, stream: &CudaStream, operation: Operation) {
        assert_eq!(issue(operation, self.comm, stream_handle(stream)), SUCCESS);
    }
}

pub(crate) fn stream_handle(stream: &CudaStream) -> usize {
    stream.cu_stream() as usize
}

pub(crate) fn at<T>(values: &CudaSlice<T>) -> u64 {
    values.device_ptr(values.stream()).0
}

/// Polls until a condition holds; false after some seconds.
pub(crate) fn becomes(mut condition: impl FnMut() -> bool) -> bool {
    for _ in 0..1000 {
        if condition() {
            return true;
        }
        thread::sleep(Duration::from_millis(5));
    }
    false
}
