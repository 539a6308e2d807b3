//! Runs ranks as threads in this process, as processes, or as a rank under a launcher.

use super::compute_device::{TransportName, missing_variables};
use super::options::{RankProgram, RunEnd, StopRequest};
use super::rank::{OnStep, RankTask, rank_trace, run};
use super::setup::Setup;
use crate::comm::launch::{Launcher, RankStatus};
use crate::comm::{Comm, RankIdentity, tcp, threads};
use crate::train::{START_VARIABLE, StartTimes, StopReason};
use crate::{Error, Result};
use std::ops::ControlFlow;

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

/// Starts the ranks and waits for them.
///
/// - `start`: times up to now, which count for every rank
pub(super) fn launch(setup: &Setup, program: &RankProgram, start: &StartTimes) -> Result<RunEnd> {
    let parallel = &setup.config.parallel;
    let mut launcher = Launcher::new(&program.path, setup.job.world_size())?
        .args(&program.args)
        .first_rank_prints_plainly()
        // A thread pool per rank, with the configured size: by default each pool would use all cores.
        .variable("RAYON_NUM_THREADS", parallel.threads.to_string())
        .variable(START_VARIABLE, start.to_variable());
    for (name, value) in missing_variables(parallel.transport) {
        launcher = launcher.variable(name, value);
    }
    let outcome = launcher.run()?;
    if let Some(failed) = outcome.failed {
        let (rank, code) = (failed.rank, failed.status.code());
        return Err(Error::RankEnded { rank, status: failed.status.to_string(), code });
    }
    match outcome.interrupted {
        Some(signal) if outcome.ranks.iter().any(RankStatus::is_failed) => Err(Error::Interrupted { signal }),
        // Rank 0 has reported it, unless the run had come to its end.
        Some(signal) if outcome.ranks.iter().any(|rank| rank.stopped_by().is_some()) => {
            Ok(RunEnd { stopped: StopReason::from_signal(signal), ..RunEnd::default() })
        }
        _ => Ok(RunEnd::default()),
    }
}

/// Runs this process as a rank under a launcher.
pub(super) fn run_rank(
    setup: &Setup,
    stop: StopRequest,
    start: StartTimes,
    identity: &RankIdentity,
    on_step: &mut OnStep<'_>,
) -> Result<RunEnd> {
    let connect = match setup.config.parallel.transport {
        TransportName::Tcp => tcp::connect,
        // tensors go over NCCL, and the tree of the job serves any number of ranks
        TransportName::Nccl => tcp::connect_tree,
    };
    let mut session = connect(identity, setup.comm_settings())?;
    // Nothing is distributed through the store any more: its host keeps no connection per rank.
    session.store = None;
    let trace = setup.options.trace.as_deref().map(|trace| rank_trace(trace, identity.rank));
    let task = RankTask { trace, stop, start, local_rank: Some(identity.local_rank) };
    let comm = Box::new(session.comm);
    match identity.rank {
        0 => run(setup, comm, &task, on_step),
        _ => run(setup, comm, &task, &mut |_| ControlFlow::Continue(())),
    }
}
