//! Conformance suite under `mpirun`, with one process per rank.

mod mpirun;

use dflop_comm::conformance::{Case, cases};
use dflop_mpi::PROMISES;
use mpirun::{mpirun, outputs};

fn is_refusal(case: &Case) -> bool {
    case.name.starts_with("refused")
}

#[test]
fn every_case_passes_on_one_to_four_ranks() {
    for ranks in 1..=4 {
        let expected: Vec<String> = cases(PROMISES)
            .into_iter()
            .filter(|case| !is_refusal(case) && case.sizes.contains(&ranks))
            .map(|case| format!("passed {}", case.name))
            .collect();
        assert!(!expected.is_empty());
        assert_eq!(outputs(&mpirun("conformance_rank", ranks, &[])), expected, "{ranks} ranks");
    }
}

/// Every rank checks the failure, leaves the job and ends without a fault.
#[test]
fn every_case_that_ends_the_job_reaches_all_ranks() {
    for case in cases(PROMISES).into_iter().filter(is_refusal) {
        for &ranks in case.sizes {
            let found = outputs(&mpirun("conformance_rank", ranks, &[case.name]));
            assert_eq!(found, [format!("passed {}", case.name)], "{ranks} ranks");
        }
    }
}
