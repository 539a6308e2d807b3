//! Writes one shard atomically.

use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use dflop_loader::flow::Progress;

use super::rng::Rng;
use super::sample::{Field, make_sample};
use crate::failure::Failure;
use crate::output::replace_file;

/// Writes the samples of a range to a tar file and returns its size.
///
/// The file appears under its name only once it is complete. Times and owners are zero, so that equal samples
/// make equal files.
///
/// # Errors
/// If the file cannot be written, or an encoder refuses its input.
pub(super) fn write_shard(
    path: &Path,
    samples: Range<usize>,
    seed: u64,
    progress: &dyn Progress,
) -> Result<u64, Failure> {
    replace_file(path, |file| {
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
