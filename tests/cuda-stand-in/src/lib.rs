//! Runs an unmodified CUDA program on a CPU, so that it can be tested without a GPU.
//!
//! Four shared libraries replace `libcuda.so.1`, `libnvrtc.so.13`, `libcublasLt.so.13` and `libnccl.so.2`.
//! They are written against the documented behavior, and where the documentation leaves a choice they choose
//! the variant that shows mistakes: streams run as late as they may, threads take turns in adversarial
//! orders, memory starts as NaN, accesses outside a living buffer fault, and a send ends when the receiver
//! has received it.
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
//! `COMPUTE_CAPABILITY`, `FAIL_LAUNCH` (`kernel:n`), `FAIL_COMPILATION`, `COUNT_BYTES`, `LOG`, and `CACHE`, a
//! directory for compiled kernels.
//!
//! Communicators with several ranks need streams with threads: `STREAM_THREADS=1`, with `QUEUES` for the
//! number of hardware queues that the streams on a device share. The communication library reads
//! `NCCL_VERSION`, `NCCL_INIT_MS`, `NCCL_DELAY_US`, `NCCL_SHARES_DEVICES`, and `NCCL_FAULTS`, a list such as
//! `error:1:3:6,hang:0:5`: an [`NcclFault`] kind in lower case, a rank, an operation number, and an error
//! code.

mod compile;
mod control;
mod nccl_control;

pub use compile::library_dir;
pub use control::{Counts, StandIn};
pub use nccl_control::{Nccl, NcclCounts, NcclFault, NcclLaunch, NcclOperation};
