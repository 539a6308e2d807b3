//! Calls cost functions in Python, whose times replace predictions of the cost model.

use std::sync::Arc;

use dflop_costmodel::{Module, ModuleTimes};
use dflop_loader::error::BoxError;
use dflop_loader::plan::{CostFunction, CostInput};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping};

/// Upper bound on the seconds of a sample, about 290 years: the largest number of nanoseconds in 63 bits.
const SECONDS_MAX: f64 = 9.2e9;

/// Python function that returns the costs of samples.
#[derive(Debug)]
pub(crate) struct PyCost(Py<PyAny>);

impl PyCost {
    pub(crate) fn new(function: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self(function))
    }
}

impl CostFunction for PyCost {
    fn module_ns(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError> {
        // Fails when the interpreter is shutting down while the planner runs on its thread.
        let answer = Python::try_attach(|py| {
            let list = PyList::empty(py);
            for sample in samples {
                list.append(describe(py, modules, sample)?)?;
            }
            let rows = self.0.bind(py).call1((list,))?;
            rows.try_iter()?.map(|row| parse_times(&row?, modules)).collect::<PyResult<Vec<_>>>()
        });
        answer.ok_or("the interpreter has ended")?.map_err(Into::into)
    }
}

/// Describes a sample for the function, as a dictionary.
fn describe<'py>(
    py: Python<'py>,
    modules: &[Module],
    sample: &CostInput<'_>,
) -> PyResult<Bound<'py, PyDict>> {
    let (dict, shape) = (PyDict::new(py), sample.shape);
    dict.set_item("key", sample.key)?;
    dict.set_item("data_set", sample.dataset)?;
    dict.set_item("sample", sample.sample)?;
    dict.set_item("text_tokens", shape.text_tokens)?;
    dict.set_item("target_tokens", shape.target_tokens)?;
    let images: Vec<_> = shape.images.iter().map(|image| (image.width, image.height)).collect();
    dict.set_item("images", images)?;
    let audio: Vec<_> = shape.audio.iter().map(|clip| (clip.frames, clip.sample_rate_hz)).collect();
    dict.set_item("audio", audio)?;
    let videos: Vec<_> = shape.videos.iter().map(|video| (video.frames, video.width, video.height)).collect();
    dict.set_item("videos", videos)?;
    dict.set_item("tokens", sample.predicted.tokens)?;
    let seconds = PyDict::new(py);
    for (module, &ns) in modules.iter().zip(sample.predicted.module_ns.as_slice()) {
        seconds.set_item(module.name(), ns as f64 / 1e9)?;
    }
    dict.set_item("seconds", seconds)?;
    Ok(dict)
}

/// Parses a row of the result: seconds by module, or in the order of modules.
fn parse_times(row: &Bound<'_, PyAny>, modules: &[Module]) -> PyResult<ModuleTimes> {
    let seconds: Vec<f64> = match row.cast::<PyMapping>() {
        Ok(by_name) => modules
            .iter()
            .map(|module| by_name.get_item(module.name())?.extract())
            .collect::<PyResult<_>>()?,
        Err(_) => row.try_iter()?.map(|value| value?.extract()).collect::<PyResult<_>>()?,
    };
    let ns = |&seconds: &f64| {
        if (0.0..=SECONDS_MAX).contains(&seconds) {
            return Ok((seconds * 1e9).round() as u64);
        }
        let message = format!("expected seconds from 0 to {SECONDS_MAX:e} as a cost, found {seconds}");
        Err(pyo3::exceptions::PyValueError::new_err(message))
    };
    let ns = seconds.iter().map(ns).collect::<PyResult<Vec<_>>>()?;
    let many = || {
        pyo3::exceptions::PyValueError::new_err(format!(
            "expected a row of {} modules, found {}",
            modules.len(),
            ns.len()
        ))
    };
    ModuleTimes::new(&ns).ok_or_else(many)
}
