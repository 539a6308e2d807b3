//! Device and operation traits, for code that calls them on a concrete device.
//!
//! Code that is generic over [`Device`] needs only that trait.

pub use crate::comm::DeviceComm;
pub use crate::device::Device;
pub use crate::runtime::Runtime;

macro_rules! traits {
    ($($file:ident::$Operation:ident),+ $(,)?) => {
        $(pub use crate::ops::$file::$Operation;)+
    };
}
crate::ops::each_operation!(traits);
