//! Ends a job whose communication fails or takes too long.
//!
//! NCCL has no time limits, and a kernel that waits for another rank waits for ever. A thread looks at all
//! communicators and at the operations in flight: an NCCL failure, a compute lane wait beyond the job
//! communicator's limits, or a failure reported by a remote rank ends all communicators on this rank, so that
//! the device's work ends and every later call on the device returns the failure. A second thread, which
//! never calls the driver, ends the job if the first thread does not return from a call.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Failure};

use super::communicator::Health;
use super::session::{Progress, Session};
use crate::driver::lasting;

/// Time between checks.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a check is assumed to be blocked in the driver.
const STUCK: Duration = Duration::from_secs(1);
/// Time in which the rank that failed is expected to be named by the job's communicator, once NCCL reports a
/// remote failure.
const REMOTE_WAIT: Duration = Duration::from_secs(10);

/// Starts the threads, which end with the session.
pub(super) fn start(session: &Arc<Session>) -> dflop_device::Result<()> {
    let looked = Arc::new(Mutex::new(Instant::now()));
    let (watched, timed, pulse) = (Arc::downgrade(session), Arc::downgrade(session), Arc::clone(&looked));
    spawn("dflop-nccl-watch", move || watch(&watched, &looked))?;
    spawn("dflop-nccl-time", move || keep_time(&timed, &pulse))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> dflop_device::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    let failed = |error| dflop_device::Error::Failed { reason: format!("no thread to watch NCCL: {error}") };
    thread.map(drop).map_err(failed)
}

/// Checks communicators and operations.
///
/// - `looked`: time of the last check, which calls the driver and may not return
fn watch(session: &Weak<Session>, looked: &Mutex<Instant>) {
    let mut remote = None;
    loop {
        std::thread::sleep(INTERVAL);
        *looked.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let Some(session) = session.upgrade() else { return };
        let ended =
            session.host.failure().or_else(|| unwell(&session, &mut remote)).or_else(|| overdue(&session));
        if let Some(failure) = ended {
            session.end(failure);
            return;
        }
    }
}

/// Ends the job, without a driver call, if the watching thread does not return from the driver.
fn keep_time(session: &Weak<Session>, looked: &Mutex<Instant>) {
    loop {
        std::thread::sleep(INTERVAL);
        let Some(session) = session.upgrade() else { return };
        let since = looked.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if since < STUCK {
            continue;
        }
        let failure = session.host.failure().or_else(|| stuck(&session, since));
        if let Some(failure) = failure {
            // aborts set marks that kernels of NCCL see, and then call the driver
            let _ = spawn("dflop-nccl-end", move || session.end(failure));
            return;
        }
    }
}

/// Returns the job failure if the driver has not answered within the wait limit.
fn stuck(session: &Session, since: Duration) -> Option<Failure> {
    if since < session.host.wait_max() {
        return None;
    }
    let calls = lasting(since / 2).unwrap_or_else(|| "a call of other code".to_owned());
    let (rank, seconds) = (session.rank(), since.as_secs_f64());
    let message = format!(
        "rank {rank}: the driver of its device has not answered for {seconds:.1} s; it is in {calls}"
    );
    Some(session.fail(Cause::TimedOut, session.last_action(), message))
}

/// Returns the job failure if NCCL has failed.
///
/// - `remote`: time when NCCL first reported a failure on a remote rank
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

/// Returns the job failure if the compute lane waits for an operation beyond the limits.
fn overdue(session: &Session) -> Option<Failure> {
    let operations = || session.operations.lock().unwrap_or_else(PoisonError::into_inner);
    // not locked during a look, which calls the driver
    let looked_at = operations().clone();
    let (mut done, mut waits) = (Vec::new(), Vec::new());
    for operation in looked_at {
        match operation.look(|| session.host.record_wait(operation.peer, operation.at)) {
            Progress::Done => done.push(operation),
            Progress::Ahead => {}
            Progress::Awaited(since) => waits.push((operation, since)),
        }
    }
    operations().retain(|operation| !done.iter().any(|done| Arc::ptr_eq(done, operation)));
    waits.iter().find_map(|(operation, since)| {
        let checked = session.host.check_wait(operation.peer, operation.at, &operation.what, since.elapsed());
        checked.err().and_then(|error| error.failure().cloned())
    })
}
