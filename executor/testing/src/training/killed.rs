//! Processes that train and save are killed at any moment; the checkpoints survive.
//!
//! The test binary is also the program: `save_if_asked` reads from the environment where to save.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dflop_comm::{Comm, threads};
use dflop_device::Cpu;
use dflop_executor::checkpoint::{CheckpointDirectory, CheckpointSaver, RunState};
use dflop_executor::optimizer::{JobOptimizer, Precision};
use dflop_models::weights::{Seed, WeightSource};
use serde_json::json;

use super::model::{LAYERS, run_staged, settings, stage, train_whole, weights};
use crate::claim::{claims, report};
use crate::support::{Transport, patient, run};

claims! {
    cpu:
    a_process_killed_at_any_moment_leaves_its_last_state_whole,
    a_process_killed_while_it_saves_behind_its_steps_leaves_its_last_state_whole,
}

const DIRECTORY: &str = "EXECUTOR_TEST_SAVE_TO";
/// Set if the process saves while it trains.
const BEHIND: &str = "EXECUTOR_TEST_SAVE_BEHIND";
/// Arguments that select no claim, for a process that does not save.
const ARGS: [&str; 2] = ["--exact", "none"];
/// Number of kills in one run.
const KILLS: usize = 8;
/// Maximum number of checkpoints that a process saves before it is killed.
const STATES_MAX: u64 = 3;

/// Trains two ranks from the newest checkpoint and saves every step until the process is killed, if the
/// environment names a directory to save in.
pub(crate) fn save_if_asked() {
    let Ok(root) = std::env::var(DIRECTORY) else { return };
    run(Transport::Threads, 2, patient(), |comm| train_and_save(Path::new(&root), &comm));
}

fn train_and_save(root: &Path, comm: &dyn Comm) {
    let checkpoints = CheckpointDirectory::new(root.join("states"));
    let saved = checkpoints.latest(comm).unwrap();
    let device = Cpu::new(1).unwrap();
    let source: &dyn WeightSource = saved.as_ref().map_or(&Seed(1), |saved| saved.weights());
    let layers = [0..2, 2..LAYERS][comm.rank()].clone();
    let mut stage = stage(&device, layers, source);
    let mut optimizer = JobOptimizer::new(settings(Precision::F32), comm, [&stage]).unwrap();
    if let Some(saved) = &saved {
        optimizer.restore([&mut stage], saved).unwrap();
    }
    let mut saver = CheckpointSaver::new(checkpoints);
    let is_behind = std::env::var_os(BEHIND).is_some();
    loop {
        run_staged(&mut stage, comm, optimizer.steps()).unwrap();
        optimizer.update([&mut stage]).unwrap();
        let state = RunState { loader: json!(optimizer.steps()), ..RunState::default() };
        // The start of a save ends the previous save.
        saver.start(&optimizer, [&stage], &state).unwrap();
        let saved = optimizer.steps() - u64::from(is_behind);
        if !is_behind {
            saver.finish(comm).unwrap();
        }
        if comm.rank() == 0 && saved > 0 {
            let said = root.join("saved.part");
            fs::write(&said, saved.to_string()).unwrap();
            fs::rename(said, root.join("saved")).unwrap();
        }
    }
}

/// Returns the last step that a process reported as saved.
fn said(root: &Path) -> u64 {
    fs::read_to_string(root.join("saved")).map_or(0, |step| step.parse().unwrap())
}

fn spawn(root: &Path, is_behind: bool) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if is_behind {
        command.env(BEHIND, "1");
    }
    command.args(ARGS).env(DIRECTORY, root).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Kills a process some time after it has saved checkpoints.
fn kill_after(root: &Path, is_behind: bool, states: u64, delay: Duration) {
    let before = said(root);
    let (mut child, start) = (spawn(root, is_behind), Instant::now());
    while said(root) < before + states {
        assert!(start.elapsed() < Duration::from_mins(1), "the process saves nothing");
        assert!(child.try_wait().unwrap().is_none(), "the process ended by itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(delay);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn a_process_killed_at_any_moment_leaves_its_last_state_whole() {
    kill_often(false);
}

fn a_process_killed_while_it_saves_behind_its_steps_leaves_its_last_state_whole() {
    kill_often(true);
}

fn kill_often(is_behind: bool) {
    let directory = tempfile::tempdir().unwrap();
    let (root, comm) = (directory.path(), threads::world(1, patient()).unwrap().remove(0));
    let (mut partial, mut random) = (0, 0x9e37_79b9_7f4a_7c15_u64);
    for round in 0..KILLS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // A step with its checkpoint takes a few milliseconds.
        kill_after(root, is_behind, 1 + random % STATES_MAX, Duration::from_micros(random >> 16 & 0x3fff));
        let states = root.join("states");
        partial += usize::from(
            fs::read_dir(&states)
                .unwrap()
                .any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with('.')),
        );
        let saved = CheckpointDirectory::new(&states).latest(&comm).unwrap().expect("a state was saved");
        assert!(saved.step() >= said(root), "round {round}: {} of {}", saved.step(), said(root));
        assert_eq!(saved.run().loader, json!(saved.step()));
    }
    // The weights are equal to the weights in an uninterrupted run on one rank.
    let saved = CheckpointDirectory::new(root.join("states")).latest(&comm).unwrap().unwrap();
    let device = Cpu::new(1).unwrap();
    let mut straight = stage(&device, 0..LAYERS, &Seed(1));
    let mut optimizer = JobOptimizer::new(settings(Precision::F32), &comm, [&straight]).unwrap();
    train_whole(&mut straight, &mut optimizer, &comm, saved.step() as usize);
    assert_eq!(weights(&stage(&device, 0..LAYERS, saved.weights())), weights(&straight));
    report!("{KILLS} kills, {partial} within a save, {} steps", saved.step());
}
