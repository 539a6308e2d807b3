//! Tensors and their collectives; the suite of communicators of any device is in `executor/testing`.

mod staged;
mod tensors;
