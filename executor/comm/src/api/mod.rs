//! Interface of all transports: the trait [`Comm`], handles for pending calls, limits, recorded waits.

mod comm;

pub(crate) use comm::compare_digests;
pub use comm::{Comm, Completion, Handle, Limits, P2pOp, Settings, WaitRecord};
