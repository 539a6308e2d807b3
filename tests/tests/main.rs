//! End-to-end tests, in one program so that it links once.

mod accounts;
mod architecture;
mod balanced;
mod foreign;
mod hostile_tar;
mod malformed;
mod metrics;
mod order;
mod resume;
mod resume_refused;
mod stalls;
mod mix;
mod order;
mod splits;
mod state;
mod stream;
mod unindexed;
mod webdataset_rules;
mod writing;
