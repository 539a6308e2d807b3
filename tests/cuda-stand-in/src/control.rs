//! Controls the libraries in the running process.
#![expect(unsafe_code, reason = "calls functions of shared libraries")]

use crate::{
    compile::{library_dir, library_files},
    nccl_control::Nccl,
};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_int},
    mem,
    sync::OnceLock,
    time::Duration,
};

/// What the program has done, in this process, since the last [`StandIn::reset`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Counts {
    pub launches: u64,
    /// Copies from the host to a device.
    pub copies_up: u64,
    /// Copies from a device to the host.
    pub copies_down: u64,
    pub copies_device: u64,
    pub memsets: u64,
    pub stream_synchronizations: u64,
    pub event_synchronizations: u64,
    pub context_synchronizations: u64,
    pub allocations: u64,
    /// Bytes on all devices, as if streams were never late.
    pub bytes_in_use: u64,
    pub bytes_highest: u64,
    pub buffers_in_use: u64,
    /// Number of buffers in use when the context was destroyed.
    pub leaked_buffers: u64,
    /// Products that the matrix library enqueued.
    pub matrix_products: u64,
    /// Loaded from buffers by kernels that were compiled to count: see [`StandIn::set_counts_bytes`].
    pub bytes_loaded: u64,
    /// Stored to buffers by such kernels.
    pub bytes_stored: u64,
}

const COUNTS: usize = 16;

impl From<[u64; COUNTS]> for Counts {
    fn from(values: [u64; COUNTS]) -> Self {
        let [
            launches,
            copies_up,
            copies_down,
            copies_device,
            memsets,
            stream_synchronizations,
            event_synchronizations,
            context_synchronizations,
            allocations,
            bytes_in_use,
            bytes_highest,
            buffers_in_use,
            leaked_buffers,
            matrix_products,
            bytes_loaded,
            bytes_stored,
        ] = values;
        Self {
            launches,
            copies_up,
            copies_down,
            copies_device,
            memsets,
            stream_synchronizations,
            event_synchronizations,
            context_synchronizations,
            allocations,
            bytes_in_use,
            bytes_highest,
            buffers_in_use,
            leaked_buffers,
            matrix_products,
            bytes_loaded,
            bytes_stored,
        }
    }
}

/// The libraries, loaded into this process. Settings hold for the whole process.
#[derive(Debug)]
pub struct StandIn {
    set: unsafe extern "C" fn(*const c_char, u64) -> c_int,
    fail_launch: unsafe extern "C" fn(*const c_char, u64) -> c_int,
    counts: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    reset: unsafe extern "C" fn() -> c_int,
    last_failure: unsafe extern "C" fn(*mut c_char, usize) -> c_int,
    calls: unsafe extern "C" fn(*mut c_char, usize) -> c_int,
    idle_device: unsafe extern "C" fn() -> c_int,
    synchronize_contexts: unsafe extern "C" fn() -> c_int,
    nccl: Nccl,
}

impl StandIn {
    /// Loads the libraries, which [`library_dir`] builds, so that this process finds them under the names of
    /// the CUDA libraries from now on. Returns `None` where there is no compiler.
    ///
    /// # Panics
    /// If the libraries cannot be built or loaded.
    pub fn load() -> Option<&'static Self> {
        static LOADED: OnceLock<Option<StandIn>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref()
    }

    fn open() -> Option<Self> {
        let directory = library_dir()?;
        let libraries: Vec<Library> = library_files()
            .map(|file| {
                // SAFETY: the libraries belong to this package; loading only initializes their statics.
                unsafe { Library::open(Some(directory.join(file)), RTLD_NOW | RTLD_GLOBAL) }
                    .unwrap_or_else(|error| panic!("could not load {file}: {error}"))
            })
            .collect();
        let driver = &libraries[0];
        let nccl = Nccl::of(libraries.last().expect("there are libraries"));
        // SAFETY: the types match the functions in `driver/control_api.cpp`.
        let stand_in = unsafe {
            Self {
                set: *driver.get(c"cuda_stand_in_set").expect("the driver exports its controls"),
                fail_launch: *driver
                    .get(c"cuda_stand_in_fail_launch")
                    .expect("the driver exports its controls"),
                counts: *driver.get(c"cuda_stand_in_counts").expect("the driver exports its controls"),
                reset: *driver.get(c"cuda_stand_in_reset").expect("the driver exports its controls"),
                last_failure: *driver
                    .get(c"cuda_stand_in_last_failure")
                    .expect("the driver exports its controls"),
                calls: *driver.get(c"cuda_stand_in_calls").expect("the driver exports its controls"),
                idle_device: *driver
                    .get(c"cuda_stand_in_idle_device")
                    .expect("the driver exports its controls"),
                synchronize_contexts: *driver
                    .get(c"cuda_stand_in_synchronize_contexts")
                    .expect("the driver exports its controls"),
                nccl,
            }
        };
        // The functions stay valid as long as the process lives.
        mem::forget(libraries);
        Some(stand_in)
    }

    fn set(&self, name: &str, value: u64) {
        let name = CString::new(name).expect("names of settings hold no NUL");
        // SAFETY: the name is a text that ends with NUL; the function only reads it.
        let status = unsafe { (self.set)(name.as_ptr(), value) };
        assert_eq!(status, 0, "the driver knows the setting");
    }

    /// Limits the memory per device. Default: 8 GiB.
    pub fn set_bytes_max(&self, bytes: u64) {
        self.set("bytes", bytes);
    }

    /// Sets the order of blocks, warps and lanes: 0 ascending, the default; 1 descending; else shuffled by
    /// this seed.
    pub fn set_order(&self, order: u64) {
        self.set("order", order);
    }

    /// Sets the number of host threads that run a launch. Default: 1.
    pub fn set_workers(&self, workers: u64) {
        self.set("workers", workers);
    }

    /// Sets how many devices there are, up to 64. Default: 1. With 0, initialization fails as on a machine
    /// without.
    pub fn set_devices(&self, devices: u64) {
        self.set("devices", devices);
    }

    /// Sets the version that the driver reports, such as 12080 for 12.8. Default: 13000.
    pub fn set_driver_version(&self, version: u64) {
        self.set("driver_version", version);
    }

    /// Sets the devices' compute capability, such as 80 for 8.0. Default: 90.
    pub fn set_compute_capability(&self, capability: u64) {
        self.set("compute_capability", capability);
    }

    /// Gives each stream a thread that runs its operations as soon as it may, or lets streams run as late as
    /// they may, the default. Waits until all devices are idle, and drops work that does not end.
    ///
    /// Communicators with several ranks need threads.
    pub fn set_stream_threads(&self, has_threads: bool) {
        self.set("stream_threads", u64::from(has_threads));
    }

    /// Lets the streams on a device share this number of queues, in creation order: an operation starts only
    /// after all earlier operations in the same queue have started. Default: 0, a queue per stream.
    ///
    /// Holds for streams with threads, and for operations that are enqueued from now on.
    pub fn set_queues(&self, queues: u64) {
        self.set("queues", queues);
    }

    /// Lets modules and libraries load all kernels at once, as with `CUDA_MODULE_LOADING=EAGER`.
    pub fn set_eager_loading(&self, is_eager: bool) {
        self.set("eager_loading", u64::from(is_eager));
    }

    /// Sets the time without progress after which a call that waits for all work of a context, which waits
    /// for other work, is taken for a hang: the device fails, and the cause names the waiting threads.
    /// Default: 10 s.
    pub fn set_hang_time(&self, time: Duration) {
        self.set("hang_ms", time.as_millis() as u64);
    }

    /// Returns the number of the first device whose context is not in use, if there is one.
    #[must_use]
    pub fn idle_device(&self) -> Option<u32> {
        // SAFETY: the function has no parameters and may be called at any time.
        u32::try_from(unsafe { (self.idle_device)() }).ok()
    }

    /// Lets a thread wait for all work in every context in turn, as other code in the process might.
    pub fn synchronize_contexts(&self) {
        // SAFETY: the function has no parameters and may be called at any time.
        unsafe { (self.synchronize_contexts)() };
    }

    /// Returns the calls of the driver since the last [`reset`](Self::reset) that enter a context, and how
    /// often they were made.
    ///
    /// # Panics
    /// If the library returns anything else.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<String, u64> {
        let text = written_text(self.calls);
        let line = |line: &str| {
            let (name, count) = line.rsplit_once(' ').expect("a line has a name and a number");
            (name.to_owned(), count.parse().expect("the number is one"))
        };
        text.lines().map(line).collect()
    }

    /// Lets kernels that are compiled from now on count the bytes that their threads load from buffers and
    /// store to buffers, or not any more. Default: they do not.
    ///
    /// What the compiler leaves of accesses counts, without a cache: bytes that threads load twice count
    /// twice. Copies, fills and matrix products are no kernels, and do not count.
    pub fn set_counts_bytes(&self, is_counting: bool) {
        self.set("count_bytes", u64::from(is_counting));
    }

    /// Returns the communication library controls.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.nccl
    }

    /// Sets whether every compilation fails from now on.
    pub fn set_compilation_fails(&self, is_failing: bool) {
        self.set("fail_compilation", u64::from(is_failing));
    }

    /// Lets the `n`-th next launch of a kernel, counted from 1, fail with an illegal address.
    ///
    /// # Panics
    /// If the name holds a NUL.
    pub fn fail_launch(&self, kernel: &str, n: u64) {
        let kernel = CString::new(kernel).expect("names of kernels hold no NUL");
        // SAFETY: the name is a text that ends with NUL; the function only reads it.
        unsafe { (self.fail_launch)(kernel.as_ptr(), n) };
    }

    /// Reads the counts.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut values = [0; COUNTS];
        // SAFETY: the function writes at most the given number of values.
        unsafe { (self.counts)(values.as_mut_ptr(), COUNTS) };
        values.into()
    }

    /// Sets all counts to zero, all settings to the environment's values, and forgets errors. Buffers stay.
    pub fn reset(&self) {
        // SAFETY: the function has no parameters and may be called at any time.
        unsafe { (self.reset)() };
        self.nccl.reset();
    }

    /// Returns the cause of the last device failure, such as a fault's address and thread, or nothing.
    #[must_use]
    pub fn last_failure(&self) -> String {
        written_text(self.last_failure)
    }
}

/// Returns the text that a function writes.
fn written_text(write: unsafe extern "C" fn(*mut c_char, usize) -> c_int) -> String {
    let mut text = vec![0_u8; 1 << 14];
    // SAFETY: the stand-in functions write at most the given number of bytes, terminated by NUL.
    unsafe { write(text.as_mut_ptr().cast(), text.len()) };
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).into_owned()
}
