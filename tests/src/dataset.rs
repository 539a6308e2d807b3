//! Writes small datasets to disk: multimodal samples, or good and bad texts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;

use crate::media::{jpeg, wav};
use crate::tar::TarBytes;

/// Shards in a temporary directory, removed when this value is dropped.
#[derive(Debug)]
pub struct TempDataset {
    directory: tempfile::TempDir,
    /// All sample keys, in shard order.
    pub keys: Vec<String>,
}

/// Shard compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Plain tar.
    Plain,
    /// Tar, compressed with gzip.
    Gzip,
    /// Tar, compressed with Zstandard.
    Zstd,
}

impl TempDataset {
    /// Writes `shards` shards with `per_shard` samples each.
    ///
    /// Every sample has a text, two out of three an image, one out of four an audio clip; sizes differ from
    /// sample to sample.
    ///
    /// # Panics
    /// If the temporary directory cannot be written.
    #[must_use]
    pub fn new(shards: usize, per_shard: usize, stored: Compression) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut keys = Vec::new();
        for shard in 0..shards {
            let mut tar = TarBytes::new();
            for sample in 0..per_shard {
                let number = shard * per_shard + sample;
                let key = format!("sample-{number:05}");
                tar = append_sample(tar, &key, number as u32);
                keys.push(key);
            }
            let path = directory.path().join(format!("shard-{shard:03}.tar"));
            std::fs::write(path, compress(&tar.finish(), stored)).expect("the directory can be written");
        }
        Self { directory, keys }
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

    /// Opens the index, building it on first use.
    ///
    /// # Panics
    /// If the index cannot be built.
    #[must_use]
    pub fn index(&self) -> Arc<Index> {
        let shards = expand_shards(&[self.pattern()]).expect("shards are there");
        Arc::new(Index::open_or_build(shards, &IndexOptions::default()).expect("the index is made"))
    }

    /// Damages the coded data in the first `count` JPEG images after the headers, where no index reads it;
    /// returns the sample keys.
    ///
    /// # Panics
    /// If there are fewer images, or if the shards are compressed.
    #[must_use]
    pub fn break_images(&self, count: usize) -> Vec<String> {
        let index = self.index();
        let mut broken = Vec::new();
        for row in (0..index.len()).map(|sample| index.sample(sample)) {
            if broken.len() == count {
                break;
            }
            let Some(field) = row.fields().find(|field| field.extension == "jpg") else { continue };
            let path = self.shard(row.shard);
            let modified =
                std::fs::metadata(&path).and_then(|shard| shard.modified()).expect("it has a time");
            let mut bytes = std::fs::read(&path).expect("the shard is there");
            let (start, end) = (field.offset as usize, (field.offset + field.bytes) as usize);
            bytes[start + (end - start) * 3 / 4..end].fill(0);
            std::fs::write(&path, bytes).expect("the shard can be written");
            let file = std::fs::File::options().write(true).open(&path).expect("the shard is there");
            file.set_modified(modified).expect("the time can be set");
            broken.push(row.key().to_owned());
        }
        assert_eq!(broken.len(), count, "there are enough images");
        broken
    }
}

fn append_sample(mut tar: TarBytes, key: &str, number: u32) -> TarBytes {
    let words = "a kite over the sea ".repeat(1 + number as usize * 7 % 23);
    tar = tar.file(&format!("{key}.txt"), words.as_bytes());
    if !number.is_multiple_of(3) {
        tar = tar.file(&format!("{key}.jpg"), &jpeg(32 + number * 13 % 300, 32 + number * 29 % 200, number));
    }
    if number.is_multiple_of(4) {
        tar = tar.file(&format!("{key}.wav"), &wav(800 + number * 311 % 9_000, 16_000));
    }
    tar
}

/// Compresses an archive.
///
/// # Panics
/// Never: writes to memory succeed.
#[must_use]
pub fn compress(tar: &[u8], stored: Compression) -> Vec<u8> {
    match stored {
        Compression::Plain => tar.to_vec(),
        Compression::Gzip => {
            use std::io::Write;
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(tar).and_then(|()| encoder.finish()).expect("memory can be written")
        }
        Compression::Zstd => zstd::encode_all(tar, 1).expect("memory can be written"),
    }
}

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
