//! Checks stage outputs: rows, gradients and losses with the size and type that the next part requires.

use dflop_balancer::schedule::Part;

use super::activation_transfer::StepView;
use super::stage_edge::Flow;
use crate::error::Result;
use dflop_device::{Device, Dtype, Tensor};
use dflop_models::{BlockOutput, Error};

/// Checks a forward output: a loss on the last stage, rows on all other stages.
///
/// - `stage`: stage name for errors
///
/// # Errors
/// [`Error::Output`] that names stage and microbatch.
pub(super) fn check_forward<D: Device>(
    view: &StepView<'_, D>,
    (stage, device): (&str, &D),
    part: Part,
    output: &BlockOutput<D>,
) -> Result<()> {
    let is_last = usize::from(part.stage) + 1 == view.job.stages.len();
    match output {
        BlockOutput::Rows(_) if is_last => {
            refuse(stage, part, "forward gives rows, expected a loss".to_owned())
        }
        BlockOutput::Rows(rows) => check_rows(view, (stage, device), Flow::Activations, part, Some(rows)),
        BlockOutput::Loss(_) if !is_last => {
            refuse(stage, part, "forward gives a loss, expected rows".to_owned())
        }
        BlockOutput::Loss(loss) if loss.len() != 1 || loss.dtype() != Dtype::F64 => {
            let found = describe(loss);
            refuse(stage, part, format!("forward gives {found} as loss, expected 1 element of F64"))
        }
        BlockOutput::Loss(_) => Ok(()),
    }
}

/// Checks rows that leave a part, if other parts receive any.
///
/// # Errors
/// [`Error::Output`] that names stage and microbatch.
pub(super) fn check_rows<D: Device>(
    view: &StepView<'_, D>,
    (stage, device): (&str, &D),
    flow: Flow,
    part: Part,
    rows: Option<&Tensor<D>>,
) -> Result<()> {
    let mut taken = None;
    for edge in view.edges(flow, part, true) {
        if view.rows(flow, edge)? > 0 {
            taken = Some(edge);
            break;
        }
    }
    let Some(edge) = taken else { return Ok(()) };
    let count = match flow {
        _ if !view.is_routed(edge) => view.rows(flow, edge)?,
        // The rows of all routes are in one tensor.
        Flow::Activations => view.route(edge).0.source_tokens(part.microbatch),
        Flow::Gradients => view.rank_step.plan.media_tokens(part.microbatch),
    };
    let (width, dtype) = (view.width(edge), device.storage());
    if rows.is_some_and(|rows| rows.len() == count * width && rows.dtype() == dtype) {
        return Ok(());
    }
    let pass = match flow {
        Flow::Activations => "forward gives",
        Flow::Gradients => "backward gives, as gradient of the input,",
    };
    let found = rows.map_or_else(|| "nothing".to_owned(), describe);
    refuse(stage, part, format!("{pass} {found}, expected {count} rows of {width} elements of {dtype:?}"))
}

fn describe<D: Device>(tensor: &Tensor<D>) -> String {
    format!("{} elements of {:?}", tensor.len(), tensor.dtype())
}

fn refuse(stage: &str, part: Part, problem: String) -> Result<()> {
    let (stage, microbatch) = (stage.to_owned(), part.microbatch as usize);
    Err(Error::Output { stage, microbatch, problem }.into())
}
