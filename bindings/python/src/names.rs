//! Converts names, paths and name lists from Python.

use std::path::PathBuf;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// Names or paths, from a single value or a list; also names of models and fields.
pub(crate) struct Names(pub(crate) Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Names {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Some(name) = name(&value)? {
            return Ok(Self(vec![name]));
        }
        let each = |item: PyResult<Bound<'py, PyAny>>| {
            let item = item?;
            name(&item)?.ok_or_else(|| not_a_name(&item))
        };
        value.try_iter().map_err(|_| not_a_name(&value))?.map(each).collect::<PyResult<_>>().map(Self)
    }
}

/// Returns text, a path as text, or a `dflop.ModelDescription` as JSON; `None` for anything else.
fn name(value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    if value.is_instance_of::<PyString>() {
        return value.extract().map(Some);
    }
    let description = value.py().import("dflop.custom")?.getattr("ModelDescription")?;
    if value.is_instance(&description)? {
        return value.call_method0("to_json")?.extract().map(Some);
    }
    Ok(value.extract::<PathBuf>().ok().map(|path| path.display().to_string()))
}

fn not_a_name(value: &Bound<'_, PyAny>) -> PyErr {
    let kind = value.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("expected a name, a path, or a list of them, found {kind}"))
}
