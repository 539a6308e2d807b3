//! Ranks that communicate through the stand-in of NCCL.

mod library;
mod operations;
mod world;
