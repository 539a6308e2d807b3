//! Cuts decoded samples into full batches: the next good sample replaces a bad sample.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use dflop_samples::sample::Sample;
use tokio::sync::mpsc::{Receiver, UnboundedSender};

use super::super::batching::BegunBatch;
use super::super::lock;
use super::super::stream_state::{Progressed, Tracker};
use crate::dataset::Dataset;
use crate::decode::{Batch, Collator, Pixels};
use crate::error::{Error, Result, SelectionError};
use crate::flow::LoaderStage;

/// Cuts the samples in begun batches into delivered batches.
#[derive(Debug)]
pub(in crate::deliver::stream) struct Refill {
    batch_size: u64,
    /// Samples that the pass has still to deliver.
    left: u64,
    /// Good samples from batches that had too few samples.
    waiting: VecDeque<WaitingSample>,
    /// Progress after the last good sample.
    behind: SampleProgress,
    /// Requests samples in place of bad samples.
    replace: UnboundedSender<u64>,
    bad_in_a_row: u64,
    /// Bad samples in a row after which none is expected to be good.
    bad_in_a_row_max: u64,
    /// Dataset name, for messages.
    dataset: String,
}

/// Reading and shuffling up to a sample, and samples skipped meanwhile.
#[derive(Debug, Default)]
struct SampleProgress {
    progressed: Progressed,
    skipped: u64,
}

#[derive(Debug)]
struct WaitingSample {
    sample: Sample,
    /// The sample images, in the tensor of the begun batch.
    images: Option<(Arc<Pixels>, Range<usize>)>,
    progress: SampleProgress,
}

impl Refill {
    /// Starts with a batch size and the number of samples to deliver.
    pub(in crate::deliver::stream) fn new(
        (batch_size, left): (usize, u64),
        dataset: &Dataset,
        replace: UnboundedSender<u64>,
    ) -> Self {
        Self {
            batch_size: batch_size as u64,
            left,
            waiting: VecDeque::new(),
            behind: SampleProgress::default(),
            replace,
            bad_in_a_row: 0,
            bad_in_a_row_max: dataset.len().saturating_mul(2),
            dataset: dataset.display(),
        }
    }

    /// Waits for the next batch; `None` after the last.
    pub(in crate::deliver::stream) async fn next(
        &mut self,
        begun: &mut Receiver<Result<BegunBatch>>,
        collator: &Collator,
        tracker: &Mutex<Tracker>,
    ) -> Result<Option<Batch>> {
        let size = self.batch_size.min(self.left);
        if size == 0 {
            return Ok(None);
        }
        while (self.waiting.len() as u64) < size {
            let begun = begun.recv().await.transpose()?.ok_or(Error::StageEnded { stage: "read" })?;
            if let Some(batch) = self.take(begun, collator, tracker, size).await? {
                self.left -= size;
                return Ok(Some(batch));
            }
        }
        self.left -= size;
        let mut progress = SampleProgress::default();
        let chosen: Vec<_> = self.waiting.drain(..size as usize).collect();
        let (mut samples, mut images) = (Vec::with_capacity(chosen.len()), Vec::new());
        for waiting in chosen {
            progress.append(waiting.progress);
            samples.push(waiting.sample);
            images.extend(waiting.images);
        }
        advance(tracker, collator, progress, size);
        let pixels = (!images.is_empty()).then(|| collator.gather(&images));
        Ok(Some(Batch { samples, pixels }))
    }

    /// Waits for the decoders of a begun batch. Returns the batch if it is delivered unchanged, else keeps
    /// the samples.
    async fn take(
        &mut self,
        begun: BegunBatch,
        collator: &Collator,
        tracker: &Mutex<Tracker>,
        size: u64,
    ) -> Result<Option<Batch>> {
        let skips = collator.skips();
        let mut progress = Vec::with_capacity(begun.steps.len());
        for mut progressed in begun.steps {
            let skipped = progressed.skipped.len() as u64;
            progressed.skipped.drain(..).for_each(|skipped| skips.push(skipped));
            progress.push(SampleProgress { progressed, skipped });
        }
        let (batch, is_good) = collator.finish(begun.batch).await?;
        let good = batch.samples.len() as u64;
        let bytes = batch.samples.iter().map(|sample| sample.bytes).sum();
        let meter = collator.metrics().stage(LoaderStage::Collate);
        meter.depth.remove(1);
        meter.count(1, bytes);
        skips.check(false)?;
        self.count_bad(&is_good)?;
        if good == size && is_good.len() as u64 == size && self.waiting.is_empty() {
            let mut whole = std::mem::take(&mut self.behind);
            for progress in progress {
                whole.append(progress);
            }
            advance(tracker, collator, whole, size);
            return Ok(Some(batch));
        }
        let bad = is_good.len() as u64 - good;
        if bad > 0 {
            // Fails after the last batch only, when the reading task has ended.
            let _ = self.replace.send(bad);
        }
        self.keep(batch, &is_good, progress);
        Ok(None)
    }

    fn keep(&mut self, batch: Batch, is_good: &[bool], progress: Vec<SampleProgress>) {
        let pixels = batch.pixels.map(Arc::new);
        let mut samples = batch.samples.into_iter().enumerate();
        for (progress, is_good) in progress.into_iter().zip(is_good) {
            self.behind.append(progress);
            if !is_good {
                self.behind.skipped += 1;
                continue;
            }
            let Some((at, sample)) = samples.next() else { return };
            let images = pixels.as_ref().map(|pixels| (pixels.clone(), pixels.rows[at].clone()));
            let progress = std::mem::take(&mut self.behind);
            self.waiting.push_back(WaitingSample { sample, images, progress });
        }
    }

    /// Counts bad samples in a row, so that a dataset without a good sample ends.
    fn count_bad(&mut self, is_good: &[bool]) -> Result<()> {
        for is_good in is_good {
            self.bad_in_a_row = if *is_good { 0 } else { self.bad_in_a_row + 1 };
        }
        if self.bad_in_a_row < self.bad_in_a_row_max {
            return Ok(());
        }
        let reason = format!("{} in a row could not be decoded", self.bad_in_a_row);
        Err(Error::Selection(SelectionError::NoSamples { dataset: self.dataset.clone(), reason }))
    }
}

impl SampleProgress {
    fn append(&mut self, later: Self) {
        self.progressed.append(later.progressed);
        self.skipped += later.skipped;
    }
}

fn advance(tracker: &Mutex<Tracker>, collator: &Collator, progress: SampleProgress, delivered: u64) {
    let mut tracker = lock(tracker);
    tracker.advance(progress.progressed, delivered, progress.skipped);
    // Bad samples are found ahead of the batch; the state reports the first bad sample if it counts any.
    if tracker.skipped() > 0 {
        tracker.note_first(collator.skips().first());
    }
}
