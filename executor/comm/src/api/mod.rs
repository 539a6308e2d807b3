//! Interface of all transports: the trait [`Comm`], handles for pending calls, limits, recorded waits.

mod comm;
mod settings;

pub(crate) use comm::compare_digests;
pub use comm::{Comm, Completion, Handle, P2pOp, WaitRecord};
pub use settings::{Limits, Settings};
