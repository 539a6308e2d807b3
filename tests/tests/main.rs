//! End-to-end tests, in one program so that it links once.

mod architecture;
mod balanced;
mod foreign;
mod hostile_tar;
mod malformed;
mod order;
mod stream;
mod webdataset_rules;
mod writing;
