//! Runs each stage once before step messages are posted, so that the device loads the required kernels, see
//! [`Runtime::prepare`](dflop_device::Runtime::prepare).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dflop_balancer::schedule::{Action, Part};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, Dtype};
use dflop_models::{BlockOutput, MicrobatchContext, Stage};

use super::activation_transfer::StepView;
use super::topology::{Flow, missing};
use crate::error::{Error, Result};

/// Properties for which passes run different kernels: stage, whether attention is limited to ranges, whether
/// there are windows, whether there is an input.
type Kind = (u16, bool, bool, bool);

/// Prepared stages and microbatch kinds.
#[derive(Debug, Default)]
pub(super) struct Preparation(BTreeSet<Kind>);

impl Preparation {
    /// Prepares the stages for microbatches in a step that differ from earlier microbatches; gradients are
    /// zeros afterwards, as before.
    pub(super) fn run<D: Device>(
        &mut self,
        device: &D,
        view: &StepView<'_, D>,
        list: &[Action],
        stages: &mut BTreeMap<u16, Box<dyn Stage<D>>>,
    ) -> Result<()> {
        if self.0.is_empty() {
            device.prepare(|| copies(device))?;
        }
        let is_split = list.iter().any(|action| matches!(action, Action::BackwardInput(_)));
        for action in list {
            let &Action::Forward(part) = action else { continue };
            if !view.is_active(part) {
                continue;
            }
            let context = view.rank_step.context(view.module(part), part.microbatch)?;
            let input = input_len(view, part)?;
            let layers = &context.layers;
            let (has_ranges, has_windows) = (layers.segments.ranges().is_some(), layers.windows.is_some());
            if self.0.insert((part.stage, has_ranges, has_windows, input.is_some())) {
                let stage = stages.get_mut(&part.stage).ok_or_else(|| missing(part.stage))?;
                device.prepare(|| passes(&mut **stage, context, input, is_split))?;
                stage.forget();
                stage.parameters_mut().zero_gradients(device)?;
            }
        }
        Ok(())
    }
}

/// Number of ranges in a copy, for which a device may use a different method than for one or two.
const RANGES: usize = 64;

/// Runs row copies between ranks and loss copies.
fn copies<D: Device>(device: &D) -> Result<(), Error> {
    for dtype in [device.storage(), Dtype::F32, Dtype::F64] {
        let (from, mut to) = (device.zeros_as(dtype, RANGES)?, device.zeros_as(dtype, RANGES)?);
        let ranges: Vec<CopyRange> = (0..RANGES).map(|at| CopyRange { from: at, to: at, len: 1 }).collect();
        device.copy_ranges(&ranges, &from, &mut to)?;
    }
    Ok(())
}

/// Returns the number of input elements of a part, if it has an input.
fn input_len<D: Device>(view: &StepView<'_, D>, part: Part) -> Result<Option<usize>> {
    let edges = view.edges(Flow::Activations, part, false);
    let Some(&first) = edges.first() else { return Ok(None) };
    let rows = if view.is_routed(first) {
        view.rank_step.plan.media_tokens(part.microbatch)
    } else {
        view.rows(Flow::Activations, first)?
    };
    Ok((rows > 0).then_some(rows * view.width(first)))
}

/// Runs both passes of a stage over zeros.
fn passes<D: Device>(
    stage: &mut dyn Stage<D>,
    context: &Arc<MicrobatchContext<D>>,
    input: Option<usize>,
    is_split: bool,
) -> Result<(), Error> {
    // an earlier run may have ended in the middle
    stage.forget();
    let device = stage.device().clone();
    let input = input.map(|len| device.zeros_as(device.storage(), len)).transpose()?;
    let gradient = match stage.forward(0, Arc::clone(context), input)? {
        BlockOutput::Rows(rows) => Some(rows),
        BlockOutput::Loss(_) => None,
    };
    if !stage.has_backward() {
        return Ok(());
    }
    if is_split {
        stage.backward_input(0, gradient)?;
        stage.backward_weight(0)?;
    } else {
        stage.backward_with(0, gradient, &mut |_, _| Ok(()))?;
    }
    Ok(())
}
