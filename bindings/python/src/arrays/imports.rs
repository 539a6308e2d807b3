//! Imports array libraries on first use, once per process.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

static NUMPY: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// Imports `NumPy`.
pub(crate) fn numpy(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    import(py, &NUMPY, "numpy")
}

/// Imports a module into `cell`, or returns the module that is already there.
pub(super) fn import<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyModule>>,
    name: &str,
) -> PyResult<&'py Bound<'py, PyModule>> {
    Ok(cell.get_or_try_init(py, || py.import(name).map(Bound::unbind))?.bind(py))
}
