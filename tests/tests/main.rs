//! End-to-end tests, in one program so that it links once.

mod architecture;
mod balanced;
mod hostile_tar;
mod malformed;
mod mix;
mod order;
mod splits;
mod state;
mod stream;
mod webdataset_rules;
