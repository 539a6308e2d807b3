//! Reads the settings dataclasses of `dflop.settings`, field by field.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Module of the dataclasses.
const MODULE: &str = "dflop.settings";

/// A settings dataclass, such as `dflop.Plan`.
pub(crate) struct Group<'py> {
    object: Bound<'py, PyAny>,
    class: &'static str,
}

impl<'py> Group<'py> {
    /// Takes the argument of a keyword; without it, all fields have their defaults.
    ///
    /// # Errors
    /// `TypeError` for an object of another class.
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
    /// The error of the conversion, with the field in its message.
    pub(crate) fn get<T: FromPyObjectOwned<'py>>(&self, field: &str) -> PyResult<T> {
        self.object.getattr(field)?.extract::<T>().map_err(|error| self.wrong(field, &error.into()))
    }

    fn wrong(&self, field: &str, error: &PyErr) -> PyErr {
        let py = self.object.py();
        let message = format!("`{field}` of `dflop.{}`: {}", self.class, error.value(py));
        PyErr::from_type(error.get_type(py), message)
    }
}

/// Refuses keywords that a loader does not have, with the dataclass of the setting if it is in one.
pub(crate) fn refuse_keywords(
    py: Python<'_>,
    loader: &str,
    unknown: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let Some(unknown) = unknown else { return Ok(()) };
    py.import(MODULE)?.call_method1("refuse_keywords", (loader, unknown)).map(drop)
}

/// Returns the error of a loader that is asked for an item by its index.
pub(crate) fn refuse_index(loader: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "a {loader} is iterated, and has no items by index: for a DataLoader wrap it, \
         DataLoader(dflop.torch.IterableDataset(loader), batch_size=None, num_workers=0)"
    ))
}
