//! Converts delivered steps to the classes of `dflop.batches`.

use std::sync::Arc;

use dflop_costmodel::CostModel;
use dflop_loader::loader::{Microbatch, Step};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::correction::Plan;
use crate::arrays::storage::Owner;
use crate::convert::{Delivery, class, samples, tensors};
use crate::model::module_seconds;

/// Converts a step to `dflop.batches.Step`.
pub(super) fn step<'py>(
    py: Python<'py>,
    of: Step,
    model: &CostModel,
    delivery: Delivery,
) -> PyResult<Bound<'py, PyAny>> {
    let delivery = delivery.resolved(py)?;
    let microbatches = PyList::empty(py);
    for one in of.microbatches {
        microbatches.append(microbatch(py, one, model, delivery)?)?;
    }
    let plan = of.plan;
    let seconds = |ns: u64| ns as f64 / 1e9;
    let (makespan, bound) = (seconds(plan.makespan_ns), seconds(plan.bound.ns));
    let digest = plan.digest.to_string();
    let plan = Plan { plan: Arc::clone(&plan) };
    class(py, "Step")?.call1((of.step, microbatches, of.target_tokens, digest, makespan, bound, plan))
}

fn microbatch<'py>(
    py: Python<'py>,
    of: Microbatch,
    model: &CostModel,
    delivery: Delivery,
) -> PyResult<Bound<'py, PyAny>> {
    let Delivery { framework, is_decoded } = delivery;
    let made = class(py, "Microbatch")?.call0()?;
    made.setattr("tokens", of.tokens)?;
    made.setattr("target_tokens", of.target_tokens)?;
    made.setattr("planned_tokens", of.planned_tokens)?;
    made.setattr("padding_tokens", of.padding_tokens)?;
    made.setattr("cost_seconds", of.cost_seconds())?;
    made.setattr("module_seconds", module_seconds(py, model, &of.module_ns)?)?;
    made.setattr("loss_scale", of.loss_scale)?;
    made.setattr("loss_scale_sum", of.loss_scale_sum)?;
    let keys: Vec<&str> = of.samples.iter().map(|sample| sample.key.as_str()).collect();
    made.setattr("sample_keys", keys)?;
    made.setattr("samples", samples(py, of.samples, Delivery { framework, is_decoded })?)?;
    if let Some(inputs) = of.inputs {
        tensors(&made, inputs.tensors, framework)?;
        let length = [inputs.cu_seqlens.len()];
        made.setattr("cu_seqlens", framework.array(py, Owner::I32(inputs.cu_seqlens), &length)?)?;
        made.setattr("max_seqlen", inputs.max_seqlen)?;
    } else {
        made.setattr("cu_seqlens", py.None())?;
        made.setattr("max_seqlen", 0)?;
    }
    Ok(made)
}
