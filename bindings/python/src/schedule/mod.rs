//! `dflop.Schedule`: lists the actions of all ranks in a step.

mod route;

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_balancer::schedule::{Action, Message, Part, ScheduleKind};
use dflop_executor::models::ModuleKind;
use dflop_executor::pipeline::{RankAction, RankLaunch, StepSchedule};
use dflop_executor::run::{ModuleTable, PlacementName, job_layout};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyTuple};

pub(crate) use route::PyRoute;

use crate::convert::{Arguments, arguments};
use crate::error::DflopError;

/// Names of the modules, in stage order.
const MODULES: [(&str, ModuleKind); 3] =
    [("vision", ModuleKind::Vision), ("audio", ModuleKind::Audio), ("llm", ModuleKind::Llm)];

/// Lists what every rank does in a step whose modules run on several ranks: the lists that `dflop.train`
/// runs, for modules of any framework.
///
/// Ranks are numbered module by module, in a module replica by replica, in a replica stage by stage, and by
/// TP rank last. An encoder and the LLM may differ in data parallelism. With ``D`` LLM replicas, microbatch
/// ``k * D + d`` is the ``k``-th on replica ``d``; all ``k``-th microbatches are round ``k``. With ``E``
/// encoder replicas, microbatch ``k * E + e`` is the share that replica ``e`` encodes in round ``k``: from
/// all LLM replicas, or from a single LLM replica if ranks are joint, or if ``E`` is ``D`` and ranks are
/// separate. `Route` has the shares and the rows.
///
/// Placements:
///
/// - ``disaggregated``: modules have separate ranks;
/// - ``joint``: all layers are a chain, which is cut into the LLM stages; an encoder without ``layers`` runs
///   in the first stage;
/// - ``colocated``: an encoder has as many ranks as the LLM, and runs on the LLM ranks, before and after it.
///
/// Ranks that run all actions in order never wait forever, if a send does not wait for the receive. If sends
/// wait, or messages share a queue, as in an NCCL communicator, ``launches`` has the order.
///
/// Args:
///     modules (Mapping): by name, ``vision``, ``audio`` and ``llm``, a mapping with ``stages``, ``dp`` and
///         ``tp``: pipeline stages, replicas, and ranks that share a stage, each 1 by default. ``layers``,
///         the number of layers by stage, replaces ``stages``; with ``joint`` it has an entry for each chain
///         stage, 0 where the module has no layers.
///     microbatches (int): number of microbatches per LLM replica.
///     schedule (str): ``1f1b``, ``gpipe``, ``zb-h1``; ``1f1b-ahead:R``, with encoders ``R`` rounds ahead;
///         ``interleaved:N``, ``N`` stages per rank, for an LLM alone.
///     placement (str): ``disaggregated``, ``joint`` or ``colocated``.
///
/// Raises:
///     ConfigError: there is no such layout, or the schedule does not run in it.
///
/// Examples:
///     Two encoder ranks feed three LLM replicas of two stages:
///
///     >>> modules = {"vision": {"dp": 2}, "llm": {"stages": 2, "dp": 3}}
///     >>> schedule = dflop.Schedule(modules, microbatches=4)
///     >>> schedule.world_size, schedule.stages, schedule.dp_size
///     (8, 3, 3)
///     >>> for action in schedule.actions(2)[:4]:
///     ...     print(action)
///     recv 0 in stage 1 from 0
///     recv 0 in stage 1 from 1
///     forward 0 in stage 1
///     send 0 in stage 1 to 3
#[pyclass(frozen, name = "Schedule", module = "dflop._native")]
pub(crate) struct PySchedule {
    arguments: Arguments,
    step: Arc<StepSchedule>,
}

#[pymethods]
impl PySchedule {
    #[new]
    #[pyo3(signature = (modules, *, microbatches, schedule="1f1b", placement="disaggregated"))]
    fn new(
        py: Python<'_>,
        modules: Bound<'_, PyAny>,
        microbatches: usize,
        schedule: &str,
        placement: &str,
    ) -> PyResult<Self> {
        let arguments = arguments!(py, modules, microbatches, schedule, placement);
        let kind: ScheduleKind = schedule.parse().map_err(DflopError::from)?;
        let layout = job_layout(parse_placement(placement)?, &tables(&modules)?, kind).map_err(refused)?;
        let step = py.detach(|| StepSchedule::new(layout, microbatches)).map_err(refused)?;
        Ok(Self { arguments, step: Arc::new(step) })
    }

    /// Number of ranks.
    #[getter]
    fn world_size(&self) -> usize {
        self.step.layout().world_size()
    }

    /// Number of stages in all modules.
    #[getter]
    fn stages(&self) -> usize {
        self.step.layout().stage_count()
    }

    /// Number of LLM replicas.
    #[getter]
    fn dp_size(&self) -> usize {
        self.step.layout().modules().last().map_or(1, |llm| llm.dp_size)
    }

    /// Number of microbatches per LLM replica.
    #[getter]
    fn microbatches(&self) -> usize {
        self.step.microbatches()
    }

    /// Digest over the layout and all actions, 16 hexadecimal digits: equal on ranks that run the same step.
    #[getter]
    fn digest(&self, py: Python<'_>) -> String {
        py.detach(|| format!("{:016x}", self.step.digest()))
    }

    /// Returns the ranks that run a stage, by replica, then by TP rank.
    ///
    /// ``reduce_gradients`` sums over replicas: over the ranks with one TP rank.
    ///
    /// Args:
    ///     stage (int): stage, below ``stages``.
    ///
    /// Returns:
    ///     list[list[int]]: ranks by replica.
    ///
    /// Raises:
    ///     ConfigError: there is no such stage.
    ///
    /// Examples:
    ///     >>> schedule = dflop.Schedule({"vision": {}, "llm": {"dp": 3, "tp": 2}}, microbatches=1)
    ///     >>> schedule.stage_ranks(1)
    ///     [[1, 2], [3, 4], [5, 6]]
    fn stage_ranks(&self, stage: usize) -> PyResult<Vec<Vec<usize>>> {
        let layout = self.step.layout();
        let stage = below("stage", stage, layout.stage_count())? as u16;
        let replicas = layout.modules()[layout.stage_module(stage)].dp_size as u32;
        let ranks = |microbatch| self.step.part_ranks(Part { microbatch, stage }).to_vec();
        Ok((0..replicas).map(ranks).collect())
    }

    /// Returns a rank's roles, encoders first: modules, replicas and stages.
    ///
    /// Args:
    ///     rank (int): rank, below ``world_size``.
    ///
    /// Returns:
    ///     list[RankRole]: roles.
    ///
    /// Raises:
    ///     ConfigError: there is no such rank.
    ///
    /// Examples:
    ///     >>> modules = {"vision": {}, "llm": {"stages": 2}}
    ///     >>> schedule = dflop.Schedule(modules, microbatches=4, placement="joint")
    ///     >>> [(role.module, role.stages) for role in schedule.roles(0)]
    ///     [('vision', (0,)), ('llm', (1,))]
    fn roles<'py>(slf: &Bound<'py, Self>, rank: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (py, layout) = (slf.py(), slf.get().step.layout());
        let rank = below("rank", rank, layout.world_size())?;
        let class = class(py, "RankRole")?;
        let roles = layout.roles(rank).map_err(refused)?;
        let role = |role: dflop_executor::pipeline::RankRole| {
            let stages = PyTuple::new(py, role.stages)?;
            class.call1((rank, module_name(role.module), role.replica, role.tp_rank, stages, slf))
        };
        roles.into_iter().map(role).collect()
    }

    /// Returns a rank's actions, in order.
    ///
    /// Messages between stages on one rank are not listed: the rows stay where they are.
    ///
    /// Args:
    ///     rank (int): rank, below ``world_size``.
    ///
    /// Returns:
    ///     list[Action]: actions.
    ///
    /// Raises:
    ///     ConfigError: there is no such rank.
    ///
    /// Examples:
    ///     >>> schedule = dflop.Schedule({"llm": {"stages": 2}}, microbatches=8, schedule="zb-h1")
    ///     >>> [action.kind for action in schedule.actions(1)[:4]]
    ///     ['recv', 'forward', 'backward_input', 'send_gradient']
    fn actions<'py>(&self, py: Python<'py>, rank: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let rank = below("rank", rank, self.world_size())?;
        let class = class(py, "Action")?;
        self.step.actions(rank).iter().map(|own| action(&class, own)).collect()
    }

    /// Returns the order in which a rank launches messages.
    ///
    /// Each message in ``actions`` is a pair: the message index, and the index of the action before which the
    /// rank launches the message. If all ranks keep this order, no message waits for itself, even if all
    /// messages on a rank share a queue and a send ends only with the receive, as in an NCCL communicator. In
    /// the same order, a receive may be launched earlier, and a send as soon as the rows are computed.
    /// Gradient sums have a separate communicator per group.
    ///
    /// Args:
    ///     rank (int): rank, below ``world_size``.
    ///
    /// Returns:
    ///     list[tuple[int, int]]: messages, with ascending second index; at the step end, the number of
    ///     actions.
    ///
    /// Raises:
    ///     ConfigError: there is no such rank.
    ///
    /// Examples:
    ///     >>> schedule = dflop.Schedule({"llm": {"stages": 2}}, microbatches=2)
    ///     >>> actions = schedule.actions(0)
    ///     >>> for message, before in schedule.launches(0)[:2]:
    ///     ...     print(f"{actions[message]}, before {actions[before]}")
    ///     send 0 in stage 0 to 1, before forward 1 in stage 0
    ///     send 1 in stage 0 to 1, before recv_gradient 0 in stage 0 from 1
    fn launches(&self, rank: usize) -> PyResult<Vec<(usize, usize)>> {
        let rank = below("rank", rank, self.world_size())?;
        let launches = self.step.launches(rank).map_err(refused)?;
        Ok(launches.into_iter().map(|RankLaunch { action, before }| (action, before)).collect())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().arguments.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments.repr(&slf.get_type())
    }
}

impl PySchedule {
    /// Returns the lists.
    pub(crate) fn step(&self) -> &Arc<StepSchedule> {
        &self.step
    }
}

/// Rejects an index that is not below a count.
pub(crate) fn below(what: &'static str, index: usize, count: usize) -> Result<usize, DflopError> {
    if index < count {
        return Ok(index);
    }
    Err(DflopError::config(what, format!("expected below {count}, found {index}")))
}

/// Returns a class in `dflop.schedule`.
pub(crate) fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static SCHEDULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = SCHEDULE.get_or_try_init(py, || py.import("dflop.schedule").map(Bound::unbind))?;
    module.bind(py).getattr(name)
}

/// Creates a `dflop.schedule.Action`.
fn action<'py>(class: &Bound<'py, PyAny>, own: &RankAction) -> PyResult<Bound<'py, PyAny>> {
    let kind = match own.action {
        Action::Recv(_) => "recv",
        Action::Forward(_) => "forward",
        Action::Send(_) => "send",
        Action::RecvGrad(_) => "recv_gradient",
        Action::Backward(_) => "backward",
        Action::BackwardInput(_) => "backward_input",
        Action::BackwardWeight(_) => "backward_weight",
        Action::SendGrad(_) => "send_gradient",
        Action::ReduceGrads(stage) => return class.call1(("reduce_gradients", stage)),
    };
    let part = own.action.pass().map(|pass| pass.part).or_else(|| own.message().map(Message::part));
    let Part { microbatch, stage } = part.unwrap_or(Part { microbatch: 0, stage: 0 });
    match own.other_end {
        Some(end) => class.call1((kind, stage, microbatch, end.rank, end.part.stage, end.part.microbatch)),
        None => class.call1((kind, stage, microbatch)),
    }
}

pub(crate) fn module_name(module: ModuleKind) -> &'static str {
    MODULES.iter().find(|(_, kind)| *kind == module).map_or("llm", |(name, _)| name)
}

fn parse_module(name: &str) -> Result<ModuleKind, DflopError> {
    let found = MODULES.iter().find(|(own, _)| *own == name);
    found.map(|(_, kind)| *kind).ok_or_else(|| {
        let known = MODULES.map(|(name, _)| format!("`{name}`")).join(", ");
        DflopError::config("modules", format!("expected {known}, found `{name}`"))
    })
}

fn parse_placement(name: &str) -> Result<PlacementName, DflopError> {
    match name {
        "disaggregated" => Ok(PlacementName::Disaggregated),
        "colocated" => Ok(PlacementName::Colocated),
        "joint" => Ok(PlacementName::Joint),
        _ => {
            let known = "`disaggregated`, `joint`, `colocated`";
            Err(DflopError::config("placement", format!("expected {known}, found `{name}`")))
        }
    }
}

/// Reads the modules.
fn tables(modules: &Bound<'_, PyAny>) -> Result<BTreeMap<ModuleKind, ModuleTable>, DflopError> {
    let invalid = |error: pythonize::PythonizeError| DflopError::config("modules", error.to_string());
    let tables: BTreeMap<String, ModuleTable> = pythonize::depythonize(modules).map_err(invalid)?;
    let mut found = BTreeMap::new();
    for (name, table) in tables {
        found.insert(parse_module(&name)?, table);
    }
    Ok(found)
}

/// Converts an executor error about a layout or a step.
pub(crate) fn refused(error: dflop_executor::Error) -> DflopError {
    use dflop_executor::Error as E;
    match error {
        E::InvalidSetting { setting, reason } => DflopError::config(setting, reason),
        E::Config(reason) => {
            DflopError::config("modules", reason.strip_prefix("`parallel` of ").unwrap_or(&reason))
        }
        E::Balancer(error) => error.into(),
        other => other.into(),
    }
}
