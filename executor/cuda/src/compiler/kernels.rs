//! Kernels that this process has loaded, by source, name and macros.
//!
//! Kernel sources, which are part of the program.

use super::Compiler;
use crate::driver::{Context, Function, Loads, Module};
use crate::error::Result;
use dflop_device::{Dtype, KernelLoads};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

thread_local! {
    /// Kernels that this thread would launch, while recording.
    static RECORDED: RefCell<Option<HashSet<KernelKey>>> = const { RefCell::new(None) };
}

/// Kernel source, name, macros and dynamic shared memory.
type KernelKey = (Source, &'static str, Macros, u32);

/// Compilation macros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Macros {
    /// Element types `X`, `Y` and `Z`.
    pub(crate) types: [Option<Dtype>; 3],
    /// `HEAD`, the head width, or `WIDTH`, the number of elements that a thread handles at a time.
    pub(crate) number: Option<(&'static str, u32)>,
    /// `RANGES`: whether attention is limited to key ranges.
    pub(crate) has_ranges: bool,
}

impl Macros {
    /// Returns the macros `X`, `Y`, `Z` for these types.
    pub(crate) fn types(types: &[Dtype]) -> Self {
        let mut macros = Self::default();
        for (place, &dtype) in macros.types.iter_mut().zip(types) {
            *place = Some(dtype);
        }
        macros
    }

    /// Adds a macro for a number.
    pub(crate) const fn number(mut self, name: &'static str, value: u32) -> Self {
        self.number = Some((name, value));
        self
    }

    /// Adds the macro for key ranges.
    pub(crate) const fn ranges(mut self, has_ranges: bool) -> Self {
        self.has_ranges = has_ranges;
        self
    }

    /// Returns the macros for another shape in the same operation: with rows that do not allow wide accesses,
    /// or do.
    fn with_other_shape(mut self) -> Option<Self> {
        let number = self.number.as_mut().filter(|(name, _)| *name == WIDTH)?;
        number.1 = if number.1 == 1 { WIDE } else { 1 };
        Some(self)
    }

    /// Returns the definitions in compiler syntax.
    fn definitions(self) -> Vec<String> {
        let of_type = |(name, dtype): (&str, Option<Dtype>)| Some(format!("{name}={}", type_name(dtype?)));
        let types = ["X", "Y", "Z"].into_iter().zip(self.types).filter_map(of_type);
        let number = self.number.map(|(name, value)| format!("{name}={value}"));
        types.chain(number).chain(self.has_ranges.then(|| "RANGES=1".to_owned())).collect()
    }
}

/// Macro name for the number of elements that a thread handles at a time: 1 or [`WIDE`].
pub(crate) const WIDTH: &str = "WIDTH";
/// Number of elements in wide accesses.
pub(crate) const WIDE: u32 = 8;

/// Returns the type name in the kernel language.
fn type_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F64 => "double",
        Dtype::U32 => "u32",
        _ => "float",
    }
}

/// Loaded kernels.
pub(crate) struct Kernels {
    context: Context,
    compiler: Compiler,
    loads: Arc<Loads>,
    modules: Mutex<HashMap<(Source, Macros), Module>>,
    functions: Mutex<HashMap<(&'static str, Macros), Function>>,
    /// Time for compiling and loading.
    load_ns: AtomicU64,
}

impl Kernels {
    pub(crate) fn new(context: Context, compiler: Compiler, loads: Arc<Loads>) -> Self {
        let (modules, functions) = (Mutex::default(), Mutex::default());
        Self { context, compiler, loads, modules, functions, load_ns: AtomicU64::new(0) }
    }

    /// Returns the loads so far.
    pub(crate) fn loads(&self) -> KernelLoads {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        let time = Duration::from_nanos(self.load_ns.load(Ordering::Relaxed));
        // without a cache on disk, a module may be compiled twice
        KernelLoads { modules, compiled: self.compiler.compiled().min(modules), time }
    }

    fn add_time_since(&self, begin: Instant) {
        self.load_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Runs work on this thread without launches or exchanges with other ranks, and returns the kernels that
    /// it would launch. Numbers that it reads are zeros.
    pub(crate) fn record(work: impl FnOnce()) -> HashSet<KernelKey> {
        RECORDED.set(Some(HashSet::new()));
        work();
        RECORDED.take().unwrap_or_default()
    }

    /// Returns whether this thread records kernels instead of launching them.
    pub(crate) fn is_recording() -> bool {
        RECORDED.with_borrow(Option::is_some)
    }

    /// Records a kernel, and returns whether this thread records kernels.
    pub(crate) fn is_recorded(key: KernelKey) -> bool {
        RECORDED.with_borrow_mut(|recorded| recorded.as_mut().map(|recorded| recorded.insert(key)).is_some())
    }

    /// Compiles kernels on all cores, and loads them, including kernels for other shapes in the same
    /// operations.
    pub(crate) fn load(&self, kernels: &HashSet<KernelKey>) -> Result<()> {
        let of_other_shapes = kernels.iter().filter_map(|&(source, name, macros, bytes)| {
            Some((source, name, macros.with_other_shape()?, bytes))
        });
        let kernels: HashSet<KernelKey> = of_other_shapes.chain(kernels.iter().copied()).collect();
        let sources: HashSet<(Source, Macros)> =
            kernels.iter().map(|&(source, _, macros, _)| (source, macros)).collect();
        let begin = Instant::now();
        let compiled = self.compile(&sources.into_iter().collect::<Vec<_>>());
        self.add_time_since(begin);
        compiled?;
        kernels
            .into_iter()
            .try_for_each(|(source, name, macros, bytes)| self.get(source, name, macros, bytes).map(drop))
    }

    /// Compiles sources that are neither loaded nor on disk, on all cores.
    fn compile(&self, sources: &[(Source, Macros)]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some((source, macros)) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.compiler.compile(*source, &macros.definitions())?;
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(compile)).collect();
            let own = compile();
            let joined = others.into_iter().map(|other| other.join().unwrap_or(Ok(())));
            joined.fold(own, Result::and)
        })
    }

    /// Returns a kernel, which the first call compiles or reads from disk, and loads.
    ///
    /// - `name`: unique among all sources
    /// - `shared_bytes`: dynamic shared memory that launches may use
    pub(crate) fn get(
        &self,
        source: Source,
        name: &'static str,
        macros: Macros,
        shared_bytes: u32,
    ) -> Result<Function> {
        let functions = || self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions().get(&(name, macros)) {
            return Ok(function.clone());
        }
        self.loads.check(name)?;
        let function = self.module(source, macros)?.function(name, shared_bytes)?;
        functions().insert((name, macros), function.clone());
        Ok(function)
    }

    fn module(&self, source: Source, macros: Macros) -> Result<Module> {
        // locked during compilation, so that ranks in one process compile a source once
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&(source, macros)) {
            return Ok(module.clone());
        }
        let begin = Instant::now();
        let code = self.compiler.compile(source, &macros.definitions())?;
        let module = Module::load(&self.context, &code)?;
        self.add_time_since(begin);
        modules.insert((source, macros), module.clone());
        Ok(module)
    }
}

/// Headers by include name.
pub(super) const HEADERS: [(&str, &str); 6] = [
    ("intrinsics.cuh", include_str!("../../kernels/intrinsics.cuh")),
    ("device.cuh", include_str!("../../kernels/device.cuh")),
    ("activation.cuh", include_str!("../../kernels/activation.cuh")),
    ("own_columns.cuh", include_str!("../../kernels/own_columns.cuh")),
    ("norm_rows.cuh", include_str!("../../kernels/norm_rows.cuh")),
    ("attention.cuh", include_str!("../../kernels/attention.cuh")),
];

/// Defines sources and files.
macro_rules! sources {
    ($($source:ident, $file:literal;)*) => {
        /// Kernel source for an operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Source {
            $($source,)*
        }

        impl Source {
            /// Returns the file name.
            pub(crate) const fn file(self) -> &'static str {
                match self {
                    $(Self::$source => $file,)*
                }
            }

            /// Returns the file text.
            pub(crate) const fn text(self) -> &'static str {
                match self {
                    $(Self::$source => include_str!(concat!("../../kernels/", $file)),)*
                }
            }
        }
    };
}

sources! {
    Activation, "activation.cu";
    AdamW, "adamw.cu";
    AttentionBackward, "attention_backward.cu";
    AttentionForward, "attention_forward.cu";
    AttentionGeneral, "attention_general.cu";
    AttentionSinks, "attention_sinks.cu";
    Bias, "bias.cu";
    ClampedGate, "clamped_gate.cu";
    Clip, "clip.cu";
    ColumnSums, "column_sums.cu";
    CopyRanges, "copy_ranges.cu";
    CrossEntropy, "cross_entropy.cu";
    Elementwise, "elementwise.cu";
    Experts, "experts.cu";
    Gate, "gate.cu";
    GatherScatter, "gather_scatter.cu";
    HeadNorm, "head_norm.cu";
    HeadNormBackward, "head_norm_backward.cu";
    LatentHeads, "latent_heads.cu";
    LayerNorm, "layer_norm.cu";
    LayerScale, "layer_scale.cu";
    Losses, "losses.cu";
    RmsNorm, "rms_norm.cu";
    Rope, "rope.cu";
    Transpose, "transpose.cu";
    VocabParallelCrossEntropy, "vocab_parallel_cross_entropy.cu";
}
