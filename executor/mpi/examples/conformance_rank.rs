//! Rank in a job under `mpirun`: runs the conformance suite cases for this number of ranks, or a single case
//! that ends the job: `mpirun -n 2 conformance_rank refused_by_the_caller`.

use std::time::Duration;

use dflop_comm::conformance::{Case, cases};
use dflop_comm::{Comm, Settings, StepContext};
use dflop_mpi::PROMISES;

fn main() -> dflop_comm::Result<()> {
    let comm = dflop_mpi::world(Settings::default().wait(Duration::from_secs(20)))?;
    let name = std::env::args().nth(1);
    let is_chosen = |case: &Case| match &name {
        Some(name) => case.name == name,
        None => !case.name.starts_with("refused"),
    };
    let chosen: Vec<Case> = cases(PROMISES).into_iter().filter(is_chosen).collect();
    assert!(!chosen.is_empty(), "no such case: {name:?}");
    for case in chosen {
        if !case.sizes.contains(&comm.size()) {
            continue;
        }
        if name.is_some() {
            (case.run)(&comm);
        } else {
            // A separate communicator, so that no case receives messages from another case.
            let own = comm.split(StepContext::step(0, "split"), Some(0), comm.rank() as u64)?;
            (case.run)(&*own.expect("a color was given"));
        }
        if comm.rank() == 0 {
            report(case.name);
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the test counts the cases")]
fn report(name: &str) {
    println!("passed {name}");
}
