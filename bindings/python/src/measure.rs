//! Chooses the sizes that ``dflop.torch.profile`` measures, and compares predictions with measured times.

use dflop_costmodel::measure::{
    Grid, MEDIAN_BOUND, PredictionCheck, RepeatedRuns, TimeSource, choose_points,
};
use dflop_costmodel::profile::Part;
use dflop_costmodel::{MicrobatchCurve, Module, Profile, TimeCurve};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::DflopError;

/// Interpolates times as predictions do: monotone between the points, and linear in work beyond them.
///
/// Args:
///     points (Iterable): pairs of tokens, above 0, and time; if several points have the same tokens, the
///         last point counts.
///     is_squared (bool): work is the square of the tokens, as in attention over a single sequence. Default:
///         ``False``.
///
/// Raises:
///     ValueError: there are no points.
#[pyclass(frozen, name = "TimeCurve", module = "dflop._native")]
pub(crate) struct PyTimeCurve(TimeCurve);

#[pymethods]
impl PyTimeCurve {
    #[new]
    #[pyo3(signature = (points, *, is_squared=false))]
    fn new(points: &Bound<'_, PyAny>, is_squared: bool) -> PyResult<Self> {
        let points =
            points.try_iter()?.map(|point| point?.extract()).collect::<PyResult<Vec<(u32, f64)>>>()?;
        let part = if is_squared { Part::Attention } else { Part::Linear };
        let curve = TimeCurve::new(part, &points);
        let none = || PyValueError::new_err("expected at least one point for a curve, found none");
        curve.map(Self).ok_or_else(none)
    }

    /// Returns the time for a number of tokens, in the unit of the points; 0 at 0.
    fn at(&self, tokens: u32) -> f64 {
        self.0.at(tokens)
    }
}

/// Predicts microbatch times for a module from a profile, as `CostModel.microbatch_time` does.
///
/// Args:
///     csv (str): profile text.
///     module (str): ``vision``, ``audio`` or ``llm``.
///
/// Raises:
///     ValueError: the text is not a profile, or has no whole-module times without tensor parallelism.
#[pyclass(frozen, name = "MicrobatchCurve", module = "dflop._native")]
pub(crate) struct PyMicrobatchCurve {
    curve: MicrobatchCurve,
    #[pyo3(get)]
    layers: u32,
}

#[pymethods]
impl PyMicrobatchCurve {
    #[new]
    fn new(csv: &str, module: &str) -> PyResult<Self> {
        let profile = Profile::parse([("profile", csv)]).map_err(DflopError::from)?;
        let named = Module::ALL.into_iter().find(|one| one.name() == module);
        let of_module = named.ok_or_else(|| PyValueError::new_err(format!("unknown module {module}")))?;
        let measured = profile.files().iter().flat_map(|file| &file.measurements);
        let settings = measured.map(|row| row.setting);
        let whole = settings.filter(|one| one.module == of_module && one.part == Part::Whole && one.tp == 1);
        let layers = whole.map(|one| one.layers).max().unwrap_or_default();
        let none = || PyValueError::new_err(format!("the profile has no times of the whole module {module}"));
        let curve = MicrobatchCurve::from_profile(&profile, of_module, layers).ok_or_else(none)?;
        Ok(Self { curve, layers })
    }

    /// Returns the microseconds for a microbatch, forward and backward, with sequences of these lengths in
    /// tokens; 0 without sequences.
    fn microseconds(&self, lengths: Vec<u32>) -> f64 {
        if lengths.is_empty() {
            return 0.0;
        }
        let lengths = || lengths.iter().map(|length| f64::from(*length));
        self.curve.ns(lengths().sum(), lengths().map(|length| length * length).sum()) / 1e3
    }

    /// Launch time in microseconds, regardless of the microbatch content; 0 if the profile shows none.
    #[getter]
    fn floor_microseconds(&self) -> f64 {
        self.curve.floor_ns / 1e3
    }
}

/// Chooses sizes so that predictions between them are within an error bound, and measures them.
///
/// Args:
///     size_min (int): smallest size, in tokens or items.
///     size_max (int): largest size.
///     error_bound (float): relative prediction error in the middle of an interval.
///     snap (Callable): returns the possible size nearest to a requested size.
///     measure (Callable): returns the times for a list of sizes that run together, all above 0, in the same
///         unit.
///     is_spent (Callable): returns whether measuring should stop; the first grid is always measured.
///     predict (Callable): returns the times for a list of sizes (second argument), predicted from pairs of
///         sizes and times (first argument). Default: by a ``TimeCurve``.
///
/// Returns:
///     tuple: the sizes, ascending; the largest error in the middle of an interval, ``None`` if no middle was
///     measured; the number of intervals whose error is not known to be within the bound.
///
/// Raises:
///     ValueError: the number of times that a function returned differs from the number of sizes.
///     Exception: exceptions from the functions, and from signal handlers, such as ``KeyboardInterrupt``.
#[pyfunction]
#[pyo3(signature = (size_min, size_max, *, error_bound, snap, measure, is_spent, predict=None))]
pub(crate) fn choose_sizes(
    size_min: u32,
    size_max: u32,
    error_bound: f64,
    snap: Bound<'_, PyAny>,
    measure: Bound<'_, PyAny>,
    is_spent: Bound<'_, PyAny>,
    predict: Option<Bound<'_, PyAny>>,
) -> PyResult<(Vec<u32>, Option<f64>, usize)> {
    let mut source = PySource { snap, measure, is_spent, predict };
    let chosen = choose_points(&Grid::new(size_min, size_max, error_bound), &mut source)?;
    let sizes = chosen.points.iter().map(|point| point.0).collect();
    Ok((sizes, chosen.error_max, chosen.open))
}

/// Python functions as a time source. They run with the interpreter held, and nothing here waits.
struct PySource<'py> {
    snap: Bound<'py, PyAny>,
    measure: Bound<'py, PyAny>,
    is_spent: Bound<'py, PyAny>,
    predict: Option<Bound<'py, PyAny>>,
}

impl TimeSource for PySource<'_> {
    type Error = PyErr;

    fn snap(&mut self, size: u32) -> PyResult<u32> {
        self.snap.call1((size,))?.extract()
    }

    fn measure(&mut self, sizes: &[u32]) -> PyResult<Vec<f64>> {
        // A function that is not written in Python runs no bytecode, where signals are handled.
        self.measure.py().check_signals()?;
        times(&self.measure.call1((sizes.to_vec(),))?, sizes)
    }

    fn predict(&mut self, points: &[(u32, f64)], sizes: &[u32]) -> PyResult<Vec<f64>> {
        match &self.predict {
            Some(predict) => times(&predict.call1((points.to_vec(), sizes.to_vec()))?, sizes),
            None => Ok(TimeCurve::interpolate(Part::Linear, points, sizes)),
        }
    }

    fn is_spent(&mut self) -> PyResult<bool> {
        self.is_spent.call0()?.extract()
    }
}

fn times(answer: &Bound<'_, PyAny>, sizes: &[u32]) -> PyResult<Vec<f64>> {
    let times: Vec<f64> = answer.extract()?;
    if times.len() == sizes.len() {
        return Ok(times);
    }
    let message = format!("expected the times of {} sizes, found {}", sizes.len(), times.len());
    Err(PyValueError::new_err(message))
}

/// Compares predicted times with measured runs.
///
/// Args:
///     predicted (Sequence[float]): predicted time for each setting.
///     runs (Sequence[Sequence[float]]): measured times for each setting, at least one, in the same unit.
///
/// Returns:
///     dict: ``measured``, the median run for each setting; ``spreads``, 1.4826 times the median absolute
///     deviation over the median; ``bias``, ``median`` and ``p95`` for the relative errors; ``spread_p95``;
///     ``median_bound`` and ``p95_bound``; ``is_within``.
///
/// Raises:
///     ValueError: the number of predictions differs from the number of settings that ran.
#[pyfunction]
pub(crate) fn check_predictions(
    py: Python<'_>,
    predicted: Vec<f64>,
    runs: Vec<Vec<f64>>,
) -> PyResult<Bound<'_, PyDict>> {
    if predicted.len() != runs.len() {
        let message = format!("expected runs of {} settings, found {}", predicted.len(), runs.len());
        return Err(PyValueError::new_err(message));
    }
    let measured: Vec<RepeatedRuns> = runs.iter().map(|runs| RepeatedRuns::new(runs)).collect();
    let errors: Vec<f64> =
        predicted.iter().zip(&measured).map(|(predicted, runs)| predicted / runs.median - 1.0).collect();
    let spreads: Vec<f64> = measured.iter().map(|runs| runs.spread).collect();
    let check = PredictionCheck::new(&errors, &spreads);
    let report = PyDict::new(py);
    report.set_item("measured", measured.iter().map(|runs| runs.median).collect::<Vec<f64>>())?;
    report.set_item("spreads", spreads)?;
    report.set_item("bias", check.errors.bias)?;
    report.set_item("median", check.errors.p50)?;
    report.set_item("p95", check.errors.p95)?;
    report.set_item("spread_p95", check.spread_p95)?;
    report.set_item("median_bound", MEDIAN_BOUND)?;
    report.set_item("p95_bound", check.p95_bound)?;
    report.set_item("is_within", check.is_within)?;
    Ok(report)
}
