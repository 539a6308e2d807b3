//! Training job under `mpirun`, compared with a thread job.

mod mpirun;

use mpirun::{mpirun, outputs, program};

#[test]
fn a_job_over_mpi_has_the_losses_of_one_over_threads() {
    let over_threads =
        outputs(&std::process::Command::new(program("train_rank")).arg("threads").output().unwrap());
    let over_mpi = outputs(&mpirun("train_rank", 4, &[]));
    let losses = |lines: &[String]| -> Vec<f64> {
        let loss = |line: &String| line.rsplit(' ').next().unwrap().parse().unwrap();
        lines.iter().map(loss).collect()
    };
    let (expected, found) = (losses(&over_threads), losses(&over_mpi));
    assert!(expected.len() == 4 && expected[3] < 0.9 * expected[0], "the model learns: {expected:?}");
    assert_eq!(found.len(), 4, "{over_mpi:?}");
    for (expected, found) in expected.iter().zip(&found) {
        // A sum over two terms is the same in any order; with more replicas the last digits could differ.
        assert!((expected - found).abs() < 1e-9, "{over_mpi:?}, over threads {over_threads:?}");
    }
}
