//! Compiled code on disk, named by a digest over everything that it depends on.
//!
//! A file starts with a digest over the code, so that a damaged file is compiled again. If a directory cannot
//! be written, only recompilation is needed, and no run fails.

use std::fmt::Write as _;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

/// Directory for compiled code.
pub(super) struct CubinCache {
    directory: Option<PathBuf>,
}

/// Digest length in bytes.
const DIGEST: usize = 32;

impl CubinCache {
    pub(super) fn new(directory: Option<PathBuf>) -> Self {
        Self { directory }
    }

    /// Returns the name for code compiled from sources and options.
    pub(super) fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
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
    pub(super) fn read(&self, key: &str) -> Option<Vec<u8>> {
        let file = std::fs::read(self.path(key)?).ok()?;
        let (digest, code) = file.split_at_checked(DIGEST)?;
        (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
    }

    /// Writes code under a temporary name, then renames it, because several processes may write it.
    pub(super) fn write(&self, key: &str, code: &[u8]) {
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
