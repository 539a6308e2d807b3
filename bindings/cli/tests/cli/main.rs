//! Tests the promises of the `dflop` command: fields, exit statuses, and reproducible answers.

mod batches;
mod command;
mod contract;
mod cuda;
mod documents;
mod index_cache;
mod memory;
mod methods;
mod misuse;
mod models;
mod order;
mod packing;
mod pipes;
mod plan;
mod plan_grid;
mod plan_samples;
mod profiles;
mod real_input;
mod remote;
mod reports;
mod resume;
mod runs;
mod train;
mod untrusted;
mod video;
mod view;
