//! Runs ranks as processes: starts them, and runs a rank under a launcher.

use std::ops::ControlFlow;

use super::compute_device::TransportName;
use super::cuda::missing_variables;
use super::options::{RankProgram, RunEnd, StopRequest};
use super::rank::{OnStep, RankTask, rank_trace, run};
use super::setup::Setup;
use crate::comm::launch::{Launcher, RankStatus};
use crate::comm::{RankIdentity, tcp};
use crate::train::{START_VARIABLE, StartTimes, StopReason};
use crate::{Error, Result};

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
