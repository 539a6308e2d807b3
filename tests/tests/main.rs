//! End-to-end tests, in one program so that it links once.

mod architecture;
mod balanced;
mod cache_processes;
mod hostile_tar;
mod malformed;
mod order;
mod remote;
mod s3;
mod stream;
mod webdataset_rules;
