//! Measures transport latency and bandwidth on this machine, best and median over many rounds.
//!
//! `cargo run --release -p dflop-comm --example comm_speed` measures threads, and TCP between processes
//! that it starts.

#![allow(clippy::print_stdout, reason = "an example prints")]

use dflop_comm::launch::{Launcher, identity_from_environment};
use dflop_comm::{Buffer, Comm, Dtype, Payload, PayloadShape, Result, Settings, StepContext, tcp, threads};
use std::time::{Duration, Instant};

/// Message size in bytes, and number of round trips.
const MESSAGES: [(usize, usize); 3] = [(8, 2000), (512 << 10, 100), (8 << 20, 20)];
const SUM_ELEMENTS: usize = 1 << 20;
const SUM_ROUNDS: usize = 20;

fn main() -> Result<()> {
    let identity = identity_from_environment()?;
    if identity.size > 1 {
        let session = tcp::connect(&identity, Settings::default())?;
        return measure("tcp", &session.comm);
    }
    for size in [2, 4] {
        let ranks = threads::world(size, Settings::default())?;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                ranks.into_iter().map(|comm| scope.spawn(move || measure("threads", &comm))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
        })?;
        let program = std::env::current_exe().unwrap_or_else(|_| "comm_speed".into());
        let outcome = Launcher::new(program, size)?.run()?;
        assert!(outcome.is_success(), "{outcome:?}");
    }
    Ok(())
}

fn measure(transport: &str, comm: &dyn Comm) -> Result<()> {
    if comm.size() == 2 {
        for (bytes, rounds) in MESSAGES {
            let seconds = there_and_back(comm, bytes, rounds)?;
            let bandwidth = |seconds: f64| bytes as f64 / seconds / 1e9;
            report(transport, comm, &format!("{bytes} B one way"), &seconds, Some(&bandwidth));
        }
    }
    report(transport, comm, "all-reduce 4 MiB", &sums(comm)?, None);
    comm.barrier(StepContext::step(0, "end"))
}

/// Returns one-way times in seconds, round by round.
fn there_and_back(comm: &dyn Comm, bytes: usize, rounds: usize) -> Result<Vec<f64>> {
    let (other, shape) = (1 - comm.rank(), PayloadShape::flat(Dtype::U8, bytes));
    let mut ball = Payload::flat(Buffer::U8(vec![1; bytes]));
    let mut seconds = Vec::new();
    for round in 0..rounds as u64 {
        let (at, begin) = (StepContext::step(round, "ball"), Instant::now());
        if comm.rank() == 0 {
            comm.send(other, 0, at, ball)?;
            ball = comm.recv(other, 0, at, shape)?;
        } else {
            ball = comm.recv(other, 0, at, shape)?;
            comm.send(other, 0, at, ball)?;
            ball = Payload::flat(Buffer::U8(Vec::new()));
        }
        seconds.push(begin.elapsed().as_secs_f64() / 2.0);
    }
    Ok(seconds)
}

fn sums(comm: &dyn Comm) -> Result<Vec<f64>> {
    let mut values = vec![1.0_f32; SUM_ELEMENTS];
    let mut seconds = Vec::new();
    for round in 0..SUM_ROUNDS as u64 {
        comm.barrier(StepContext::step(round, "start"))?;
        let begin = Instant::now();
        comm.all_reduce(StepContext::step(round, "sum"), values.as_mut_slice().into())?;
        seconds.push(begin.elapsed().as_secs_f64());
        values.fill(1.0);
    }
    Ok(seconds)
}

fn report(
    transport: &str,
    comm: &dyn Comm,
    what: &str,
    seconds: &[f64],
    bandwidth: Option<&dyn Fn(f64) -> f64>,
) {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (best, median) = (sorted[0], sorted[sorted.len() / 2]);
    let bandwidth = bandwidth.map_or(String::new(), |of| format!(", {:.2} GB/s at best", of(best)));
    if comm.rank() == 0 {
        let show = |seconds| format!("{:?}", Duration::from_secs_f64(seconds));
        println!(
            "{transport} x {}: {what}: best {}, median {}{bandwidth}",
            comm.size(),
            show(best),
            show(median)
        );
    }
}
