//! Settings for assigning samples to ranks and microbatches: `dflop.Plan`.

use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Caps, Strategy};
use dflop_loader::{CostFunction, StepPlannerBuilder, Synchronization};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::cost::PyCost;
use crate::error::DflopError;
use crate::settings::Group;

/// Settings for planning a global batch.
pub(in crate::balanced) struct PlanSettings {
    strategy: Strategy,
    search_effort: u64,
    /// Number of pipeline stages for every module; `None` if the modules share a device.
    stages: Option<Vec<usize>>,
    schedule: ScheduleKind,
    synchronization: Synchronization,
    caps: Caps,
    pub(in crate::balanced) correction_interval: u64,
}

impl PlanSettings {
    /// Reads the fields in a `dflop.Plan`.
    pub(in crate::balanced) fn new(group: &Group<'_>) -> PyResult<Self> {
        let caps = Caps { tokens_max: group.get("tokens_max")?, bytes_max: group.get("bytes_max")? };
        Ok(Self {
            strategy: strategy(&group.get::<String>("strategy")?)?,
            search_effort: group.get("search_effort")?,
            stages: group.get("stages")?,
            schedule: schedule(&group.get::<String>("schedule")?)?,
            synchronization: synchronization(&group.get::<String>("synchronize")?)?,
            caps,
            correction_interval: group.get("correction_interval")?,
        })
    }

    /// Applies the settings to a planner builder.
    ///
    /// - `cost`: function that replaces the model's times
    pub(super) fn apply(
        &self,
        mut builder: StepPlannerBuilder,
        cost: Option<&Arc<dyn CostFunction>>,
    ) -> StepPlannerBuilder {
        builder =
            builder.strategy(self.strategy).work(self.search_effort).schedule(self.schedule).caps(self.caps);
        builder = match &self.stages {
            Some(stages) => builder.stages(stages.clone()),
            None => builder.one_device(self.synchronization),
        };
        match cost {
            Some(function) => builder.cost_function(function.clone()),
            None => builder,
        }
    }
}

/// Reads the cost function in a `dflop.Plan`.
pub(in crate::balanced) fn cost(group: &Group<'_>) -> PyResult<Option<Arc<PyCost>>> {
    let Some(function) = group.get::<Option<Bound<'_, PyAny>>>("cost")? else { return Ok(None) };
    if !function.is_callable() {
        let found = function.get_type().name()?;
        let message = format!("expected `cost` of `dflop.Plan` to be a function, found {found}");
        return Err(PyTypeError::new_err(message));
    }
    Ok(Some(PyCost::new(function.unbind())))
}

/// Parses a strategy by name or alias.
pub(crate) fn strategy(name: &str) -> Result<Strategy, DflopError> {
    name.parse().map_err(|_| {
        let known = Strategy::describe(Strategy::ALL.iter().copied());
        DflopError::config("strategy", format!("expected {known}, found `{name}`"))
    })
}

fn schedule(name: &str) -> Result<ScheduleKind, DflopError> {
    Ok(name.parse::<ScheduleKind>()?)
}

fn synchronization(name: &str) -> Result<Synchronization, DflopError> {
    match name {
        "step" => Ok(Synchronization::PerStep),
        "microbatch" => Ok(Synchronization::PerMicrobatch),
        _ => Err(DflopError::config("synchronize", format!("expected step or microbatch, found `{name}`"))),
    }
}
