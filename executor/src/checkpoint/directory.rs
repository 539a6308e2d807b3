//! Creates, renames and removes checkpoint directories, so that a crash at any moment leaves a complete
//! checkpoint, and records which checkpoints are being moved aside, so that a killed process has moved all or
//! none.
//!
//! The record is published by one rename, before the first checkpoint moves. From then on the listed
//! checkpoints belong to an earlier run, regardless of where they are.

use std::path::{Path, PathBuf};
use std::{fs, io};

use dflop_loader::files;
use dflop_loader::store::file;
use serde_json::{Value, json};

use super::{MANIFEST_FILE, failed, sync};
use crate::error::{Error, Result};

const PREFIX: &str = "step-";
/// Suffix for a directory being written.
const PARTIAL: &str = ".partial";
/// Suffix for a checkpoint that a new checkpoint for the same step is about to replace.
const REPLACED: &str = ".replaced";
/// Prefix for directories with checkpoints from earlier runs.
const EARLIER: &str = "earlier-";
/// Suffix for a directory being removed.
const REMOVED: &str = ".removed";

/// Returns the directory for a step.
pub(super) fn for_step(root: &Path, step: u64) -> PathBuf {
    root.join(format!("{PREFIX}{step:08}"))
}

fn hidden(root: &Path, step: u64, suffix: &str) -> PathBuf {
    root.join(format!(".{PREFIX}{step:08}{suffix}"))
}

/// Returns the directory for a step while it is being written.
pub(super) fn partial(root: &Path, step: u64) -> PathBuf {
    hidden(root, step, PARTIAL)
}

/// Completes moves and removes leftovers from killed processes, and creates an empty directory to write into.
pub(super) fn prepare(root: &Path, step: u64) -> Result<()> {
    finish_set_aside(root)?;
    let all = || {
        fs::create_dir_all(root)?;
        for name in names(root)? {
            let is_left = name.starts_with('.') && (name.ends_with(PARTIAL) || name.ends_with(REMOVED));
            if is_left && [PREFIX, EARLIER].iter().any(|prefix| name[1..].starts_with(prefix)) {
                fs::remove_dir_all(root.join(name))?;
            }
        }
        fs::create_dir(partial(root, step))
    };
    all().map_err(failed("prepare", root))
}

/// Turns a written directory into a step checkpoint.
pub(super) fn publish(root: &Path, step: u64) -> Result<PathBuf> {
    let (from, to, replaced) = (partial(root, step), for_step(root, step), hidden(root, step, REPLACED));
    let all = || {
        // The files must be on disk before the rename makes them a checkpoint.
        sync(&from)?;
        if to.exists() {
            // Until the new checkpoint is renamed, `candidates` still finds the old checkpoint under this
            // name.
            remove(&replaced)?;
            fs::rename(&to, &replaced)?;
        }
        fs::rename(&from, &to)?;
        sync(root)?;
        remove(&replaced)
    };
    all().map_err(failed("rename", &to))?;
    Ok(to)
}

/// Removes all checkpoints except the newest `kept`.
pub(super) fn prune(root: &Path, kept: usize) -> Result<()> {
    let all = || {
        let mut steps: Vec<u64> = names(root)?.iter().filter_map(|name| step_from_name(name)).collect();
        steps.retain(|&step| for_step(root, step).join(MANIFEST_FILE).exists());
        steps.sort_unstable();
        for &step in steps.iter().rev().skip(kept) {
            // Rename before removing, so that a half-removed directory is never mistaken for a checkpoint.
            let removed = hidden(root, step, REMOVED);
            remove(&removed)?;
            fs::rename(for_step(root, step), &removed)?;
            remove(&removed)?;
        }
        Ok(())
    };
    all().map_err(failed("remove old checkpoints of", root))
}

/// Removes checkpoints from earlier runs except the last `kept` runs; removes none if there is no limit.
pub(super) fn prune_earlier(root: &Path, kept: Option<usize>) -> Result<()> {
    let Some(kept) = kept else { return Ok(()) };
    let all = || {
        for number in earlier(root)?.into_iter().rev().skip(kept) {
            let removed = root.join(format!(".{EARLIER}{number}{REMOVED}"));
            remove(&removed)?;
            fs::rename(root.join(format!("{EARLIER}{number}")), &removed)?;
            remove(&removed)?;
        }
        Ok(())
    };
    all().map_err(failed("remove checkpoints of earlier runs from", root))
}

/// Returns the numbers of the subdirectories for earlier runs, ascending.
fn earlier(root: &Path) -> io::Result<Vec<u64>> {
    let number = |name: &String| name.strip_prefix(EARLIER)?.parse().ok();
    let mut numbers: Vec<u64> = names(root)?.iter().filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Moves all checkpoints into a new subdirectory, `earlier-1` or the next number; `None` if there were none.
///
/// A killed process has decided to move all checkpoints or none: [`candidates`] finds none of them, and the
/// next [`prepare`] or call to this function moves the rest.
pub(super) fn set_aside(root: &Path) -> Result<Option<PathBuf>> {
    let finished = finish_set_aside(root)?;
    let states = candidates(root)?;
    if states.is_empty() {
        return Ok(finished);
    }
    // Above all existing numbers, so that numbers show the run order even after some were removed.
    let last = earlier(root).map_err(failed("read", root))?.last().copied().unwrap_or(0);
    let into = format!("{EARLIER}{}", last + 1);
    let name = |state: &PathBuf| state.file_name()?.to_str().map(str::to_owned);
    let states = states.iter().filter_map(name).collect();
    SetAside { into, states }.write(root)?;
    finish_set_aside(root)
}

/// Moves the checkpoints listed in a record, if there is one; returns the subdirectory.
fn finish_set_aside(root: &Path) -> Result<Option<PathBuf>> {
    let Some(SetAside { into, states }) = SetAside::read(root)? else { return Ok(None) };
    let earlier = root.join(into);
    let all = || {
        fs::create_dir_all(&earlier)?;
        for state in &states {
            match fs::rename(root.join(state), earlier.join(state)) {
                // moved before the process was killed
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                moved => moved?,
            }
        }
        sync(&earlier)?;
        sync(root)?;
        SetAside::remove(root)
    };
    all().map_err(failed("move earlier checkpoints into", &earlier))?;
    Ok(Some(earlier))
}

/// Returns directories that may be checkpoints, newest first; for the same step, the published directory
/// before the replaced directory. Checkpoints that are being moved aside are left out.
pub(super) fn candidates(root: &Path) -> Result<Vec<PathBuf>> {
    let mut names = match names(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names.map_err(failed("read", root))?,
    };
    if let Some(moving) = SetAside::read(root)? {
        names.retain(|name| !moving.states.contains(name));
    }
    let replaced = |name: &str| step_from_name(name.strip_prefix('.')?.strip_suffix(REPLACED)?);
    let place = |name: &String| {
        Some((step_from_name(name).or_else(|| replaced(name))?, step_from_name(name).is_some()))
    };
    let mut places: Vec<((u64, bool), String)> =
        names.into_iter().filter_map(|name| Some((place(&name)?, name))).collect();
    places.sort_by(|a, b| b.cmp(a));
    Ok(places.into_iter().map(|(_, name)| root.join(name)).collect())
}

fn step_from_name(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?;
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Returns the names in a directory, ascending.
fn names(root: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

const RECORD_FILE: &str = ".set-aside";

/// Checkpoints to move, and their destination; both are names in the checkpoint directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    pub(super) into: String,
    pub(super) states: Vec<String>,
}

impl SetAside {
    /// Publishes the record.
    pub(super) fn write(&self, root: &Path) -> Result<()> {
        let path = root.join(RECORD_FILE);
        let document = json!({"into": self.into, "states": self.states});
        files::replace(&path, format!("{document}\n").as_bytes())
            .and_then(|()| sync(root))
            .map_err(failed("write", &path))
    }

    /// Reads the record; `None` if nothing moves.
    ///
    /// # Errors
    /// [`Error::Saved`] if it is damaged, [`Error::File`] if it cannot be read.
    pub(super) fn read(root: &Path) -> Result<Option<Self>> {
        let path = root.join(RECORD_FILE);
        let text = match file::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(failed("read", &path))?,
        };
        let damaged = || Error::Saved { path, problem: "the record is damaged".to_owned() };
        serde_json::from_slice(&text)
            .ok()
            .and_then(|document| Self::parse(&document))
            .map(Some)
            .ok_or_else(damaged)
    }

    fn parse(document: &Value) -> Option<Self> {
        // a name with a path could refer to directories elsewhere
        let plain = |name: &Value| {
            let name = name.as_str()?;
            (Path::new(name).file_name() == Some(name.as_ref())).then(|| name.to_owned())
        };
        let states = document.get("states")?.as_array()?.iter().map(plain).collect::<Option<_>>()?;
        Some(Self { into: plain(document.get("into")?)?, states })
    }

    /// Removes the record, after everything has moved.
    pub(super) fn remove(root: &Path) -> io::Result<()> {
        fs::remove_file(root.join(RECORD_FILE))?;
        sync(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a directory that looks like a checkpoint.
    fn make(directory: &Path, text: &str) {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join(MANIFEST_FILE), text).unwrap();
    }

    fn found(root: &Path) -> Vec<String> {
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        candidates(root).unwrap().into_iter().map(name).collect()
    }

    #[test]
    fn the_newest_states_stay_and_what_was_left_goes() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for step in [1, 2, 10, 100_000_000] {
            make(&for_step(root, step), "old");
        }
        make(&partial(root, 11), "half");
        make(&root.join(".step-00000003.removed"), "half");
        make(&root.join("step-best"), "not ours");
        prepare(root, 10).unwrap();
        make(&partial(root, 10), "new");
        publish(root, 10).unwrap();
        prune(root, 2).unwrap();
        assert_eq!(found(root), ["step-100000000", "step-00000010"]);
        assert_eq!(fs::read_to_string(for_step(root, 10).join(MANIFEST_FILE)).unwrap(), "new");
        assert_eq!(names(root).unwrap(), ["step-00000010", "step-100000000", "step-best"]);
    }

    #[test]
    fn states_that_are_set_aside_are_kept_and_not_found() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(set_aside(&root.join("none")).unwrap(), None);
        for (number, step) in [(1, 3), (2, 1)] {
            make(&for_step(root, step), "old");
            let earlier = set_aside(root).unwrap().unwrap();
            assert_eq!(earlier, root.join(format!("earlier-{number}")));
            assert_eq!(found(&earlier), [format!("step-{step:08}")]);
            assert!(found(root).is_empty());
        }
        assert_eq!(set_aside(root).unwrap(), None);
    }

    #[test]
    fn earlier_runs_beyond_the_limit_go_oldest_first_and_numbers_rise() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let set_one_aside = || {
            make(&for_step(root, 3), "old");
            set_aside(root).unwrap();
        };
        (0..3).for_each(|_| set_one_aside());
        make(&root.join("earlier-best"), "not ours");
        // left by a process that was killed while it removed
        make(&root.join(".earlier-9.removed"), "half");
        prune_earlier(root, None).unwrap();
        assert_eq!(names(root).unwrap().len(), 5);
        prepare(root, 4).unwrap();
        publish(root, 4).unwrap();
        prune_earlier(root, Some(2)).unwrap();
        assert_eq!(names(root).unwrap(), ["earlier-2", "earlier-3", "earlier-best", "step-00000004"]);
        prune_earlier(root, Some(0)).unwrap();
        assert_eq!(names(root).unwrap(), ["earlier-best", "step-00000004"]);
        (0..2).for_each(|_| set_one_aside());
        prune_earlier(root, Some(1)).unwrap();
        set_one_aside();
        assert_eq!(names(root).unwrap(), ["earlier-2", "earlier-3", "earlier-best"]);
    }

    #[test]
    fn a_process_killed_while_it_sets_states_aside_has_moved_all_or_none() {
        let names_of = ["step-00000003", "step-00000005", "step-00000007"];
        // killed after this number of renames; the record stays until the last one
        for moved in 0..=names_of.len() {
            let directory = tempfile::tempdir().unwrap();
            let root = directory.path();
            for step in [3, 5, 7] {
                make(&for_step(root, step), "old");
            }
            let states = names_of.map(str::to_owned).to_vec();
            SetAside { into: "earlier-1".into(), states }.write(root).unwrap();
            if moved > 0 {
                fs::create_dir(root.join("earlier-1")).unwrap();
            }
            for name in &names_of[..moved] {
                fs::rename(root.join(name), root.join("earlier-1").join(name)).unwrap();
            }
            // a run that resumes finds no state of the earlier run, and saves its own
            assert!(found(root).is_empty(), "{moved} renames");
            prepare(root, 5).unwrap();
            make(&partial(root, 5), "new");
            publish(root, 5).unwrap();
            prune(root, 1).unwrap();
            assert_eq!(names(root).unwrap(), ["earlier-1", "step-00000005"]);
            assert_eq!(fs::read_to_string(for_step(root, 5).join(MANIFEST_FILE)).unwrap(), "new");
            assert_eq!(names(&root.join("earlier-1")).unwrap(), names_of);
            let old = fs::read_to_string(for_step(&root.join("earlier-1"), 5).join(MANIFEST_FILE)).unwrap();
            assert_eq!(old, "old");
        }
    }

    #[test]
    fn setting_aside_completes_what_a_killed_process_began() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        make(&for_step(root, 3), "old");
        SetAside { into: "earlier-1".into(), states: vec!["step-00000003".into()] }.write(root).unwrap();
        assert_eq!(set_aside(root).unwrap(), Some(root.join("earlier-1")));
        assert_eq!(names(root).unwrap(), ["earlier-1"]);
        assert_eq!(set_aside(root).unwrap(), None);
    }

    #[test]
    fn a_state_that_is_being_replaced_is_found() {
        let directory = tempfile::tempdir().unwrap();
        make(&hidden(directory.path(), 7, REPLACED), "old");
        make(&for_step(directory.path(), 6), "older");
        assert_eq!(found(directory.path()), [".step-00000007.replaced", "step-00000006"]);
        make(&for_step(directory.path(), 7), "new");
        assert_eq!(found(directory.path())[..2], ["step-00000007", ".step-00000007.replaced"]);
        assert!(candidates(&directory.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn records_round_trip_and_damaged_ones_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(SetAside::read(root).unwrap(), None);
        let record = SetAside { into: "earlier-1".into(), states: vec!["step-00000003".into()] };
        record.write(root).unwrap();
        assert_eq!(SetAside::read(root).unwrap(), Some(record));
        SetAside::remove(root).unwrap();
        assert_eq!(SetAside::read(root).unwrap(), None);
        for text in
            ["", "{", r#"{"into":"a"}"#, r#"{"into":"../a","states":[]}"#, r#"{"into":"a","states":["b/c"]}"#]
        {
            fs::write(root.join(RECORD_FILE), text).unwrap();
            let error = SetAside::read(root).unwrap_err().to_string();
            assert!(error.contains(RECORD_FILE) && error.contains("damaged"), "{text}: {error}");
        }
    }
}
