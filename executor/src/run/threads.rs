//! Runs all ranks in a job as threads in this process.

use std::ops::ControlFlow;

use super::options::{RunEnd, StopRequest};
use super::rank::{OnStep, RankTask, rank_trace, run};
use super::setup::Setup;
use crate::comm::{Comm, threads};
use crate::train::StartTimes;
use crate::{Error, Result};

/// Runs all ranks as threads in this process; `on_step` is called for the steps on rank 0, on this thread.
///
/// - `start`: times up to now, which count for every rank
pub(super) fn run_threads(
    setup: &Setup,
    stop: &StopRequest,
    start: &StartTimes,
    on_step: &mut OnStep<'_>,
) -> Result<RunEnd> {
    let world = threads::world(setup.job.world_size(), setup.comm_settings())?;
    std::thread::scope(|scope| {
        let (sender, reports) = std::sync::mpsc::channel();
        let ranks: std::io::Result<Vec<_>> = world
            .into_iter()
            .map(|comm| {
                let sender = (comm.rank() == 0).then(|| sender.clone());
                let trace = setup.options.trace.as_deref().map(|path| rank_trace(path, comm.rank()));
                let task = RankTask { trace, stop: stop.clone(), start: start.clone(), local_rank: None };
                let rank = move || {
                    run(setup, Box::new(comm), &task, &mut |report| match &sender {
                        // The receiver is gone after `on_step` requested the end.
                        Some(sender) if sender.send(report.clone()).is_err() => ControlFlow::Break(()),
                        _ => ControlFlow::Continue(()),
                    })
                };
                // Without it, the ranks that run find it gone.
                std::thread::Builder::new().spawn_scoped(scope, rank)
            })
            .collect();
        // The loop below ends when the last sender is dropped.
        drop(sender);
        let ranks = ranks.map_err(Error::Threads)?;
        let _asked_to_end = reports.iter().try_for_each(|report| on_step(&report));
        // After `Break`, this fails the send of rank 0, which ends the run.
        drop(reports);
        let ended: Vec<_> = ranks.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        first_failure(ended.into_iter().map(|done| done.unwrap_or(Err(Error::RankPanicked))))
    })
}

/// Returns the run's end, or the error on the rank that caused it; other ranks only report that the job is
/// over.
fn first_failure(ended: impl Iterator<Item = Result<RunEnd>>) -> Result<RunEnd> {
    let (mut end, mut own, mut others) = (RunEnd::default(), None, None);
    for rank in ended {
        match rank {
            Ok(rank) => end = RunEnd { has_first_rank: true, ..rank },
            Err(error) if error.is_secondary() => others = others.or(Some(error)),
            Err(error) => own = own.or(Some(error)),
        }
    }
    own.or(others).map_or(Ok(end), Err)
}
