//! Saves and loads checkpoints that survive a crash at any moment.
//!
//! Checkpoint directory of a run, claimed by one job: a locked file names the owner.
//!
//! A checkpoint is a directory `step-00000040` with
//! - `config.json`, the tokenizer and other model files, unchanged;
//! - `model.safetensors`, or several files with `model.safetensors.index.json`, under the names that Hugging
//!   Face uses: `transformers` loads the directory;
//! - `optimizer-00001-of-00002.safetensors`: `exp_avg.NAME` and `exp_avg_sq.NAME` for every trained
//!   parameter, and `master.NAME` if weights are bf16;
//! - `state.json`: step, seed, learning rate, layout, loader state, and correction tables;
//! - `manifest.json`, written last: sizes and digests of all other files.
//!
//! Every rank copies the parameters that it owns ([`crate::optimizer::Ownership`]) to host memory, and a
//! thread writes them into `.step-00000040.partial`, hashes them on the way, and flushes each file to disk,
//! while training continues ([`CheckpointSaver`]). When all ranks are done, as compared at the end of each
//! step, rank 0 writes the manifest, renames the directory and flushes the rename. A killed process leaves a
//! directory that is never mistaken for a checkpoint, and that the next save removes.
//!
//! A run that starts from scratch in a directory with checkpoints moves them into `earlier-1`
//! ([`CheckpointDirectory::set_aside`]): a run removes only its own checkpoints, and the newest checkpoint
//! always belongs to the run that was started last. Checkpoints from older runs are removed on request
//! ([`CheckpointDirectory::kept_earlier`]). A running job claims its directory
//! ([`CheckpointDirectory::claim`]), so that a second job is rejected.
//!
//! Before a checkpoint is loaded, the ranks compare its files with the digests, each rank a share. Exactly
//! these files are loaded; additional weights in the directory make the checkpoint unusable. Loading goes by
//! tensor name: every rank reads the tensors in its stages, or its parts of them, so stages, replicas and
//! tensor-parallel degree may differ from the run that saved. Tensors that ranks share are assembled in
//! memory on the writing rank. All ranks must share the file system.
//!
//! The lock belongs to the open file, so it ends with the rank 0 process, however the process ends. The file
//! contents (host, process, start) only describe the owner; contents that a killed process left do not count.

mod directory;
mod load;
mod manifest;
mod saver;
mod snapshot;

use super::error::{Error, Result};
use dflop_comm::{Comm, StepContext};
use dflop_costmodel::correction::CorrectionTable;
use dflop_loader::files::open_own;
use dflop_loader::store::file;
use dflop_models::weights::Tensor;
use serde_json::{Value, json};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub use load::{SavedCheckpoint, open_weights};
pub use saver::CheckpointSaver;

/// File with sizes and digests of all other files.
const MANIFEST_FILE: &str = "manifest.json";
/// File with the progress of the run.
const STATE_FILE: &str = "state.json";
/// Format version of both files.
const FORMAT: u64 = 1;
/// Prefixes for optimizer tensors.
const MEAN: &str = "exp_avg.";
const SQUARE: &str = "exp_avg_sq.";
const MASTER: &str = "master.";

/// State that a run needs to resume, in addition to weights and optimizer state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunState {
    /// Run seed.
    pub seed: u64,
    /// Model layout over ranks, for information.
    pub layout: Value,
    /// Loader state, as JSON.
    pub loader: Value,
    /// Correction tables that plans for the next steps may need, in order.
    pub corrections: Vec<CorrectionTable>,
}

/// Progress of a save, from one rank or summed over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveProgress {
    /// Number of ranks whose part in the current phase is done.
    pub done: u64,
    /// Number of ranks whose part has failed.
    pub failed: u64,
}

/// Flushes directory entries to disk.
fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Adds action and path to an I/O error.
fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}

/// Number of words in which a rank reports its outcome: 0 for success, then the reported values.
const WORDS: usize = 6;

/// Returns this rank's value if all ranks succeeded; fails on all ranks if any rank failed.
fn agree_on_success<T>(comm: &dyn Comm, step: u64, action: &str, own: Result<T>) -> Result<T> {
    let mut value = None;
    let words = own.map(|own| {
        value = Some(own);
        [0; WORDS]
    });
    agree(comm, step, action, words)?;
    Ok(value.unwrap_or_else(|| unreachable!("ranks agree only if this one succeeded")))
}

/// Exchanges the words of all ranks, which start with 0 for success; fails on all ranks if any rank failed.
fn agree(comm: &dyn Comm, step: u64, action: &str, own: Result<[u64; WORDS]>) -> Result<Vec<[u64; WORDS]>> {
    let mut words = vec![0; WORDS * comm.size()];
    let row = &mut words[WORDS * comm.rank()..][..WORDS];
    match &own {
        Ok(own) => row.copy_from_slice(own),
        Err(_) => row[0] = 1,
    }
    let gathered = comm.all_gather(
        StepContext::step(step, action),
        words.as_mut_slice().into(),
        &vec![WORDS; comm.size()],
    );
    own?;
    gathered?;
    let all = words.as_chunks::<WORDS>().0.to_vec();
    match all.iter().position(|row| row[0] != 0) {
        Some(rank) => Err(Error::NotSaved { step, rank }),
        None => Ok(all),
    }
}

/// Checkpoint directory.
#[derive(Debug, Clone)]
pub struct CheckpointDirectory {
    root: PathBuf,
    kept: usize,
    kept_earlier: Option<usize>,
    companions: Vec<(String, Vec<u8>)>,
    others: Arc<[Tensor]>,
}

impl CheckpointDirectory {
    /// Creates a handle for a directory, which need not exist; keeps the last two checkpoints, and
    /// checkpoints from all earlier runs.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            kept: 2,
            kept_earlier: None,
            companions: Vec::new(),
            others: Arc::default(),
        }
    }

    /// Sets the number of checkpoints to keep, at least 1. Default: 2.
    #[must_use]
    pub fn kept(mut self, states: usize) -> Self {
        self.kept = states.max(1);
        self
    }

    /// Sets the number of earlier runs whose checkpoints are kept ([`set_aside`](Self::set_aside));
    /// checkpoints from older runs are removed when this run has saved its first checkpoint. Default: all.
    #[must_use]
    pub fn kept_earlier(mut self, runs: usize) -> Self {
        self.kept_earlier = Some(runs);
        self
    }

    /// Adds a file that is copied into every checkpoint unchanged, such as `config.json`.
    #[must_use]
    pub fn companion(mut self, name: impl Into<String>, bytes: Vec<u8>) -> Self {
        self.companions.push((name.into(), bytes));
        self
    }

    /// Sets tensors that the model does not read but the checkpoint has
    /// ([`dflop_models::weights::Checkpoint::others`]); they are also saved, as `f32`.
    #[must_use]
    pub fn others(mut self, tensors: Vec<Tensor>) -> Self {
        self.others = tensors.into();
        self
    }

    /// Returns the checkpoint directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory for the checkpoint after this number of steps, whether or not it exists.
    #[must_use]
    pub fn for_step(&self, steps: u64) -> PathBuf {
        directory::for_step(&self.root, steps)
    }

    /// Moves checkpoints from other runs into a subdirectory `earlier-N`, for a run that starts from scratch:
    /// its checkpoints have lower steps, and must neither be removed as old nor ignored in favor of newer
    /// checkpoints. All ranks in `comm` call it.
    ///
    /// - returns the subdirectory, on rank 0, if any checkpoint was moved
    ///
    /// # Errors
    /// [`crate::Error::File`] on rank 0, [`crate::Error::NotSaved`] on all other ranks;
    /// [`crate::Error::Comm`].
    pub fn set_aside(&self, comm: &dyn Comm) -> Result<Option<PathBuf>> {
        let moved = if comm.rank() == 0 { directory::set_aside(&self.root) } else { Ok(None) };
        agree_on_success(comm, 0, "set earlier checkpoints aside", moved)
    }
}

/// File that a directory owner holds locked.
const OWNER_FILE: &str = ".owner";

/// Job claim on a checkpoint directory, until it is dropped or the process ends.
#[derive(Debug)]
#[must_use = "the claim ends when it is dropped"]
pub struct DirectoryClaim {
    /// Locked file on rank 0; `None` on other ranks and on file systems without locks.
    owner: Option<(PathBuf, File)>,
}

impl CheckpointDirectory {
    /// Claims the directory for this job, and creates it if it does not exist. All ranks in `comm` call it
    /// before they read or write checkpoints.
    ///
    /// A file system without locks is reported as a warning: a second job is not detected there.
    ///
    /// # Errors
    /// On rank 0 [`Error::Occupied`] if a running job has claimed it, and [`Error::File`]; on all other ranks
    /// [`Error::NotSaved`]; [`Error::Comm`].
    pub fn claim(&self, comm: &dyn Comm) -> Result<DirectoryClaim> {
        let claimed = if comm.rank() == 0 { take(self.root()) } else { Ok(DirectoryClaim { owner: None }) };
        agree_on_success(comm, 0, "claim the directory", claimed)
    }

    /// Returns the description of the running job that has claimed the directory; `None` if there is none, or
    /// if that cannot be determined. Changes nothing.
    #[must_use]
    pub fn claimed_by(&self) -> Option<String> {
        let mut file = file::open(&self.root().join(OWNER_FILE)).ok()?;
        matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)).then(|| owner(&mut file))
    }
}

fn take(root: &Path) -> Result<DirectoryClaim> {
    fs::create_dir_all(root).map_err(failed("create", root))?;
    let path = root.join(OWNER_FILE);
    loop {
        let mut file = open_own(&path).map_err(failed("open", &path))?;
        match file.try_lock() {
            // otherwise an owner that ended meanwhile has removed this file, and there may be a new file
            Ok(()) if is_at(&file, &path).map_err(failed("read", &path))? => {
                describe(&mut file).map_err(failed("write", &path))?;
                return Ok(DirectoryClaim { owner: Some((path, file)) });
            }
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Occupied { path: root.to_owned(), owner: owner(&mut file) });
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(path = %path.display(), %error, "a second job in this directory would not be noticed");
                return Ok(DirectoryClaim { owner: None });
            }
        }
    }
}

/// Returns whether an open file is the file at this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::metadata(path) {
        Ok(found) => Ok((open.dev(), open.ino()) == (found.dev(), found.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a description of this process.
fn describe(file: &mut File) -> io::Result<()> {
    let system = rustix::system::uname();
    let owner = json!({
        "host": system.nodename().to_string_lossy(), "pid": std::process::id(),
        "started_unix_seconds": unix_seconds(),
    });
    file.set_len(0)?;
    file.write_all(format!("{owner}\n").as_bytes())
}

/// Reads the owner description from a locked file.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    // an owner that has not described itself yet is still an owner
    let _ = file.read_to_string(&mut text);
    let owner: Value = serde_json::from_str(&text).unwrap_or_default();
    let known = || {
        let (host, pid) = (owner["host"].as_str()?, owner["pid"].as_u64()?);
        let seconds = unix_seconds().saturating_sub(owner["started_unix_seconds"].as_u64()?);
        Some(format!("process {pid} on `{host}`, which started {seconds} s ago"))
    };
    known().unwrap_or_else(|| "another process".to_owned())
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Drop for DirectoryClaim {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.owner {
            // still locked, so this is the file of this process; a file that stays does no harm
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_comm::{Settings, threads};

    #[test]
    fn a_directory_has_one_owner_at_a_time_which_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("states");
        let claim = take(&root).unwrap();
        let text = take(&root).unwrap_err().to_string();
        let process = format!("process {} on `", std::process::id());
        assert!(text.contains(&process) && text.contains("started"), "{text}");
        assert!(text.contains(root.to_str().unwrap()), "{text}");
        let looked = CheckpointDirectory::new(&root);
        assert!(looked.claimed_by().is_some_and(|owner| owner.starts_with(&process)));
        drop(claim);
        assert_eq!(looked.claimed_by(), None);
        assert!(fs::read_dir(&root).unwrap().next().is_none(), "nothing is left");
        drop(take(&root).unwrap());
    }

    #[test]
    fn the_file_of_a_killed_process_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(OWNER_FILE);
        fs::write(
            &path,
            "{\"host\":\"a-much-longer-name-than-this\",\"pid\":1,\"started_unix_seconds\":1}\n",
        )
        .unwrap();
        let _claim = take(directory.path()).unwrap();
        let owner: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(owner["pid"], std::process::id());
    }

    #[test]
    fn an_owner_that_is_not_described_is_still_an_owner() {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create(directory.path().join(OWNER_FILE)).unwrap();
        file.try_lock().unwrap();
        let error = take(directory.path()).unwrap_err();
        assert!(matches!(&error, Error::Occupied { owner, .. } if owner == "another process"), "{error}");
    }

    #[test]
    fn one_of_many_claims_at_the_same_time_wins() {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..50 {
            let start = std::sync::Barrier::new(4);
            let claims: Vec<_> = std::thread::scope(|scope| {
                let claim = || {
                    start.wait();
                    let claim = take(directory.path());
                    // claims live until all threads have tried
                    start.wait();
                    claim
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(claim)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1);
        }
    }

    #[test]
    fn a_claim_that_rank_0_does_not_get_fails_on_all_ranks() {
        let directory = tempfile::tempdir().unwrap();
        let checkpoints = CheckpointDirectory::new(directory.path());
        let claim_all = || {
            let ranks = threads::world(2, Settings::default()).unwrap();
            std::thread::scope(|scope| {
                let threads = ranks.into_iter().map(|comm| scope.spawn(|| checkpoints.claim(&{ comm })));
                threads
                    .collect::<Vec<_>>()
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect::<Vec<_>>()
            })
        };
        let first = claim_all();
        assert!(first.iter().all(Result::is_ok));
        let second = claim_all();
        assert!(matches!(second[0], Err(Error::Occupied { .. })));
        assert!(matches!(second[1], Err(Error::NotSaved { rank: 0, .. })));
    }
}
