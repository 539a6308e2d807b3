//! Runs an unmodified CUDA program on a CPU, so that it can be tested without a GPU.
//!
//! Three shared libraries stand in for `libcuda.so.1`, `libnvrtc.so.13` and `libcublasLt.so.13`. They are
//! written against the documented behavior of those libraries, and where the documentation leaves a choice
//! they take the one that shows mistakes: streams run as late as they may, threads take turns in adversarial
//! orders, memory starts as NaN, and accesses outside of a living buffer fault.
//!
//! A test loads them before it calls CUDA; crates that load CUDA by its names then find them:
//!
//! ```no_run
//! let Some(cuda) = dflop_cuda_stand_in::StandIn::load() else { return };
//! cuda.set_order(7);
//! // ... run the program ...
//! assert_eq!(cuda.counts().buffers_in_use, 0);
//! ```
//!
//! A whole process uses them through `LD_LIBRARY_PATH`, set to [`library_dir`], and variables whose names
//! start with `CUDA_STAND_IN_`: `ORDER`, `BYTES`, `WORKERS`, `DEVICES`, `DRIVER_VERSION`,
//! `COMPUTE_CAPABILITY`, `FAIL_LAUNCH` (`kernel:n`), `FAIL_COMPILATION`, `LOG`, and `CACHE`, a directory for
//! compiled kernels.

mod compile;
mod control;

pub use compile::library_dir;
pub use control::{Counts, StandIn};
