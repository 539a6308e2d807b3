//! Tasks and channels of this room. `tests/interleavings` runs the other files on its own.

pub(super) use crossbeam::channel::{Receiver, Sender, bounded};
pub(super) use tokio::spawn;
