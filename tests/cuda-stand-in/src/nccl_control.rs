//! Controls the communication library in the running process.
#![expect(unsafe_code, reason = "calls functions of a shared library")]

use libloading::os::unix::Library;
use std::{
    ffi::{CString, c_char, c_int},
    time::Duration,
};

/// Operations of the ranks in this process since the last [`StandIn::reset`](crate::StandIn::reset).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct NcclCounts {
    pub all_reduces: u64,
    pub reduces: u64,
    pub reduce_scatters: u64,
    pub all_gathers: u64,
    pub broadcasts: u64,
    pub sends: u64,
    pub receives: u64,
    /// Number of send buffer bytes.
    pub bytes: u64,
    /// Communicators that are alive.
    pub communicators: u64,
    /// The most operations that ran at the same time.
    pub in_flight_highest: u64,
}

const COUNTS: usize = 10;

impl From<[u64; COUNTS]> for NcclCounts {
    fn from(values: [u64; COUNTS]) -> Self {
        let [
            all_reduces,
            reduces,
            reduce_scatters,
            all_gathers,
            broadcasts,
            sends,
            receives,
            bytes,
            communicators,
            in_flight_highest,
        ] = values;
        Self {
            all_reduces,
            reduces,
            reduce_scatters,
            all_gathers,
            broadcasts,
            sends,
            receives,
            bytes,
            communicators,
            in_flight_highest,
        }
    }
}

/// A requested fault on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclFault {
    /// An asynchronous error with this code of NCCL; the operation ends with an abort only.
    Error(c_int),
    /// The operation, and all later ones of the rank, end with an abort only.
    Hang,
    /// The rank closes the connections; only an abort ends the operation.
    Lost,
    /// Communicator creation fails with this NCCL code.
    Init(c_int),
}

/// Operations, in the numbers of the launch record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum NcclOperation {
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Send,
    Recv,
}

impl NcclOperation {
    const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::Reduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Send,
        Self::Recv,
    ];
}

/// An operation as a host thread has issued it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclLaunch {
    /// Communicator id, equal on all ranks in a communicator.
    pub communicator: u64,
    /// The rank in the communicator.
    pub rank: i32,
    /// The operation.
    pub operation: NcclOperation,
    /// The peer rank in a send or receive, the root in a rooted collective, -1 otherwise.
    pub peer: i32,
    /// Type code.
    pub data_type: i32,
    /// Number of elements, as passed to the call.
    pub count: u64,
}

/// As the library writes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawLaunch {
    communicator: u64,
    rank: i32,
    kind: i32,
    peer: i32,
    data_type: i32,
    count: u64,
}

/// The NCCL stand-in, loaded into this process. Settings hold for the whole process.
#[derive(Debug)]
pub struct Nccl {
    set: unsafe extern "C" fn(*const c_char, u64) -> c_int,
    request_fault: unsafe extern "C" fn(c_int, c_int, u64, c_int) -> c_int,
    counts: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    launches: unsafe extern "C" fn(*mut RawLaunch, usize) -> c_int,
    reset: unsafe extern "C" fn() -> c_int,
}

impl Nccl {
    pub(crate) fn of(library: &Library) -> Self {
        let missing = "the communication library exports its controls";
        // SAFETY: the types match the functions in `nccl/control_api.cpp`.
        unsafe {
            Self {
                set: *library.get(c"nccl_stand_in_set").expect(missing),
                request_fault: *library.get(c"nccl_stand_in_request_fault").expect(missing),
                counts: *library.get(c"nccl_stand_in_counts").expect(missing),
                launches: *library.get(c"nccl_stand_in_launches").expect(missing),
                reset: *library.get(c"nccl_stand_in_reset").expect(missing),
            }
        }
    }

    fn set(&self, name: &str, value: u64) {
        let name = CString::new(name).expect("names of settings hold no NUL");
        // SAFETY: the name is a text that ends with NUL; the function only reads it.
        let status = unsafe { (self.set)(name.as_ptr(), value) };
        assert_eq!(status, 0, "the library knows the setting");
    }

    /// Sets the version that the library reports, such as 22809 for 2.28.9, the default.
    pub fn set_version(&self, version: u64) {
        self.set("version", version);
    }

    /// Sets the wait limit for the other ranks in a new communicator. Default: 60 s.
    pub fn set_init_timeout(&self, time: Duration) {
        self.set("init_ms", time.as_millis().try_into().unwrap_or(u64::MAX));
    }

    /// Delays operations, or operation groups, on their streams. Default: not at all.
    pub fn set_delay(&self, time: Duration) {
        self.set("delay_us", time.as_micros().try_into().unwrap_or(u64::MAX));
    }

    /// Lets two ranks in a communicator share a device in this process. Default: they must not.
    pub fn set_shares_devices(&self, is_allowed: bool) {
        self.set("shares_devices", u64::from(is_allowed));
    }

    /// Requests a fault in a rank's `n`-th operation, counted from 1 and from now; in the rank's `n`-th
    /// communicator for [`NcclFault::Init`].
    ///
    /// The rank is the rank in the communicator that was created from a unique id, also for operations on its
    /// splits. Operations count as host threads issue them.
    pub fn request_fault(&self, fault: NcclFault, rank: i32, n: u64) {
        let (kind, code) = match fault {
            NcclFault::Error(code) => (1, code),
            NcclFault::Hang => (2, 0),
            NcclFault::Lost => (3, 0),
            NcclFault::Init(code) => (4, code),
        };
        // SAFETY: the function takes only numbers.
        unsafe { (self.request_fault)(kind, rank, n, code) };
    }

    /// Reads the counts.
    #[must_use]
    pub fn counts(&self) -> NcclCounts {
        let mut values = [0; COUNTS];
        // SAFETY: the function writes at most the given number of values.
        unsafe { (self.counts)(values.as_mut_ptr(), COUNTS) };
        values.into()
    }

    /// Reads the operations that host threads in this process have issued, oldest first.
    ///
    /// # Panics
    /// If the library writes an operation that does not exist.
    #[must_use]
    pub fn launches(&self) -> Vec<NcclLaunch> {
        // SAFETY: the function writes nothing if there is room for nothing.
        let count = unsafe { (self.launches)(std::ptr::null_mut(), 0) };
        let mut raw = vec![RawLaunch::default(); usize::try_from(count).unwrap_or(0)];
        // SAFETY: the function writes at most the given number of launches.
        unsafe { (self.launches)(raw.as_mut_ptr(), raw.len()) };
        raw.into_iter().map(NcclLaunch::from).collect()
    }

    /// Sets counts to zero, settings to the environment's values, and forgets requested faults.
    pub fn reset(&self) {
        // SAFETY: the function has no parameters and may be called at any time.
        unsafe { (self.reset)() };
    }
}

impl From<RawLaunch> for NcclLaunch {
    fn from(raw: RawLaunch) -> Self {
        let RawLaunch { communicator, rank, kind, peer, data_type, count } = raw;
        let operation =
            usize::try_from(kind).map(|kind| NcclOperation::ALL[kind]).expect("kinds are not negative");
        Self { communicator, rank, operation, peer, data_type, count }
    }
}
