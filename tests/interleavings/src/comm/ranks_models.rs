//! Ranks that are threads: messages, collectives, failures and farewells between them.

use super::api::{Comm, Settings};
use super::error::{Error, Result, StepContext};
use super::message::{Buffer, Payload, PayloadShape};
use super::sync::thread;
use super::threads;
use crate::model::Model;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) fn models() -> Vec<Model> {
    vec![
        Model { name: "threads: sums of three ranks, now and meanwhile, are equal", run: sums_are_equal },
        Model { name: "threads: two ranks send over the bound to each other", run: both_send_over_the_bound },
        Model { name: "threads: a send over the bound waits for its receiver", run: a_send_waits },
        Model { name: "threads: the first of two failures ends all ranks", run: one_failure_is_kept },
        Model { name: "threads: a rank that leaves ends waits for it", run: a_rank_leaves },
    ]
}

/// Settings whose time limits never expire, with this bound on buffered bytes.
pub(super) fn patient(buffered_bytes_max: usize) -> Settings {
    Settings::default().wait(Duration::from_hours(24)).buffered_bytes_max(buffered_bytes_max)
}

pub(super) fn at(step: u64) -> StepContext {
    StepContext::step(step, "model")
}

pub(super) fn row(values: &[f32]) -> Payload {
    Payload::f32(1, values.len(), values.to_vec()).unwrap()
}

pub(super) fn recv(comm: &impl Comm, from: usize, tag: u64, elements: usize) -> Result<Vec<f32>> {
    let found = comm.recv(from, tag, at(0), PayloadShape::f32(1, elements))?;
    Ok(found.into_f32().unwrap())
}

/// Runs every rank on a separate thread until all have ended. A rank that returns the communicator leaves
/// after that.
fn run<T: Send + 'static>(
    size: usize,
    settings: Settings,
    rank: impl Fn(threads::ThreadComm) -> T + Clone + Send + 'static,
) {
    let ranks = threads::world(size, settings).unwrap().into_iter().map(|comm| {
        let rank = rank.clone();
        thread::spawn(move || rank(comm))
    });
    let ranks: Vec<_> = ranks.collect();
    let ended: Vec<T> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    drop(ended);
}

fn sums_are_equal() {
    run(3, patient(8), |comm| {
        let mine = vec![comm.rank() as f32, 10.0];
        let meanwhile = comm.start_all_reduce(at(0), Buffer::F32(mine.clone())).unwrap();
        // an early look keeps the result
        let _ = meanwhile.is_complete();
        let mut values = mine;
        comm.all_reduce(at(1), values.as_mut_slice().into()).unwrap();
        assert_eq!(values, [3.0, 30.0]);
        assert_eq!(meanwhile.wait().unwrap(), Buffer::F32(vec![3.0, 30.0]));
        comm.barrier(at(2)).unwrap();
    });
}

fn both_send_over_the_bound() {
    run(2, patient(4), |comm| {
        let other = 1 - comm.rank();
        let sent: Vec<_> = (0..3)
            .map(|value| comm.start_send(other, 7, at(0), row(&[value as f32, 0.0])).unwrap())
            .collect();
        if comm.rank() == 0 {
            sent.into_iter().for_each(|sent| sent.wait().unwrap());
            (0..3).for_each(|value| assert_eq!(recv(&comm, other, 7, 2).unwrap(), [value as f32, 0.0]));
        } else {
            (0..3).for_each(|value| assert_eq!(recv(&comm, other, 7, 2).unwrap(), [value as f32, 0.0]));
            sent.into_iter().for_each(|sent| sent.wait().unwrap());
        }
    });
}

fn a_send_waits() {
    let is_received = Arc::new(AtomicBool::new(false));
    run(2, patient(4), move |comm| {
        if comm.rank() == 0 {
            comm.send(1, 7, at(0), row(&[1.0, 2.0])).unwrap();
            assert!(is_received.load(Ordering::SeqCst), "the message is over the bound");
        } else {
            thread::yield_now();
            is_received.store(true, Ordering::SeqCst);
            assert_eq!(recv(&comm, 0, 7, 2).unwrap(), [1.0, 2.0]);
        }
    });
}

fn one_failure_is_kept() {
    run(3, patient(8), |comm| {
        let error = match comm.rank() {
            2 => recv(&comm, 0, 7, 1).unwrap_err(),
            _ => comm.abort(at(0), "enough"),
        };
        let Error::Failed { failure, .. } = error else { panic!("the job has failed") };
        assert!(failure.by < 2);
        let again = comm.abort(at(1), "too late");
        assert_eq!(again.failure().unwrap(), &*failure, "every later call has the same failure");
        comm
    });
}

fn a_rank_leaves() {
    run(2, patient(8), |comm| {
        if comm.rank() == 0 {
            comm.send(1, 7, at(0), row(&[1.0])).unwrap();
            // leaves, with a message that it has not received
        } else {
            comm.send(0, 9, at(0), row(&[2.0])).ok();
            assert_eq!(recv(&comm, 0, 7, 1).unwrap(), [1.0]);
            assert!(recv(&comm, 0, 7, 1).unwrap_err().to_string().contains("rank 0 finished"));
        }
    });
}
