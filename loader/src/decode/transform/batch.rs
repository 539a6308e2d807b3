//! Runs a batch's transforms in a task, from decoding to delivery.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dflop_samples::media::Media;
use dflop_samples::media::augment::field_seed;
use dflop_samples::sample::{Field, Sample};
use tokio::sync::oneshot;

use super::{
    AbortOnDrop, CallAnswer, PendingTransforms, SampleInput, SampleTransform, Transform, TransformFault,
    TransformInput, TransformPool, Transforms, UserCode,
};
use crate::decode::{Decoded, FieldError, PendingFields, PrepareStage};
use crate::error::{BoxError, Error, Result, UserCodeError, error_reason};
use crate::flow::{LoaderStage, Metrics};
use crate::shard::{FieldSelection, RawSample};

/// Runs batch transforms on a thread pool.
#[derive(Debug)]
pub(crate) struct TransformStage {
    transforms: Transforms,
    pool: TransformPool,
    /// Completion signals for the last batches, one per thread: each resolves when the batch is transformed.
    tickets: Mutex<VecDeque<oneshot::Receiver<()>>>,
    /// Whether any sample had a field for the transform, in `transforms` order.
    has_field: Vec<AtomicBool>,
}

/// Permission for a batch to start transforms, and the signal that it is done.
///
/// The number of batches transformed at the same time equals the number of threads, in the order in which the
/// batches were started. No batch overtakes a batch that is awaited earlier, and a single thread processes
/// calls in sample order.
struct BatchTicket {
    before: Option<oneshot::Receiver<()>>,
    done: oneshot::Sender<()>,
}

/// A sample between two transforms.
struct SampleInTransit {
    raw: RawSample,
    outcome: Result<Decoded, FieldError>,
}

/// Field position in a call: sample index and field index.
type FieldPlace = (usize, usize);

impl TransformStage {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] if a thread cannot be started.
    pub(crate) fn new(transforms: &Transforms, metrics: Arc<Metrics>) -> Result<Option<Arc<Self>>> {
        if transforms.is_empty() {
            return Ok(None);
        }
        let pool = TransformPool::new(transforms.threads, metrics)?;
        let has_field = transforms.list.iter().map(|_| AtomicBool::new(false)).collect();
        let transforms = transforms.clone().in_order();
        Ok(Some(Arc::new(Self { transforms, pool, tickets: Mutex::default(), has_field })))
    }

    /// Returns whether a transform, not the built-in decoder, decodes a field.
    pub(crate) fn decodes(&self, extension: &str) -> bool {
        self.transforms.decodes(extension)
    }

    /// Returns the fields of a transform whose fields occurred in no sample.
    pub(crate) fn without_field(&self) -> Option<&FieldSelection> {
        let mut unused = self.transforms.list.iter().zip(&self.has_field);
        unused.find_map(|(of, has_field)| of.selection().filter(|_| !has_field.load(Ordering::Relaxed)))
    }

    fn note_fields(&self, sample: &RawSample) {
        for (of, has_field) in self.transforms.list.iter().zip(&self.has_field) {
            let is_found = has_field.load(Ordering::Relaxed);
            if !is_found && sample.fields.iter().any(|field| of.wants(&field.extension)) {
                has_field.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Starts the transforms for samples that are being decoded, in a task that ends with the last result.
    ///
    /// The samples come without undecoded bytes, which would otherwise stay in memory.
    pub(crate) fn start(
        self: &Arc<Self>,
        samples: Vec<(RawSample, PendingFields)>,
        preparing: Option<PrepareStage>,
    ) -> Vec<PendingTransforms> {
        for (sample, _) in &samples {
            self.note_fields(sample);
        }
        let (senders, answers): (Vec<_>, Vec<_>) = samples.iter().map(|_| oneshot::channel()).unzip();
        let (stage, ticket) = (self.clone(), self.take_ticket());
        let task = tokio::spawn(async move {
            match stage.run(samples, ticket, preparing).await {
                Ok(outcomes) => {
                    for (sender, outcome) in senders.into_iter().zip(outcomes) {
                        drop(sender.send(Ok(outcome)));
                    }
                }
                // The error ends the stream when the first sample is awaited; the other channels just close.
                Err(error) => {
                    let mut senders: VecDeque<_> = senders.into();
                    if let Some(first) = senders.pop_front() {
                        drop(first.send(Err(error)));
                    }
                }
            }
        });
        let task = Arc::new(AbortOnDrop(task.abort_handle()));
        answers.into_iter().map(|answer| PendingTransforms { answer, _task: task.clone() }).collect()
    }

    fn take_ticket(&self) -> BatchTicket {
        let (done, is_done) = oneshot::channel();
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = tickets.len() == self.transforms.threads;
        // With `n` threads, the batch waits for the batch `n` places earlier.
        let before = if is_full { tickets.pop_front() } else { None };
        tickets.push_back(is_done);
        BatchTicket { before, done }
    }

    async fn run(
        &self,
        samples: Vec<(RawSample, PendingFields)>,
        ticket: BatchTicket,
        preparing: Option<PrepareStage>,
    ) -> Result<Vec<Result<Decoded, FieldError>>> {
        let mut in_transit = Vec::with_capacity(samples.len());
        for (raw, fields) in samples {
            in_transit.push(SampleInTransit { raw, outcome: fields.finish().await? });
        }
        if let Some(before) = ticket.before {
            // An aborted batch drops its sender, which resolves this with an error; it counts as done.
            let _ = before.await;
        }
        for at in 0..self.transforms.list.len() {
            self.apply(at, &mut in_transit).await?;
        }
        // Preparation does not need the threads of transforms, so the next batch may start.
        drop(ticket.done);
        let Some(preparing) = preparing else {
            return Ok(in_transit.into_iter().map(|sample| sample.outcome).collect());
        };
        preparing.run(in_transit.into_iter().map(|sample| (sample.raw, sample.outcome)).collect()).await
    }

    /// Runs a single transform on all selected fields or samples, in as many calls as needed.
    async fn apply(&self, at: usize, samples: &mut [SampleInTransit]) -> Result<()> {
        match &self.transforms.list[at].code {
            UserCode::Fields { fields, transform, .. } => {
                self.apply_to_fields(at, (fields, transform), samples).await
            }
            UserCode::Samples(transform) => self.apply_to_samples(at, transform, samples).await,
        }
    }

    async fn apply_to_fields(
        &self,
        at: usize,
        (selection, transform): (&FieldSelection, &Arc<dyn Transform>),
        samples: &mut [SampleInTransit],
    ) -> Result<()> {
        let mut calls = Vec::new();
        // All calls are submitted before the first result is awaited, so that threads can share a batch.
        for (places, fields) in self.take_fields(at, samples) {
            let transform = transform.clone();
            let call = self.pool.submit(fields.len(), move || transform.apply(fields)).await?;
            calls.push((places, call));
        }
        for (places, answer) in calls {
            let answer = answer.await.map_err(|_| Error::StageEnded { stage: "transform" })?;
            let failed =
                |source| Error::UserCode(UserCodeError::Transform { fields: selection.to_string(), source });
            put_back(samples, &places, answer).map_err(failed)?;
        }
        Ok(())
    }

    async fn apply_to_samples(
        &self,
        at: usize,
        transform: &Arc<dyn SampleTransform>,
        samples: &mut [SampleInTransit],
    ) -> Result<()> {
        let mut calls = Vec::new();
        for (places, inputs) in self.take_samples(at, samples) {
            let transform = transform.clone();
            let call = self.pool.submit(inputs.len(), move || transform.apply(inputs)).await?;
            calls.push((places, call));
        }
        for (places, answer) in calls {
            let answer = answer.await.map_err(|_| Error::StageEnded { stage: "transform" })?;
            let failed = |source| {
                Error::UserCode(UserCodeError::Transform { fields: "whole samples".to_owned(), source })
            };
            let answers = item_results(answer, places.len()).map_err(failed)?;
            for (place, answer) in places.into_iter().zip(answers) {
                samples[place].outcome = sample_outcome(answer);
            }
        }
        Ok(())
    }

    /// Moves the fields out of the samples that are still good, split into calls.
    fn take_samples(
        &self,
        at: usize,
        samples: &mut [SampleInTransit],
    ) -> Vec<(Vec<usize>, Vec<SampleInput>)> {
        let mut inputs = Vec::new();
        for (place, SampleInTransit { raw, outcome }) in samples.iter_mut().enumerate() {
            let Ok((fields, _)) = outcome else { continue };
            let sample = Sample::from_raw(raw.clone(), raw.bytes(), std::mem::take(fields));
            inputs.push((place, SampleInput { sample, seed: self.seed(at, raw, "") }));
        }
        let (mut calls, mut inputs) = (Vec::new(), inputs.into_iter().peekable());
        while inputs.peek().is_some() {
            calls.push(inputs.by_ref().take(self.transforms.items_max).unzip());
        }
        calls
    }

    /// Moves a transform's fields out of the samples that are still good, split into calls.
    fn take_fields(
        &self,
        at: usize,
        samples: &mut [SampleInTransit],
    ) -> Vec<(Vec<FieldPlace>, Vec<TransformInput>)> {
        let mut calls: Vec<(Vec<FieldPlace>, Vec<TransformInput>)> = Vec::new();
        for (sample, SampleInTransit { raw, outcome }) in samples.iter_mut().enumerate() {
            let Ok((fields, _)) = outcome else { continue };
            for (number, field) in fields.iter_mut().enumerate() {
                if !self.transforms.runs_on(at, &field.extension) {
                    continue;
                }
                if calls.last().is_none_or(|(places, _)| places.len() == self.transforms.items_max) {
                    calls.push(Default::default());
                }
                let Some((places, inputs)) = calls.last_mut() else { continue };
                places.push((sample, number));
                inputs.push(TransformInput {
                    key: raw.key.clone(),
                    shard: raw.shard.clone(),
                    extension: field.extension.clone(),
                    epoch: raw.epoch,
                    seed: self.seed(at, raw, &field.extension),
                    media: std::mem::replace(&mut field.media, Media::Opaque(Bytes::new())),
                });
            }
        }
        calls
    }

    fn seed(&self, at: usize, raw: &RawSample, extension: &str) -> u64 {
        let number = self.transforms.list[at].number;
        field_seed(self.transforms.seed.unwrap_or_default(), raw.id(), raw.epoch, extension, number)
    }
}

/// Puts call results back into the samples; a sample's first error is kept as the reason.
///
/// # Errors
/// The reason why the call as a whole failed.
fn put_back(
    samples: &mut [SampleInTransit],
    places: &[FieldPlace],
    answer: CallAnswer<Result<Vec<Result<Media, BoxError>>, BoxError>>,
) -> Result<(), BoxError> {
    let answers = item_results(answer, places.len())?;
    for (&(sample, field), answer) in places.iter().zip(answers) {
        let outcome = &mut samples[sample].outcome;
        let Ok((fields, _)) = outcome else { continue };
        match answer {
            Ok(media) => fields[field].media = media,
            Err(reason) => {
                let field = Some(fields[field].extension.to_string());
                *outcome =
                    Err(FieldError { field, reason, is_dropped: false, stage: LoaderStage::Transform });
            }
        }
    }
    Ok(())
}

/// Returns the call results, with reasons for failed items; a panic fails all items.
///
/// # Errors
/// The reason why the call as a whole failed.
fn item_results<T>(
    answer: CallAnswer<Result<Vec<Result<T, BoxError>>, BoxError>>,
    expected: usize,
) -> Result<Vec<Result<T, String>>, BoxError> {
    let answers: Vec<_> = match answer {
        Ok(answers) => {
            answers?.into_iter().map(|answer| answer.map_err(|error| error_reason(&*error))).collect()
        }
        Err(panic) => (0..expected).map(|_| Err(panic.clone())).collect(),
    };
    if answers.len() != expected {
        return Err(TransformFault::Answers { expected, given: answers.len() }.into());
    }
    Ok(answers)
}

/// Converts a sample's result to an outcome.
fn sample_outcome(answer: Result<Option<Vec<Field>>, String>) -> Result<Decoded, FieldError> {
    let fault =
        |reason, is_dropped| FieldError { field: None, reason, is_dropped, stage: LoaderStage::Transform };
    match answer {
        Ok(Some(fields)) => Ok((fields, None)),
        Ok(None) => Err(fault("a transform left it out".to_owned(), true)),
        Err(reason) => Err(fault(reason, false)),
    }
}
