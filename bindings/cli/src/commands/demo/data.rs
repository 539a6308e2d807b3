//! Writes a small multimodal dataset with synthetic samples, in the WebDataset layout.
//!
//! A seed gives the same bytes for any number of threads.

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use dflop_loader::flow::{Progress, on_threads};
use dflop_synthetic::{Field, Rng, make_sample};

use crate::failure::Failure;
use crate::output::place_file;

/// Maximum number of shards in a dataset.
const SHARDS_MAX: usize = 8;

/// Written shards with paths and size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DemoData {
    /// Shard paths, in order.
    pub(super) shards: Vec<PathBuf>,
    /// Number of samples in all shards.
    pub(super) samples: u64,
    /// Size of all shards in bytes.
    pub(super) bytes: u64,
}

/// Writes `samples` samples into the directory, as up to 8 shards `demo-000.tar`, `demo-001.tar`, ….
///
/// The directory is created if it does not exist. Shards of these names are replaced, each atomically; other
/// files are not touched. 512 samples are about 37 MB.
///
/// # Errors
/// If the directory or a shard cannot be written.
pub(super) fn write_demo_data(
    directory: &Path,
    samples: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<DemoData, Failure> {
    std::fs::create_dir_all(directory).map_err(|error| Failure::from(error).in_file(directory))?;
    progress.begin("samples", samples as u64);
    let written = write_shards(directory, &cut(samples), seed, progress);
    progress.end();
    let (shards, bytes): (Vec<PathBuf>, Vec<u64>) = written?.into_iter().unzip();
    Ok(DemoData { shards, samples: samples as u64, bytes: bytes.iter().sum() })
}

/// Returns the sample range for each shard, as even as possible.
fn cut(samples: usize) -> Vec<Range<usize>> {
    let shards = samples.min(SHARDS_MAX);
    (0..shards).map(|shard| samples * shard / shards..samples * (shard + 1) / shards).collect()
}

/// Writes the shards on all cores; returns path and size of each, in order.
fn write_shards(
    directory: &Path,
    ranges: &[Range<usize>],
    seed: u64,
    progress: &dyn Progress,
) -> Result<Vec<(PathBuf, u64)>, Failure> {
    // Threads pick shards by a counter, because shards differ in cost.
    let next = AtomicUsize::new(0);
    let work = || {
        let mut written = Vec::new();
        loop {
            let shard = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ranges.get(shard) else { return Ok(written) };
            let path = directory.join(format!("demo-{shard:03}.tar"));
            let bytes = write_shard(&path, range.clone(), seed, progress)?;
            written.push((path, bytes));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(ranges.len());
    let results: Vec<Result<Vec<_>, Failure>> = on_threads(threads, work);
    let mut written = Vec::with_capacity(ranges.len());
    for result in results {
        written.extend(result?);
    }
    // Threads finish in any order; names sort in the order of shards.
    written.sort_unstable();
    Ok(written)
}

/// Writes a sample range to a tar file and returns the file size.
///
/// The file appears under its name only when complete. Times and owners are zero, so that equal samples give
/// equal files.
///
/// # Errors
/// If the file cannot be written, or an encoder rejects an input.
fn write_shard(
    path: &Path,
    samples: Range<usize>,
    seed: u64,
    progress: &dyn Progress,
) -> Result<u64, Failure> {
    place_file(path, |file| {
        let mut archive = tar::Builder::new(file);
        for sample in samples {
            let key = format!("{sample:06}");
            for field in make_sample(&key, &mut Rng::new(seed, sample))? {
                append(&mut archive, &key, &field)?;
            }
            progress.advance(1);
        }
        let file = archive.into_inner()?;
        file.flush()?;
        Ok(file.get_ref().metadata()?.len())
    })
}

fn append(archive: &mut tar::Builder<impl Write>, key: &str, field: &Field) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(field.payload.len() as u64);
    archive.append_data(&mut header, format!("{key}.{}", field.extension), field.payload.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::flow::NoProgress;
    use dflop_loader::media::{DecodeLimits, Media, decode};
    use dflop_loader::shard::{FIELD_BYTES_MAX, MappedSamples, RawSample, ShardItem};

    const SAMPLES: usize = 24;

    fn shard_bytes(seed: u64) -> Vec<Vec<u8>> {
        let directory = tempfile::tempdir().unwrap();
        let made = write_demo_data(&directory.path().join("new"), SAMPLES, seed, &NoProgress).unwrap();
        let shards: Vec<Vec<u8>> = made.shards.iter().map(|path| std::fs::read(path).unwrap()).collect();
        assert_eq!(made.samples, SAMPLES as u64);
        assert_eq!(made.bytes, shards.iter().map(|shard| shard.len() as u64).sum::<u64>());
        let files = std::fs::read_dir(directory.path().join("new")).unwrap().count();
        assert_eq!(files, made.shards.len(), "only shards remain");
        shards
    }

    fn shard_samples(shard: Vec<u8>) -> Vec<RawSample> {
        let items = MappedSamples::new("demo.tar".into(), shard.into(), FIELD_BYTES_MAX);
        items
            .map(|item| match item {
                ShardItem::Sample(sample) => sample,
                ShardItem::Skipped(skipped) => panic!("{skipped:?}"),
            })
            .collect()
    }

    #[test]
    fn the_seed_fixes_every_byte() {
        let first = shard_bytes(7);
        assert_eq!(first.len(), SHARDS_MAX);
        assert!(first == shard_bytes(7));
        assert!(first != shard_bytes(8));
    }

    #[test]
    fn every_field_of_every_sample_decodes() {
        let samples: Vec<RawSample> = shard_bytes(1).into_iter().flat_map(shard_samples).collect();
        assert_eq!(samples.len(), SAMPLES);
        let mut found = [0; 4];
        for field in samples.iter().flat_map(|sample| &sample.fields) {
            let bytes = field.payload.clone().unwrap();
            let kind = match decode(&field.extension, bytes, &DecodeLimits::default()).unwrap() {
                Media::Image(image) => {
                    assert!(!image.is_truncated && image.width >= 64 && image.height >= 64);
                    0
                }
                Media::Audio(clip) => {
                    assert!(!clip.is_truncated && clip.frames() >= 3 * 16_000);
                    1
                }
                Media::Text(text) => {
                    assert!(!text.is_empty());
                    2
                }
                Media::Json(json) => {
                    assert!(dflop_loader::sample::document::has_turns(&json));
                    3
                }
                other => panic!("{other:?}"),
            };
            found[kind] += 1;
        }
        assert!(found.iter().all(|&fields| fields > 0), "{found:?} of {SAMPLES} samples");
    }

    #[test]
    fn few_samples_make_few_shards_and_none_makes_none() {
        let sizes = |samples| cut(samples).iter().map(ExactSizeIterator::len).collect::<Vec<_>>();
        assert_eq!(sizes(0), [0; 0]);
        assert_eq!(sizes(3), [1; 3]);
        assert_eq!(sizes(20).iter().sum::<usize>(), 20);
    }
}
