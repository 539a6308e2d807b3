//! Runs user code in the pipeline: the code changes decoded fields, or decodes fields itself, in batches.
//!
//! Runs user code on separate threads, fed through a bounded queue.
//!
//! A [`Transform`] processes the fields that a [`FieldSelection`] selects, a [`SampleTransform`] whole
//! samples, from a batch or from a microbatch in a balanced loader. It runs after decoding and built-in image
//! augmentation, and before a [`SampleProcessor`](dflop_samples::inputs::SampleProcessor), as soon as a batch
//! is read rather than when it is requested. Read-ahead is bounded as it is without transforms, so a slow
//! transform stalls the reader. The bytes that it allocates are not known in advance: memory is bounded by
//! the number of batches in flight.
//!
//! ```text
//! batch ─▶ decode pool ─▶ transform threads: transforms in order, calls of at most `items_max` fields or
//! samples ─▶ prepare
//! ```
//!
//! - A transform that [takes encoded](Transform::takes_encoded) fields is a *decoder*: it replaces the
//!   built-in decoder for these fields. Decoders run before all remaining transforms; if a field has several
//!   decoders, only the first runs. The remaining transforms run in the order in which they were added.
//! - An error for a single field or sample, or a panic, makes the samples bad: they are recorded like fields
//!   that cannot be decoded, under the error budget. A call that fails as a whole, or returns a wrong number
//!   of results, ends the stream with [`Error::UserCode`].
//! - A single thread makes calls in batch order; several threads work on different batches, or on different
//!   fields in the same batch.
//! - Random numbers drawn from [`TransformInput::seed`] are the same on any number of ranks, workers and
//!   threads, and after a restore.

mod batch;

use super::{Decode, Decoded, FieldError};
use crate::error::{BoxError, Error, Result, check_at_most};
use crate::flow::{JobQueue, Jobs, LoaderStage, Metrics};
use crate::shard::FieldSelection;
use dflop_samples::media::codec::modality_extensions;
use dflop_samples::media::{Media, Modality};
use dflop_samples::sample::{Field, Sample};
use std::any::Any;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

pub(crate) use batch::TransformStage;

/// Maximum number of transform threads.
const THREADS_MAX: u64 = 1_024;
/// Maximum number of fields or samples per call.
const ITEMS_MAX: u64 = 1 << 20;

/// Field passed to user code.
#[derive(Debug, Clone, PartialEq)]
pub struct TransformInput {
    /// Sample key.
    pub key: String,
    /// Shard URL.
    pub shard: Arc<str>,
    /// Field extension in lower case, such as `jpg` or `seg.png`.
    pub extension: Arc<str>,
    /// Sample epoch, from 0.
    pub epoch: u64,
    /// Seed derived from the configured seed, different for every sample, epoch, field and transform. All
    /// randomness in the transform must come from it.
    pub seed: u64,
    /// Field content; stored bytes as [`Media::Opaque`] for a decoder, and where nothing is decoded.
    pub media: Media,
}

/// Contract violation in [`Transform::apply`] or [`SampleTransform::apply`] that ends the stream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum TransformFault {
    /// The number of results differs from the number of fields or samples in the call.
    #[error("expected {expected} results, one per field or sample, got {given}")]
    Answers { expected: usize, given: usize },
}

/// User code that changes or decodes fields.
pub trait Transform: Debug + Send + Sync {
    /// Returns whether the transform is a decoder, which receives fields as stored. Called once, when a
    /// loader is built.
    fn takes_encoded(&self) -> bool {
        false
    }

    /// Changes fields from different samples; returns one result per field, in the same order.
    ///
    /// Called on a transform thread, on several at a time if so configured. It may block: read-ahead waits
    /// for it.
    ///
    /// # Errors
    /// An inner error makes the field's sample bad; the outer error ends the stream with [`Error::UserCode`].
    fn apply(&self, fields: Vec<TransformInput>) -> Result<Vec<Result<Media, BoxError>>, BoxError>;
}

/// Loader transforms, with thread count, call size and seed.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use dflop_loader::error::BoxError;
/// use dflop_loader::media::Media;
/// use dflop_loader::shard::FieldSelection;
/// use dflop_loader::decode::{Transform, TransformInput, Transforms};
///
/// #[derive(Debug)]
/// struct Upper;
/// impl Transform for Upper {
///     fn apply(&self, fields: Vec<TransformInput>) -> Result<Vec<Result<Media, BoxError>>, BoxError> {
///         let upper = |input: TransformInput| match input.media {
///             Media::Text(text) => Ok(Media::Text(text.to_uppercase())),
///             _ => Err(format!("`{}` is not a text", input.extension).into()),
///         };
///         Ok(fields.into_iter().map(upper).collect())
///     }
/// }
/// let transforms = Transforms::new().add(FieldSelection::new(["txt"])?, Arc::new(Upper)).items_max(16);
/// assert!(!transforms.is_empty());
/// # Ok::<(), dflop_loader::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Transforms {
    list: Vec<AddedTransform>,
    threads: usize,
    items_max: usize,
    /// Base seed; `None` means the loader's seed.
    seed: Option<u64>,
}

/// Transform with a position.
#[derive(Debug, Clone)]
struct AddedTransform {
    code: UserCode,
    /// Position in addition order, part of the transform's seed.
    number: u64,
}

/// User code with an input selection.
#[derive(Debug, Clone)]
enum UserCode {
    Fields { fields: FieldSelection, transform: Arc<dyn Transform>, is_decoder: bool },
    Samples(Arc<dyn SampleTransform>),
}

impl AddedTransform {
    /// Returns the fields that the code processes; `None` for whole samples.
    fn selection(&self) -> Option<&FieldSelection> {
        match &self.code {
            UserCode::Fields { fields, .. } => Some(fields),
            UserCode::Samples(_) => None,
        }
    }

    fn wants(&self, extension: &str) -> bool {
        self.selection().is_none_or(|fields| fields.wants(extension))
    }

    fn is_decoder(&self) -> bool {
        matches!(self.code, UserCode::Fields { is_decoder: true, .. })
    }
}

impl Default for Transforms {
    fn default() -> Self {
        Self { list: Vec::new(), threads: 1, items_max: 64, seed: None }
    }
}

impl Transforms {
    /// Creates an empty list of transforms.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a transform for the selected fields, after all transforms added before.
    #[must_use]
    pub fn add(mut self, fields: FieldSelection, transform: Arc<dyn Transform>) -> Self {
        let is_decoder = transform.takes_encoded();
        self.push(UserCode::Fields { fields, transform, is_decoder });
        self
    }

    /// Adds a transform for whole samples, after all transforms added before.
    #[must_use]
    pub fn add_samples(mut self, transform: Arc<dyn SampleTransform>) -> Self {
        self.push(UserCode::Samples(transform));
        self
    }

    fn push(&mut self, code: UserCode) {
        let number = self.list.len() as u64;
        self.list.push(AddedTransform { code, number });
    }

    /// Sets the number of threads that run transforms, separate from the decode pool. Default: 1, because
    /// Python's interpreter lock lets one thread run at a time, and more threads would only contend for the
    /// lock.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the maximum number of fields, or samples, per transform call. Default: 64.
    #[must_use]
    pub fn items_max(mut self, items: usize) -> Self {
        self.items_max = items;
        self
    }

    /// Sets the base seed for [`TransformInput::seed`] and [`SampleInput::seed`]. Default: the stream
    /// `transforms` derived from the loader's seed.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the seed, unless a seed was set.
    pub(crate) fn or_seed(mut self, seed: u64) -> Self {
        self.seed.get_or_insert(seed);
        self
    }

    /// Returns whether there is no transform.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Checks the settings, and that they are compatible with the decode mode.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub(crate) fn check(&self, decode: Decode) -> Result<()> {
        for (setting, value, most) in [
            ("transforms.threads", self.threads, THREADS_MAX),
            ("transforms.items_max", self.items_max, ITEMS_MAX),
        ] {
            check_at_most(setting, value as u64, most)?;
            if value == 0 {
                return Err(Error::Config { setting, reason: "must be at least 1".into() });
            }
        }
        let mut of_fields = self.list.iter().filter(|of| of.selection().is_some());
        let images = modality_extensions(Modality::Image);
        let of_images = of_fields.any(|of| images.iter().any(|extension| of.wants(extension)));
        if matches!(decode, Decode::Pixels { .. }) && of_images {
            let reason = "images that are decoded into one tensor pass no transform: name other fields, or decode to \
                          `Media`, and resize and collate images there";
            return Err(Error::Config { setting: "transforms", reason: reason.into() });
        }
        Ok(())
    }

    /// Returns the field selections of all field transforms.
    pub(crate) fn selections(&self) -> impl Iterator<Item = &FieldSelection> {
        self.list.iter().filter_map(AddedTransform::selection)
    }

    /// Returns whether any transform processes the field.
    pub(crate) fn takes(&self, extension: &str) -> bool {
        self.list.iter().any(|of| of.wants(extension))
    }

    /// Returns whether a transform decodes the field.
    pub(crate) fn decodes(&self, extension: &str) -> bool {
        self.decoder_index(extension).is_some()
    }

    /// Returns the index of the transform that decodes the field.
    fn decoder_index(&self, extension: &str) -> Option<usize> {
        self.list.iter().position(|of| of.is_decoder() && of.wants(extension))
    }

    /// Returns whether the transform at an index runs on the field.
    fn runs_on(&self, at: usize, extension: &str) -> bool {
        let of = &self.list[at];
        if of.is_decoder() { self.decoder_index(extension) == Some(at) } else { of.wants(extension) }
    }

    /// Moves decoders to the front, keeping the order otherwise.
    fn in_order(mut self) -> Self {
        self.list.sort_by_key(|of| !of.is_decoder());
        self
    }
}

/// Fields of one sample that are being transformed.
#[derive(Debug)]
pub(crate) struct PendingTransforms {
    answer: oneshot::Receiver<Result<Result<Decoded, FieldError>>>,
    _task: Arc<AbortOnDrop>,
}

/// Aborts a task when its last waiter is dropped.
#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PendingTransforms {
    /// Waits for the last transform and for the preparer.
    pub(crate) async fn finish(self) -> Result<Result<Decoded, FieldError>> {
        self.answer.await.unwrap_or(Err(Error::StageEnded { stage: "transform" }))
    }
}

/// Sample passed to user code.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleInput {
    /// Sample with decoded fields, but without the images that share a tensor.
    pub sample: Sample,
    /// Seed derived from the configured seed, different for every sample, epoch and transform. All randomness
    /// in the transform must come from it.
    pub seed: u64,
}

/// Result for a sample: the new fields, or `None` to drop it.
pub type SampleAnswer = Result<Option<Vec<Field>>, BoxError>;

/// User code that changes whole samples.
pub trait SampleTransform: Debug + Send + Sync {
    /// Changes samples; returns one result per sample, in the same order.
    ///
    /// Fields may be changed, added and removed. A sample answered with `None` is counted as dropped, outside
    /// the error budget. Called on a transform thread, on several at a time if so configured. It may block:
    /// read-ahead waits for it.
    ///
    /// # Errors
    /// An inner error makes the sample bad; the outer error ends the stream with [`crate::Error::UserCode`].
    fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError>;
}

/// Number of queued calls per thread, in addition to the running call.
const CALLS_WAITING: usize = 2;

/// User code result, or the panic message.
type CallAnswer<T> = Result<T, String>;

type Call = Box<dyn FnOnce() + Send>;

/// Fixed number of threads that call transforms; they end after the pool and the last call are dropped.
#[derive(Debug)]
struct TransformPool {
    calls: JobQueue<Call>,
    metrics: Arc<Metrics>,
}

impl TransformPool {
    fn new(threads: usize, metrics: Arc<Metrics>) -> Result<Self> {
        let (calls, queue) = JobQueue::<Call>::new(threads * CALLS_WAITING);
        metrics.transforms_on(threads);
        for number in 0..threads {
            let (queue, metrics) = (queue.clone(), metrics.clone());
            let run = move || work(queue, &metrics);
            let thread = std::thread::Builder::new().name(format!("dflop-transform-{number}")).spawn(run);
            thread.map_err(|error| Error::Config {
                setting: "transforms.threads",
                reason: format!("thread {number} of {threads} could not be started: {error}"),
            })?;
        }
        Ok(Self { calls, metrics })
    }

    /// Submits a call as soon as there is room; it is skipped if the result was dropped before it starts.
    ///
    /// - `items`: number of fields or samples in the call
    async fn submit<T: Send + 'static>(
        &self,
        items: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<CallAnswer<T>>> {
        let since = Instant::now();
        let room = self.calls.room().await;
        self.metrics.stage(LoaderStage::Transform).waited_for_room(since.elapsed());
        let (answer, pending) = oneshot::channel();
        let metrics = self.metrics.clone();
        let call = move || {
            if answer.is_closed() {
                return;
            }
            let meter = metrics.stage(LoaderStage::Transform);
            meter.depth.add(1);
            let called = meter.timed(|| catch_unwind(AssertUnwindSafe(work)));
            meter.depth.remove(1);
            meter.count(items as u64, 0);
            drop(answer.send(called.map_err(|panic| panic_message(&*panic))));
        };
        let is_queued = self.calls.push(room, Box::new(call));
        if is_queued { Ok(pending) } else { Err(Error::StageEnded { stage: "transform" }) }
    }
}

fn work(queue: Jobs<Call>, metrics: &Metrics) {
    let mut idle_since = Instant::now();
    for call in queue {
        metrics.stage(LoaderStage::Transform).waited_for_input(idle_since.elapsed());
        call();
        idle_since = Instant::now();
    }
}

/// Returns a panic message.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    words.map_or_else(|| "the transform panicked".into(), |words| format!("the transform panicked: {words}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Keep {
        is_decoder: bool,
    }

    impl Transform for Keep {
        fn takes_encoded(&self) -> bool {
            self.is_decoder
        }

        fn apply(&self, fields: Vec<TransformInput>) -> Result<Vec<Result<Media, BoxError>>, BoxError> {
            Ok(fields.into_iter().map(|input| Ok(input.media)).collect())
        }
    }

    #[test]
    fn decoders_stand_in_front_and_the_first_has_the_field() {
        let add = |transforms: Transforms, (name, is_decoder)| {
            transforms.add(FieldSelection::new([name]).unwrap(), Arc::new(Keep { is_decoder }))
        };
        let added = [("images", false), ("jpg", true), ("txt", false), ("images", true)];
        let transforms = added.into_iter().fold(Transforms::new(), add).in_order();
        let numbers_of = |extension| -> Vec<u64> {
            let runs = (0..transforms.list.len()).filter(|&at| transforms.runs_on(at, extension));
            runs.map(|at| transforms.list[at].number).collect()
        };
        assert_eq!(numbers_of("0.jpg"), [1, 0]);
        assert_eq!(numbers_of("png"), [3, 0]);
        assert_eq!(numbers_of("txt"), [2]);
        assert!(transforms.decodes("png") && !transforms.decodes("txt"));
        assert!(transforms.takes("txt") && !transforms.takes("wav"));
    }
}
