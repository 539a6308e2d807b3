//! The `dflop` command; all code is in the library.

use std::process::ExitCode;

use dflop_cli::{Program, main_from};

fn main() -> ExitCode {
    ExitCode::from(main_from(Program::this(), std::env::args_os().skip(1)))
}
