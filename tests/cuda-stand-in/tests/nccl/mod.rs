//! Ranks that communicate through the NCCL stand-in.

mod errors;
mod faults;
mod library;
mod operations;
mod order;
mod processes;
mod usage;
mod world;
