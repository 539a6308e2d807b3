//! Converts a microbatch to `dflop.batches.Microbatch`.

use std::sync::Arc;

use dflop_loader::inputs::{ModelInputs, NamedTensor, TensorValues};
use dflop_loader::processors::image::Normalization;
use dflop_loader::{Dataset, Microbatch, StepPlan, StepPlanner};
use pyo3::prelude::*;

use crate::arrays::storage::Owner;
use crate::convert::{Delivery, class, samples, tensors};
use crate::model::module_seconds;

/// Pixel scale, mean and standard deviation.
type Statistics = (f64, [f64; 3], [f64; 3]);

/// Returns the pixel normalization, if pixels are bytes.
fn byte_normalization(
    inputs: Option<&ModelInputs>,
    normalization: Option<Normalization>,
) -> Option<Statistics> {
    let is_bytes = |tensor: &NamedTensor| matches!(tensor.values, TensorValues::U8(_));
    let Normalization { scale, mean, deviation } = normalization?;
    inputs?.tensors.iter().any(is_bytes).then_some((scale, mean, deviation))
}

/// Converts a microbatch.
///
/// - `plan`: step plan
/// - `normalization`: model's pixel normalization
pub(super) fn microbatch<'py>(
    py: Python<'py>,
    of: Microbatch,
    (planner, plan): (&StepPlanner, &StepPlan),
    normalization: Option<Normalization>,
    delivery: Delivery,
) -> PyResult<Bound<'py, PyAny>> {
    let Delivery { framework, is_decoded } = delivery;
    let made = class(py, "Microbatch")?.call0()?;
    made.setattr("tokens", of.tokens)?;
    made.setattr("target_tokens", of.target_tokens)?;
    made.setattr("planned_tokens", of.planned_tokens)?;
    made.setattr("padding_tokens", of.padding_tokens)?;
    made.setattr("cost_seconds", of.cost_seconds())?;
    made.setattr("module_seconds", module_seconds(py, planner.model(), &of.module_ns)?)?;
    made.setattr("loss_scale", of.loss_scale)?;
    made.setattr("loss_scale_sum", of.loss_scale_sum)?;
    let names: Vec<Arc<str>> = planner.datasets().iter().map(Dataset::name).collect();
    let dataset = |&place: &u32| &*names[plan.samples[place as usize].dataset];
    made.setattr("sources", of.places.iter().map(dataset).collect::<Vec<_>>())?;
    let keys: Vec<&str> = of.samples.iter().map(|sample| sample.key.as_str()).collect();
    made.setattr("sample_keys", keys)?;
    made.setattr("samples", samples(py, of.samples, Delivery { framework, is_decoded })?)?;
    made.setattr("pixel_normalization", byte_normalization(of.inputs.as_ref(), normalization))?;
    if let Some(inputs) = of.inputs {
        tensors(&made, inputs.tensors, framework)?;
        // Models with a cache, which is the default, attend across packed samples.
        made.set_item("use_cache", false)?;
        let length = [inputs.cu_seqlens.len()];
        made.setattr("cu_seqlens", framework.array(py, Owner::I32(inputs.cu_seqlens), &length)?)?;
        made.setattr("max_seqlen", inputs.max_seqlen)?;
    } else {
        made.setattr("cu_seqlens", py.None())?;
        made.setattr("max_seqlen", 0)?;
    }
    Ok(made)
}
