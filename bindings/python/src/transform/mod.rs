//! `dflop.Transform`: runs Python functions on fields inside the loader.

mod whole_sample;

use std::sync::{Arc, Mutex, PoisonError};

use dflop_loader::decode::{Transform, TransformInput, Transforms};
use dflop_loader::error::BoxError;
use dflop_loader::media::{Audio, CustomMedia, Media, RgbImage};
use dflop_loader::shard::FieldSelection;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBaseException, PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

pub(crate) use self::whole_sample::PySampleTransform;
use self::whole_sample::SampleFunction;
use super::convert::{Arguments, Names, arguments};
use crate::arrays::framework::Framework;
use crate::convert::{Delivery, class, json_text, media};
use crate::error::DflopError;

/// A function for fields: called with a list of values, it returns a list with the same length.
///
/// Model inputs need values with the types that the built-in decoders return: uint8 arrays
/// ``[height, width, 3]``, `Audio`, text, JSON.
///
/// Args:
///     fields (str | Sequence[str]): field names: extensions, or ``images``, ``audio``, ``video``, ``text``.
///     function (Callable): accepts a list of values, as in samples, except that numbers (``cls``) are still
///         `Array`s of bytes; returns a list of new values, with any type. An exception among the values
///         makes the sample bad. If a call with several values raises, each value is tried separately, so
///         that only the values that raise are lost.
///     decodes (bool): passes the field's bytes as stored (`Array`) instead of the result of the built-in
///         decoder. Default: ``False``.
///     has_context (bool): passes a second list to the function: for each value a dictionary with ``key``,
///         ``shard``, ``extension``, ``epoch`` and ``seed``, a seed for all random choices for the value.
///         Default: ``False``.
///
/// Raises:
///     TypeError: ``function`` is not a function.
///     ConfigError: a field name is invalid.
///
/// Examples:
///     >>> def numbers(values, contexts):
///     ...     return [(context["key"], int(bytes(value))) for value, context in zip(values, contexts)]
///     >>> transform = dflop.Transform("cls", numbers, has_context=True)
///     >>> read = dflop.Read(fields="cls")
///     >>> loader = dflop.Loader("shards/", batch_size=3, read=read, transforms=[transform])
///     >>> next(iter(loader))["cls"]
///     [('000000', 6), ('000001', 3), ('000002', 4)]
#[pyclass(frozen, name = "Transform", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyTransform {
    fields: Vec<String>,
    function: Py<PyAny>,
    decodes: bool,
    has_context: bool,
}

#[pymethods]
impl PyTransform {
    #[new]
    #[pyo3(signature = (fields, function, *, decodes=false, has_context=false))]
    fn new(fields: Names, function: Bound<'_, PyAny>, decodes: bool, has_context: bool) -> PyResult<Self> {
        if !function.is_callable() {
            return Err(PyTypeError::new_err("expected a function of a list of values"));
        }
        FieldSelection::new(&fields.0).map_err(DflopError::from)?;
        Ok(Self { fields: fields.0, function: function.unbind(), decodes, has_context })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().arguments(slf.py())?.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments(slf.py())?.repr(&slf.get_type())
    }
}

impl PyTransform {
    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let Self { fields, function, decodes, has_context } = self;
        Ok(arguments!(py, fields, function, decodes, has_context))
    }
}

/// The first exception that user functions raised for a sample in a pass.
#[derive(Debug, Clone, Default)]
pub(crate) struct FirstException(Arc<Mutex<Option<PyErr>>>);

impl FirstException {
    /// Forgets the exception, for a new pass.
    pub(crate) fn forget(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    pub(crate) fn keep(&self, py: Python<'_>, error: &PyErr) {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| error.clone_ref(py));
    }

    /// Converts a stream error; the exception becomes the cause of an error about too many bad samples.
    pub(crate) fn explain(&self, py: Python<'_>, error: dflop_loader::Error) -> DflopError {
        let is_explained = matches!(error, dflop_loader::Error::ErrorBudget(_));
        let first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let cause = first.as_ref().filter(|_| is_explained).map(|first| first.clone_ref(py));
        DflopError::from(error).with_cause(cause)
    }
}

/// User function settings.
pub(crate) struct UserCode {
    threads: usize,
    seed: u64,
    /// Form of values passed to functions.
    delivery: Delivery,
    /// Whether the results become model inputs.
    is_prepared: bool,
    pub(crate) first_exception: FirstException,
}

impl UserCode {
    pub(crate) fn new(threads: usize, seed: u64, delivery: Delivery, is_prepared: bool) -> Self {
        Self { threads, seed, delivery, is_prepared, first_exception: FirstException::default() }
    }

    /// Converts a dictionary of functions, or a list of `Transform` and `SampleTransform`.
    pub(crate) fn transforms(self, given: Option<&Bound<'_, PyAny>>) -> PyResult<Transforms> {
        let mut transforms = Transforms::new().threads(self.threads).seed(self.seed);
        let Some(given) = given else { return Ok(transforms) };
        if let Ok(by_field) = given.cast::<PyDict>() {
            for (field, function) in by_field {
                let transform = PyTransform::new(field.extract()?, function, false, false)?;
                transforms = self.add(transforms, Bound::new(given.py(), transform)?)?;
            }
            return Ok(transforms);
        }
        let wrong = || {
            PyTypeError::new_err(
                "expected `transforms` to be a dictionary of functions, or a list of `Transform` and `SampleTransform`",
            )
        };
        for transform in given.try_iter().map_err(|_| wrong())? {
            let transform = transform?;
            transforms = match transform.cast::<PySampleTransform>() {
                Ok(transform) => self.add_samples(transforms, transform),
                Err(_) => self.add(transforms, transform.cast_into().map_err(|_| wrong())?)?,
            };
        }
        Ok(transforms)
    }

    fn add(&self, to: Transforms, transform: Bound<'_, PyTransform>) -> PyResult<Transforms> {
        let fields = FieldSelection::new(&transform.get().fields).map_err(DflopError::from)?;
        let function = Function {
            transform: transform.unbind(),
            framework: self.delivery.framework,
            is_prepared: self.is_prepared,
            first_exception: self.first_exception.clone(),
        };
        Ok(to.add(fields, Arc::new(function)))
    }

    fn add_samples(&self, to: Transforms, transform: &Bound<'_, PySampleTransform>) -> Transforms {
        to.add_samples(Arc::new(SampleFunction {
            transform: transform.clone().unbind(),
            delivery: self.delivery,
            is_prepared: self.is_prepared,
            first_exception: self.first_exception.clone(),
        }))
    }
}

/// A Python function that the loader calls.
#[derive(Debug)]
struct Function {
    transform: Py<PyTransform>,
    framework: Framework,
    is_prepared: bool,
    first_exception: FirstException,
}

impl Transform for Function {
    fn takes_encoded(&self) -> bool {
        self.transform.get().decodes
    }

    fn apply(&self, fields: Vec<TransformInput>) -> Result<Vec<Result<Media, BoxError>>, BoxError> {
        let answer = Python::try_attach(|py| self.call(py, fields));
        answer.ok_or("the interpreter has ended")?.map_err(Into::into)
    }
}

impl Function {
    fn call(&self, py: Python<'_>, fields: Vec<TransformInput>) -> PyResult<Vec<Result<Media, BoxError>>> {
        let (mut values, mut contexts) = (Vec::new(), Vec::new());
        for input in fields {
            if self.transform.get().has_context {
                contexts.push(context(py, &input)?);
            }
            values.push(media(py, input.media, self.framework)?);
        }
        let answers = match self.function(py, &values, &contexts) {
            Ok(answers) if answers.len() == values.len() => answers.into_iter().map(Ok).collect(),
            Ok(answers) => {
                let (given, expected) = (answers.len(), values.len());
                let message = format!("expected {expected} values from a transform, found {given}");
                return Err(PyTypeError::new_err(message));
            }
            // An interrupt or an exit is not a fault in a sample.
            Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
            Err(error) if values.len() == 1 => vec![Err(error)],
            // An exception does not identify the value that caused it.
            Err(_) => (0..values.len())
                .map(|at| {
                    let context = contexts.get(at..=at).unwrap_or_default();
                    let mut answer = self.function(py, &values[at..=at], context)?;
                    answer
                        .pop()
                        .ok_or_else(|| PyTypeError::new_err("expected a value from a transform, found none"))
                })
                .collect::<Vec<_>>(),
        };
        let answers = answers.into_iter().map(|answer| {
            let answer = answer.and_then(|value| self.convert_answer(&value));
            Ok(answer.inspect_err(|error| self.first_exception.keep(py, error))?)
        });
        Ok(answers.collect())
    }

    fn function<'py>(
        &self,
        py: Python<'py>,
        values: &[Bound<'py, PyAny>],
        contexts: &[Bound<'py, PyDict>],
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let function = self.transform.get().function.bind(py);
        let values = PyList::new(py, values)?;
        let answer = if self.transform.get().has_context {
            function.call1((values, PyList::new(py, contexts)?))?
        } else {
            function.call1((values,))?
        };
        answer.try_iter()?.collect()
    }

    fn convert_answer(&self, value: &Bound<'_, PyAny>) -> PyResult<Media> {
        if value.is_instance_of::<PyBaseException>() {
            return Err(PyErr::from_value(value.clone()));
        }
        to_media(value, self.is_prepared)
    }
}

/// Converts a value from user code: model inputs need Rust values; otherwise the Python object passes through
/// unchanged.
pub(crate) fn to_media(value: &Bound<'_, PyAny>, is_prepared: bool) -> PyResult<Media> {
    if is_prepared { prepared(value) } else { Ok(custom(value)) }
}

fn custom(value: &Bound<'_, PyAny>) -> Media {
    Media::Custom(CustomMedia::new(value.clone().unbind()))
}

fn context<'py>(py: Python<'py>, input: &TransformInput) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("key", &input.key)?;
    dict.set_item("shard", &*input.shard)?;
    dict.set_item("extension", &*input.extension)?;
    dict.set_item("epoch", input.epoch)?;
    dict.set_item("seed", input.seed)?;
    Ok(dict)
}

/// Converts to the type that the built-in decoder returns; other values stay Python objects.
fn prepared(value: &Bound<'_, PyAny>) -> PyResult<Media> {
    if value.is_instance_of::<PyString>() {
        return Ok(Media::Text(value.extract()?));
    }
    if value.is_instance_of::<PyDict>() || value.is_instance_of::<PyList>() {
        let document = serde_json::from_str(&json_text(value)?);
        return document.map(Media::Json).map_err(|error| PyTypeError::new_err(error.to_string()));
    }
    if value.is_instance(&class(value.py(), "Audio")?)? {
        return clip(value).map(Media::Audio);
    }
    Ok(image(value)?.map_or_else(|| custom(value), Media::Image))
}

/// Converts a uint8 array `[height, width, 3]` to an image; `None` for other arrays.
fn image(value: &Bound<'_, PyAny>) -> PyResult<Option<RgbImage>> {
    let Some(array) = numpy_array(value)? else { return Ok(None) };
    let Ok(buffer) = PyBuffer::<u8>::get(&array) else { return Ok(None) };
    let &[height, width, 3] = buffer.shape() else { return Ok(None) };
    let pixels = buffer.to_vec(value.py())?;
    Ok(Some(RgbImage { width: width as u32, height: height as u32, pixels, is_truncated: false }))
}

fn clip(value: &Bound<'_, PyAny>) -> PyResult<Audio> {
    let wrong = || PyTypeError::new_err("expected a float32 array [frames, channels] as samples of audio");
    let array = numpy_array(&value.getattr("samples")?)?.ok_or_else(wrong)?;
    let buffer = PyBuffer::<f32>::get(&array).map_err(|_| wrong())?;
    let &[_, channels] = buffer.shape() else { return Err(wrong()) };
    Ok(Audio {
        sample_rate_hz: value.getattr("sample_rate_hz")?.extract()?,
        channels: channels as u16,
        samples: buffer.to_vec(value.py())?,
        is_truncated: value.getattr("is_truncated")?.extract()?,
    })
}

/// Converts an array from any library to an array with the buffer protocol; `None` for other values.
fn numpy_array<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if value.hasattr("__dlpack__")? || value.hasattr("__array__")? {
        return crate::arrays::numpy(value.py())?.call_method1("asarray", (value,)).map(Some);
    }
    Ok(None)
}
