//! Ranks that communicate through the stand-in of NCCL.

mod errors;
mod faults;
mod library;
mod operations;
mod order;
mod processes;
mod usage;
mod world;
