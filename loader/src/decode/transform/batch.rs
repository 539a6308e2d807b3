//! The transforms of one batch, a task of its own from its decoding to its delivery.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::pool::{CallAnswer, TransformPool};
use super::{TransformFault, TransformInput, Transforms};
use crate::decode::fields::{Decoded, FieldError, PendingFields, Preparing};
use crate::error::{Error, Result, reason_of};
use crate::flow::{Metrics, Stage};
use crate::media::Media;
use crate::media::augment::field_seed;
use crate::shard::RawSample;

/// Runs transforms of batches.
#[derive(Debug)]
pub(crate) struct TransformStage {
    transforms: Transforms,
    pool: TransformPool,
    /// Of the last batches, as many as there are threads: each resolves when its batch is transformed.
    turns: Mutex<VecDeque<oneshot::Receiver<()>>>,
}

/// When a batch may begin with its transforms, and what says that it is done with them.
///
/// As many batches as there are threads are transformed at the same time, in the order in which they were begun: none
/// overtakes one that is waited for earlier, and one thread makes its calls in the order of samples.
struct Turn {
    before: Option<oneshot::Receiver<()>>,
    done: oneshot::Sender<()>,
}

/// What becomes of the fields of a sample.
#[derive(Debug)]
pub(crate) struct PendingTransforms {
    answer: oneshot::Receiver<Result<Result<Decoded, FieldError>>>,
    _task: Arc<AbortOnDrop>,
}

/// Ends a task that nobody waits for.
#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PendingTransforms {
    /// Waits for the last transform, and the preparer.
    pub(crate) async fn finish(self) -> Result<Result<Decoded, FieldError>> {
        self.answer.await.unwrap_or(Err(Error::StageEnded { stage: "transform" }))
    }
}

/// A sample between two transforms.
struct Moving {
    raw: RawSample,
    outcome: Result<Decoded, FieldError>,
}

/// Where a field of a call lies: sample and field.
type FieldPlace = (usize, usize);

impl TransformStage {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] if one cannot be started.
    pub(crate) fn new(transforms: &Transforms, metrics: Arc<Metrics>) -> Result<Option<Arc<Self>>> {
        if transforms.is_empty() {
            return Ok(None);
        }
        let pool = TransformPool::new(transforms.threads, metrics)?;
        Ok(Some(Arc::new(Self { transforms: transforms.clone().in_order(), pool, turns: Mutex::default() })))
    }

    /// Whether a field is kept from the built-in decoder.
    pub(crate) fn decodes(&self, extension: &str) -> bool {
        self.transforms.decodes(extension)
    }

    /// Starts the transforms of samples that are being decoded, in a task that ends with the last of the answers.
    ///
    /// The samples come without their undecoded bytes.
    pub(crate) fn begin(
        self: &Arc<Self>,
        samples: Vec<(RawSample, PendingFields)>,
        preparing: Option<Preparing>,
    ) -> Vec<PendingTransforms> {
        let (senders, answers): (Vec<_>, Vec<_>) = samples.iter().map(|_| oneshot::channel()).unzip();
        let (stage, turn) = (self.clone(), self.turn());
        let task = tokio::spawn(async move {
            match stage.run(samples, turn, preparing).await {
                Ok(outcomes) => {
                    for (sender, outcome) in senders.into_iter().zip(outcomes) {
                        drop(sender.send(Ok(outcome)));
                    }
                }
                // The first sample is waited for first; the others are not asked for any more.
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

    fn turn(&self) -> Turn {
        let (done, is_done) = oneshot::channel();
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = turns.len() == self.transforms.threads;
        let before = if is_full { turns.pop_front() } else { None };
        turns.push_back(is_done);
        Turn { before, done }
    }

    async fn run(
        &self,
        samples: Vec<(RawSample, PendingFields)>,
        turn: Turn,
        preparing: Option<Preparing>,
    ) -> Result<Vec<Result<Decoded, FieldError>>> {
        let mut moving = Vec::with_capacity(samples.len());
        for (raw, fields) in samples {
            moving.push(Moving { raw, outcome: fields.finish().await? });
        }
        if let Some(before) = turn.before {
            // One that was given up is done as well.
            let _ = before.await;
        }
        for at in 0..self.transforms.list.len() {
            self.apply(at, &mut moving).await?;
        }
        drop(turn.done);
        let Some(preparing) = preparing else {
            return Ok(moving.into_iter().map(|sample| sample.outcome).collect());
        };
        preparing.run(moving.into_iter().map(|sample| (sample.raw, sample.outcome)).collect()).await
    }

    /// Runs one transform over all of its fields, in as many calls as it takes.
    async fn apply(&self, at: usize, samples: &mut [Moving]) -> Result<()> {
        let of = &self.transforms.list[at];
        let mut calls = Vec::new();
        for (places, fields) in self.take_fields(at, samples) {
            calls.push((places, self.pool.submit(of.transform.clone(), fields).await?));
        }
        for (places, answer) in calls {
            let answer = answer.await.map_err(|_| Error::StageEnded { stage: "transform" })?;
            let failed = |source| Error::Transform { fields: of.fields.to_string(), source };
            put_back(samples, &places, answer).map_err(failed)?;
        }
        Ok(())
    }

    /// Takes the fields of a transform out of the samples that are still good, cut into calls.
    fn take_fields(&self, at: usize, samples: &mut [Moving]) -> Vec<(Vec<FieldPlace>, Vec<TransformInput>)> {
        let mut calls: Vec<(Vec<FieldPlace>, Vec<TransformInput>)> = Vec::new();
        for (sample, Moving { raw, outcome }) in samples.iter_mut().enumerate() {
            let Ok((fields, _)) = outcome else { continue };
            for (number, field) in fields.iter_mut().enumerate() {
                if !self.transforms.runs_on(at, &field.extension) {
                    continue;
                }
                if calls.last().is_none_or(|(places, _)| places.len() == self.transforms.fields_max) {
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
        field_seed(self.transforms.seed, raw.id(), raw.epoch, extension, number)
    }
}

/// Puts the answers of a call where its fields lay; the first fault of a sample is its reason.
///
/// # Errors
/// Why the call as a whole is no answer.
fn put_back(
    samples: &mut [Moving],
    places: &[FieldPlace],
    answer: CallAnswer,
) -> Result<(), crate::error::BoxError> {
    let answers = match answer {
        Ok(answers) => {
            answers?.into_iter().map(|answer| answer.map_err(|error| reason_of(&*error))).collect()
        }
        Err(panic) => vec![Err(panic); places.len()],
    };
    if answers.len() != places.len() {
        return Err(TransformFault::Answers { expected: places.len(), given: answers.len() }.into());
    }
    for (&(sample, field), answer) in places.iter().zip(answers) {
        let outcome = &mut samples[sample].outcome;
        let Ok((fields, _)) = outcome else { continue };
        match answer {
            Ok(media) => fields[field].media = media,
            Err(reason) => {
                let field = Some(fields[field].extension.to_string());
                *outcome = Err(FieldError { field, reason, is_dropped: false, stage: Stage::Transform });
            }
        }
    }
    Ok(())
}
