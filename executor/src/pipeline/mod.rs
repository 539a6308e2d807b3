//! Runs a rank in a job: the action list of a schedule over stages and communicators.
//!
//! Runs each stage once before step messages are posted, so that the device loads the required kernels, see
//! [`Runtime::prepare`](dflop_device::Runtime::prepare).
//!
//! A [`Job`] describes how a model is distributed over ranks. A [`PipelineStepPlan`] has the microbatches in
//! a step and the encoder replica for every medium. Both are the same on all ranks. [`RankStep`] adds the
//! contexts for the microbatches on this rank. [`PipelineRank::step`] runs the rank's list of
//! [`Action`]s, the same list that is simulated.
//!
//! **Guarantees.** No shape is ever sent: both ends of a message know it from the plan, and a message without
//! rows is not sent at all. Sums have a fixed order: two runs give the same bits over any transport, and so
//! does any number of stages with one or two replicas. With more replicas, the summation order depends on the
//! position of an element in the bucket, hence on the remaining parameters in the stage. A rank or microbatch
//! without media or tokens computes nothing there and changes no gradient. A failure on one rank ends the job
//! on all ranks, with the failed action.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use dflop_balancer::schedule::ScheduleKind;
//! use dflop_executor::Result;
//! use dflop_executor::comm::{Comm, Settings, threads};
//! use dflop_executor::device::Cpu;
//! use dflop_executor::models::{FrozenModules, ModelConfig, ModuleKind, Stage, TextBatch};
//! use dflop_executor::pipeline::{
//!     Job, MicrobatchPlan, ModuleParallelism, PipelineRank, PipelineStepPlan, RankStep,
//! };
//! use dflop_executor::models::Activations;
//! use dflop_executor::models::weights::Seed;
//!
//! // Three layers on two ranks, two microbatches of four tokens.
//! let model = ModelConfig::from_config(&serde_json::json!({"model_type": "qwen2", "hidden_size": 16,
//!     "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
//!     "vocab_size": 48}))?;
//! let layout = ModuleParallelism::new(ModuleKind::Llm, vec![0..2, 2..3]);
//! let job = Job::new(model, FrozenModules::default(), vec![layout], ScheduleKind::OneForwardOneBackward)?;
//! let job = Arc::new(job);
//!
//! let loss_of_rank = |comm: threads::ThreadComm| -> Result<f64> {
//!     let (device, model) = (Cpu::new(1)?, job.model());
//!     let role = job.roles(comm.rank())?.remove(0);
//!     let frozen = FrozenModules::default();
//!     // Another implementation of `Stage` may take the place of each.
//!     let stage = |range| {
//!         model.stage(&device, range, frozen, Activations::Stored, &Seed(1)).map(Stage::boxed)
//!     };
//!     let stages = job.ranges(&role).iter().map(stage).collect::<Result<_, _>>()?;
//!     let mut pipeline = PipelineRank::new(Box::new(comm), Arc::clone(&job), stages)?;
//!
//!     let microbatches = vec![MicrobatchPlan { tokens: 4, media: Vec::new() }; 2];
//!     let plan = Arc::new(PipelineStepPlan::new(&job, 0, 6, microbatches)?);
//!     let batch = TextBatch {
//!         input_ids: &[5, 6, 7, 8],
//!         labels: &[5, 6, 7, 8],
//!         positions: &[0, 1, 2, 3],
//!         cu_seqlens: &[0, 4],
//!         media_places: &[],
//!         loss_scale: plan.loss_scale(),
//!     };
//!     let own = plan.replica_microbatches(&job, role.module, role.replica);
//!     let context = |own| Ok(((ModuleKind::Llm, own), Arc::new(model.llm.context(&device, &batch)?)));
//!     let contexts = own.map(context).collect::<Result<_>>()?;
//!     Ok(pipeline.step(&RankStep { plan, contexts })?.loss)
//! };
//! let losses = std::thread::scope(|scope| {
//!     let ranks = threads::world(2, Settings::default())?;
//!     let ranks: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(|| loss_of_rank(comm))).collect();
//!     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<f64>>>()
//! })?;
//! assert!(losses[0] > 3.0 && losses[0] == losses[1]);
//! # Ok::<(), dflop_executor::Error>(())
//! ```

mod gradient_reduction;
mod job;
#[cfg(test)]
mod launch_order;
mod layout;
mod message_check;
mod pipeline_rank;
mod rank_step;
mod simulation;
mod step_execution;
mod step_order;
mod step_plan;
mod step_schedule;
mod timeline;
mod topology;
mod transfer_buffers;

use super::error::{Error, Result};
use dflop_balancer::schedule::{Action, Part};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, Dtype};
use dflop_models::{BlockOutput, MicrobatchContext, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use topology::{Flow, missing};
use transfer_buffers::StepView;

pub use dflop_planner::Placement;
pub use job::{Job, JobStage};
pub use layout::{JobLayout, ModuleParallelism};
pub(crate) use pipeline_rank::DeviceTimes;
pub use pipeline_rank::{PendingStep, PipelineRank, StepOutcome};
pub use rank_step::{RankContexts, RankStep};
pub use simulation::PassTimes;
pub(crate) use simulation::simulate;
pub(crate) use step_plan::name as module_name;
pub use step_plan::{
    MediumPlan, MicrobatchPlan, PipelineStepPlan, RouteEnd, RoutePlan, RoutedMedium, assign_media,
};
pub use step_schedule::{MessageEnd, RankAction, RankLaunch, StepSchedule};
pub use timeline::{CommunicationKind, CommunicationLane, TimedAction, TimedCommunication};
pub use topology::RankRole;

/// Properties for which passes run different kernels: stage, whether attention is limited to ranges, whether
/// there are windows, whether there is an input.
type Kind = (u16, bool, bool, bool);

/// Prepared stages and microbatch kinds.
#[derive(Debug, Default)]
struct Preparation(BTreeSet<Kind>);

impl Preparation {
    /// Prepares the stages for microbatches in a step that differ from earlier microbatches; gradients are
    /// zeros afterwards, as before.
    fn run<D: Device>(
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
