//! Checks the library NCCL, where ranks exchange messages over it.

use super::report::Report;

pub(super) fn check(report: &mut Report) {
    report.skipped("NCCL", "ranks exchange messages over TCP");
}
