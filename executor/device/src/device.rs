//! Device trait: memory and all operations.

use crate::ops::each_operation;
use crate::runtime::Runtime;

macro_rules! device {
    ($($file:ident::$Operation:ident),+ $(,)?) => {
        /// Device memory and operations.
        ///
        /// Each operation is a separate trait, next to the functions that compute it on a CPU
        /// ([`crate::ops`]); a device implements all operations. Tensor shapes are documented at the
        /// functions with the same name.
        pub trait Device: Runtime $(+ crate::ops::$file::$Operation)+ {}

        impl<D> Device for D where D: Runtime $(+ crate::ops::$file::$Operation)+ {}
    };
}
each_operation!(device);
