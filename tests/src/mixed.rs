//! Writes shards with good and bad texts, for tests about order and skipped samples.

use std::path::{Path, PathBuf};

use crate::dataset::{Compression, compress};
use crate::tar::TarBytes;

/// Texts with different lengths; every seventh is not UTF-8, which decoding finds, and every eleventh has a
/// repeated field, which reading finds.
#[derive(Debug)]
pub struct MixedTexts {
    directory: tempfile::TempDir,
    /// Number of samples in each shard.
    pub counts: Vec<usize>,
}

impl MixedTexts {
    /// Writes a shard for each count.
    ///
    /// # Panics
    /// If the temporary directory cannot be written.
    #[must_use]
    pub fn new(counts: &[usize], stored: Compression) -> Self {
        let texts = Self { directory: tempfile::tempdir().expect("a directory"), counts: counts.to_vec() };
        for shard in 0..counts.len() {
            let bytes = compress(&texts.archive(shard, 0), stored);
            std::fs::write(texts.shard(shard), bytes).expect("the directory can be written");
        }
        texts
    }

    /// Returns the archive of a shard, starting at one of the samples.
    #[must_use]
    pub fn archive(&self, shard: usize, from: usize) -> Vec<u8> {
        let first: usize = self.counts[..shard].iter().sum();
        let numbers = first + from..first + self.counts[shard];
        numbers.fold(TarBytes::new(), append).finish()
    }

    /// Returns the directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a shard path.
    #[must_use]
    pub fn shard(&self, number: usize) -> PathBuf {
        self.directory().join(format!("shard-{number:03}.tar"))
    }

    /// Returns the directory as a pattern.
    ///
    /// # Panics
    /// If the directory's name is not UTF-8.
    #[must_use]
    pub fn pattern(&self) -> String {
        self.directory().to_str().expect("temporary directories are UTF-8").to_owned()
    }

    /// Returns shards that are commands, which cannot be read a second time.
    #[must_use]
    pub fn pipes(&self) -> Vec<String> {
        (0..self.counts.len()).map(|shard| format!("pipe:cat {}", self.shard(shard).display())).collect()
    }
}

fn append(tar: TarBytes, number: usize) -> TarBytes {
    let name = format!("k{number:04}.txt");
    let text = format!("text {number} ").repeat(1 + number * 13 % 29);
    match number {
        _ if number % 11 == 5 => tar.file(&name, b"once").file(&name, b"twice"),
        _ if number % 7 == 3 => tar.file(&name, b"\xff\xfe"),
        _ => tar.file(&name, text.as_bytes()),
    }
}
