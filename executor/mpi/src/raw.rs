//! MPI library calls: communicators and operations in progress, which own the buffers.
//!
//! None of these values leaves the thread that created them, so one thread makes all calls. An error within
//! MPI ends the job through the MPI error handler, so return codes are not checked.

#![expect(unsafe_code, reason = "the functions of MPI take pointers")]
#![expect(clippy::unused_self, reason = "only a thread that has initialized MPI has the library")]

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr;

use dflop_comm::{Buffer, Dtype};
use mpi::ffi;

/// Library that this thread has initialized.
pub(crate) struct Library(PhantomData<*const ()>);

/// MPI communicator.
pub(crate) struct Channel {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
}

/// Operation in progress, with all memory that MPI reads and writes meanwhile.
pub(crate) struct Pending {
    request: ffi::MPI_Request,
    /// Elements that are received or changed in place, otherwise elements that are sent.
    buffer: Option<Buffer>,
    /// Elements that are only read.
    input: Option<Buffer>,
    /// Part counts and offsets.
    parts: Vec<c_int>,
}

/// Combination of elements, such as a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Combination {
    Sum,
    Max,
}

impl Library {
    /// Initializes MPI; this thread makes all further calls. `None` if the process has done so before, or MPI
    /// does not allow other threads besides this thread.
    pub(crate) fn start() -> Option<Self> {
        let mut is_initialized = 0;
        // SAFETY: may be called at any time; writes one integer.
        unsafe { ffi::MPI_Initialized(&raw mut is_initialized) };
        if is_initialized != 0 {
            return None;
        }
        let mut provided = 0;
        // SAFETY: MPI is not initialized yet; it accepts a program without arguments.
        let required = unsafe {
            let required = ffi::RSMPI_THREAD_FUNNELED;
            ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), required, &raw mut provided);
            required
        };
        (provided >= required).then_some(Self(PhantomData))
    }

    /// Copies the communicator for all processes, so that no other MPI user sees the messages.
    pub(crate) fn world(&self) -> Channel {
        // SAFETY: MPI is initialized, and its constants are set.
        Channel::copy(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    /// Ends all processes in the job.
    pub(crate) fn abort(&self, status: i32) {
        // SAFETY: MPI is initialized.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, status) };
    }

    /// Waits for all processes and ends the use of MPI.
    pub(crate) fn finish(self) {
        // SAFETY: MPI is initialized, and is finalized once, as `self` is consumed.
        unsafe { ffi::MPI_Finalize() };
    }
}

impl Channel {
    fn copy(of: ffi::MPI_Comm) -> Self {
        // SAFETY: the constant is set once MPI is initialized.
        let mut comm = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: `of` is a communicator; all its ranks make the call.
        unsafe { ffi::MPI_Comm_dup(of, &raw mut comm) };
        Self::new(comm)
    }

    fn new(comm: ffi::MPI_Comm) -> Self {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `comm` is a communicator; each call writes one integer.
        unsafe {
            ffi::MPI_Comm_rank(comm, &raw mut rank);
            ffi::MPI_Comm_size(comm, &raw mut size);
        }
        Self { comm, rank: rank as usize, size: size as usize }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Creates a communicator for the ranks with the same color, ordered by key; all ranks call it together.
    /// Ranks without a color get none.
    pub(crate) fn split(&self, color: Option<usize>, key: usize) -> Option<Self> {
        // SAFETY: the constants are set.
        let (none, mut comm) = unsafe { (ffi::RSMPI_UNDEFINED, ffi::RSMPI_COMM_NULL) };
        let number = color.map_or(none, |color| color as c_int);
        // SAFETY: `self.comm` is a communicator; writes one handle.
        unsafe { ffi::MPI_Comm_split(self.comm, number, key as c_int, &raw mut comm) };
        color.map(|_| Self::new(comm))
    }

    /// Starts to send.
    pub(crate) fn send(&self, buffer: Buffer, to: usize, tag: i32) -> Pending {
        Pending::start(buffer, None, Vec::new(), |buffer, _, _, request| {
            let (data, count, kind) = buffer_parts(buffer);
            // SAFETY: `Pending` keeps the buffer until the operation is done; `to` is a rank.
            unsafe { ffi::MPI_Isend(data, count, kind, to as c_int, tag, self.comm, request) };
        })
    }

    /// Starts a receive into a buffer, from one rank or from any rank.
    pub(crate) fn receive(&self, buffer: Buffer, from: Option<usize>, tag: i32) -> Pending {
        Pending::start(buffer, None, Vec::new(), |buffer, _, _, request| {
            let (data, count, kind) = buffer_parts(buffer);
            // SAFETY: as in `send`; the message is at most as long as the buffer, as the header states.
            unsafe {
                let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |from| from as c_int);
                ffi::MPI_Irecv(data, count, kind, from, tag, self.comm, request);
            }
        })
    }

    /// Starts to combine elements over all ranks.
    pub(crate) fn all_reduce(&self, input: Buffer, combination: Combination) -> Pending {
        let result = Buffer::zeros(input.dtype(), input.elements());
        Pending::start(result, Some(input), Vec::new(), |result, input, _, request| {
            let (data, count, kind) = buffer_parts(result);
            let from = input.map_or(data, |input| buffer_parts(input).0);
            // SAFETY: as in `send`; all ranks pass the same number of elements, which they have compared.
            unsafe {
                let op = operation(combination);
                ffi::MPI_Iallreduce(from, data, count, kind, op, self.comm, request);
            }
        })
    }

    /// Starts a sum over all ranks; the result is the part on this rank.
    pub(crate) fn reduce_scatter(&self, input: Buffer, parts: &[usize]) -> Pending {
        let part = Buffer::zeros(input.dtype(), parts[self.rank]);
        let counts = parts.iter().map(|&part| part as c_int).collect();
        Pending::start(part, Some(input), counts, |part, input, counts, request| {
            let (data, _, kind) = buffer_parts(part);
            let from = input.map_or(data, |input| buffer_parts(input).0);
            // SAFETY: as in `all_reduce`; there is a count for every rank.
            unsafe {
                let op = operation(Combination::Sum);
                ffi::MPI_Ireduce_scatter(from, data, counts.as_ptr(), kind, op, self.comm, request);
            }
        })
    }

    /// Starts to gather the parts of all ranks on every rank; this rank contributes a part.
    pub(crate) fn all_gather(&self, whole: Buffer, parts: &[usize]) -> Pending {
        let counts = parts.iter().map(|&part| part as c_int);
        let offsets = parts.iter().scan(0, |end, &part| {
            *end += part;
            Some((*end - part) as c_int)
        });
        let both = counts.chain(offsets).collect();
        let own = part(&whole, parts, self.rank);
        Pending::start(whole, Some(own), both, |whole, own, both, request| {
            let (data, _, kind) = buffer_parts(whole);
            let (from, count) = own.map_or((data, 0), |own| (buffer_parts(own).0, own.elements() as c_int));
            let (counts, offsets) = both.split_at(both.len() / 2);
            // SAFETY: as in `all_reduce`; there are a count and an offset for every rank, within the buffer.
            unsafe {
                let (counts, offsets) = (counts.as_ptr(), offsets.as_ptr());
                ffi::MPI_Iallgatherv(from, count, kind, data, counts, offsets, kind, self.comm, request);
            }
        })
    }

    /// Starts to copy the elements of one rank to all ranks.
    pub(crate) fn broadcast(&self, buffer: Buffer, root: usize) -> Pending {
        Pending::start(buffer, None, Vec::new(), |buffer, _, _, request| {
            let (data, count, kind) = buffer_parts(buffer);
            // SAFETY: as in `all_reduce`; `root` is a rank.
            unsafe { ffi::MPI_Ibcast(data, count, kind, root as c_int, self.comm, request) };
        })
    }

    /// Starts to wait for all ranks.
    pub(crate) fn barrier(&self) -> Pending {
        Pending::start(Buffer::U8(Vec::new()), None, Vec::new(), |_, _, _, request| {
            // SAFETY: `self.comm` is a communicator; writes one handle.
            unsafe { ffi::MPI_Ibarrier(self.comm, request) };
        })
    }
}

impl Pending {
    fn start(
        mut buffer: Buffer,
        mut input: Option<Buffer>,
        mut parts: Vec<c_int>,
        start: impl FnOnce(&mut Buffer, Option<&mut Buffer>, &mut [c_int], *mut ffi::MPI_Request),
    ) -> Self {
        // SAFETY: the constant is set once MPI is initialized.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // The elements stay where they are when their owners move.
        start(&mut buffer, input.as_mut(), &mut parts, &raw mut request);
        Self { request, buffer: Some(buffer), input, parts }
    }

    /// Lets MPI work on the operation; returns the elements once it is done, and the sender.
    pub(crate) fn test(&mut self) -> Option<(Buffer, usize)> {
        let (mut is_done, mut status) = (0, std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed());
        // SAFETY: the request belongs to an operation in progress, or is the null request; writes flag,
        // status.
        let source = unsafe {
            ffi::MPI_Test(&raw mut self.request, &raw mut is_done, status.as_mut_ptr());
            status.assume_init().MPI_SOURCE
        };
        if is_done == 0 {
            return None;
        }
        self.buffer.take().map(|buffer| (buffer, source.max(0) as usize))
    }

    /// Abandons a receive for which no message has arrived.
    pub(crate) fn cancel(mut self) {
        // SAFETY: the request belongs to a receive; waiting returns at once, as it is canceled or done.
        unsafe {
            ffi::MPI_Cancel(&raw mut self.request);
            ffi::MPI_Wait(&raw mut self.request, ffi::RSMPI_STATUS_IGNORE);
        }
        self.buffer = None;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            // MPI still uses the memory, which therefore stays allocated.
            std::mem::forget((self.buffer.take(), self.input.take(), std::mem::take(&mut self.parts)));
        }
    }
}

/// Copies the part of a rank.
fn part(whole: &Buffer, parts: &[usize], rank: usize) -> Buffer {
    let mut own = Buffer::zeros(whole.dtype(), parts[rank]);
    let begin = parts[..rank].iter().sum::<usize>() * whole.dtype().bytes();
    let length = own.as_bytes().len();
    own.as_bytes_mut().copy_from_slice(&whole.as_bytes()[begin..begin + length]);
    own
}

/// Returns element address, count and type; bf16 travels as integers.
fn buffer_parts(buffer: &mut Buffer) -> (*mut c_void, c_int, ffi::MPI_Datatype) {
    let (dtype, count) = (buffer.dtype(), buffer.elements() as c_int);
    // SAFETY: the constants are set.
    let kind = unsafe {
        match dtype {
            Dtype::Bf16 => ffi::RSMPI_UINT16_T,
            Dtype::F32 => ffi::RSMPI_FLOAT,
            Dtype::F64 => ffi::RSMPI_DOUBLE,
            Dtype::U64 => ffi::RSMPI_UINT64_T,
            _ => ffi::RSMPI_UINT8_T,
        }
    };
    (buffer.as_bytes_mut().as_mut_ptr().cast(), count, kind)
}

/// # Safety
/// MPI is initialized.
unsafe fn operation(combination: Combination) -> ffi::MPI_Op {
    // SAFETY: the constants are set.
    unsafe {
        match combination {
            Combination::Sum => ffi::RSMPI_SUM,
            Combination::Max => ffi::RSMPI_MAX,
        }
    }
}
