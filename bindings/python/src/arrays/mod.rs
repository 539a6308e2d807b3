//! Arrays that Rust owns and Python shares without a copy, and the library whose array type they get.

pub(crate) mod array;
mod dlpack;
pub(crate) mod framework;
mod imports;
pub(crate) mod storage;

pub(crate) use imports::numpy;
