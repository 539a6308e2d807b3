//! Interface of all transports: the trait [`Comm`], handles for pending calls, limits, recorded waits.

mod comm;
mod handle;
mod settings;
mod wait_record;

pub(crate) use comm::compare_digests;
pub use comm::{Comm, P2pOp};
pub use handle::{Completion, Handle};
pub use settings::{Limits, Settings};
pub use wait_record::WaitRecord;
