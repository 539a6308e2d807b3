//! The dflop command.
fn main() {}
