//! Plans, reads and starts to decode microbatches before they are asked for.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use async_stream::try_stream;
use dflop_costmodel::SampleShape;
use dflop_samples::inputs::SampleProcessor;
use dflop_samples::media::Modality;
use futures::Stream;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::BalancedSettings;
use crate::decode::{Collator, PendingSample, Transforms};
use crate::error::{Error, PlanError, Result};
use crate::fetch::{Demand, ReadPlan, StepReader, StepReaderSettings};
use crate::flow::{ByteBudget, ByteLease, LoaderStage, Metrics, memory_available, metered};
use crate::index::SampleRow;
use crate::plan::{StepPlan, StepPlanner};

/// Step event whose reads have started.
pub(super) enum PendingEvent {
    Start { plan: Arc<StepPlan>, microbatches: usize },
    Microbatch(PendingMicrobatch),
}

/// Microbatch whose samples are being decoded.
pub(super) struct PendingMicrobatch {
    /// Samples with plan indices.
    pub(super) samples: Vec<(u32, PendingSample)>,
    pub(super) _lease: ByteLease,
}

/// Limits reads to the fields that transforms and the preparer need.
#[derive(Debug)]
struct InputDemand {
    preparer: Option<Arc<dyn SampleProcessor>>,
    transforms: Transforms,
    dp_rank: usize,
    /// Whether images are augmented, which may change their sizes.
    is_augmented: bool,
}

impl Demand for InputDemand {
    fn needs_pixels(&self, extension: &str) -> bool {
        let is_size_enough = self.preparer.as_ref().is_some_and(|preparer| !preparer.reads_pixels());
        !is_size_enough || self.transforms.takes(extension)
    }

    fn is_encoded_elsewhere(&self, plan: &StepPlan, place: u32, image: u32, extension: &str) -> bool {
        let Some(context) = &plan.context else { return false };
        let place = &context.places[place as usize];
        // Where frames of videos become images, images are not known by number before they are prepared.
        let has_videos = place.media.iter().any(|part| part.modality == Modality::Video);
        place.is_split()
            && !has_videos
            && !self.is_augmented
            && !self.transforms.takes(extension)
            && !place.encodes(self.dp_rank, Modality::Image, image)
    }

    fn tensor_bytes(&self, row: &SampleRow<'_>) -> u64 {
        let Some(preparer) = &self.preparer else { return 0 };
        let mut shape = SampleShape::default();
        row.read_shape(&mut shape);
        preparer.tensor_bytes(&shape)
    }
}

/// Plans on a separate thread, at most `ahead` steps after the last started step.
fn plan_ahead(
    planner: StepPlanner,
    steps: std::ops::Range<u64>,
    ahead: usize,
    mut started: watch::Receiver<u64>,
    metrics: Arc<Metrics>,
) -> mpsc::Receiver<Result<StepPlan>> {
    let (sender, receiver) = mpsc::channel(ahead);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let meter = metrics.stage(LoaderStage::Plan);
        for step in steps {
            let is_due = |started: &u64| step <= started.saturating_add(ahead as u64);
            // The plan receiver may end first, with the runtime.
            let due = async {
                tokio::select! { due = started.wait_for(is_due) => due.is_ok(), () = sender.closed() => false }
            };
            if !runtime.block_on(due) {
                return;
            }
            // A panic must not look like the end of the run.
            let plan = catch_unwind(AssertUnwindSafe(|| {
                meter.timed(|| planner.has_step(step).then(|| planner.plan(step)))
            }));
            let Some(plan) = plan.unwrap_or(Some(Err(Error::StageEnded { stage: "plan" }))) else { return };
            let (planned, is_last) = (Instant::now(), plan.is_err());
            meter.fail(is_last.into());
            meter.depth.add(1);
            if sender.blocking_send(plan).is_err() || is_last {
                return;
            }
            meter.count(1, 0);
            meter.waited_for_room(planned.elapsed());
        }
    });
    receiver
}

/// Begins the microbatches of all steps, in order.
///
/// - `started`: last started step
pub(super) fn begin_events(
    settings: Arc<BalancedSettings>,
    collator: Collator,
    started: watch::Receiver<u64>,
) -> impl Stream<Item = Result<PendingEvent>> + Send {
    try_stream! {
        let metrics = collator.metrics().clone();
        let budget = ByteBudget::new(settings.buffered_bytes_max(), metrics.decoded.clone());
        let limit = MemoryLimit { settings: settings.clone() };
        let until = settings.steps.map_or(u64::MAX, |steps| settings.from_step.saturating_add(steps));
        // The end of a run of rows is found when it is reached.
        let run_end = settings.planner.steps().len().filter(|_| settings.planner.rows().is_none());
        let until = until.min(run_end.unwrap_or(u64::MAX));
        let steps = settings.from_step..until;
        let ahead = settings.steps_ahead;
        let mut plans = plan_ahead(settings.planner.clone(), steps, ahead, started, metrics.clone());
        let demand = InputDemand {
            preparer: settings.preparer.clone(),
            transforms: settings.shared.transforms.clone(),
            dp_rank: settings.dp_rank,
            is_augmented: settings.shared.augment.is_some(),
        };
        let read_settings = StepReaderSettings {
            planner: settings.planner.clone(),
            share: settings.share.clone(),
            fields: settings.shared.fields.clone(),
            demand: Arc::new(demand),
            unpacked_bytes_max: settings.unpacked_bytes_max,
        };
        let mut reader = Some(StepReader::new(read_settings, collator.skips(), metrics.clone()));
        while let Some(plan) = plans.recv().await {
            metrics.stage(LoaderStage::Plan).depth.remove(1);
            let plan = Arc::new(plan?);
            let mut at_work = reader.take().ok_or(Error::StageEnded { stage: "read" })?;
            let plan_indices = at_work.plan_indices(&plan)?;
            metrics.stage(LoaderStage::Collate).depth.add(1);
            yield PendingEvent::Start { plan: plan.clone(), microbatches: plan_indices.len() };
            let mut waiting: VecDeque<ReadPlan> =
                plan_indices.iter().map(|plan_indices| at_work.plan(&plan, plan_indices)).collect();
            limit.check(&plan, &waiting)?;
            while let Some(mut group) = next_group(&mut waiting, settings.buffered_bytes_max()) {
                let bytes: Vec<u64> = group.iter().map(|reads| reads.resident_bytes).collect();
                let mut lease = budget.lease(bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))).await?;
                metered(metrics.stage(LoaderStage::Read), at_work.fetch(&mut group)).await?;
                let its_metrics = metrics.clone();
                let reading = tokio::task::spawn_blocking(move || {
                    (its_metrics.stage(LoaderStage::Read).timed(|| at_work.read(group)), at_work)
                });
                let (microbatches, done) =
                    reading.await.map_err(|_| Error::StageEnded { stage: "read" })?;
                at_work = done;
                for (microbatch, bytes) in microbatches?.into_iter().zip(bytes) {
                    let mut samples = Vec::with_capacity(microbatch.len());
                    for (place, raw) in microbatch {
                        samples.push((place, collator.start_sample(raw).await?));
                    }
                    collator.transform(samples.iter_mut().map(|(_, sample)| sample));
                    yield PendingEvent::Microbatch(PendingMicrobatch { samples, _lease: lease.split(bytes) });
                }
            }
            reader = Some(at_work);
        }
    }
}

/// Removes the next microbatches to read: a single microbatch of local shards, or as many as fit into half of
/// the buffered bytes, so that remote fields and table rows are fetched together while the other half is
/// consumed.
fn next_group(waiting: &mut VecDeque<ReadPlan>, buffered_bytes_max: u64) -> Option<Vec<ReadPlan>> {
    let mut group = vec![waiting.pop_front()?];
    let mut bytes = group[0].resident_bytes;
    let is_fetched = group[0].is_fetched();
    while let Some(next) = waiting.pop_front_if(|next| {
        is_fetched && next.is_fetched() && bytes.saturating_add(next.resident_bytes) <= buffered_bytes_max / 2
    }) {
        bytes += next.resident_bytes;
        group.push(next);
    }
    Some(group)
}

/// Refuses microbatches that do not fit into memory.
struct MemoryLimit {
    settings: Arc<BalancedSettings>,
}

impl MemoryLimit {
    /// Checks the largest microbatch in this rank's share of a step.
    fn check(&self, plan: &StepPlan, microbatches: &VecDeque<ReadPlan>) -> Result<()> {
        let largest = microbatches.iter().enumerate().max_by_key(|(_, reads)| reads.resident_bytes);
        let Some((microbatch, reads)) = largest else { return Ok(()) };
        let bytes_max = match self.settings.microbatch_bytes_max {
            Some(bytes_max) => bytes_max,
            // A microbatch within the buffer size is not compared, so that usual steps need no system call.
            None if reads.resident_bytes <= self.settings.buffered_bytes_max() => return Ok(()),
            None => memory_available().unwrap_or(u64::MAX),
        };
        if reads.resident_bytes <= bytes_max {
            return Ok(());
        }
        Err(Error::Plan(PlanError::MicrobatchTooLarge {
            step: plan.step,
            dp_rank: self.settings.dp_rank,
            microbatch,
            samples: reads.samples.len(),
            bytes: reads.resident_bytes,
            bytes_max,
        }))
    }
}
