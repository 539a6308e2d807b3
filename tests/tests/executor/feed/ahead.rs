//! Checks that inputs which are prepared a step ahead change nothing but time.

use std::sync::Arc;
use std::time::Duration;

use super::corpus::{Corpus, Family, mixed};
use super::job::{Setting, planner};
use dflop_executor::comm::{Comm, Settings, StepContext, threads};
use dflop_executor::device::Cpu;
use dflop_executor::inputs::InputReader;
use dflop_executor::models::weights::Seed;
use dflop_executor::models::{Activations, FrozenModules};
use dflop_executor::optimizer::{Decay, JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{Job, PipelineRank, Placement};
use dflop_executor::train::{TrainingRank, TrainingRankOptions, join_job};
use dflop_executor::{Error, Result};
use dflop_loader::flow::ErrorBudget;

/// Loss and gradient norm per step, bit by bit, and the error that ended the run.
type Seen = (Vec<[u64; 2]>, Option<Error>);

/// Step order on a rank.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Reads the step inputs when they are needed.
    InOrder,
    /// Runs at most this many steps, whose inputs are prepared ahead.
    Ahead { taken: usize, until: Option<u64>, is_ended: bool },
}

const AHEAD: Way = Way::Ahead { taken: usize::MAX, until: None, is_ended: true };

/// Parts of a rank.
type Parts = (PipelineRank<Cpu>, InputReader<Cpu>, JobOptimizer<Cpu>);

fn parts(
    corpus: &Corpus,
    setting: &Setting,
    budget: f64,
    (job, comm): (&Arc<Job>, threads::ThreadComm),
) -> Result<Parts> {
    let device = Cpu::new(1)?;
    let roles = job.roles(comm.rank())?;
    let budget = ErrorBudget::new(budget)?;
    let planner = planner(corpus, setting, job)?;
    let reader =
        InputReader::new(device.clone(), job.clone(), roles, planner, &corpus.preparer(), |loader| {
            loader.workers(1).steps(setting.steps).error_budget(budget)
        })?;
    let (frozen, stored) = (FrozenModules::default(), Activations::Stored);
    let pipeline = join_job(Box::new(comm), job, &device, frozen, stored, &Seed(1))?.check_plans(true);
    let rate = LearningRate { peak: 1e-2, warmup_steps: 0, decay: Decay::Constant };
    let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
    let optimizer = JobOptimizer::new(JobOptimizerSettings::new(rate), pipeline.comm(), stages)?;
    Ok((pipeline, reader, optimizer))
}

fn take_in_order((mut pipeline, mut reader, mut optimizer): Parts, seen: &mut Vec<[u64; 2]>) -> Result<()> {
    while let Some(inputs) = reader.next(pipeline.comm())? {
        let unread = pipeline.start(&inputs.rank_step)?;
        let (outcome, update) = optimizer.update_step(&unread, pipeline.stages_mut())?;
        seen.push([outcome.loss.to_bits(), update.gradient_norm.to_bits()]);
    }
    Ok(())
}

fn take_ahead(
    (pipeline, reader, optimizer): Parts,
    (taken, until, is_ended): (usize, Option<u64>, bool),
    seen: &mut Vec<[u64; 2]>,
) -> Result<()> {
    let options = TrainingRankOptions {
        correction: None,
        pass_predictor: None,
        peak_flops_per_second: 1e9,
        trace: None,
        seed: 1,
        layout: serde_json::Value::Null,
        checkpoints: None,
        stop: None,
        until,
    };
    let mut rank = TrainingRank::new(pipeline, reader, optimizer, options)?;
    while seen.len() < taken
        && let Some(report) = rank.step()?
    {
        seen.push([report.loss.to_bits(), report.gradient_norm.to_bits()]);
    }
    if is_ended {
        rank.end_inputs();
        rank.comm().barrier(StepContext::step(rank.steps(), "end the run"))?;
    }
    Ok(())
}

/// Runs all ranks in a job.
fn train(corpus: &Corpus, setting: &Setting, budget: f64, way: Way) -> Vec<Seen> {
    let job = Arc::new(setting.job(corpus));
    let settings = Settings::default().wait(Duration::from_secs(20));
    let world = threads::world(job.world_size(), settings).expect("a world");
    let rank = |comm: threads::ThreadComm| {
        let mut seen = Vec::new();
        let ended = parts(corpus, setting, budget, (&job, comm)).and_then(|parts| match way {
            Way::InOrder => take_in_order(parts, &mut seen),
            Way::Ahead { taken, until, is_ended } => take_ahead(parts, (taken, until, is_ended), &mut seen),
        });
        (seen, ended.err())
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world.into_iter().map(|comm| scope.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

#[track_caller]
fn complete(ranks: Vec<Seen>) -> Vec<[u64; 2]> {
    let mut steps = ranks.into_iter().map(|(steps, error)| {
        assert!(error.is_none(), "{error:?}");
        steps
    });
    let first = steps.next().expect("a rank");
    assert!(steps.all(|steps| steps == first), "all ranks report the same");
    first
}

fn settings() -> [Setting; 3] {
    let joint = Setting { placement: Placement::Joint, ..Setting::new(4, 5) };
    [
        joint,
        Setting { llm: [2, 1], ..Setting::new(4, 5) },
        Setting { encoder: [2, 1], llm: [1, 2], ..Setting::new(4, 5) },
    ]
}

#[test]
fn steps_whose_inputs_are_prepared_ahead_have_the_same_bits() {
    let corpus = Corpus::new(Family::InternVl, &mixed(8));
    for setting in settings() {
        let truth = complete(train(&corpus, &setting, 1.0, Way::InOrder));
        assert_eq!(truth.len(), 5);
        assert_eq!(complete(train(&corpus, &setting, 1.0, AHEAD)), truth);
    }
}

#[test]
fn a_run_that_stops_early_leaves_no_rank_waiting() {
    let corpus = Corpus::new(Family::InternVl, &mixed(8));
    for setting in settings() {
        let truth = complete(train(&corpus, &setting, 1.0, Way::InOrder));
        for is_ended in [true, false] {
            for taken in [0, 2] {
                let way = Way::Ahead { taken, until: None, is_ended };
                assert_eq!(complete(train(&corpus, &setting, 1.0, way)), truth[..taken]);
            }
        }
        let way = Way::Ahead { taken: usize::MAX, until: Some(3), is_ended: true };
        assert_eq!(complete(train(&corpus, &setting, 1.0, way)), truth[..3]);
    }
}

/// A sample in the last step is damaged, and the budget allows none.
#[test]
fn a_step_that_cannot_be_read_ends_no_earlier_one() {
    for setting in settings() {
        let setting = Setting { global_batch: 4, steps: 6, ..setting };
        let order = super::job::run(&Corpus::new(Family::InternVl, &mixed(24)), &setting);
        let last = |index: &usize| order.steps[5].samples.contains(&(*index as u64));
        let mut samples = mixed(24);
        let bad = (0..24).filter(last).find(|&index| !samples[index].media.is_empty());
        let Some(bad) = bad else { panic!("the last step has an image") };
        samples[bad].is_damaged = true;
        let ranks = train(&Corpus::new(Family::InternVl, &samples), &setting, 0.0, AHEAD);
        let taken = ranks[0].0.len();
        // Loaders decode two steps ahead.
        assert!((2..6).contains(&taken), "{taken} steps");
        let mut causes = 0;
        for (steps, error) in &ranks {
            assert_eq!(steps, &ranks[0].0, "every rank has taken the same steps");
            match error {
                Some(Error::Loader(_)) => causes += 1,
                Some(Error::Comm(error)) => {
                    let text = error.to_string();
                    assert!(text.contains("ended the job"), "{text}");
                }
                other => panic!("expected an error of the loader or its text, found {other:?}"),
            }
        }
        assert_eq!(causes, 1, "{ranks:?}");
    }
}
