//! CUDA device tests on the stand-ins: operations, steps, failures, and faults that must be found.
//!
//! All tests that use the stand-in in this process hold [`turn`](dflop_cuda_tests::cuda::turn), since
//! settings, counts and failures apply to the entire process.

#![allow(clippy::print_stdout, reason = "what was found is worth reading")]

mod attention;
mod cases;
mod experts;
mod failures;
mod mutants;
mod operations;
mod random;
mod steps;
mod traffic;
