//! Checks the checkpoint directory: write access, free space, and the state that a run would resume from.

use std::path::Path;

use dflop_costmodel::memory::format_bytes;
use dflop_loader::LoaderState;

use super::Findings;
use crate::Error;
use crate::checkpoint::{CheckpointDirectory, SavedCheckpoint};
use crate::run::config::{PrecisionName, RunConfig};
use crate::run::setup::Setup;

const DIRECTORY: &str = "checkpoints";
const RESUME: &str = "resume";

/// Checks that the directory can be written and has room for a state of the model; leaves nothing in it.
pub(super) fn check_directory(report: &mut Findings, config: &RunConfig, setup: Option<&Setup>) {
    let Some(directory) = &config.checkpoint.directory else {
        return report.note(DIRECTORY, "no directory: nothing is saved");
    };
    let shown = directory.display();
    if let Some(owner) = CheckpointDirectory::new(directory).claimed_by() {
        let finding = format!("`{shown}` is in use by {owner}");
        return report.wrong(DIRECTORY, finding, "end that job, or choose another directory");
    }
    // The run creates the directory below the nearest one that is there.
    let existing = directory.ancestors().find(|ancestor| ancestor.exists());
    let existing = existing.filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let fault = if existing.is_dir() {
        // The message of the error would name a temporary file.
        tempfile::tempfile_in(existing).err().map(|error| error.kind().to_string())
    } else {
        Some(format!("`{}` is no directory", existing.display()))
    };
    if let Some(fault) = fault {
        let finding = format!("`{shown}` cannot be written: {fault}");
        return report.wrong(DIRECTORY, finding, "choose another directory, or change its permissions");
    }
    let free = rustix::fs::statvfs(existing).ok().map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    match (free, setup.map(|setup| state_bytes(config, setup))) {
        (Some(free), Some(state)) if free < state => {
            let (free, state) = (format_bytes(free), format_bytes(state));
            report.wrong(DIRECTORY, format!("`{shown}` has {free} left, a state takes {state}"), "make room");
        }
        (Some(free), Some(state)) => {
            let states = config.checkpoint.kept.unwrap_or(2) as u64 + 1;
            let room = format!("{} left, a state takes {}", format_bytes(free), format_bytes(state));
            report.ok(DIRECTORY, format!("`{shown}` can be written, {room}"));
            if free < state.saturating_mul(states) {
                report.note(
                    DIRECTORY,
                    format!("room for fewer than {states} states, which are there during a save"),
                );
            }
        }
        _ => report.ok(DIRECTORY, format!("`{shown}` can be written")),
    }
}

/// Returns the bytes in a saved state: weights, two moments, and the exact weights in a bf16 run.
fn state_bytes(config: &RunConfig, setup: &Setup) -> u64 {
    let each = match config.optimizer.precision {
        PrecisionName::F32 => 4 + 8,
        PrecisionName::Bf16 => 2 + 8 + 4,
    };
    setup.spec.parameters().saturating_mul(each)
}

/// Checks the state that a run would resume from, or describes the effect on existing states.
///
/// - `has_index`: whether the index is there, so that the state of the loader can be compared
pub(super) fn check_resume(report: &mut Findings, setup: &Setup, has_index: bool) {
    let (config, is_resumed) = (&setup.config, setup.options.resume);
    let Some(directory) = &config.checkpoint.directory else { return };
    let saved = match CheckpointDirectory::new(directory).newest() {
        Ok(saved) => saved,
        // A directory that cannot be used was reported.
        Err(_) if !directory.is_dir() => return,
        Err(error) => return report.failed(RESUME, error),
    };
    let shown = directory.display();
    match (saved, is_resumed) {
        (None, false) => {}
        (None, true) => report.note(RESUME, format!("`{shown}` has no state; the run starts from step 0")),
        (Some(saved), false) => {
            let step = saved.step();
            report.note(
                RESUME,
                format!("`{shown}` has a state of step {step}; without `--resume` it is moved aside"),
            );
        }
        (Some(saved), true) => match compare(setup, &saved, has_index) {
            Err(fault) => report.wrong(
                RESUME,
                format!("`{}`: {fault}", saved.directory().display()),
                "use the settings of the run that saved it, or start anew without `--resume`",
            ),
            Ok(()) if saved.step() >= setup.end_step() => {
                report.note(RESUME, format!("`{}` is the end of the run", saved.directory().display()));
            }
            Ok(()) => report.ok(RESUME, format!("goes on at step {}", saved.step())),
        },
    }
}

fn compare(setup: &Setup, saved: &SavedCheckpoint, has_index: bool) -> Result<(), String> {
    let message = |error: Error| error.message();
    let config = &setup.config;
    let run = saved.run();
    if run.seed != config.seed {
        return Err(format!("it has seed {}, the configuration {}", run.seed, config.seed));
    }
    setup.job.model().check::<crate::device::Cpu>(saved.weights()).map_err(|error| message(error.into()))?;
    if has_index {
        let state: LoaderState =
            serde_json::from_value(run.loader.clone()).map_err(|error| error.to_string())?;
        setup.planner(Some(state)).map_err(message)?;
    }
    Ok(())
}
