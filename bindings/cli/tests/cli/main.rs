//! What users of the `dflop` command rely on: fields, exit statuses, and the same answer every time.

mod batches;
mod command;
mod contract;
mod documents;
mod index_cache;
mod memory;
mod methods;
mod misuse;
mod order;
mod packing;
mod pipes;
mod plan;
mod profiles;
mod real_input;
mod remote;
mod resume;
mod runs;
mod train;
mod video;
