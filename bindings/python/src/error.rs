//! Converts crate errors to the exceptions in `dflop.errors`.

use std::borrow::Cow;

use dflop_loader::error::ErrorCategory;
use dflop_loader::model::unknown_name_hint;
use dflop_loader::store::redact;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

/// Crate error, not yet an exception; converts into a [`PyErr`].
#[derive(Debug)]
pub(crate) struct DflopError(Box<Content>);

#[derive(Debug)]
struct Content {
    /// Class in `dflop.errors`.
    class: &'static str,
    /// Error variant, in snake case.
    kind: &'static str,
    message: String,
    fields: Vec<(Cow<'static, str>, Value)>,
    /// Exception that user code raised.
    cause: Option<PyErr>,
}

/// Error field value.
#[derive(Debug)]
enum Value {
    Text(String),
    Number(u64),
    Json(serde_json::Value),
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl DflopError {
    fn new(class: &'static str, kind: &'static str, error: &dyn std::error::Error) -> Self {
        Self::new_message(class, kind, with_causes(error))
    }

    fn new_message(class: &'static str, kind: &'static str, message: String) -> Self {
        let message = redact(&message).into_owned();
        Self(Box::new(Content { class, kind, message, fields: Vec::new(), cause: None }))
    }

    fn field(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.0.fields.push((Cow::Borrowed(name), value.into()));
        self
    }

    /// Keeps the exception that a Python function raised.
    fn caused_by(mut self, source: &(dyn std::error::Error + Send + Sync + 'static)) -> Self {
        self.0.cause =
            source.downcast_ref::<PyErr>().and_then(|error| Python::try_attach(|py| error.clone_ref(py)));
        self
    }

    /// Adds the exception of user code that led to the error.
    pub(crate) fn with_cause(mut self, cause: Option<PyErr>) -> Self {
        if cause.is_some() {
            self.0.cause = cause;
        }
        self
    }

    /// Returns the error for an invalid setting.
    pub(crate) fn config(setting: &'static str, reason: impl Into<String>) -> Self {
        dflop_loader::Error::Config { setting, reason: reason.into() }.into()
    }

    /// Returns a command's error.
    pub(crate) fn command(message: String, is_misuse: bool) -> Self {
        let (class, kind) = if is_misuse { ("ConfigError", "misuse") } else { ("Error", "failed") };
        Self::new_message(class, kind, message)
    }

    /// Returns the error for using a loader after it was closed.
    pub(crate) fn closed() -> Self {
        Self::new_message("Error", "closed", "the loader is closed; create another one".to_owned())
    }

    /// Returns the error for using threads after a fork.
    pub(crate) fn forked() -> Self {
        let message =
            "this process was forked after dflop had started its threads, which do not live on in a fork; \
                       use `multiprocessing.get_context(\"spawn\")`, or create loaders in the new process only"
                .to_owned();
        Self::new_message("ForkError", "forked", message)
    }
}

/// Returns the keyword for a crate setting.
fn keyword(setting: &'static str) -> &'static str {
    match setting {
        "global_batch" => "global_batch_size",
        "rank" => "dp_rank",
        "world" => "dp_size",
        "samples_max" => "samples",
        "buffered_bytes_max" => "buffered_bytes",
        "stall_seconds_error" => "stall_seconds",
        "transforms.threads" => "python_threads",
        "work" => "strategy",
        "pad_to_tokens" => "length_buckets",
        "sample_multiple_of" | "rows" => "layout",
        setting => setting,
    }
}

/// Joins an error and all causes, one per line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}\n  because: {cause}"))
}

impl From<dflop_loader::Error> for DflopError {
    fn from(error: dflop_loader::Error) -> Self {
        use dflop_loader::Error as E;
        let mut converted = match &error {
            E::Model(error) => return Self::from(error.clone()),
            E::Config { setting, reason } => {
                let setting = keyword(setting);
                let reason = reason.replace("`world`", "`dp_size`");
                return Self::new_message("ConfigError", "config", format!("invalid `{setting}`: {reason}"))
                    .field("setting", setting)
                    .field("reason", reason);
            }
            _ => Self::new(exception_class(error.category()), error.kind(), &error),
        };
        let fields = error.fields().into_iter();
        converted.0.fields.extend(fields.map(|(name, value)| (Cow::Owned(name), Value::Json(value))));
        match &error {
            E::UserCode(error) => converted.caused_by(error.cause()),
            _ => converted,
        }
    }
}

impl From<dflop_loader::error::ProcessorError> for DflopError {
    fn from(error: dflop_loader::error::ProcessorError) -> Self {
        dflop_loader::Error::from(error).into()
    }
}

/// Returns the exception class for a category.
fn exception_class(category: ErrorCategory) -> &'static str {
    match category {
        ErrorCategory::Config => "ConfigError",
        ErrorCategory::Model => "ModelError",
        ErrorCategory::Storage => "ReadError",
        ErrorCategory::Data => "DataError",
        ErrorCategory::ErrorBudget => "ErrorBudgetError",
        ErrorCategory::State => "StateError",
        ErrorCategory::Plan => "PlanError",
        ErrorCategory::UserCode => "UserCodeError",
        ErrorCategory::Stalled => "StalledError",
        ErrorCategory::Internal => "StageError",
    }
}

impl From<dflop_costmodel::Error> for DflopError {
    fn from(error: dflop_costmodel::Error) -> Self {
        use dflop_costmodel::Error as E;
        let new = |kind| Self::new("ModelError", kind, &error);
        match &error {
            E::UnknownModel { name, known } => {
                let message = format!("{error}; {}", unknown_name_hint(name));
                Self::new_message("ModelError", "unknown_model", message)
                    .field("name", name.clone())
                    .field("known", known.clone())
            }
            E::UnknownDevice { name, known } => {
                new("unknown_device").field("name", name.clone()).field("known", known.clone())
            }
            E::UnknownPart { name, known } => {
                new("unknown_part").field("name", name.clone()).field("known", known.clone())
            }
            E::Configuration { file, field, problem } => new("configuration")
                .field("file", *file)
                .field("field", field.clone())
                .field("problem", problem.clone()),
            E::Composition { name, problem } => {
                new("composition").field("name", name.clone()).field("problem", problem.clone())
            }
            E::Incompatible { name, problem } => {
                new("unfit").field("name", name.clone()).field("problem", problem.clone())
            }
            E::ProfileFormat { file, line, column, reason } => new("profile_format")
                .field("file", file.clone())
                .field("line", *line)
                .field("column", column.clone())
                .field("reason", reason.clone()),
            E::ProfileMixed { reason } => new("profile_mixed").field("reason", reason.clone()),
            E::ProfileLacks { needed } => new("profile_lacks").field("needed", needed.clone()),
            E::Memory { module, reason } => {
                new("memory").field("module", module.name()).field("reason", reason.clone())
            }
            E::Correction { reason } => new("correction").field("reason", reason.clone()),
            _ => new("sample"),
        }
    }
}

impl From<dflop_executor::Error> for DflopError {
    /// Keeps the message as it is: it names settings as the configuration of a run does.
    fn from(error: dflop_executor::Error) -> Self {
        Self::new_message(class_of_run(&error), "train", error.message())
    }
}

/// Returns the exception class of an error of a run.
fn class_of_run(error: &dflop_executor::Error) -> &'static str {
    use dflop_executor::Error as E;
    match error {
        E::Config(_) | E::InvalidSetting { .. } => "ConfigError",
        E::CostModel(_) | E::Model(_) => "ModelError",
        E::Loader(error) => exception_class(error.category()),
        E::Named(named) => class_of_run(&named.error),
        _ => "Error",
    }
}

impl From<dflop_balancer::Error> for DflopError {
    fn from(error: dflop_balancer::Error) -> Self {
        use dflop_balancer::Error as E;
        let new = |class, kind| Self::new(class, kind, &error);
        let number = |number: &usize| *number as u64;
        match &error {
            E::Config { setting, reason } => {
                new("ConfigError", "config").field("setting", *setting).field("reason", reason.clone())
            }
            E::Json { .. } => new("ConfigError", "json"),
            E::Length { field, found, expected } => new("ConfigError", "length")
                .field("field", *field)
                .field("found", number(found))
                .field("expected", number(expected)),
            E::ItemLength { item, found, expected } => new("ConfigError", "item_length")
                .field("item", number(item))
                .field("found", number(found))
                .field("expected", number(expected)),
            E::NotWhole { field, item, value } => new("ConfigError", "not_whole")
                .field("field", *field)
                .field("item", number(item))
                .field("value", value.clone()),
            E::Negative { field, item, value } => new("ConfigError", "negative")
                .field("field", *field)
                .field("item", number(item))
                .field("value", value.to_string()),
            E::Overflow { field, item } => {
                new("ConfigError", "overflow").field("field", *field).field("item", number(item))
            }
            E::TooFewItems { items, groups } => new("PlanError", "too_few_items")
                .field("items", number(items))
                .field("groups", number(groups)),
            E::CapItem { item, unit, value, max } => new("PlanError", "cap_item")
                .field("item", number(item))
                .field("unit", *unit)
                .field("value", *value)
                .field("max", *max),
            E::CapTotal { unit, total, max, groups } => new("PlanError", "cap_total")
                .field("unit", *unit)
                .field("total", *total)
                .field("max", *max)
                .field("groups", number(groups)),
            E::CapUnmet { items, groups } => {
                new("PlanError", "cap_unmet").field("items", number(items)).field("groups", number(groups))
            }
            E::NothingFits { reason } => new("PlanError", "nothing_fits").field("reason", reason.clone()),
            _ => new("PlanError", "plan"),
        }
    }
}

impl From<DflopError> for PyErr {
    fn from(error: DflopError) -> Self {
        // If attaching or importing fails, that error is reported.
        Python::attach(|py| error.into_exception(py).unwrap_or_else(|error| error))
    }
}

impl DflopError {
    fn into_exception(self, py: Python<'_>) -> PyResult<PyErr> {
        static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let errors = ERRORS.get_or_try_init(py, || py.import("dflop.errors").map(Bound::unbind))?;
        let fields = PyDict::new(py);
        let Content { class, kind, message, fields: known, cause } = *self.0;
        for (name, value) in known {
            match value {
                Value::Text(text) => fields.set_item(name, redact(&text))?,
                Value::Number(number) => fields.set_item(name, number)?,
                Value::Json(value) => fields.set_item(name, to_python(py, &value)?)?,
            }
        }
        let class = errors.bind(py).getattr(class)?;
        let exception = PyErr::from_value(class.call1((message, kind, fields))?);
        if cause.is_some() {
            exception.set_cause(py, cause);
        }
        Ok(exception)
    }
}

/// Converts a value to Python's dictionaries, lists, numbers and text.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    pythonize::pythonize(py, value).map_err(PyErr::from)
}
