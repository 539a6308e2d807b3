//! Tensors and tensor collectives; the communicator suite for any device is in `executor/testing`.

mod staged;
mod tensors;
