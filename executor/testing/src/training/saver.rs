//! Checkpoints that are written while training continues.

use std::fs;
use std::path::Path;

use dflop_comm::{Comm, Communicator};
use dflop_device::Cpu;
use dflop_executor::Error;
use dflop_executor::checkpoint::{CheckpointDirectory, CheckpointSaver, RunState, SaveProgress};
use dflop_executor::optimizer::JobOptimizer;
use dflop_models::BlockStage;
use dflop_models::weights::Tensor;

use super::checkpoint::{begin, go_on};
use super::model::{stage, weights};
use crate::claim::claims;
use crate::support::{Transport, patient, run};

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
