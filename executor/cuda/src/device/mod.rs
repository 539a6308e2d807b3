//! CUDA device, device settings and tensor addresses.

mod runtime;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use dflop_comm::Failure;
use dflop_device::{Dtype, Tensor};
pub use runtime::KernelTime;
use runtime::KernelTimes;

use crate::attention::{AttentionEngines, CudnnEngine};
use crate::blas::Blas;
use crate::compiler::{Compiler, Kernels};
use crate::driver::{Context, CudaMemory, Event, Gate, Lanes, LateLoads, Loads, MemoryPool, Staging, Stream};
use crate::error::{Error, Result};
use crate::libraries::{Libraries, SearchPath};

/// Computes on a CUDA device; numbers are stored as bf16 or `f32`, and added in `f32`.
///
/// Cheap to clone; clones are the same device, with one compute stream. Ranks that share a device in one
/// process create a separate `Cuda` each. Operations are queued and return at once;
/// [`read`](dflop_device::Runtime::read) and [`download`](dflop_device::Runtime::download) wait. Messages
/// through the host ([`dflop_device::Staged`]) also wait: tensor-parallel sums on the calling thread, all
/// other messages on a thread per lane. Results have the same bits in every run on devices of the same kind.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    /// Lanes; none in the clones that lane threads have, so that lanes end when the last of the remaining
    /// clones is dropped.
    lanes: Option<Arc<Lanes>>,
    /// Stream for uploads in parallel with the compute stream; `None` for uploads in compute stream order.
    beside: Option<Stream>,
}

pub(crate) struct Shared {
    pub(crate) context: Context,
    pub(crate) compute: Stream,
    pub(crate) pool: MemoryPool,
    pub(crate) staging: Arc<Staging>,
    pub(crate) blas: Blas,
    pub(crate) kernels: Kernels,
    pub(crate) loads: Arc<Loads>,
    pub(crate) times: KernelTimes,
    pub(crate) cudnn: Option<CudnnEngine>,
    storage: Dtype,
    reads: AtomicU64,
    launches: AtomicU64,
    /// Job failure, after which communication with other devices was cut off, and the rank of this device.
    failure: OnceLock<(Failure, usize)>,
}

/// [`Cuda`] device settings.
#[derive(Debug, Clone)]
pub struct CudaBuilder {
    ordinal: u32,
    storage: Dtype,
    memory_limit: Option<u64>,
    search: SearchPath,
    kernel_cache: Option<PathBuf>,
    attention: AttentionEngines,
    replaced_sources: Vec<(String, String)>,
    late_loads: LateLoads,
}

/// Device properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Name, as reported by the driver.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub processors: u32,
    /// Memory in bytes.
    pub total_bytes: u64,
    /// CUDA version that the driver supports, major and minor.
    pub driver_version: (u32, u32),
}

impl CudaBuilder {
    /// Sets the storage type for weights and activations, bf16 or `f32`. Default: bf16.
    #[must_use]
    pub fn storage(mut self, dtype: Dtype) -> Self {
        self.storage = dtype;
        self
    }

    /// Sets the limit for bytes in live tensors. Default: the device memory.
    #[must_use]
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets the search path for libraries. Default: [`SearchPath::from_environment`].
    #[must_use]
    pub fn search_path(mut self, search: SearchPath) -> Self {
        self.search = search;
        self
    }

    /// Sets the directory for compiled kernels; `None` compiles them in every process. Default:
    /// `dflop/kernels` in the user cache.
    #[must_use]
    pub fn kernel_cache(mut self, directory: Option<PathBuf>) -> Self {
        self.kernel_cache = directory;
        self
    }

    /// Sets the attention engines. Default: [`AttentionEngines::Own`].
    #[must_use]
    pub fn attention(mut self, engines: AttentionEngines) -> Self {
        self.attention = engines;
        self
    }

    /// Replaces the source of a kernel or header, by file name: for tests that check whether a fault in it
    /// would be found.
    #[doc(hidden)]
    #[must_use]
    pub fn replace_source(mut self, file: &str, text: String) -> Self {
        self.replaced_sources.push((file.to_owned(), text));
        self
    }

    /// Sets what becomes of loads while messages are in flight, for tests. Default: an error in debug builds.
    #[doc(hidden)]
    #[must_use]
    pub fn late_loads(mut self, late: LateLoads) -> Self {
        self.late_loads = late;
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a type other than `f32` and bf16; [`Error::LibraryNotFound`],
    /// [`Error::LibraryUnusable`], [`Error::NoDevice`], [`Error::DeviceTooOld`], [`Error::Driver`];
    /// [`Error::Cudnn`] if cuDNN is requested and cannot be used.
    pub fn build(self) -> Result<Cuda> {
        if !matches!(self.storage, Dtype::F32 | Dtype::Bf16) {
            let reason = format!("expected F32 or Bf16, found {:?}", self.storage);
            return Err(Error::InvalidSetting { setting: "storage", reason });
        }
        let libraries = Libraries::open(&self.search)?;
        let context = Context::new(self.ordinal)?;
        let compute = Stream::new(&context)?;
        let pool = MemoryPool::new(&compute)?;
        if let Some(bytes) = self.memory_limit {
            pool.limit(bytes);
        }
        let loads = Arc::new(Loads::new(self.late_loads));
        let staging = Arc::new(Staging::new(context.clone(), Arc::clone(&loads)));
        let cudnn = match self.attention {
            AttentionEngines::Own => None,
            AttentionEngines::Fastest => {
                let directory = self.kernel_cache.as_deref();
                let device = (&compute, &pool, &staging);
                Some(CudnnEngine::new(self.search.cudnn().as_deref(), directory, device)?)
            }
        };
        let driver = context.driver_version();
        let compiler = Compiler::new(context.capability(), driver, libraries.compiler, self.kernel_cache)?;
        let compiler = compiler.replace_sources(self.replaced_sources);
        let lanes = Some(Arc::new(Lanes::new(context.clone())));
        let shared = Shared {
            staging,
            blas: Blas::new(&context, &pool)?,
            kernels: Kernels::new(context.clone(), compiler, Arc::clone(&loads)),
            loads,
            times: KernelTimes::default(),
            cudnn,
            storage: self.storage,
            reads: AtomicU64::new(0),
            launches: AtomicU64::new(0),
            failure: OnceLock::new(),
            context,
            compute,
            pool,
        };
        Ok(Cuda { shared: Arc::new(shared), lanes, beside: None })
    }
}

/// Returns the directory in the user cache for compiled kernels.
fn default_kernel_cache() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    Some(cache.or_else(home)?.join("dflop/kernels"))
}

impl Cuda {
    /// Returns settings for the device with this number.
    #[must_use]
    pub fn builder(ordinal: u32) -> CudaBuilder {
        CudaBuilder {
            ordinal,
            storage: Dtype::Bf16,
            memory_limit: None,
            search: SearchPath::from_environment(),
            kernel_cache: default_kernel_cache(),
            attention: AttentionEngines::default(),
            replaced_sources: Vec::new(),
            late_loads: LateLoads::default(),
        }
    }

    /// Returns the number of devices, which is at least 1.
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`], [`Error::LibraryUnusable`]; [`Error::NoDevice`] if there is none.
    pub fn count(search: &SearchPath) -> Result<u32> {
        Libraries::open(search)?;
        Context::count()
    }

    /// Returns the device properties.
    #[must_use]
    pub fn properties(&self) -> Properties {
        let context = &self.shared.context;
        Properties {
            name: context.name().to_owned(),
            capability: context.capability(),
            processors: context.processors(),
            total_bytes: context.total_bytes(),
            driver_version: context.driver_version(),
        }
    }

    /// Returns the number of kernels and matrix products that were queued so far, on all clones.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.shared.launches.load(Ordering::Relaxed)
    }

    /// Starts or stops recording the time of every kernel and matrix product, on all clones.
    ///
    /// Recorded launches do not overlap with the next launch, so that a step takes somewhat longer.
    pub fn record_kernel_times(&self, is_on: bool) {
        self.shared.times.record(is_on);
    }

    /// Waits for the device, and takes the times recorded so far, longest first.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn take_kernel_times(&self) -> Result<Vec<KernelTime>> {
        self.shared.times.take(&self.shared.compute)
    }

    /// Returns the attention engines by shape, as far as they are known; none without
    /// [`AttentionEngines::Fastest`].
    #[must_use]
    pub fn attention_choices(&self) -> Vec<crate::attention::AttentionChoice> {
        self.shared.cudnn.as_ref().map(CudnnEngine::choices).unwrap_or_default()
    }

    pub(crate) fn count_launch(&self) {
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the job has failed: device results are invalid from now on.
    pub(crate) fn fail(&self, failure: Failure, rank: usize) {
        // the first failure is the failure that ended the job
        let _ = self.shared.failure.set((failure, rank));
    }

    /// Checks that the job has not failed.
    pub(crate) fn check(&self) -> dflop_device::Result<()> {
        let Some((failure, rank)) = self.shared.failure.get() else { return Ok(()) };
        let (failure, at) = (Box::new(failure.clone()), Box::new(failure.at));
        Err(dflop_comm::Error::Failed { failure, rank: *rank, at }.into())
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Queues lane work, which receives the device.
    pub(crate) fn queue(
        &self,
        lane: u64,
        work: impl FnOnce(&Self, &Stream) -> dflop_device::Result<Event> + Send + 'static,
    ) -> dflop_device::Result<Arc<Gate>> {
        let Some(lanes) = &self.lanes else {
            let reason = "a communication lane cannot queue work".to_owned();
            return Err(dflop_device::Error::Failed { reason });
        };
        let device = Self { shared: Arc::clone(&self.shared), lanes: None, beside: None };
        lanes.queue(lane, move |stream| work(&device, stream))
    }

    /// Returns the same device with uploads in this stream.
    pub(crate) fn with_uploads(&self, stream: Stream) -> Self {
        Self { beside: Some(stream), ..self.clone() }
    }

    /// Returns the stream for uploads, if they run in parallel with the compute stream.
    pub(crate) const fn uploads(&self) -> Option<&Stream> {
        self.beside.as_ref()
    }

    pub(crate) fn storage_type(&self) -> Dtype {
        self.shared.storage
    }

    pub(crate) fn count_read(&self) {
        self.shared.reads.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_of_reads(&self) -> u64 {
        self.shared.reads.load(Ordering::Relaxed)
    }

    /// Allocates elements with unspecified contents.
    pub(crate) fn allocate(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        self.allocate_in(&self.shared.compute, dtype, len)
    }

    /// Allocates elements in stream order; other streams may use them after that point.
    pub(crate) fn allocate_in(&self, stream: &Stream, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        Ok(Tensor::new(CudaMemory::new_in(stream, &self.shared.pool, dtype, len)?, len))
    }
}

/// Tensor address.
pub(crate) trait Address {
    /// Returns the address of the first element.
    fn address(&self) -> u64;

    /// Returns whether elements can be loaded and stored 16 bytes at a time.
    fn is_aligned(&self) -> bool {
        self.address().is_multiple_of(16)
    }
}

impl Address for Tensor<Cuda> {
    fn address(&self) -> u64 {
        self.memory().address() + (self.range().start * self.dtype().bytes()) as u64
    }
}
