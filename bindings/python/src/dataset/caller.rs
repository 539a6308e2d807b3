//! Calls a Python function with descriptions of samples, many at a time.

use dflop_costmodel::SampleShape;
use dflop_loader::Dataset;
use dflop_loader::index::{Index, SampleRow};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::DflopError;

/// Number of samples per call of a function.
const SAMPLES_TOGETHER: usize = 1 << 12;

/// Function that is called with descriptions of samples.
pub(crate) struct Caller<'a, 'py> {
    pub(crate) setting: &'static str,
    pub(crate) index: &'a Index,
    pub(crate) function: &'a Bound<'py, PyAny>,
}

impl<'py> Caller<'_, 'py> {
    /// Returns the function's value for each sample; stores the function's exception in `raised`.
    pub(crate) fn ask<T>(
        &self,
        samples: &[u64],
        raised: &mut Option<PyErr>,
        describe: impl Fn(u64, &SampleRow<'_>, &SampleShape) -> PyResult<Bound<'py, PyDict>>,
        convert: impl Fn(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<Vec<T>, dflop_loader::Error> {
        let list = PyList::empty(self.function.py());
        let described = samples.iter().try_for_each(|&sample| {
            let (row, mut shape) = (self.index.sample(sample), SampleShape::default());
            row.read_shape(&mut shape);
            let described = describe(sample, &row, &shape)?;
            described.set_item("bytes", row.bytes())?;
            list.append(described)
        });
        let answer = described.and_then(|()| self.function.call1((list,)));
        let answer = answer.and_then(|answer| answer.try_iter()?.map(|value| convert(&value?)).collect());
        answer.map_err(|error| {
            let reason = format!("the function failed: {error}");
            raised.get_or_insert(error);
            dflop_loader::Error::Config { setting: self.setting, reason }
        })
    }
}

/// Returns the values of a Python function for all dataset samples, without predicted costs.
pub(super) fn values_by_shape<'py, T>(
    dataset: &Dataset,
    function: &Bound<'py, PyAny>,
    setting: &'static str,
    convert: impl Fn(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let (py, mut raised, mut values) = (function.py(), None, Vec::new());
    for start in (0..dataset.len()).step_by(SAMPLES_TOGETHER) {
        let end = dataset.len().min(start + SAMPLES_TOGETHER as u64);
        let numbers: Vec<u64> = (start..end).map(|place| dataset.sample_number(place)).collect();
        let caller = Caller { setting, index: dataset.index(), function };
        let describe = |_, row: &SampleRow<'_>, shape: &SampleShape| describe_by_shape(py, row, shape);
        let answer = caller.ask(&numbers, &mut raised, describe, &convert);
        let answer =
            answer.map_err(|error| PyErr::from(DflopError::from(error).with_cause(raised.take())))?;
        if answer.len() != numbers.len() {
            let reason = format!("it returned {} values for {} samples", answer.len(), numbers.len());
            return Err(DflopError::config(setting, reason).into());
        }
        values.extend(answer);
    }
    Ok(values)
}

/// Describes a sample by key and shape.
pub(crate) fn describe_by_shape<'py>(
    py: Python<'py>,
    row: &SampleRow<'_>,
    shape: &SampleShape,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("key", row.key())?;
    describe_shape(&dict, shape)?;
    Ok(dict)
}

/// Adds a sample's shape to the description.
pub(crate) fn describe_shape(dict: &Bound<'_, PyDict>, shape: &SampleShape) -> PyResult<()> {
    dict.set_item("text_tokens", shape.text_tokens)?;
    dict.set_item("target_tokens", shape.target_tokens)?;
    let images: Vec<_> = shape.images.iter().map(|image| (image.width, image.height)).collect();
    dict.set_item("images", images)?;
    let audio: Vec<_> = shape.audio.iter().map(|clip| (clip.frames, clip.sample_rate_hz)).collect();
    dict.set_item("audio", audio)?;
    let videos: Vec<_> = shape.videos.iter().map(|video| (video.frames, video.width, video.height)).collect();
    dict.set_item("videos", videos)
}
