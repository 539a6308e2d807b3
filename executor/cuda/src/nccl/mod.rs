//! Communication between CUDA devices over NCCL.
//!
//! [`NcclComm`] implements [`dflop_device::DeviceComm`]: tensors move from device to device, ordered by lanes
//! and events, without the host. Each rank group has a dedicated NCCL communicator, and so does each
//! [`dflop_device::MessageLane`], as far as the device has queues: with a communicator and a stream for every
//! rank pair and flow direction, a receive posted ahead never blocks a later message. Lanes that share a
//! communicator and stream run messages in an order common to all ranks. Communicator ids, order checks,
//! failures and job shutdown use the job's [`dflop_comm::Comm`].

mod communicator;
mod library;
mod message_lanes;
mod nccl_comm;
mod self_check;
mod session;

pub use library::{Nccl, NcclVersion};
pub use nccl_comm::NcclComm;
pub use self_check::check_alone;
pub use session::NCCL_VARIABLES;
