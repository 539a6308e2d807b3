//! What users of the `dflop` command rely on: fields, exit statuses, and the same answer every time.

mod command;
mod contract;
mod index_cache;
mod misuse;
mod order;
mod packing;
mod pipes;
mod real_input;
mod resume;
mod runs;
mod remote;
