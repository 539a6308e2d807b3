//! Compares checkpoint files with the manifest; ranks divide the files among themselves.

use std::path::Path;

use super::digest::FileDigest;
use super::manifest::Manifest;
use crate::error::{Error, Result};

impl Manifest {
    /// Compares the sizes of all files in a directory; reads none.
    ///
    /// # Errors
    /// [`Error::Saved`] that names the first file that is missing or has the wrong size.
    pub(super) fn verify_sizes(&self, directory: &Path) -> Result<()> {
        for (name, expected) in &self.files {
            let bytes = match std::fs::metadata(directory.join(name)) {
                Ok(metadata) if !metadata.is_file() => {
                    return unusable(directory, format!("`{name}` is not a regular file"));
                }
                Ok(metadata) => metadata.len(),
                Err(error) => return unusable(directory, format!("`{name}` cannot be read: {error}")),
            };
            if bytes != expected.bytes {
                return unusable(directory, format!("`{name}` has {bytes} bytes, not {}", expected.bytes));
            }
        }
        Ok(())
    }

    /// Compares the digests of the files in one rank's share.
    ///
    /// - returns the number of bytes read
    ///
    /// # Errors
    /// [`Error::Saved`] that names the first file in the share that cannot be read or has different bytes.
    pub(super) fn verify_share(&self, directory: &Path, rank: usize, ranks: usize) -> Result<u64> {
        let mut read = 0;
        for name in self.share(rank, ranks) {
            let digest = match FileDigest::of(&directory.join(name)) {
                Ok(digest) => digest,
                Err(error) => return unusable(directory, format!("`{name}` cannot be read: {error}")),
            };
            if digest != self.files[name] {
                let problem = format!("`{name}` is damaged: its digest differs from the manifest");
                return unusable(directory, problem);
            }
            read += digest.bytes;
        }
        Ok(read)
    }

    /// Returns the files in a rank's share: files are assigned by descending size to the rank with the fewest
    /// bytes.
    fn share(&self, rank: usize, ranks: usize) -> Vec<&str> {
        let mut files: Vec<(u64, &str)> =
            self.files.iter().map(|(name, file)| (file.bytes, name.as_str())).collect();
        files.sort_by(|a, b| b.cmp(a));
        let (mut loads, mut own) = (vec![0_u64; ranks], Vec::new());
        for (bytes, name) in files {
            // the lowest rank among equal loads
            let Some(least) = (0..ranks).min_by_key(|&rank| loads[rank]) else { break };
            loads[least] += bytes;
            if least == rank {
                own.push(name);
            }
        }
        own
    }
}

fn unusable<T>(directory: &Path, problem: String) -> Result<T> {
    Err(Error::Saved { path: directory.to_owned(), problem })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;

    use super::*;

    /// Number of bytes per parameter in a bf16 state: weights, master weights and two moments.
    const STATE_BYTES: u64 = 14;

    /// Creates sparse files with the sizes of a model state saved by `ranks` ranks, and the manifest.
    fn made_up(directory: &Path, parameters: u64, ranks: u64) -> Manifest {
        let mut files = BTreeMap::new();
        let mut digests = BTreeMap::new();
        for piece in 1..=ranks {
            for (kind, bytes) in [("model", 2), ("optimizer", STATE_BYTES - 2)] {
                let name = format!("{kind}-{piece:05}-of-{ranks:05}.safetensors");
                let length = bytes * parameters / ranks;
                File::create(directory.join(&name)).unwrap().set_len(length).unwrap();
                // files with equal lengths have equal digests, as all bytes are zeros
                let digest =
                    digests.entry(length).or_insert_with(|| FileDigest::of(&directory.join(&name)).unwrap());
                files.insert(name, *digest);
            }
        }
        Manifest { step: 7, files }
    }

    /// Returns the number of bytes that each rank reads to verify a made-up state.
    fn bytes_by_rank(parameters: u64, writers: u64, ranks: usize) -> Vec<u64> {
        let directory = tempfile::tempdir().unwrap();
        let manifest = made_up(directory.path(), parameters, writers);
        manifest.verify_sizes(directory.path()).unwrap();
        (0..ranks).map(|rank| manifest.verify_share(directory.path(), rank, ranks).unwrap()).collect()
    }

    #[track_caller]
    fn assert_divided(bytes: &[u64], parameters: u64, writers: u64) {
        let total = STATE_BYTES * parameters;
        assert_eq!(bytes.iter().sum::<u64>(), total, "every byte is read by one rank");
        let largest = (STATE_BYTES - 2) * parameters / writers;
        let most = bytes.iter().max().unwrap();
        assert!(*most <= total / bytes.len() as u64 + largest, "{bytes:?}");
    }

    #[test]
    fn ranks_divide_the_bytes_of_a_state_evenly() {
        const PARAMETERS: u64 = 8 << 20;
        for (writers, ranks) in [(8, 8), (8, 4), (4, 3), (2, 8), (1, 1)] {
            let bytes = bytes_by_rank(PARAMETERS, writers, ranks);
            assert_divided(&bytes, PARAMETERS, writers);
            if writers as usize == ranks {
                assert!(bytes.iter().all(|own| *own == bytes[0]), "{bytes:?}");
            }
        }
    }

    /// Runs for a minute: `make test-heavy`.
    #[test]
    #[ignore = "reads 98 GB of zeros"]
    fn no_rank_of_eight_reads_more_than_an_eighth_of_a_state_of_7b_parameters() {
        const PARAMETERS: u64 = 7_000_000_000;
        let bytes = bytes_by_rank(PARAMETERS, 8, 8);
        assert_divided(&bytes, PARAMETERS, 8);
        assert!(bytes.iter().all(|own| *own == STATE_BYTES * PARAMETERS / 8), "{bytes:?}");
    }

    #[test]
    fn the_share_with_the_damage_names_it_and_others_do_not_see_it() {
        let directory = tempfile::tempdir().unwrap();
        let manifest = made_up(directory.path(), 1 << 16, 4);
        let damaged = "model-00003-of-00004.safetensors";
        let path = directory.path().join(damaged);
        let length = std::fs::metadata(&path).unwrap().len() as usize;
        std::fs::write(&path, vec![1; length]).unwrap();
        manifest.verify_sizes(directory.path()).unwrap();
        let found: Vec<_> = (0..3).map(|rank| manifest.verify_share(directory.path(), rank, 3)).collect();
        let errors: Vec<String> =
            found.iter().filter_map(|share| share.as_ref().err()).map(Error::to_string).collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(errors[0].contains(&format!("`{damaged}` is damaged")), "{errors:?}");
    }
}
