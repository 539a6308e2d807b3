//! End-to-end tests, in one program so that it links once.

mod accounts;
mod architecture;
mod augment;
mod balanced;
mod cache_processes;
mod fields;
mod foreign;
mod hostile_tar;
mod malformed;
mod metrics;
mod mix;
mod model_inputs;
mod order;
mod processors;
mod remote;
mod resume;
mod resume_refused;
mod s3;
mod splits;
mod stalls;
mod state;
mod stream;
mod unindexed;
mod video;
mod webdataset_rules;
mod writing;
