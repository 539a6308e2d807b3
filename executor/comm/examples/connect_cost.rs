//! Measures the cost to connect job ranks over TCP: time, threads and open files per rank.
//!
//! `cargo run --release -p dflop-comm --example connect_cost -- 2 8 32 64` starts jobs with these numbers of
//! processes, one after another. Each line has the connect time of the slowest rank, then the maximum numbers
//! of threads and open files per rank: after connecting, after a sum over all ranks, and after a barrier.

#![allow(clippy::print_stdout, reason = "an example prints")]

use dflop_comm::launch::{Launcher, identity_from_environment};
use dflop_comm::{Comm, Result, Settings, StepContext, tcp};
use std::time::Instant;

fn main() -> Result<()> {
    let identity = identity_from_environment()?;
    if identity.size > 1 {
        let begin = Instant::now();
        let session = tcp::connect(&identity, Settings::default())?;
        let connect_us = begin.elapsed().as_micros() as u64;
        return report(&session.comm, connect_us);
    }
    let sizes = std::env::args().skip(1).filter_map(|size| size.parse().ok());
    for size in sizes {
        let program = std::env::current_exe().unwrap_or_else(|_| "connect_cost".into());
        let begin = Instant::now();
        let outcome = Launcher::new(program, size)?.run()?;
        assert!(outcome.is_success(), "{outcome:?}");
        println!("{size} ranks: whole job {:.3} s", begin.elapsed().as_secs_f64());
    }
    Ok(())
}

fn report(comm: &dyn Comm, connect_us: u64) -> Result<()> {
    let at = |action| StepContext::step(0, action);
    let mut figures = vec![connect_us, entries("task"), entries("fd")];
    // ranks are counted before any rank continues
    let mut values = vec![1.0_f32; 1024];
    comm.all_reduce(at("sum"), values.as_mut_slice().into())?;
    figures.extend([entries("task"), entries("fd")]);
    comm.barrier(at("barrier"))?;
    figures.extend([entries("task"), entries("fd")]);
    let width = figures.len();
    let mut all = vec![0_u64; width * comm.size()];
    all[width * comm.rank()..][..width].copy_from_slice(&figures);
    comm.all_gather(at("figures"), all.as_mut_slice().into(), &vec![width; comm.size()])?;
    if comm.rank() == 0 {
        let largest = |figure| all.iter().skip(figure).step_by(width).max().copied().unwrap_or_default();
        println!(
            "{} ranks: connect {:.3} s; threads/files {}/{}, after a sum {}/{}, after a barrier {}/{}",
            comm.size(),
            largest(0) as f64 / 1e6,
            largest(1),
            largest(2),
            largest(3),
            largest(4),
            largest(5),
            largest(6),
        );
    }
    comm.barrier(at("end"))
}

/// Returns the number of entries in a directory for this process; 0 on systems without `/proc`.
fn entries(directory: &str) -> u64 {
    std::fs::read_dir(format!("/proc/self/{directory}")).map_or(0, |entries| entries.count() as u64)
}
