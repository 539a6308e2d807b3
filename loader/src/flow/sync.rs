//! Tasks and channels for this directory. `tests/interleavings` runs the remaining files separately.

pub(super) use crossbeam::channel::{Receiver, Sender, bounded};
pub(super) use tokio::spawn;
