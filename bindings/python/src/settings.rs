//! Reads the settings dataclasses in `dflop.settings`, field by field.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Module with the dataclasses.
const MODULE: &str = "dflop.settings";

/// A settings dataclass, such as `dflop.Plan`.
pub(crate) struct Group<'py> {
    object: Bound<'py, PyAny>,
    class: &'static str,
}

impl<'py> Group<'py> {
    /// Creates a group from a keyword's argument; without an argument, all fields have the default.
    ///
    /// # Errors
    /// `TypeError` for an object of any other class.
    pub(crate) fn new(
        py: Python<'py>,
        keyword: &str,
        given: Option<&Bound<'py, PyAny>>,
        class: &'static str,
    ) -> PyResult<Self> {
        let of = py.import(MODULE)?.getattr(class)?;
        let Some(object) = given else { return Ok(Self { object: of.call0()?, class }) };
        if !object.is_instance(&of)? {
            let found = object.get_type().name()?;
            let message = format!("expected `{keyword}` to be a `dflop.{class}`, found {found}");
            return Err(PyTypeError::new_err(message));
        }
        Ok(Self { object: object.clone(), class })
    }

    /// Reads a field.
    ///
    /// # Errors
    /// The conversion error, with the field in the message.
    pub(crate) fn get<T: FromPyObjectOwned<'py>>(&self, field: &str) -> PyResult<T> {
        self.object.getattr(field)?.extract::<T>().map_err(|error| self.wrong(field, &error.into()))
    }

    fn wrong(&self, field: &str, error: &PyErr) -> PyErr {
        let py = self.object.py();
        let message = format!("`{field}` of `dflop.{}`: {}", self.class, error.value(py));
        PyErr::from_type(error.get_type(py), message)
    }
}

/// Refuses keywords that a loader or dataset does not have, with the dataclass of the setting if it has one.
pub(crate) fn refuse_keywords(
    py: Python<'_>,
    loader: &str,
    unknown: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let Some(unknown) = unknown else { return Ok(()) };
    py.import(MODULE)?.call_method1("refuse_keywords", (loader, unknown)).map(drop)
}

/// Returns the error for a loader that is indexed.
pub(crate) fn refuse_index(loader: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "a {loader} is iterated, and has no items by index: for a DataLoader wrap it, \
         DataLoader(dflop.torch.IterableDataset(loader), batch_size=None, num_workers=0)"
    ))
}
