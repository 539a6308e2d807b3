//! NCCL communicators: calls, shutdown.
//!
//! Calls return before completion ([`Config::nonblocking`]), so that a rank waiting in a call can still end:
//! once [`abort`](Communicator::abort) was called, every call returns.

#![expect(unsafe_code, reason = "calls take addresses and handles of a C library")]

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use dflop_device::{Dtype, Tensor};

use super::library::{
    Config, Functions, Handle, IN_PROGRESS, Nccl, REMOTE_ERROR, SUCCESS, SUM, Status, UniqueId,
};
use crate::device::{Address, Cuda};
use crate::driver::{Context, Stream};
use crate::error::{Error, Result};

/// Minimum and maximum pause between polls while a call is in progress.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// Maximum time that an abort waits for a call on a different thread, which may hang in the driver.
const ABORT_WAIT: Duration = Duration::from_secs(1);

/// A rank's handle to a communicator.
pub(super) struct Communicator {
    nccl: Nccl,
    context: Context,
    handle: AtomicPtr<std::ffi::c_void>,
    /// Held during a call: communicators are not thread-safe.
    calls: Mutex<()>,
    is_aborted: AtomicBool,
    /// Name of the connection, for errors.
    name: String,
    rank: usize,
}

/// Communicator state between calls.
pub(super) enum Health {
    Well,
    /// A remote rank failed; the job's communicator has the details.
    RemoteFailed(String),
    Failed(String),
}

impl Communicator {
    /// Creates an id, which all ranks in a new communicator pass.
    pub(super) fn new_id(nccl: &Nccl) -> Result<UniqueId> {
        let mut id = UniqueId([0; super::library::ID_BYTES]);
        // SAFETY: the pointer is to a local variable.
        let status = unsafe { (nccl.functions().unique_id)(&raw mut id) };
        if status != SUCCESS {
            let reason = nccl.describe(status, std::ptr::null_mut());
            return Err(Error::Nccl { call: "ncclGetUniqueId", of: "this process".to_owned(), reason });
        }
        Ok(id)
    }

    /// Starts to create a communicator; [`ready`](Self::ready) waits for the remaining ranks.
    ///
    /// - `name`: connection name, for errors
    pub(super) fn start(
        nccl: &Nccl,
        context: &Context,
        id: UniqueId,
        (rank, size): (usize, usize),
        name: String,
    ) -> Result<Self> {
        context.make_current()?;
        let (mut handle, mut config): (Handle, _) = (std::ptr::null_mut(), Config::nonblocking());
        // SAFETY: both pointers are to local variables; the device of the communicator is the current one.
        let status = unsafe {
            (nccl.functions().init)(&raw mut handle, size as c_int, id, rank as c_int, &raw mut config)
        };
        let communicator = Self {
            nccl: nccl.clone(),
            context: context.clone(),
            handle: AtomicPtr::new(handle),
            calls: Mutex::new(()),
            is_aborted: AtomicBool::new(false),
            name,
            rank,
        };
        if status != SUCCESS && status != IN_PROGRESS {
            return Err(communicator.error("ncclCommInitRankConfig", status));
        }
        Ok(communicator)
    }

    /// Waits until all ranks have created the communicator.
    ///
    /// # Errors
    /// Errors from `go_on`, which is called with the time since the wait began.
    pub(super) fn ready(
        &self,
        mut go_on: impl FnMut(Duration) -> dflop_device::Result<()>,
    ) -> dflop_device::Result<()> {
        let (begin, _turn) = (Instant::now(), self.turn());
        let mut pause = PAUSES[0];
        loop {
            match self.status() {
                SUCCESS => return Ok(()),
                IN_PROGRESS => {}
                status => return Err(self.error("ncclCommInitRankConfig", status).into()),
            }
            go_on(begin.elapsed())?;
            if self.is_aborted() {
                return Err(self.aborted("ncclCommInitRankConfig").into());
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sums over all ranks, in place.
    pub(super) fn all_reduce(&self, stream: &Stream, values: &Tensor<Cuda>) -> Result<()> {
        let (address, dtype) = (values.address(), data_type(values.dtype())?);
        self.call("ncclAllReduce", |functions, handle| {
            // SAFETY: the tensor has this many elements, and lives until the work is done.
            unsafe {
                let at = address as *mut std::ffi::c_void;
                (functions.all_reduce)(at, at, values.len(), dtype, SUM, handle, stream.raw())
            }
        })
    }

    /// Sums over all ranks and leaves each rank with the summed part for that rank.
    pub(super) fn reduce_scatter(
        &self,
        stream: &Stream,
        values: &Tensor<Cuda>,
        parts: &[usize],
    ) -> Result<()> {
        let (dtype, places) = (data_type(values.dtype())?, places(values, parts));
        let base = values.address() as *mut std::ffi::c_void;
        if parts.windows(2).all(|pair| pair[0] == pair[1]) {
            return self.call("ncclReduceScatter", |functions, handle| {
                let own = places[self.rank] as *mut std::ffi::c_void;
                // SAFETY: as above; a rank's part is where it is in the whole, as in-place calls want it.
                unsafe { (functions.reduce_scatter)(base, own, parts[0], dtype, SUM, handle, stream.raw()) }
            });
        }
        self.group("ncclReduce", parts.len(), |functions, handle, root| {
            let at = places[root] as *mut std::ffi::c_void;
            // SAFETY: as above.
            unsafe {
                (functions.reduce)(at, at, parts[root], dtype, SUM, root as c_int, handle, stream.raw())
            }
        })
    }

    /// Gathers all parts on every rank.
    pub(super) fn all_gather(&self, stream: &Stream, values: &Tensor<Cuda>, parts: &[usize]) -> Result<()> {
        let (dtype, places) = (data_type(values.dtype())?, places(values, parts));
        let base = values.address() as *mut std::ffi::c_void;
        if parts.windows(2).all(|pair| pair[0] == pair[1]) {
            return self.call("ncclAllGather", |functions, handle| {
                let own = places[self.rank] as *mut std::ffi::c_void;
                // SAFETY: as above.
                unsafe { (functions.all_gather)(own, base, parts[0], dtype, handle, stream.raw()) }
            });
        }
        self.group("ncclBroadcast", parts.len(), |functions, handle, root| {
            let at = places[root] as *mut std::ffi::c_void;
            // SAFETY: as above.
            unsafe { (functions.broadcast)(at, at, parts[root], dtype, root as c_int, handle, stream.raw()) }
        })
    }

    /// Sends to a different rank.
    pub(super) fn send(&self, stream: &Stream, values: &Tensor<Cuda>, to: usize) -> Result<()> {
        let (address, dtype) = (values.address(), data_type(values.dtype())?);
        self.call("ncclSend", |functions, handle| {
            // SAFETY: as above.
            unsafe {
                let at = address as *const std::ffi::c_void;
                (functions.send)(at, values.len(), dtype, to as c_int, handle, stream.raw())
            }
        })
    }

    /// Receives from a different rank.
    pub(super) fn recv(&self, stream: &Stream, values: &Tensor<Cuda>, from: usize) -> Result<()> {
        let (address, dtype) = (values.address(), data_type(values.dtype())?);
        self.call("ncclRecv", |functions, handle| {
            // SAFETY: as above.
            unsafe {
                let at = address as *mut std::ffi::c_void;
                (functions.recv)(at, values.len(), dtype, from as c_int, handle, stream.raw())
            }
        })
    }

    /// Runs a call for each index, as a single NCCL group.
    fn group(
        &self,
        call: &'static str,
        calls: usize,
        run: impl Fn(&Functions, Handle, usize) -> Status,
    ) -> Result<()> {
        self.call(call, |functions, handle| {
            // SAFETY: every start has its end below.
            let started = unsafe { (functions.group_start)() };
            let each = (0..calls).map(|index| run(functions, handle, index));
            let failed = each.into_iter().find(|&status| status != SUCCESS && status != IN_PROGRESS);
            // SAFETY: as above.
            let ended = unsafe { (functions.group_end)() };
            [Some(started), failed, Some(ended)]
                .into_iter()
                .flatten()
                .find(|&status| status != SUCCESS)
                .unwrap_or(SUCCESS)
        })
    }

    /// Creates a communicator for the ranks with the same color.
    pub(super) fn split(&self, color: usize, name: String) -> Result<Self> {
        let mut config = Config::nonblocking();
        // NCCL writes the handle later, from a thread of its own. If this call returns before, because of an
        // abort, the place for it must stay.
        let place: &'static AtomicPtr<std::ffi::c_void> = Box::leak(Box::default());
        self.call("ncclCommSplit", |functions, whole| {
            // SAFETY: the place stays, and the configuration is read during the call; the device is that of
            // the whole communicator.
            unsafe { (functions.split)(whole, color as c_int, 0, place.as_ptr(), &raw mut config) }
        })?;
        let handle = place.load(Ordering::Acquire);
        // SAFETY: the split is done, so that nobody else has the place, which came from a box.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(place).cast_mut()) });
        Ok(Self {
            nccl: self.nccl.clone(),
            context: self.context.clone(),
            handle: AtomicPtr::new(handle),
            calls: Mutex::new(()),
            is_aborted: AtomicBool::new(false),
            name,
            rank: 0,
        })
    }

    /// Sends to this rank itself and receives the message, as a single group.
    pub(super) fn exchange_alone(
        &self,
        stream: &Stream,
        from: &Tensor<Cuda>,
        to: &Tensor<Cuda>,
    ) -> Result<()> {
        let (source, place, dtype) = (from.address(), to.address(), data_type(from.dtype())?);
        let (own, count) = (self.rank as c_int, from.len());
        self.group("ncclSend", 2, |functions, handle, index| {
            // SAFETY: as above; the tensors have the same length and type.
            unsafe {
                if index == 0 {
                    (functions.send)(source as *const _, count, dtype, own, handle, stream.raw())
                } else {
                    (functions.recv)(place as *mut _, count, dtype, own, handle, stream.raw())
                }
            }
        })
    }

    /// Runs a call, and waits until it has queued its work.
    fn call(&self, call: &'static str, run: impl FnOnce(&Functions, Handle) -> Status) -> Result<()> {
        self.context.make_current()?;
        let _turn = self.turn();
        if self.is_aborted() {
            return Err(self.aborted(call));
        }
        let mut status = run(self.nccl.functions(), self.handle.load(Ordering::Acquire));
        if status == SUCCESS {
            // some calls, such as that of a split, return success while they go on
            status = self.status();
        }
        let mut pause = PAUSES[0];
        while status == IN_PROGRESS {
            std::thread::sleep(pause);
            pause = (2 * pause).min(PAUSES[1]);
            if self.is_aborted() {
                return Err(self.aborted(call));
            }
            status = self.status();
        }
        if status == SUCCESS { Ok(()) } else { Err(self.error(call, status)) }
    }

    fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the communicator status: call in progress or failed work.
    fn status(&self) -> Status {
        let (handle, mut state) = (self.handle.load(Ordering::Acquire), SUCCESS);
        if handle.is_null() {
            return IN_PROGRESS;
        }
        // SAFETY: the handle is alive as long as it is not null, and the pointer is to a local variable.
        let status = unsafe { (self.nccl.functions().async_error)(handle, &raw mut state) };
        if status == SUCCESS { state } else { status }
    }

    /// Returns whether work has failed.
    pub(super) fn health(&self) -> Health {
        if self.is_aborted() {
            return Health::Well;
        }
        match self.status() {
            SUCCESS | IN_PROGRESS => Health::Well,
            REMOTE_ERROR => Health::RemoteFailed(self.describe(REMOTE_ERROR)),
            status => Health::Failed(self.describe(status)),
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }

    /// Aborts all work on the communicator, and every later call.
    pub(super) fn abort(&self) {
        if self.is_aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        // calls see the mark and return; one that hangs in the driver needs the abort to come back
        let deadline = Instant::now() + ABORT_WAIT;
        let _turn = loop {
            match self.calls.try_lock() {
                Ok(turn) => break Some(turn),
                Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSES[1]),
            }
        };
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !handle.is_null() && self.context.make_current().is_ok() {
            // SAFETY: the handle was alive, and is not used again.
            let _ = unsafe { (self.nccl.functions().abort)(handle) };
        }
    }

    /// Starts to end a communicator whose work is done.
    pub(super) fn finalize(&self) {
        let _turn = self.turn();
        let handle = self.handle.load(Ordering::Acquire);
        if !handle.is_null() && self.context.make_current().is_ok() {
            // SAFETY: the handle is alive.
            let _ = unsafe { (self.nccl.functions().finalize)(handle) };
        }
    }

    /// Frees a communicator ended by [`finalize`](Self::finalize), once the remaining ranks have ended as
    /// well; aborts the communicator if the deadline passes first.
    pub(super) fn destroy(&self, deadline: Instant) {
        while !self.is_aborted() && self.status() == IN_PROGRESS {
            if Instant::now() > deadline {
                return self.abort();
            }
            std::thread::sleep(PAUSES[1]);
        }
        let _turn = self.turn();
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !handle.is_null() && self.context.make_current().is_ok() {
            // SAFETY: the handle was alive, and is not used again.
            let _ = unsafe { (self.nccl.functions().destroy)(handle) };
        }
    }

    fn describe(&self, status: Status) -> String {
        self.nccl.describe(status, self.handle.load(Ordering::Acquire))
    }

    fn error(&self, call: &'static str, status: Status) -> Error {
        Error::Nccl { call, of: self.name.clone(), reason: self.describe(status) }
    }

    fn aborted(&self, call: &'static str) -> Error {
        Error::Nccl { call, of: self.name.clone(), reason: "the communicator was aborted".to_owned() }
    }
}

/// Returns the NCCL number for an element type.
fn data_type(dtype: Dtype) -> Result<c_int> {
    match dtype {
        Dtype::U32 => Ok(3),
        Dtype::F32 => Ok(7),
        Dtype::F64 => Ok(8),
        Dtype::Bf16 => Ok(9),
        other => {
            let reason = format!("{other:?} cannot be sent");
            Err(Error::InvalidSetting { setting: "tensor", reason })
        }
    }
}

/// Returns the addresses for a tensor's parts.
fn places(values: &Tensor<Cuda>, parts: &[usize]) -> Vec<u64> {
    let bytes = values.dtype().bytes() as u64;
    let starts = parts.iter().scan(values.address(), |at, &len| {
        *at += len as u64 * bytes;
        Some(*at - len as u64 * bytes)
    });
    starts.collect()
}
