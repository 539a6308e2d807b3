//! Tests `dflop train`: output, job layouts, states, killed ranks, and wrong files.

mod agreement;
mod cache_directory;
mod check;
pub(crate) mod config;
mod corrections;
mod damaged;
mod data;
mod evaluation;
mod groups;
mod killed;
mod misuse;
mod planted;
mod process;
mod replay;
mod report;
mod runs;
mod slow_disk;
mod states;
mod stops;
mod top;
mod trace;
mod two_jobs;
