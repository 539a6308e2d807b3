//! Rank in a job under `mpirun` that ends in the way that the argument names; prints the failure that the
//! rank learns about.

use std::time::Duration;

use dflop_comm::{Comm, Payload, PayloadShape, Result, Settings, StepContext};

const SHAPE: PayloadShape = PayloadShape { dtype: dflop_comm::Dtype::F32, rows: 1, cols: 1 };

fn main() -> Result<()> {
    let settings = Settings::default().wait(Duration::from_secs(1)).slow(Duration::from_secs(20));
    let comm = dflop_mpi::world(settings)?;
    let (rank, at) = (comm.rank(), StepContext::microbatch(3, 1, "ending"));
    let pause = |seconds| std::thread::sleep(Duration::from_secs(seconds));
    let mode = std::env::args().nth(1).unwrap_or_default();
    let ended = match mode.as_str() {
        // The other ranks are in a collective that rank 1 never enters.
        "abort" if rank == 1 => {
            pause(1);
            Err(comm.abort(at, "the loss is NaN"))
        }
        "abort" | "panic" if rank != 1 => comm.barrier(at),
        "panic" => panic!("a bug of rank 1"),
        // Every rank waits for the next rank.
        "deadlock" => comm.recv((rank + 1) % comm.size(), 0, at, SHAPE).map(drop),
        // Rank 1 computes for longer than the short limit.
        "busy" if rank == 1 => {
            pause(3);
            comm.send(0, 0, at, Payload::f32(1, 1, vec![7.0])?)
        }
        "busy" if rank == 0 => comm.recv(1, 0, at, SHAPE).map(drop),
        // Rank 1 leaves after one of two messages.
        "leave" if rank == 1 => comm.send(0, 0, at, Payload::f32(1, 1, vec![7.0])?),
        "leave" if rank == 0 => comm.recv(1, 0, at, SHAPE).and_then(|_| comm.recv(1, 0, at, SHAPE)).map(drop),
        _ => Ok(()),
    };
    report(rank, &ended);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the test reads the ends")]
fn report(rank: usize, ended: &Result<()>) {
    match ended {
        Ok(()) => println!("rank {rank}: done"),
        Err(error) => println!("rank {rank}: {error}"),
    }
}
