//! Keeps constructor arguments, for `repr`, `pickle` and `copy`.

use dflop_loader::error::excerpt;
use dflop_loader::store::redact;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

/// Maximum number of characters per argument in a `repr`.
const CHARACTERS_MAX: usize = 80;

/// Constructor arguments, by name.
#[derive(Debug)]
pub(crate) struct Arguments(Py<PyDict>);

impl Arguments {
    /// Keeps a dictionary of all arguments.
    pub(crate) fn new(arguments: Bound<'_, PyDict>) -> Self {
        Self(arguments.unbind())
    }

    /// Removes arguments that are `None`.
    pub(crate) fn without_none(self, py: Python<'_>) -> PyResult<Self> {
        let arguments = self.0.bind(py);
        for (name, value) in arguments.copy()? {
            if value.is_none() {
                arguments.del_item(name)?;
            }
        }
        Ok(self)
    }

    /// Returns a function without arguments that creates the object again.
    pub(crate) fn constructor<'py>(&self, class: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = class.py();
        py.import("functools")?.getattr("partial")?.call((class,), Some(self.0.bind(py)))
    }

    /// Formats the constructor call, without arguments that have the default value.
    pub(crate) fn repr(&self, class: &Bound<'_, PyType>) -> PyResult<String> {
        Ok(format!("{}({})", class.name()?, self.shown(class)?.join(", ")))
    }

    /// Formats the arguments that do not have the default value, without credentials in URLs.
    pub(crate) fn shown(&self, class: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let py = class.py();
        let inspect = py.import("inspect")?;
        let keyword_only = inspect.getattr("Parameter")?.getattr("KEYWORD_ONLY")?;
        let parameters = inspect.call_method1("signature", (class,))?.getattr("parameters")?;
        let mut shown = Vec::new();
        for item in parameters.call_method0("items")?.try_iter()? {
            let (name, parameter): (String, Bound<'_, PyAny>) = item?.extract()?;
            let Some(value) = self.0.bind(py).get_item(&name)? else { continue };
            let default = parameter.getattr("default")?;
            // A required parameter has a default that no value equals.
            if value.eq(&default).unwrap_or(false) {
                continue;
            }
            let text = value.repr()?.to_string();
            let text = excerpt(&redact(&text), CHARACTERS_MAX).into_owned();
            let is_named = !shown.is_empty() || parameter.getattr("kind")?.is(&keyword_only);
            shown.push(if is_named { format!("{name}={text}") } else { text });
        }
        Ok(shown)
    }
}

/// Collects variables by name to [`Arguments`].
macro_rules! arguments {
    ($py:expr, $($name:ident),+ $(,)?) => {{
        let arguments = pyo3::types::PyDict::new($py);
        $(arguments.set_item(stringify!($name), &$name)?;)+
        $crate::arguments::Arguments::new(arguments)
    }};
}
pub(crate) use arguments;
