//! Selects samples with a Python function, before a run.

use dflop_costmodel::{CostModel, SampleShape};
use dflop_loader::index::SampleRow;
use dflop_loader::{CostInput, Dataset, Mixture};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::cost::{describe, describe_shape};
use crate::error::DflopError;

/// Keeps the mixture samples that a Python function selects.
pub(crate) fn filtered(
    mixture: Mixture,
    function: &Bound<'_, PyAny>,
    model: &CostModel,
) -> PyResult<Mixture> {
    let py = function.py();
    let free = model.predict(&SampleShape::default()).map_err(DflopError::from)?;
    let mut raised = None;
    let mixture = mixture.map_datasets(|number, dataset| {
        keep(dataset, function, &mut raised, |sample, row, shape| {
            let predicted = model.predict(shape).unwrap_or(free);
            let input = CostInput { key: row.key(), dataset: number, sample, shape, predicted };
            describe(py, model.modules(), &input)
        })
    });
    mixture.map_err(|error| PyErr::from(DflopError::from(error).with_cause(raised)))
}

/// Keeps the dataset samples that a Python function selects, without predicted costs.
pub(crate) fn filtered_by_shape(dataset: Dataset, function: &Bound<'_, PyAny>) -> PyResult<Dataset> {
    let mut raised = None;
    let dataset = keep(dataset, function, &mut raised, |_, row, shape| {
        let dict = PyDict::new(function.py());
        dict.set_item("key", row.key())?;
        describe_shape(&dict, shape)?;
        Ok(dict)
    });
    dataset.map_err(|error| PyErr::from(DflopError::from(error).with_cause(raised)))
}

/// Keeps the samples that a function selects by description; stores the function's exception in `raised`.
fn keep<'py>(
    dataset: Dataset,
    function: &Bound<'py, PyAny>,
    raised: &mut Option<PyErr>,
    describe: impl Fn(u64, &SampleRow<'_>, &SampleShape) -> PyResult<Bound<'py, PyDict>>,
) -> Result<Dataset, dflop_loader::Error> {
    let index = dataset.index().clone();
    dataset.filter(|samples| {
        let list = PyList::empty(function.py());
        let described = samples.iter().try_for_each(|&sample| {
            let (row, mut shape) = (index.sample(sample), SampleShape::default());
            row.read_shape(&mut shape);
            let described = describe(sample, &row, &shape)?;
            described.set_item("bytes", row.bytes())?;
            list.append(described)
        });
        let answer = described.and_then(|()| function.call1((list,)));
        let answer =
            answer.and_then(|answer| answer.try_iter()?.map(|is_kept| is_kept?.is_truthy()).collect());
        answer.map_err(|error| {
            let reason = format!("the function failed: {error}");
            raised.get_or_insert(error);
            dflop_loader::Error::Config { setting: "filter", reason }
        })
    })
}
