//! `dflop.SampleTransform`: runs Python functions on whole samples inside the loader.

use dflop_loader::decode::{SampleAnswer, SampleInput, SampleTransform};
use dflop_loader::error::BoxError;
use dflop_loader::sample::Field;
use pyo3::exceptions::{PyBaseException, PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping};

use super::{FirstException, to_media};
use crate::convert::{self, Arguments, Delivery, arguments};

/// A function for whole samples: called with a list of `Sample`, it returns a list with the same length.
///
/// The function runs at the transform's position in ``transforms=``, after the built-in decoders. With
/// ``image=`` samples come without images. Model inputs need values with the types that the built-in decoders
/// return: uint8 arrays ``[height, width, 3]``, `Audio`, text, JSON.
///
/// Args:
///     function (Callable): accepts a list of at most 64 samples, and returns for each sample a mapping with
///         the sample's fields, or ``None`` to exclude the sample, which counts as dropped and not as bad.
///         The function may change, add and remove fields. An exception among the results makes the sample
///         bad. If a call with several samples raises, each sample is tried separately, with the original
///         fields, so that only the samples that raise are lost; values that the function changed in place
///         stay changed.
///     has_context (bool): passes a second list to the function: for each sample a dictionary with ``seed``,
///         a seed for all random choices for the sample. Default: ``False``.
///
/// Raises:
///     TypeError: ``function`` is not a function.
///
/// Examples:
///     >>> def questions(samples):
///     ...     for sample in samples:
///     ...         sample["txt"] = sample.pop("json")["conversations"][0]["value"]
///     ...     return [sample if "<image>" in sample["txt"] else None for sample in samples]
///     >>> transforms = [dflop.SampleTransform(questions)]
///     >>> read = dflop.Read(fields="json")
///     >>> loader = dflop.Loader("shards/", batch_size=4, read=read, transforms=transforms)
///     >>> batch = next(iter(loader))
///     >>> batch.sample_keys, batch["txt"][0]
///     (['000001', '000002', '000003'], '<image>\n<image>\nw429 w104 w15 w82')
#[pyclass(frozen, name = "SampleTransform", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PySampleTransform {
    function: Py<PyAny>,
    has_context: bool,
}

#[pymethods]
impl PySampleTransform {
    #[new]
    #[pyo3(signature = (function, *, has_context=false))]
    fn new(function: Bound<'_, PyAny>, has_context: bool) -> PyResult<Self> {
        if !function.is_callable() {
            return Err(PyTypeError::new_err("expected a function of a list of samples"));
        }
        Ok(Self { function: function.unbind(), has_context })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().arguments(slf.py())?.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments(slf.py())?.repr(&slf.get_type())
    }
}

impl PySampleTransform {
    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let Self { function, has_context } = self;
        Ok(arguments!(py, function, has_context))
    }
}

/// A Python function that the loader calls.
#[derive(Debug)]
pub(crate) struct SampleFunction {
    pub(crate) transform: Py<PySampleTransform>,
    pub(crate) delivery: Delivery,
    /// Whether the results become model inputs.
    pub(crate) is_prepared: bool,
    pub(crate) first_exception: FirstException,
}

impl SampleTransform for SampleFunction {
    fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError> {
        let answer = Python::try_attach(|py| self.call(py, samples));
        answer.ok_or("the interpreter has ended")?.map_err(Into::into)
    }
}

impl SampleFunction {
    fn call(&self, py: Python<'_>, inputs: Vec<SampleInput>) -> PyResult<Vec<SampleAnswer>> {
        let seeds: Vec<u64> = inputs.iter().map(|input| input.seed).collect();
        let delivery = self.delivery.resolved(py)?;
        let samples = inputs.into_iter().map(|input| input.sample).collect();
        let given = convert::samples(py, samples, delivery)?;
        let kept = copies(&given)?;
        let answers: Vec<PyResult<Bound<'_, PyAny>>> = match self.function(&given, &seeds) {
            Ok(answers) if answers.len() == given.len() => answers.into_iter().map(Ok).collect(),
            Ok(answers) => {
                let (found, expected) = (answers.len(), given.len());
                let message = format!("expected {expected} samples from a transform, found {found}");
                return Err(PyTypeError::new_err(message));
            }
            // An interrupt or an exit is not a fault in a sample.
            Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
            Err(error) if given.len() == 1 => vec![Err(error)],
            // An exception does not identify the sample that caused it.
            Err(_) => (0..kept.len()).map(|at| self.one(&kept, &seeds, at)).collect(),
        };
        let answers = answers.into_iter().map(|answer| {
            let fields = answer.and_then(|answer| self.fields(&answer));
            Ok(fields.inspect_err(|error| self.first_exception.keep(py, error))?)
        });
        Ok(answers.collect())
    }

    fn one<'py>(&self, given: &Bound<'py, PyList>, seeds: &[u64], at: usize) -> PyResult<Bound<'py, PyAny>> {
        let mut answer = self.function(&given.get_slice(at, at + 1), &seeds[at..=at])?;
        answer.pop().ok_or_else(|| PyTypeError::new_err("expected a sample from a transform, found none"))
    }

    fn function<'py>(&self, given: &Bound<'py, PyList>, seeds: &[u64]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (py, transform) = (given.py(), self.transform.get());
        let function = transform.function.bind(py);
        if !transform.has_context {
            return function.call1((given,))?.try_iter()?.collect();
        }
        let contexts = PyList::empty(py);
        for seed in seeds {
            let context = PyDict::new(py);
            context.set_item("seed", seed)?;
            contexts.append(context)?;
        }
        function.call1((given, contexts))?.try_iter()?.collect()
    }

    /// Converts a result to fields; `None` excludes the sample.
    fn fields(&self, answer: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Field>>> {
        if answer.is_none() {
            return Ok(None);
        }
        if answer.is_instance_of::<PyBaseException>() {
            return Err(PyErr::from_value(answer.clone()));
        }
        let wrong = |_| {
            let found = answer.get_type();
            PyTypeError::new_err(format!("expected a mapping of fields from a transform, found {found}"))
        };
        let mapping = answer.cast::<PyMapping>().map_err(wrong)?;
        let mut fields = Vec::with_capacity(mapping.len()?);
        for item in mapping.items()? {
            let (extension, value): (String, Bound<'_, PyAny>) = item.extract()?;
            fields.push(Field { extension: extension.into(), media: to_media(&value, self.is_prepared)? });
        }
        Ok(Some(fields))
    }
}

/// Copies samples with fields, but not the values: a call that raises may have changed some of them before.
fn copies<'py>(samples: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
    let py = samples.py();
    if samples.len() == 1 {
        return Ok(samples.clone());
    }
    let copy = py.import("copy")?.getattr("copy")?;
    let copies = samples.iter().map(|sample| copy.call1((sample,))).collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, copies)
}
