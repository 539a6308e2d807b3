//! Runs all ranks of a job as threads of this process.

use dflop_executor::comm::{Comm, threads};
use dflop_executor::train::StepReport;

use super::config::TrainConfig;
use super::rank::{RankTask, RunEnd, part, run};
use super::setup::Setup;
use crate::failure::Failure;

/// Runs all ranks as threads of this process; `on_step` is called for the steps of rank 0, on this thread.
pub(crate) fn run_threads(
    config: &TrainConfig,
    setup: &Setup,
    task: &RankTask,
    on_step: &mut dyn FnMut(&StepReport) -> Result<(), Failure>,
) -> Result<RunEnd, Failure> {
    let world = threads::world(setup.job.world_size(), super::settings(config))
        .map_err(dflop_executor::Error::from)?;
    std::thread::scope(|scope| {
        let (sender, reports) = std::sync::mpsc::channel();
        let ranks: std::io::Result<Vec<_>> = world
            .into_iter()
            .map(|comm| {
                let sender = (comm.rank() == 0).then(|| sender.clone());
                let trace = task.trace.as_deref().map(|path| part(path, comm.rank()));
                let task = RankTask { trace, ..task.clone() };
                let rank = move || {
                    run(config, setup, Box::new(comm), &task, &mut |report| match &sender {
                        // The receiver is gone only if printing failed, which is reported there.
                        Some(sender) => sender.send(report.clone()).map_err(|_| Failure::Closed),
                        None => Ok(()),
                    })
                };
                // Without it, the ranks that run find it gone.
                std::thread::Builder::new().spawn_scoped(scope, rank)
            })
            .collect();
        // The loop below ends when the last sender is dropped.
        drop(sender);
        let too_few =
            |error| Failure::Failed(format!("the system has no thread for each of the ranks: {error}"));
        let ranks = ranks.map_err(too_few)?;
        let printed = reports.iter().try_for_each(|report| on_step(&report));
        // After a failure to print, this fails the send of rank 0, which ends the run.
        drop(reports);
        let ended: Vec<_> = ranks.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        printed?;
        first_failure(
            ended
                .into_iter()
                .map(|done| done.unwrap_or_else(|_| Err(Failure::Failed("a rank panicked".to_owned())))),
        )
    })
}

/// Returns the end of the run, or the failure of the rank that caused it; other ranks only report that the
/// job is over.
fn first_failure(ended: impl Iterator<Item = Result<RunEnd, Failure>>) -> Result<RunEnd, Failure> {
    let (mut end, mut own, mut others) = (RunEnd::default(), None, None);
    for rank in ended {
        match rank {
            Ok(of_rank) => end = of_rank,
            Err(failure @ Failure::Secondary(_)) => others = others.or(Some(failure)),
            Err(failure) => own = own.or(Some(failure)),
        }
    }
    own.or(others).map_or(Ok(end), Err)
}
