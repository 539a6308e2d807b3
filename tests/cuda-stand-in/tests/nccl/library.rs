//! Communication library functions.
#![expect(unsafe_code, reason = "calls of a shared library")]

use dflop_cuda_stand_in::{StandIn, library_dir};
use libloading::os::unix::Library as File;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const UNHANDLED_CUDA_ERROR: c_int = 1;
pub(crate) const SYSTEM_ERROR: c_int = 2;
pub(crate) const INVALID_ARGUMENT: c_int = 4;
pub(crate) const INVALID_USAGE: c_int = 5;
pub(crate) const REMOTE_ERROR: c_int = 6;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct UniqueId([u8; 128]);

/// A communicator handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(usize);

type Init = unsafe extern "C" fn(*mut usize, c_int, UniqueId, c_int, *const c_void) -> c_int;
type Split = unsafe extern "C" fn(usize, c_int, c_int, *mut usize, *const c_void) -> c_int;
type AllReduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, usize, usize) -> c_int;
type Reduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, c_int, usize, usize) -> c_int;
type AllGather = unsafe extern "C" fn(u64, u64, usize, c_int, usize, usize) -> c_int;
type SendOrRecv = unsafe extern "C" fn(u64, usize, c_int, c_int, usize, usize) -> c_int;
type OfHandle = unsafe extern "C" fn(usize) -> c_int;
type Question = unsafe extern "C" fn(usize, *mut c_int) -> c_int;

struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: Init,
    split: Split,
    finalize: OfHandle,
    destroy: OfHandle,
    abort: OfHandle,
    async_error: Question,
    count: Question,
    user_rank: Question,
    last_error: unsafe extern "C" fn(usize) -> *const c_char,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    all_reduce: AllReduce,
    reduce: Reduce,
    reduce_scatter: AllReduce,
    all_gather: AllGather,
    /// With a root where an all-reduce has a reduction.
    broadcast: AllReduce,
    send: SendOrRecv,
    receive: SendOrRecv,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
}

fn functions() -> &'static Functions {
    static LOADED: OnceLock<Functions> = OnceLock::new();
    LOADED.get_or_init(|| {
        StandIn::load().expect("the test has a stand-in");
        let path = library_dir().expect("the test has a stand-in").join("libnccl.so.2");
        // SAFETY: the library is loaded already, and the types match the NCCL documentation.
        unsafe {
            let file = File::new(path).expect("the library is loaded");
            let functions = Functions {
                get_version: *file.get(c"ncclGetVersion").unwrap(),
                get_unique_id: *file.get(c"ncclGetUniqueId").unwrap(),
                init: *file.get(c"ncclCommInitRankConfig").unwrap(),
                split: *file.get(c"ncclCommSplit").unwrap(),
                finalize: *file.get(c"ncclCommFinalize").unwrap(),
                destroy: *file.get(c"ncclCommDestroy").unwrap(),
                abort: *file.get(c"ncclCommAbort").unwrap(),
                async_error: *file.get(c"ncclCommGetAsyncError").unwrap(),
                count: *file.get(c"ncclCommCount").unwrap(),
                user_rank: *file.get(c"ncclCommUserRank").unwrap(),
                last_error: *file.get(c"ncclGetLastError").unwrap(),
                error_string: *file.get(c"ncclGetErrorString").unwrap(),
                all_reduce: *file.get(c"ncclAllReduce").unwrap(),
                reduce: *file.get(c"ncclReduce").unwrap(),
                reduce_scatter: *file.get(c"ncclReduceScatter").unwrap(),
                all_gather: *file.get(c"ncclAllGather").unwrap(),
                broadcast: *file.get(c"ncclBroadcast").unwrap(),
                send: *file.get(c"ncclSend").unwrap(),
                receive: *file.get(c"ncclRecv").unwrap(),
                group_start: *file.get(c"ncclGroupStart").unwrap(),
                group_end: *file.get(c"ncclGroupEnd").unwrap(),
            };
            std::mem::forget(file);
            functions
        }
    })
}

/// An operation, as a call describes it. Addresses need not be valid: some tests are about invalid addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    AllReduce(u64, u64, usize, c_int, c_int),
    /// The last number is the root.
    Reduce(u64, u64, usize, c_int, c_int, c_int),
    ReduceScatter(u64, u64, usize, c_int, c_int),
    AllGather(u64, u64, usize, c_int),
    Broadcast(u64, u64, usize, c_int, c_int),
    Send(u64, usize, c_int, c_int),
    Recv(u64, usize, c_int, c_int),
}

pub(crate) fn issue(operation: Operation, Handle(handle): Handle, stream: usize) -> c_int {
    let nccl = functions();
    // SAFETY: the stand-in checks all handles and addresses.
    unsafe {
        match operation {
            Operation::AllReduce(from, to, count, kind, reduction) => {
                (nccl.all_reduce)(from, to, count, kind, reduction, handle, stream)
            }
            Operation::Reduce(from, to, count, kind, reduction, root) => {
                (nccl.reduce)(from, to, count, kind, reduction, root, handle, stream)
            }
            Operation::ReduceScatter(from, to, count, kind, reduction) => {
                (nccl.reduce_scatter)(from, to, count, kind, reduction, handle, stream)
            }
            Operation::AllGather(from, to, count, kind) => {
                (nccl.all_gather)(from, to, count, kind, handle, stream)
            }
            Operation::Broadcast(from, to, count, kind, root) => {
                (nccl.broadcast)(from, to, count, kind, root, handle, stream)
            }
            Operation::Send(from, count, kind, peer) => (nccl.send)(from, count, kind, peer, handle, stream),
            Operation::Recv(to, count, kind, peer) => (nccl.receive)(to, count, kind, peer, handle, stream),
        }
    }
}

/// Runs calls in a group; returns the result at the group end.
pub(crate) fn group(calls: impl FnOnce()) -> c_int {
    // SAFETY: the functions have no parameters.
    unsafe {
        assert_eq!((functions().group_start)(), SUCCESS);
        calls();
        (functions().group_end)()
    }
}

pub(crate) fn version() -> c_int {
    let mut version = 0;
    // SAFETY: the function writes one integer.
    assert_eq!(unsafe { (functions().get_version)(&raw mut version) }, SUCCESS);
    version
}

pub(crate) fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the function writes the id.
    assert_eq!(unsafe { (functions().get_unique_id)(&raw mut id) }, SUCCESS);
    id
}

impl UniqueId {
    pub(crate) fn to_hex(self) -> String {
        self.0.map(|byte| format!("{byte:02x}")).concat()
    }

    pub(crate) fn from_hex(text: &str) -> Self {
        Self(std::array::from_fn(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()))
    }
}

/// Creates the communicator for a rank.
pub(crate) fn init(ranks: c_int, id: UniqueId, rank: c_int) -> Result<Handle, c_int> {
    let mut handle = 0;
    // SAFETY: the function writes the handle, and requires no configuration.
    let result = unsafe { (functions().init)(&raw mut handle, ranks, id, rank, ptr::null()) };
    if result == SUCCESS { Ok(Handle(handle)) } else { Err(result) }
}

/// Creates the communicators for all ranks on this host thread, in a single group. `bind` makes a rank's
/// context current.
pub(crate) fn init_all(ranks: usize, bind: impl Fn(usize)) -> Vec<Handle> {
    let id = unique_id();
    let mut handles = vec![0; ranks];
    let result = group(|| {
        for (rank, handle) in handles.iter_mut().enumerate() {
            bind(rank);
            // SAFETY: the function writes the handle before the group ends.
            let result =
                unsafe { (functions().init)(handle, ranks as c_int, id, rank as c_int, ptr::null()) };
            assert_eq!(result, SUCCESS);
        }
    });
    assert_eq!(result, SUCCESS);
    handles.into_iter().map(Handle).collect()
}

impl Handle {
    pub(crate) const NULL: Self = Self(0);

    /// The new communicator, or the null communicator for a color of -1.
    pub(crate) fn split(self, color: c_int, key: c_int) -> Result<Self, c_int> {
        let mut handle = 0;
        // SAFETY: the function writes the handle, and requires no configuration.
        let result = unsafe { (functions().split)(self.0, color, key, &raw mut handle, ptr::null()) };
        if result == SUCCESS { Ok(Self(handle)) } else { Err(result) }
    }

    fn call(self, function: OfHandle) -> c_int {
        // SAFETY: the stand-in checks all handles.
        unsafe { function(self.0) }
    }

    fn ask(self, function: Question) -> c_int {
        let mut answer = -1;
        // SAFETY: the function writes one integer.
        assert_eq!(unsafe { function(self.0, &raw mut answer) }, SUCCESS);
        answer
    }

    pub(crate) fn finalize(self) -> c_int {
        self.call(functions().finalize)
    }

    pub(crate) fn destroy(self) -> c_int {
        self.call(functions().destroy)
    }

    pub(crate) fn abort(self) -> c_int {
        self.call(functions().abort)
    }

    pub(crate) fn async_error(self) -> c_int {
        self.ask(functions().async_error)
    }

    pub(crate) fn count(self) -> c_int {
        self.ask(functions().count)
    }

    pub(crate) fn user_rank(self) -> c_int {
        self.ask(functions().user_rank)
    }

    pub(crate) fn last_error(self) -> String {
        // SAFETY: the function returns a text that ends with NUL.
        let text = unsafe { CStr::from_ptr((functions().last_error)(self.0)) };
        text.to_string_lossy().into_owned()
    }
}

pub(crate) fn error_string(result: c_int) -> String {
    // SAFETY: the function returns a text that ends with NUL.
    let text = unsafe { CStr::from_ptr((functions().error_string)(result)) };
    text.to_string_lossy().into_owned()
}
