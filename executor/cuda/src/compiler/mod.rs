//! Compiles kernels to machine code with NVRTC, and keeps the code on disk.
//!
//! The code is a cubin, not PTX: older drivers reject PTX from a newer compiler.

mod cubin_cache;
mod nvrtc;
mod sources;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use cubin_cache::CubinCache;
use sources::HEADERS;
pub(crate) use sources::Source;

/// Compiler for a single architecture.
pub(crate) struct Compiler {
    /// NVRTC version, major and minor.
    version: (u32, u32),
    architecture: String,
    cache: CubinCache,
    replaced: Vec<(String, String)>,
    /// Number of compilations.
    compiled: AtomicU64,
}

impl Compiler {
    /// Creates a compiler for devices with a compute capability.
    ///
    /// - `driver`: CUDA version that the driver supports
    /// - `directory`: directory in which compiled code is kept
    pub(crate) fn new(
        capability: (u32, u32),
        driver: (u32, u32),
        path: PathBuf,
        directory: Option<PathBuf>,
    ) -> Result<Self> {
        let version = nvrtc::version()?;
        if version.0 > driver.0 {
            let reason = format!(
                "version {}.{} compiles code that the driver, of version {}.{}, cannot load; \
                 install NVRTC of major version {} or a newer driver",
                version.0, version.1, driver.0, driver.1, driver.0
            );
            return Err(Error::LibraryUnusable { library: "NVRTC", path, reason });
        }
        let (major, minor) = capability;
        // `a`: instructions specific to this architecture, since code is compiled where it runs
        let suffix = if major >= 9 { "a" } else { "" };
        let architecture = format!("sm_{major}{minor}{suffix}");
        let (cache, compiled) = (CubinCache::new(directory), AtomicU64::new(0));
        Ok(Self { version, architecture, cache, replaced: Vec::new(), compiled })
    }

    /// Returns the number of sources that were compiled, because their code was not on disk.
    pub(crate) fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Compiles replacement texts instead of the built-in files.
    pub(crate) fn replace_sources(mut self, replaced: Vec<(String, String)>) -> Self {
        self.replaced = replaced;
        self
    }

    /// Returns the text of a file.
    fn text<'a>(&'a self, file: &str, own: &'a str) -> &'a str {
        self.replaced.iter().find(|(name, _)| name == file).map_or(own, |(_, text)| text)
    }

    /// Returns the code for a source with these macros.
    pub(crate) fn compile(&self, source: Source, macros: &[String]) -> Result<Vec<u8>> {
        let mut options = vec![format!("--gpu-architecture={}", self.architecture), "--std=c++17".to_owned()];
        options.extend(macros.iter().map(|definition| format!("-D{definition}")));
        let version = format!("NVRTC {}.{}", self.version.0, self.version.1);
        let text = self.text(source.file(), source.text());
        let headers = HEADERS.map(|(name, text)| (name, self.text(name, text)));
        let of_headers = headers.iter().flat_map(|&(name, text)| [name, text]);
        let parts = [version.as_str(), source.file(), text].into_iter().chain(of_headers);
        let key = CubinCache::key(parts.chain(options.iter().map(String::as_str)));
        if let Some(code) = self.cache.read(&key) {
            return Ok(code);
        }
        let code = nvrtc::compile((source.file(), text), &headers, &options)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        self.cache.write(&key, &code);
        Ok(code)
    }
}
