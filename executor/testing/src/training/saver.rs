//! Checkpoints that are written while training continues.
//!
//! Processes that train and save are killed at any moment; the checkpoints survive.
//!
//! The test binary is also the program: `save_if_asked` reads from the environment where to save.

use super::checkpoint::{begin, go_on};
use super::model::{LAYERS, run_staged, settings, stage, train_whole, weights};
use crate::claim::{claims, report};
use crate::support::{Transport, patient, run};
use dflop_comm::{Comm, Communicator, threads};
use dflop_device::Cpu;
use dflop_executor::Error;
use dflop_executor::checkpoint::{CheckpointDirectory, CheckpointSaver, RunState, SaveProgress};
use dflop_executor::optimizer::{JobOptimizer, Precision};
use dflop_models::BlockStage;
use dflop_models::weights::{Seed, Tensor, WeightSource};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

claims! {
    cpu:
    a_state_saved_behind_later_steps_is_that_of_its_step,
    a_second_save_waits_for_the_first_and_the_end_for_the_second,
    a_rank_that_cannot_write_fails_the_next_step_on_all_ranks,
    a_save_that_is_given_up_is_no_checkpoint_and_its_files_go,
    states_of_earlier_runs_go_when_the_new_run_has_one,
}

/// Layers on two ranks.
const CUTS: [usize; 3] = [0, 2, 4];

/// Training rank, with a saver.
struct Rank {
    comm: Communicator,
    stage: BlockStage<Cpu>,
    optimizer: JobOptimizer<Cpu>,
    saver: CheckpointSaver,
}

impl Rank {
    fn new(comm: Communicator, directory: CheckpointDirectory) -> Self {
        let (stage, optimizer) = begin::<Cpu>(&comm, &CUTS, None);
        Self { comm, stage, optimizer, saver: CheckpointSaver::new(directory) }
    }

    fn train(&mut self, steps: u64) {
        go_on(&mut self.stage, &mut self.optimizer, &self.comm, steps);
    }

    fn save(&mut self) -> Result<(), Error> {
        self.saver.start(&self.optimizer, [&self.stage], &RunState::default())
    }

    /// Ends a step like the training loop: sums progress, and continues the save.
    fn end_step(&mut self) -> Result<Option<std::path::PathBuf>, Error> {
        let SaveProgress { done, failed } = self.saver.progress();
        let mut words = [done, failed];
        let at = dflop_comm::StepContext::step(self.optimizer.steps(), "end step");
        self.comm.all_reduce(at, words.as_mut_slice().into()).unwrap();
        let [done, failed] = words;
        self.saver.advance(&self.comm, SaveProgress { done, failed })
    }

    /// Trains until the save is complete.
    fn train_until_saved(&mut self) -> Result<std::path::PathBuf, Error> {
        for steps in self.optimizer.steps() + 1.. {
            self.train(steps);
            if let Some(path) = self.end_step()? {
                return Ok(path);
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        unreachable!("the loop has no end")
    }
}

/// Runs two ranks that save into a directory.
fn ranks<T: Send>(directory: &CheckpointDirectory, rank: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    run(Transport::Threads, 2, patient(), |comm| rank(Rank::new(comm, directory.clone())))
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn a_state_saved_behind_later_steps_is_that_of_its_step() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = CheckpointDirectory::new(directory.path());
    let expected = ranks(&checkpoints, |mut rank| {
        rank.train(3);
        let at_the_save = weights(&rank.stage);
        rank.save().unwrap();
        assert_eq!(names(directory.path()), [".step-00000003.partial"], "nothing is a checkpoint yet");
        rank.train(5);
        assert_eq!(names(directory.path()), [".step-00000003.partial"], "ranks have to agree first");
        let path = rank.train_until_saved().unwrap();
        assert!(path.ends_with("step-00000003") && rank.optimizer.steps() > 5);
        assert_ne!(weights(&rank.stage), at_the_save);
        at_the_save
    });
    let expected: super::checkpoint::Weights = expected.into_iter().flatten().collect();
    let comm = super::checkpoint::alone();
    let saved = checkpoints.latest(&comm).unwrap().unwrap();
    let restored = stage(&Cpu::new(1).unwrap(), 0..super::model::LAYERS, saved.weights());
    assert_eq!((saved.step(), weights(&restored)), (3, expected));
}

fn a_second_save_waits_for_the_first_and_the_end_for_the_second() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = CheckpointDirectory::new(directory.path());
    let last = ranks(&checkpoints, |mut rank| {
        for steps in 1..=4 {
            rank.train(steps);
            rank.save().unwrap();
            let complete = names(directory.path()).iter().filter(|name| !name.starts_with('.')).count();
            assert_eq!(complete as u64, (steps - 1).min(2), "the one before is complete");
        }
        let last = rank.saver.finish(&rank.comm).unwrap();
        assert_eq!(rank.saver.finish(&rank.comm).unwrap(), None, "nothing is under way");
        last
    });
    assert_eq!(last, [Some(checkpoints.for_step(4)), Some(checkpoints.for_step(4))]);
    assert_eq!(names(directory.path()), ["step-00000003", "step-00000004"]);
}

fn a_rank_that_cannot_write_fails_the_next_step_on_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let wrong = Tensor { name: "wrong".to_owned(), shape: vec![3], values: vec![0.0; 2] };
    // The first cannot be written by a rank, the second cannot be completed by rank 0.
    for (checkpoints, expected) in [
        (
            CheckpointDirectory::new(directory.path()).others(vec![wrong]),
            "expected tensor `wrong` to have shape [2]",
        ),
        (
            CheckpointDirectory::new(directory.path()).companion("no/such/directory", Vec::new()),
            "could not write `",
        ),
    ] {
        let errors = ranks(&checkpoints, |mut rank| {
            rank.train(1);
            rank.save().unwrap();
            let error = rank.train_until_saved().unwrap_err();
            // The run can continue, and save again.
            rank.saver = CheckpointSaver::new(CheckpointDirectory::new(directory.path()));
            rank.save().unwrap();
            assert!(rank.saver.finish(&rank.comm).unwrap().is_some());
            error
        });
        assert!(errors[0].to_string().starts_with(expected), "{}", errors[0]);
        assert!(matches!(errors[1], Error::NotSaved { step: 1, rank: 0 }), "{}", errors[1]);
    }
}

fn a_save_that_is_given_up_is_no_checkpoint_and_its_files_go() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = CheckpointDirectory::new(directory.path());
    ranks(&checkpoints, |mut rank| {
        rank.train(1);
        rank.save().unwrap();
    });
    assert_eq!(names(directory.path()), [".step-00000001.partial"]);
    assert!(checkpoints.latest(&super::checkpoint::alone()).unwrap().is_none());
    ranks(&checkpoints, |mut rank| {
        rank.train(2);
        rank.save().unwrap();
        rank.saver.finish(&rank.comm).unwrap();
    });
    assert_eq!(names(directory.path()), ["step-00000002"]);
}

fn states_of_earlier_runs_go_when_the_new_run_has_one() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = CheckpointDirectory::new(directory.path()).kept_earlier(1);
    for run in 1..=3_u64 {
        ranks(&checkpoints, |mut rank| {
            checkpoints.set_aside(&rank.comm).unwrap();
            let earlier = names(directory.path());
            assert_eq!(
                earlier.len() as u64,
                (run - 1).min(2),
                "before it has saved, none is removed: {earlier:?}"
            );
            rank.train(1);
            rank.save().unwrap();
            rank.saver.finish(&rank.comm).unwrap();
        });
    }
    assert_eq!(names(directory.path()), ["earlier-2", "step-00000001"]);
}

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
