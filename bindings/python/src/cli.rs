//! Runs the command line inside the interpreter.

use std::ffi::OsString;

use dflop_cli::{Program, answer_from, main_from};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::DflopError;
use crate::{logging, runtime};

/// Runs the command line with these arguments and returns the exit status; the interpreter is released
/// meanwhile.
///
/// Args:
///     args (Sequence[str]): user arguments, without the program name.
///     program (Sequence[str]): starts this command line in another process, for the ranks in ``train``: a
///         file, then the first arguments.
///
/// Raises:
///     ValueError: ``program`` is empty.
#[pyfunction]
#[pyo3(signature = (args, *, program))]
pub(crate) fn cli(py: Python<'_>, args: Vec<OsString>, program: Vec<OsString>) -> PyResult<u8> {
    let mut program = program.into_iter();
    let file = program.next().ok_or_else(|| PyValueError::new_err("`program` is empty"))?;
    let program = Program::new(file, program);
    let status = py.detach(|| main_from(program, args));
    logging::emit(py);
    Ok(status)
}

/// Runs a command in this process and returns the standard output.
///
/// Args:
///     args (Sequence[str]): the command and the command's arguments.
///
/// Raises:
///     ConfigError: the arguments are invalid.
///     Error: the command failed.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, args: Vec<OsString>) -> PyResult<String> {
    runtime::run(py, move || {
        answer_from(args).map_err(|refusal| DflopError::command(refusal.message, refusal.is_misuse))
    })
}
