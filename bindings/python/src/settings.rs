//! Reads the settings dataclasses in `dflop.settings`, field by field.

use std::path::PathBuf;

use dflop_loader::Error;
use dflop_loader::settings::{names, set};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PySequence, PyString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Number, Value};

use crate::error::DflopError;

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

    /// Reads all fields that the library declares, with the defaults of the dataclass.
    ///
    /// # Errors
    /// `TypeError` and `OverflowError` for a value of another type, `ConfigError` for a value that the
    /// setting does not have, with the field in the message.
    pub(crate) fn settings<S: Serialize + DeserializeOwned + Default>(&self) -> PyResult<S> {
        let mut settings = S::default();
        for &field in names::<S>() {
            // Settings of commands alone are not in the dataclasses.
            let Some(value) = self.object.getattr_opt(field)? else { continue };
            let value = plain(&value).map_err(|error| self.wrong(field, &error))?;
            if let Err(error) = set(&mut settings, field, value) {
                return Err(match &error {
                    Error::Config { reason, .. } if reason.starts_with("invalid type") => {
                        self.wrong(field, &PyTypeError::new_err(reason.clone()))
                    }
                    Error::Config { reason, .. } if reason.starts_with("invalid value: integer") => {
                        self.wrong(field, &PyOverflowError::new_err(reason.clone()))
                    }
                    _ => DflopError::from(error).into(),
                });
            }
        }
        Ok(settings)
    }

    fn wrong(&self, field: &str, error: &PyErr) -> PyErr {
        let py = self.object.py();
        let message = format!("`{field}` of `dflop.{}`: {}", self.class, error.value(py));
        PyErr::from_type(error.get_type(py), message)
    }
}

/// Converts a number, a text, a path, a list of these, or `None`; NumPy's numbers are numbers.
fn plain(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if value.is_instance_of::<PyBool>() || value.is_instance_of::<PyString>() {
        return Ok(pythonize::depythonize(value)?);
    }
    if value.hasattr("__index__")? {
        return match value.extract::<u64>() {
            Ok(number) => Ok(number.into()),
            Err(_) => Ok(value.extract::<i64>()?.into()),
        };
    }
    if value.hasattr("__float__")? {
        let number = value.extract::<f64>()?;
        return Ok(Number::from_f64(number).map_or_else(|| number.to_string().into(), Value::Number));
    }
    if value.hasattr("__fspath__")? {
        return Ok(value.extract::<PathBuf>()?.display().to_string().into());
    }
    if value.cast::<PySequence>().is_ok() {
        return value
            .try_iter()?
            .map(|part| plain(&part?))
            .collect::<PyResult<Vec<Value>>>()
            .map(Value::from);
    }
    Err(PyTypeError::new_err(format!(
        "expected a number, a text or a list, found {}",
        value.get_type().name()?
    )))
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
