//! End-to-end tests, in one program so that it links once.

mod architecture;
mod augment;
mod balanced;
mod fields;
mod hostile_tar;
mod malformed;
mod order;
mod stream;
mod webdataset_rules;
