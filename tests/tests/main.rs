//! End-to-end tests, in one program so that it links once.

mod architecture;
mod balanced;
mod hostile_tar;
mod malformed;
mod order;
mod processors;
mod stream;
mod webdataset_rules;
