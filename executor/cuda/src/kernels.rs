//! Kernels that this process has loaded, by source, name and macros.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use dflop_device::Dtype;

use crate::compiler::{Compiler, Source};
use crate::driver::{Context, Function, Module};
use crate::error::Result;

/// Macros of a compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Macros {
    /// Types of elements `X`, `Y` and `Z`.
    pub(crate) types: [Option<Dtype>; 3],
    /// `HEAD`, the width of a head, or `WIDTH`, elements that a thread handles at a time.
    pub(crate) number: Option<(&'static str, u32)>,
    /// `RANGES`: whether attention is limited to ranges of keys.
    pub(crate) has_ranges: bool,
}

impl Macros {
    /// Macros `X`, `Y`, `Z` for these types.
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

    /// Adds the macro for ranges of keys.
    pub(crate) const fn ranges(mut self, has_ranges: bool) -> Self {
        self.has_ranges = has_ranges;
        self
    }

    /// Definitions, as the compiler takes them.
    fn definitions(self) -> Vec<String> {
        let of_type = |(name, dtype): (&str, Option<Dtype>)| Some(format!("{name}={}", type_name(dtype?)));
        let types = ["X", "Y", "Z"].into_iter().zip(self.types).filter_map(of_type);
        let number = self.number.map(|(name, value)| format!("{name}={value}"));
        types.chain(number).chain(self.has_ranges.then(|| "RANGES=1".to_owned())).collect()
    }
}

/// Type in the language of kernels.
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
    modules: Mutex<HashMap<(Source, Macros), Module>>,
    functions: Mutex<HashMap<(&'static str, Macros), Function>>,
}

impl Kernels {
    pub(crate) fn new(context: Context, compiler: Compiler) -> Self {
        Self { context, compiler, modules: Mutex::default(), functions: Mutex::default() }
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
        let function = self.module(source, macros)?.function(name, shared_bytes)?;
        functions().insert((name, macros), function.clone());
        Ok(function)
    }

    fn module(&self, source: Source, macros: Macros) -> Result<Module> {
        // locked while it compiles, so that ranks of one process compile a source once
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&(source, macros)) {
            return Ok(module.clone());
        }
        let code = self.compiler.compile(source, &macros.definitions())?;
        let module = Module::load(&self.context, &code)?;
        modules.insert((source, macros), module.clone());
        Ok(module)
    }
}
