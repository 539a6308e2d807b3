//! `dflop train`: what it prints, what cuts of a job have in common, states, dead ranks, and wrong files.

mod config;
mod damaged;
mod killed;
mod misuse;
mod process;
mod runs;
mod states;
mod trace;
