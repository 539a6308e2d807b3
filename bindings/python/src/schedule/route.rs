//! `dflop.Route`: lists the rows in every message in a planned step.

use std::cell::Cell;
use std::sync::Arc;

use dflop_balancer::schedule::Part;
use dflop_executor::models::ModuleKind;
use dflop_executor::pipeline::{MediumPlan, MicrobatchPlan, PipelineStepPlan, RoutedMedium, StepSchedule};
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyTuple};

use super::{PySchedule, class, module_name, parse_module, refused};
use crate::error::DflopError;

/// Maximum number of rows in a microbatch.
const ROWS_MAX: usize = 1 << 40;

/// Assigns media to encoder replicas, and lists the rows in every message: the routes in `dflop.train`, for
/// modules in any framework.
///
/// In each round, media go to encoder replicas so that the slowest replica is as fast as possible by
/// predicted time. Ranks that pass the same numbers get the same routes, without communication; ``digest``
/// verifies that. A message has the rows for all media that the microbatches at both ends share; without rows
/// it is not sent. Gradients return in the same rows.
///
/// Args:
///     schedule (Schedule): the layout and the number of microbatches.
///     microbatches (Sequence[Sequence[MicrobatchRows]]): by LLM replica, the microbatches in order, with
///         their media.
///
/// Raises:
///     ConfigError: the schedule has more or fewer microbatches, a medium's module does not run, or a number
///         is negative or not finite.
///
/// Examples:
///     Two encoder ranks share the images of one LLM replica:
///
///     >>> schedule = dflop.Schedule({"vision": {"dp": 2}, "llm": {}}, microbatches=1)
///     >>> images = [dflop.MediumRows("vision", rows, key=rows) for rows in (16, 4, 9)]
///     >>> route = dflop.Route(schedule, [[dflop.MicrobatchRows(40, images)]])
///     >>> [(routed.medium.key, routed.encoder_ranks, routed.encoder_row) for routed in route.media]
///     [(16, (0,), 0), (4, (1,), 0), (9, (1,), 4)]
///     >>> for action in schedule.actions(2)[:2]:
///     ...     print(action, route.rows(action))
///     recv 0 in stage 1 from 0 [range(0, 16)]
///     recv 0 in stage 1 from 1 [range(16, 20), range(20, 29)]
#[pyclass(frozen, name = "Route", module = "dflop._native")]
pub(crate) struct PyRoute {
    step: Arc<StepSchedule>,
    plan: PipelineStepPlan,
    /// Media by LLM microbatch, as passed.
    media: Vec<Vec<Medium>>,
}

/// Medium as passed, with checked numbers.
struct Medium {
    object: Py<PyAny>,
    /// Number of rows between two encoder stages, if known.
    encoder_rows: Option<usize>,
    seconds: Option<f64>,
    module: ModuleKind,
    rows: usize,
}

#[pymethods]
impl PyRoute {
    #[new]
    fn new(schedule: PyRef<'_, PySchedule>, microbatches: Vec<Vec<Bound<'_, PyAny>>>) -> PyResult<Self> {
        let step = schedule.step.clone();
        let (replicas, rounds) = (schedule.dp_size(), step.microbatches());
        let expected = format!("expected {rounds} for each of {replicas} LLM replicas");
        if microbatches.len() != replicas {
            let found = microbatches.len();
            return Err(
                DflopError::config("microbatches", format!("{expected}, found {found} replicas")).into()
            );
        }
        if let Some(replica) = microbatches.iter().position(|own| own.len() != rounds) {
            let found = microbatches[replica].len();
            let reason = format!("{expected}, found {found} for replica {replica}");
            return Err(DflopError::config("microbatches", reason).into());
        }
        let (mut tokens, mut media) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            for own in &microbatches {
                let microbatch = &own[round];
                let own: Vec<Bound<'_, PyAny>> = microbatch.getattr("media")?.extract()?;
                let own = own.into_iter().map(Medium::new).collect::<PyResult<Vec<_>>>()?;
                tokens.push(number(&microbatch.getattr("rows")?, "rows")?);
                media.push(own);
            }
        }
        let mut costs_ns = costs_ns(media.iter().flatten())?.into_iter();
        let plan = |(tokens, own): (usize, &Vec<Medium>)| {
            let medium = |(medium, cost_ns): (&Medium, u64)| MediumPlan {
                module: medium.module,
                tokens: medium.rows,
                cost_ns,
            };
            MicrobatchPlan { tokens, media: own.iter().zip(costs_ns.by_ref()).map(medium).collect() }
        };
        let microbatches: Vec<MicrobatchPlan> = tokens.into_iter().zip(&media).map(plan).collect();
        let plan = schedule.py().detach(|| PipelineStepPlan::new(step.layout(), 0, 0, microbatches));
        let plan = plan.map_err(|error| refused_plan(error, replicas))?;
        Ok(Self { step, plan, media })
    }

    /// All media with encoder and LLM ranks, by encoder, LLM microbatch and position.
    #[getter]
    fn media<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let class = class(py, "RoutedMedium")?;
        let layout = self.step.layout();
        let modules = layout.modules();
        let encoders = &modules[..modules.len() - 1];
        let llm = encoders.iter().map(|module| module.stages.len()).sum::<usize>() as u16;
        let (mut media, mut last) = (Vec::new(), 0);
        for module in encoders {
            last += module.stages.len() as u16;
            let Some(route) = self.plan.route(layout, module.module) else { continue };
            for row in route.rows() {
                let source = Part { microbatch: row.source, stage: last - 1 };
                let destination = Part { microbatch: row.destination, stage: llm };
                let ranks = |part| PyTuple::new(py, self.step.part_ranks(part));
                media.push(class.call1((
                    self.medium(row).object.bind(py),
                    row.source,
                    ranks(source)?,
                    row.source_offset,
                    row.destination,
                    ranks(destination)?,
                    row.destination_offset,
                ))?);
            }
        }
        Ok(media)
    }

    /// Returns message rows at this end, in message order; none if the message is not sent.
    ///
    /// Between an encoder and the LLM, they are rows in the encoder output at the encoder end, and in the
    /// media rows at the LLM end. Between two stages in a module, they are all microbatch rows.
    ///
    /// Args:
    ///     action (Action): send or receive in the schedule.
    ///
    /// Returns:
    ///     list[range]: rows at this end.
    ///
    /// Raises:
    ///     ConfigError: the schedule has no such message.
    ///
    /// Examples:
    ///     >>> schedule = dflop.Schedule({"llm": {"stages": 2}}, microbatches=1)
    ///     >>> route = dflop.Route(schedule, [[dflop.MicrobatchRows(40)]])
    ///     >>> route.rows(schedule.actions(1)[0])
    ///     [range(0, 40)]
    fn rows<'py>(&self, py: Python<'py>, action: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyRange>>> {
        let part = |stage: &str, microbatch: &str| -> PyResult<Option<Part>> {
            let stage: Option<u16> = action.getattr(stage)?.extract()?;
            let microbatch: Option<u32> = action.getattr(microbatch)?.extract()?;
            Ok(stage.zip(microbatch).map(|(stage, microbatch)| Part { microbatch, stage }))
        };
        let ends = part("stage", "microbatch")?.zip(part("peer_stage", "peer_microbatch")?);
        let ends = ends.map(|(own, other)| [own, other]).filter(|ends| self.step.is_linked(*ends));
        let Some(ends) = ends else {
            let reason = format!("expected a message of the schedule, found `{}`", action.str()?);
            return Err(DflopError::config("action", reason).into());
        };
        let is_known = Cell::new(true);
        let rows = self.step.rows(&self.plan, ends, |row| {
            let encoder_rows = self.medium(row).encoder_rows;
            is_known.set(is_known.get() && encoder_rows.is_some());
            encoder_rows.unwrap_or(0)
        });
        if !is_known.get() {
            let reason = format!("the rows of `{}` between encoder stages are not known", action.str()?);
            return Err(DflopError::config("action", reason).into());
        }
        rows.into_iter().map(|rows| PyRange::new(py, rows.start as isize, rows.end as isize)).collect()
    }

    /// Digest over the layout, all microbatches and all routes, 16 hexadecimal digits.
    #[getter]
    fn digest(&self) -> String {
        format!("{:016x}", self.plan.digest(self.step.layout()))
    }

    fn __repr__(&self) -> String {
        let media: usize = self.media.iter().map(Vec::len).sum();
        format!("Route(microbatches={}, media={media})", self.media.len())
    }
}

impl PyRoute {
    /// Routes the media in a step plan.
    ///
    /// - `key`: names a medium by LLM microbatch and index there
    pub(crate) fn from_plan(
        py: Python<'_>,
        step: Arc<StepSchedule>,
        plan: PipelineStepPlan,
        key: impl Fn(usize, usize) -> String,
    ) -> PyResult<Self> {
        let (class, mut media) = (class(py, "MediumRows")?, Vec::new());
        for (number, microbatch) in plan.microbatches().iter().enumerate() {
            let medium = |(index, medium): (usize, &MediumPlan)| -> PyResult<Medium> {
                let (rows, seconds, module) = (medium.tokens, medium.cost_ns as f64 / 1e9, medium.module);
                let object =
                    class.call1((module_name(module), rows, seconds, py.None(), key(number, index)))?;
                let (object, seconds) = (object.unbind(), Some(seconds));
                Ok(Medium { object, encoder_rows: None, seconds, module, rows })
            };
            media.push(microbatch.media.iter().enumerate().map(medium).collect::<PyResult<_>>()?);
        }
        Ok(Self { step, plan, media })
    }

    fn medium(&self, row: &RoutedMedium) -> &Medium {
        &self.media[row.destination as usize][row.medium]
    }
}

impl Medium {
    fn new(object: Bound<'_, PyAny>) -> PyResult<Self> {
        let rows = number(&object.getattr("rows")?, "rows")?;
        let encoder_rows = object.getattr("encoder_rows")?;
        let encoder_rows = if encoder_rows.is_none() { rows } else { number(&encoder_rows, "encoder_rows")? };
        let encoder_rows = Some(encoder_rows);
        let seconds: Option<f64> = object.getattr("seconds")?.extract()?;
        if let Some(seconds) = seconds.filter(|seconds| !seconds.is_finite() || *seconds < 0.0) {
            let reason = format!("expected a finite number, at least 0, found {seconds}");
            return Err(DflopError::config("seconds", reason).into());
        }
        let module = parse_module(&object.getattr("module")?.extract::<String>()?)?;
        Ok(Self { object: object.unbind(), encoder_rows, seconds, module, rows })
    }
}

/// Extracts a number of rows.
fn number(value: &Bound<'_, PyAny>, setting: &'static str) -> PyResult<usize> {
    let number: Option<usize> = value.extract().ok().filter(|number| *number <= ROWS_MAX);
    number.ok_or_else(|| {
        let reason = format!("expected a whole number from 0 to {ROWS_MAX}, found {value}");
        DflopError::config(setting, reason).into()
    })
}

/// Returns media costs in nanoseconds: predicted times, or row numbers if no medium has a time.
fn costs_ns<'a>(media: impl Iterator<Item = &'a Medium> + Clone) -> Result<Vec<u64>, DflopError> {
    if media.clone().all(|medium| medium.seconds.is_none()) {
        return Ok(media.map(|medium| medium.rows as u64).collect());
    }
    let cost_ns = |medium: &Medium| {
        let missing = || DflopError::config("seconds", "expected for all media, or for none");
        Ok((medium.seconds.ok_or_else(missing)? * 1e9).round() as u64)
    };
    media.map(cost_ns).collect()
}

/// Converts an error about a plan, and names the microbatch by replica and position.
fn refused_plan(error: dflop_executor::Error, replicas: usize) -> DflopError {
    match error {
        dflop_executor::Error::Plan { microbatch, problem, .. } => {
            let (replica, round) = (microbatch % replicas, microbatch / replicas);
            DflopError::config("microbatches", format!("microbatch {round} of replica {replica} {problem}"))
        }
        other => refused(other),
    }
}
