//! The Python package `dflop`: converts types between Python and the crates, and decides nothing.

mod cli;

use pyo3::prelude::*;

/// The compiled part of the package `dflop`.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::cli::cli;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
