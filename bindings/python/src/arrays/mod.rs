//! Arrays over memory that Rust owns, shared with NumPy, PyTorch and JAX without a copy.

pub(crate) mod array;
mod dlpack;
pub(crate) mod framework;
mod imports;
pub(crate) mod storage;

pub(crate) use imports::numpy;
