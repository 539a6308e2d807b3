//! Finishes pending step events: waits for decoders, scales the loss, packs tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dflop_costmodel::SampleCost;
use dflop_costmodel::flops::ZigzagSlices;
use dflop_samples::inputs::{Filler, SampleProcessor};
use dflop_samples::media::MediaShape;
use dflop_samples::sample::Sample;
use tokio::sync::mpsc;

use super::read_ahead::{PendingEvent, PendingMicrobatch};
use super::slices::pack_slices;
use super::{BalancedSettings, Microbatch, StepEvent};
use crate::decode::{Collator, FinishedSample};
use crate::error::{Error, PlanError, Result, Skipped};
use crate::flow::{LoaderStage, PrepareLog, SourceMeter, TruncatedSample};
use crate::order::TokenSpan;
use crate::plan::{PadTo, SamplePlace, StepContext, StepPlan, StepPlanner};

/// Finishes events, in order.
pub(super) struct Finisher {
    collator: Collator,
    planner: StepPlanner,
    packing: Packing,
    dp_rank: usize,
    step: Option<StepAtWork>,
}

/// The step whose microbatches are being delivered.
struct StepAtWork {
    plan: Arc<StepPlan>,
    microbatches: usize,
    /// Microbatches that were finished.
    finished: usize,
    /// Payload bytes in the microbatch samples.
    bytes: u64,
}

impl Finisher {
    pub(super) fn new(settings: &BalancedSettings, collator: Collator, log: Arc<PrepareLog>) -> Result<Self> {
        let (planner, packing) = (settings.planner.clone(), Packing::new(settings, log)?);
        Ok(Self { collator, planner, packing, dp_rank: settings.dp_rank, step: None })
    }

    /// Waits for the next pending event and the decoders.
    pub(super) async fn next(
        &mut self,
        events: &mut mpsc::Receiver<Result<PendingEvent>>,
    ) -> Result<Option<StepEvent>> {
        let pending = match events.recv().await.transpose()? {
            None => return Ok(None),
            Some(PendingEvent::Start { plan, microbatches }) => {
                self.check_targets(&plan)?;
                self.step = Some(StepAtWork { plan: plan.clone(), microbatches, finished: 0, bytes: 0 });
                self.end_step();
                return Ok(Some(StepEvent::Start { plan, microbatches }));
            }
            Some(PendingEvent::Microbatch(pending)) => pending,
        };
        let mut microbatch = self.finish(pending).await?;
        if let Some(too_long) = self.packing.too_long(&microbatch) {
            return Err(self.too_long(microbatch, too_long, events).await);
        }
        self.count_sources(&microbatch);
        self.packing.log_cut(&microbatch);
        match &self.step {
            Some(step) if step.plan.context.is_some() => {
                let plan = step.plan.clone();
                self.packing.pack_slices(&self.collator, &mut microbatch, &plan, self.dp_rank).await?;
            }
            _ => self.packing.pack(&self.collator, &mut microbatch).await?,
        }
        let bytes = microbatch.samples.iter().map(|sample| sample.bytes).sum();
        self.collator.metrics().stage(LoaderStage::Deliver).count(microbatch.samples.len() as u64, bytes);
        if let Some(step) = &mut self.step {
            step.finished += 1;
            step.bytes += bytes;
        }
        self.end_step();
        Ok(Some(StepEvent::Microbatch(microbatch)))
    }

    /// Rejects a step without target tokens, where the processor requires targets.
    fn check_targets(&self, plan: &StepPlan) -> Result<()> {
        if plan.target_tokens > 0 || !self.packing.requires_targets() {
            return Ok(());
        }
        let unused: Vec<String> =
            self.planner.datasets().iter().filter_map(|dataset| dataset.index().unused_summary()).collect();
        Err(Error::Plan(PlanError::NoTargets {
            step: plan.step,
            samples: plan.samples.len(),
            unused: unused.join("; "),
        }))
    }

    /// Lets a run continue with the current step if it is not delivered completely.
    pub(super) fn roll_back(&self, at_step: &AtomicU64) {
        if let Some(step) = &self.step {
            at_step.store(step.plan.step, Ordering::Relaxed);
        }
    }

    /// Counts the step, after the last microbatch.
    fn end_step(&mut self) {
        if let Some(step) = self.step.take_if(|step| step.finished == step.microbatches) {
            let meter = self.collator.metrics().stage(LoaderStage::Collate);
            meter.depth.remove(1);
            meter.count(1, step.bytes);
        }
    }

    /// Returns the counters for the dataset of a sample.
    fn source(&self, step: &StepAtWork, place: u32) -> Option<&SourceMeter> {
        self.collator.metrics().source(step.plan.samples[place as usize].dataset)
    }

    /// Counts samples and tokens in a delivered microbatch by dataset.
    fn count_sources(&self, microbatch: &Microbatch) {
        let Some(step) = &self.step else { return };
        for (at, &place) in microbatch.plan_indices.iter().enumerate() {
            let counted = microbatch.prepared.get(at).map(|prepared| prepared.tokens() as u64);
            let tokens = counted.unwrap_or_else(|| u64::from(microbatch.costs[at].tokens));
            // A sample that several ranks share counts once, on the first of them.
            let shared = step.plan.context.as_ref().map(|context| &context.places[place as usize]);
            if shared.is_some_and(|place| place.ranks.start != self.dp_rank) {
                continue;
            }
            if let Some(source) = self.source(step, place) {
                source.deliver(1, tokens);
            }
        }
    }

    async fn finish(&self, pending: PendingMicrobatch) -> Result<Microbatch> {
        let step = self.step.as_ref().ok_or(Error::StageEnded { stage: "collate" })?;
        let (mut samples, mut plan_indices, mut prepared) = (Vec::new(), Vec::new(), Vec::new());
        for (place, sample) in pending.samples {
            let finished = match self.collator.try_finish_sample(sample).await? {
                Ok(finished) => Some(finished),
                Err(field) => {
                    self.check_skipped(step, place, field.as_deref())?;
                    None
                }
            };
            let finished = match (finished, step.plan.span(place)) {
                (Some(finished), Some(span)) => self.cut(finished, span),
                (finished, _) => finished,
            };
            let Some(finished) = finished else {
                if let Some(source) = self.source(step, place) {
                    source.skip(1);
                }
                continue;
            };
            samples.push(finished.sample);
            prepared.extend(finished.prepared);
            plan_indices.push(place);
        }
        self.collator.skips().delivered(samples.len() as u64);
        let costs = plan_indices.iter().map(|&place| step.plan.costs[place as usize]).collect();
        let (planner, target_tokens) = (&self.planner, step.plan.target_tokens);
        let loss_scale_sum =
            if target_tokens == 0 { 0.0 } else { planner.dp_size() as f64 / target_tokens as f64 };
        let microbatch = build_microbatch(samples, costs, loss_scale_sum);
        let is_lockstep = planner.is_lockstep();
        let mut microbatch = Microbatch { plan_indices, prepared, is_lockstep, ..microbatch };
        pad(&mut microbatch, step, self.dp_rank, planner);
        microbatch.module_ns = step.plan.constants.microbatch_ns(microbatch.module_ns);
        self.packing.count_tokens(&mut microbatch);
        if let Some(context) = &step.plan.context {
            self.check_ranks(&microbatch, context)?;
            plan_slices(&mut microbatch, context, self.dp_rank);
        }
        Ok(microbatch)
    }

    /// Refuses samples of other ranks, which have no slice here.
    fn check_ranks(&self, microbatch: &Microbatch, context: &StepContext) -> Result<()> {
        let is_own = |at: &u32| context.places[*at as usize].ranks.contains(&self.dp_rank);
        if microbatch.plan_indices.iter().all(is_own) {
            return Ok(());
        }
        let reason = "samples that ranks share are delivered to these ranks only: plan without `context`";
        Err(Error::Config { setting: "share", reason: reason.into() })
    }

    /// Refuses to skip a sample that other ranks share and do not skip: only the ranks that encode a medium
    /// read it.
    fn check_skipped(&self, step: &StepAtWork, place: u32, field: Option<&str>) -> Result<()> {
        let shared = step.plan.context.as_ref().map(|context| &context.places[place as usize]);
        let (Some(shared), Some(field)) = (shared.filter(|place| place.is_split()), field) else {
            return Ok(());
        };
        let row = self.planner.row(step.plan.samples[place as usize]);
        let is_medium = |extension: &str| {
            let is_media =
                |shape| matches!(shape, MediaShape::Image(_) | MediaShape::Audio(_) | MediaShape::Video(_));
            row.fields().any(|field| field.extension == extension && is_media(field.shape))
        };
        if !field.split(", ").any(is_medium) {
            return Ok(());
        }
        Err(Error::Plan(PlanError::SplitSample {
            step: step.plan.step,
            key: row.key().to_owned(),
            first: shared.ranks.start,
            last: shared.ranks.end - 1,
            reason: format!("`{field}` cannot be used"),
        }))
    }

    /// Cuts the tokens that a row holds out of a document; `None` if it has not as many tokens as were
    /// planned, which makes it a bad sample.
    fn cut(&self, finished: FinishedSample, span: TokenSpan) -> Option<FinishedSample> {
        let FinishedSample { sample, prepared } = finished;
        let Some(document) = prepared else { return Some(FinishedSample { sample, prepared }) };
        let (tokens, planned) = (document.tokens(), span.document_tokens as usize);
        let range = span.start as usize..(span.start + span.tokens) as usize;
        let part = (tokens == planned && tokens > 0).then(|| document.part(range)).flatten();
        if part.is_none() {
            let reason = format!(
                "has {tokens} tokens, and the index counted {planned}: a row holds texts as they were counted, \
                 which no transform or filter changes afterwards"
            );
            let (shard, key) = (sample.shard.to_string(), Some(sample.key.clone()));
            let skipped = Skipped { shard, offset: sample.offset, key, field: None, reason };
            self.collator.metrics().stage(LoaderStage::Decode).fail(1);
            self.collator.skips().push(skipped);
        }
        part.map(|part| FinishedSample { sample, prepared: Some(part) })
    }

    /// Explains which length the step needs, from all microbatches.
    async fn too_long(
        &self,
        microbatch: Microbatch,
        pad_to_tokens: u64,
        events: &mut mpsc::Receiver<Result<PendingEvent>>,
    ) -> Error {
        let Some(step) = &self.step else { return Error::StageEnded { stage: "collate" } };
        let Microbatch { tokens, planned_tokens, .. } = microbatch;
        // Frees the tensors before new tensors are created.
        drop(microbatch);
        let mut tokens_needed = tokens;
        for _ in step.finished + 1..step.microbatches {
            let Some(Ok(PendingEvent::Microbatch(pending))) = events.recv().await else { break };
            let Ok(other) = self.finish(pending).await else { break };
            tokens_needed = tokens_needed.max(other.tokens);
        }
        Error::Plan(PlanError::MicrobatchTooLong {
            step: step.plan.step,
            dp_rank: self.dp_rank,
            microbatch: step.finished,
            tokens,
            planned_tokens,
            pad_to_tokens,
            tokens_needed,
        })
    }
}

/// Adds the padding up to the length that the step was planned for.
fn pad(microbatch: &mut Microbatch, step: &StepAtWork, dp_rank: usize, planner: &StepPlanner) {
    let Some(to) = planner.pad_to() else { return };
    let (samples, tokens) = (microbatch.samples.len(), microbatch.tokens);
    microbatch.padding_tokens = to.padding_tokens(samples, tokens);
    microbatch.module_ns.resize(planner.model().modules().len(), 0);
    if let Some(llm_ns) = microbatch.module_ns.last_mut() {
        // The cost model has to be asked again only where samples were skipped or a different share is read.
        let planned = step.plan.planned_padding_ns(dp_rank, step.finished, &microbatch.plan_indices);
        let padding_ns = planned.unwrap_or_else(|| planner.padding_ns(step.plan.step, samples, tokens));
        *llm_ns = llm_ns.saturating_add(padding_ns);
    }
}

/// Replaces whole samples by this rank's slices in the planned tokens and times.
fn plan_slices(microbatch: &mut Microbatch, context: &StepContext, dp_rank: usize) {
    let own = microbatch.plan_indices.iter().zip(&microbatch.costs);
    let (mut tokens, mut targets, mut slot) = (0, 0, None);
    for (&at, cost) in own {
        let place = &context.places[at as usize];
        let (ranks, rank) = (place.ranks.len() as u64, (dp_rank - place.ranks.start) as u64);
        tokens += u64::from(ZigzagSlices::new(cost.tokens, ranks as u32).tokens(rank as u32));
        let before = |rank: u64| u64::from(cost.target_tokens) * rank / ranks;
        targets += before(rank + 1) - before(rank);
        slot = Some(place.microbatch);
    }
    (microbatch.planned_tokens, microbatch.planned_target_tokens) = (tokens, targets);
    if let Some(slot) = slot {
        microbatch.module_ns.clone_from(&context.times_ns[dp_rank][slot]);
    }
}

fn build_microbatch(samples: Vec<Sample>, costs: Vec<SampleCost>, loss_scale_sum: f64) -> Microbatch {
    let target_tokens = costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
    let modules = costs.first().map_or(0, |cost| cost.module_ns.as_slice().len());
    let module_ns = |module: usize| costs.iter().map(|cost| cost.module_ns.as_slice()[module]).sum();
    let tokens = costs.iter().map(|cost| u64::from(cost.tokens)).sum();
    Microbatch {
        plan_indices: Vec::new(),
        prepared: Vec::new(),
        inputs: None,
        context: None,
        tokens,
        target_tokens,
        padding_tokens: 0,
        planned_tokens: tokens,
        planned_target_tokens: target_tokens,
        module_ns: (0..modules).map(module_ns).collect(),
        is_lockstep: false,
        loss_scale: target_tokens as f64 * loss_scale_sum,
        loss_scale_sum,
        samples,
        costs,
    }
}

/// Packs microbatches, where the loader has a preparer, and counts packed tokens.
struct Packing {
    preparer: Option<Arc<dyn SampleProcessor>>,
    /// Filler for packed microbatches; `None` if samples are left unpacked.
    filler: Option<Arc<Filler>>,
    tokens_max: Option<u64>,
    pad_to: Option<PadTo>,
    requires_targets: bool,
    log: Arc<PrepareLog>,
}

impl Packing {
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) if a processor refuses the blank medium that
    /// microbatches need.
    fn new(settings: &BalancedSettings, log: Arc<PrepareLog>) -> Result<Self> {
        let (planner, preparer) = (&settings.planner, settings.preparer.clone());
        let filler = match &preparer {
            Some(preparer) if settings.is_packed => {
                Some(Arc::new(preparer.filler(planner.required_encoders())?))
            }
            _ => None,
        };
        let (tokens_max, pad_to) = (planner.caps().tokens_max, planner.pad_to());
        let requires_targets = preparer.as_ref().is_some_and(|preparer| preparer.requires_targets());
        Ok(Self { preparer, filler, tokens_max, pad_to, requires_targets, log })
    }

    /// Returns whether a step without a training target is an error.
    fn requires_targets(&self) -> bool {
        self.requires_targets
    }

    /// Replaces the planned microbatch tokens by the counted tokens.
    fn count_tokens(&self, microbatch: &mut Microbatch) {
        if self.preparer.is_none() {
            return;
        }
        let prepared = &microbatch.prepared;
        microbatch.tokens = prepared.iter().map(|sample| sample.tokens() as u64).sum();
        microbatch.target_tokens = prepared.iter().map(|sample| sample.target_tokens() as u64).sum();
        microbatch.loss_scale = microbatch.target_tokens as f64 * microbatch.loss_scale_sum;
        if let Some(to) = self.pad_to {
            microbatch.padding_tokens = to.padding_tokens(microbatch.samples.len(), microbatch.tokens);
        }
    }

    /// Returns the fixed length if a microbatch is longer than the tensors that all ranks count on.
    fn too_long(&self, microbatch: &Microbatch) -> Option<u64> {
        let to = self.pad_to.filter(|to| self.preparer.is_some() && to.layout.is_packed())?;
        let filler = self.filler.as_ref().map_or(0, |filler| filler.tokens_for(&microbatch.prepared));
        (microbatch.tokens + filler > to.tokens).then_some(to.tokens)
    }

    /// Packs the microbatch tensors on the pool.
    async fn pack(&self, collator: &Collator, microbatch: &mut Microbatch) -> Result<()> {
        let Some(preparer) = self.preparer.clone() else { return Ok(()) };
        if let Some(filler) = self.filler.clone() {
            let samples = std::mem::take(&mut microbatch.prepared);
            let inputs = collator.run(move || preparer.pack(samples, &filler)).await?;
            let tokens = inputs.tensor("input_ids").map_or(0, |ids| ids.values.len() as u64);
            microbatch.padding_tokens = tokens.saturating_sub(microbatch.tokens);
            microbatch.inputs = Some(inputs);
        }
        self.count(microbatch);
        Ok(())
    }

    /// Packs this rank's slices on the pool.
    async fn pack_slices(
        &self,
        collator: &Collator,
        microbatch: &mut Microbatch,
        plan: &StepPlan,
        dp_rank: usize,
    ) -> Result<()> {
        let (Some(preparer), Some(filler), Some(context)) =
            (self.preparer.clone(), self.filler.clone(), &plan.context)
        else {
            return Ok(());
        };
        let samples = std::mem::take(&mut microbatch.prepared);
        let places: Vec<SamplePlace> =
            microbatch.plan_indices.iter().map(|&place| context.places[place as usize].clone()).collect();
        let cut = move || pack_slices(&*preparer, samples, &places, dp_rank, &filler);
        let sliced = collator.run(cut).await?.map_err(|(at, reason)| {
            let place = &context.places[microbatch.plan_indices[at] as usize];
            Error::Plan(PlanError::SplitSample {
                step: plan.step,
                key: microbatch.samples[at].key.clone(),
                first: place.ranks.start,
                last: place.ranks.end - 1,
                reason,
            })
        })?;
        let rows = sliced.inputs.tensor("input_ids").map_or(0, |ids| ids.values.len() as u64);
        microbatch.tokens = sliced.tokens;
        microbatch.padding_tokens = rows.saturating_sub(sliced.tokens);
        microbatch.target_tokens = sliced.inputs.target_tokens;
        microbatch.loss_scale = microbatch.target_tokens as f64 * microbatch.loss_scale_sum;
        microbatch.inputs = Some(sliced.inputs);
        microbatch.context = Some(sliced.context);
        self.count(microbatch);
        Ok(())
    }

    /// Writes down which samples were cut.
    fn log_cut(&self, microbatch: &Microbatch) {
        let cut = microbatch.samples.iter().zip(&microbatch.prepared);
        for (sample, prepared) in cut.filter(|(_, prepared)| prepared.cut_tokens > 0) {
            let cut_tokens = prepared.cut_tokens as u64;
            let tokens = prepared.tokens() as u64 + cut_tokens;
            let (shard, key) = (sample.shard.to_string(), sample.key.clone());
            self.log.truncated(TruncatedSample { shard, key, tokens, cut_tokens });
        }
    }

    fn count(&self, microbatch: &Microbatch) {
        let is_over = self.tokens_max.is_some_and(|tokens_max| microbatch.tokens > tokens_max);
        self.log.change(|report| {
            report.samples += microbatch.samples.len() as u64;
            report.tokens += microbatch.tokens;
            report.planned_tokens += microbatch.planned_tokens;
            report.target_tokens += microbatch.target_tokens;
            report.planned_target_tokens += microbatch.planned_target_tokens;
            report.microbatches_over_cap += u64::from(is_over);
            report.microbatch_tokens_max = report.microbatch_tokens_max.max(microbatch.tokens);
        });
    }
}
