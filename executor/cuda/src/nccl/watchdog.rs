//! Ends a job whose communication fails or takes too long.
//!
//! NCCL has no time limits, and a kernel that waits for another rank waits for ever. A thread looks at all
//! communicators and at the operations in flight: a failure of NCCL, a wait of the compute lane beyond the
//! limits of the job's communicator, and a failure that another rank reported over it end all communicators
//! of this rank, so that the device's work ends, and every later call on the device returns the failure.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Failure};

use super::communicator::Health;
use super::operation::Progress;
use super::session::Session;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time in which the rank that failed is expected to be named by the job's communicator, once NCCL knows of a
/// failure elsewhere.
const REMOTE_WAIT: Duration = Duration::from_secs(10);

/// Starts the thread, which ends with the session.
pub(super) fn start(session: &Arc<Session>) -> dflop_device::Result<()> {
    let session = Arc::downgrade(session);
    let watch = move || watch(&session);
    let thread = std::thread::Builder::new().name("dflop-nccl-watch".to_owned()).spawn(watch);
    let failed = |error| dflop_device::Error::Failed { reason: format!("no thread to watch NCCL: {error}") };
    thread.map(drop).map_err(failed)
}

fn watch(session: &Weak<Session>) {
    let mut remote = None;
    loop {
        std::thread::sleep(INTERVAL);
        let Some(session) = session.upgrade() else { return };
        let ended =
            session.host.failure().or_else(|| unwell(&session, &mut remote)).or_else(|| overdue(&session));
        if let Some(failure) = ended {
            session.end(failure);
            return;
        }
    }
}

/// Returns the failure of the job if NCCL has failed.
///
/// - `remote`: when NCCL first knew of a failure of another rank
fn unwell(session: &Session, remote: &mut Option<Instant>) -> Option<Failure> {
    for communicator in session.communicators() {
        let reason = match communicator.health() {
            Health::Well => continue,
            // the rank itself is blamed over the job's communicator, which learns of its end as well
            Health::RemoteFailed(reason) => {
                if remote.get_or_insert_with(Instant::now).elapsed() < REMOTE_WAIT {
                    continue;
                }
                reason
            }
            Health::Failed(reason) => reason,
        };
        let (rank, name) = (session.rank(), communicator.name());
        let message = format!("rank {rank}: NCCL failed in {name}: {reason}");
        return Some(session.fail(Cause::Transport, session.last_action(), message));
    }
    None
}

/// Returns the failure of the job if the compute lane waits for an operation beyond the limits.
fn overdue(session: &Session) -> Option<Failure> {
    let mut operations = session.operations.lock().unwrap_or_else(PoisonError::into_inner);
    let mut waits = Vec::new();
    operations.retain(|operation| {
        match operation.look(|| session.host.record_wait(operation.peer, operation.at)) {
            Progress::Done => false,
            Progress::Ahead => true,
            Progress::Awaited(since) => {
                waits.push((Arc::clone(operation), since));
                true
            }
        }
    });
    drop(operations);
    waits.iter().find_map(|(operation, since)| {
        let checked = session.host.check_wait(operation.peer, operation.at, &operation.what, since.elapsed());
        checked.err().and_then(|error| error.failure().cloned())
    })
}
