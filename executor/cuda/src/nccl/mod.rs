//! Communication between CUDA devices over NCCL.
//!
//! [`NcclComm`] implements [`dflop_device::DeviceComm`]: tensors go from device to device, in the order of
//! lanes and events, without the host. Each group of ranks has a communicator of NCCL of its own, and so has
//! each [`dflop_device::MessageLane`], as far as the device has queues: with a communicator and a stream for
//! every pair of ranks and direction of flow, a receive that is posted ahead never holds up another message.
//! Lanes that share both run their messages in an order that all ranks have in common. Ids of communicators,
//! comparisons of orders, failures and the end of a job go over the job's [`dflop_comm::Comm`].

mod collective;
mod communicator;
mod environment;
mod functions;
mod ids;
mod lane_plan;
mod library;
mod message_lanes;
mod nccl_comm;
mod operation;
mod self_check;
mod session;
mod transfer;
mod watchdog;

pub use environment::NCCL_VARIABLES;
pub use library::{Nccl, NcclVersion};
pub use nccl_comm::NcclComm;
pub use self_check::check_alone;
