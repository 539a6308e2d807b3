//! Compiles kernels to machine code with NVRTC, and keeps the code on disk.
//!
//! The code is a cubin, not PTX: older drivers reject PTX from a newer compiler.
//!
//! On disk, code is named by a digest over everything that it depends on. A file starts with a digest over
//! the code, so that a damaged file is compiled again. If a directory cannot be written, only recompilation
//! is needed, and no run fails.

mod kernels;
mod nvrtc;

pub(crate) use kernels::{Kernels, Macros, Source, WIDE};

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::HEADERS;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

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

/// Directory for compiled code.
struct CubinCache {
    directory: Option<PathBuf>,
}

/// Digest length in bytes.
const DIGEST: usize = 32;

impl CubinCache {
    fn new(directory: Option<PathBuf>) -> Self {
        Self { directory }
    }

    /// Returns the name for code compiled from sources and options.
    fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
        let mut digest = Sha256::new();
        for part in parts {
            // lengths keep parts apart
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part.as_bytes());
        }
        let mut name = String::new();
        for byte in digest.finalize() {
            let _ = write!(name, "{byte:02x}");
        }
        name
    }

    /// Reads code; returns none if it is missing or damaged.
    fn read(&self, key: &str) -> Option<Vec<u8>> {
        let file = std::fs::read(self.path(key)?).ok()?;
        let (digest, code) = file.split_at_checked(DIGEST)?;
        (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
    }

    /// Writes code under a temporary name, then renames it, because several processes may write it.
    fn write(&self, key: &str, code: &[u8]) {
        let Some(path) = self.path(key) else { return };
        let written = (|| {
            let directory = path.parent().unwrap_or(&path);
            std::fs::create_dir_all(directory)?;
            let mut file = tempfile::NamedTempFile::new_in(directory)?;
            std::io::Write::write_all(&mut file, &[&Sha256::digest(code), code].concat())?;
            file.persist(&path).map_err(std::io::Error::from)
        })();
        if let Err(error) = written {
            tracing::warn!("could not keep a compiled kernel at {}: {error}", path.display());
        }
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(format!("{key}.cubin")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_code_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(Some(directory.path().join("kernels")));
        let key = CubinCache::key(["a", "bc"]);
        assert_ne!(key, CubinCache::key(["ab", "c"]));
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"code");
        assert_eq!(cache.read(&key).as_deref(), Some(&b"code"[..]));
        let path = cache.path(&key).unwrap();
        let mut file = std::fs::read(&path).unwrap();
        file.pop();
        std::fs::write(&path, &file).unwrap();
        assert_eq!(cache.read(&key), None);
        std::fs::write(&path, b"").unwrap();
        assert_eq!(cache.read(&key), None);
        let nowhere = CubinCache::new(None);
        nowhere.write(&key, b"code");
        assert_eq!(nowhere.read(&key), None);
    }
}
