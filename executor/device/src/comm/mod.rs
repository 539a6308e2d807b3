//! Communication of tensors between devices.
//!
//! Models and pipelines call [`DeviceComm`]. A device that can exchange memory itself implements it;
//! [`Staged`] implements it for every device over a [`dflop_comm::Comm`], through the host.

mod device_comm;
mod staged;

pub use device_comm::{DeviceComm, MessageLane, RowShape};
pub use staged::{Staged, reserve_lanes};
