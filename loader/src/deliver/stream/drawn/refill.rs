//! Replaces bad samples, so that every batch is full.
//!
//! A bad sample is replaced by the first good sample from half a dataset away on, in index order. This
//! depends on the draw alone: a resumed run, on any number of ranks, has the same batches.

use std::ops::Range;
use std::sync::Arc;

use dflop_samples::sample::Sample;

use super::super::batching::DrawnSlot;
use super::reader::{DrawnReader, DrawnSettings};
use crate::dataset::Dataset;
use crate::decode::{Batch, Collator, PendingBatch, Pixels};
use crate::error::{Error, Result, SelectionError};
use crate::order::StepSample;
use crate::shard::ShardItem;

/// A good sample, with the images in a batch tensor.
type Filled = (Sample, Option<(Arc<Pixels>, Range<usize>)>);

/// Finishes batches of drawn samples.
#[derive(Debug)]
pub(in crate::deliver::stream) struct Refill {
    settings: DrawnSettings,
    /// Reader for replacements, kept while there are any.
    reader: Option<DrawnReader>,
    /// Dataset names, by number.
    names: Vec<Arc<str>>,
}

impl Refill {
    /// Reads nothing before the first bad sample.
    pub(in crate::deliver::stream) fn new(settings: DrawnSettings) -> Self {
        let names = settings.draw.datasets().iter().map(Dataset::name).collect();
        Self { settings, reader: None, names }
    }

    /// Waits for the decoders of a batch, and fills the slots of bad samples.
    ///
    /// # Errors
    /// [`Error::ErrorBudget`] if more samples are bad than the budget allows; [`Error::Selection`] if no
    /// sample in a dataset can replace a bad one; the errors of the reader.
    pub(in crate::deliver::stream) async fn finish(
        &mut self,
        pending: PendingBatch,
        slots: &[DrawnSlot],
        collator: &Collator,
    ) -> Result<Batch> {
        let (batch, is_good) = collator.finish(pending).await?;
        let mut is_good = is_good.into_iter();
        let is_filled: Vec<bool> =
            slots.iter().map(|slot| slot.is_read && is_good.next().unwrap_or(false)).collect();
        count_sources(slots, &is_filled, collator);
        // A batch that ends the stream is not delivered, and not filled.
        collator.skips().check(false)?;
        let sources = slots.iter().map(|slot| self.names[slot.drawn.dataset].clone()).collect();
        if is_filled.iter().all(|is_filled| *is_filled) {
            return Ok(Batch { sources, ..batch });
        }
        let mut good = filled(batch).into_iter();
        let mut samples: Vec<Option<Filled>> =
            is_filled.iter().map(|is_filled| if *is_filled { good.next() } else { None }).collect();
        let mut tries = 0;
        while samples.iter().any(Option::is_none) {
            self.fill(&mut samples, slots, tries, collator).await?;
            tries += 1;
        }
        let (samples, images): (Vec<Sample>, Vec<_>) = samples.into_iter().flatten().unzip();
        let images: Vec<_> = images.into_iter().flatten().collect();
        let pixels = (!images.is_empty()).then(|| collator.gather(&images));
        Ok(Batch { samples, pixels, sources })
    }

    /// Tries the next replacement for each empty slot.
    async fn fill(
        &mut self,
        samples: &mut [Option<Filled>],
        slots: &[DrawnSlot],
        tries: u64,
        collator: &Collator,
    ) -> Result<()> {
        let empty: Vec<usize> = (0..slots.len()).filter(|place| samples[*place].is_none()).collect();
        let draws = empty.iter().map(|place| {
            let bad = slots[*place].drawn;
            let dataset = &self.settings.draw.datasets()[bad.dataset];
            replacement(dataset, bad, tries).ok_or_else(|| no_samples(dataset))
        });
        let draws: Vec<StepSample> = draws.collect::<Result<_>>()?;
        let reader = self.reader.take().unwrap_or_else(|| DrawnReader::new(self.settings.clone()));
        let (reader, items) = reader.read_all(draws).await?;
        self.reader = Some(reader);
        let (mut raw, mut places) = (Vec::new(), Vec::new());
        for (place, item) in empty.into_iter().zip(items) {
            match item {
                ShardItem::Sample(sample) => {
                    raw.push(sample);
                    places.push(place);
                }
                ShardItem::Skipped(skipped) => collator.skips().push(skipped),
            }
        }
        if !raw.is_empty() {
            let mut pending = collator.start(raw).await?;
            if let PendingBatch::Fields(started) = &mut pending {
                collator.transform(started.iter_mut());
            }
            let (batch, is_good) = collator.finish(pending).await?;
            let good = places.into_iter().zip(is_good).filter(|(_, is_good)| *is_good);
            for ((place, _), sample) in good.zip(filled(batch)) {
                samples[place] = Some(sample);
            }
        }
        collator.skips().check(false)
    }
}

/// Counts delivered and bad samples by dataset; a replacement counts as delivered.
fn count_sources(slots: &[DrawnSlot], is_filled: &[bool], collator: &Collator) {
    for (slot, is_filled) in slots.iter().zip(is_filled) {
        let Some(source) = collator.metrics().source(slot.drawn.dataset) else { continue };
        source.deliver(1, 0);
        source.skip(u64::from(!is_filled));
    }
}

/// Pairs the good samples in a batch with the images.
fn filled(batch: Batch) -> Vec<Filled> {
    let pixels = batch.pixels.map(Arc::new);
    let images = |at: usize| pixels.as_ref().map(|pixels| (pixels.clone(), pixels.rows[at].clone()));
    batch.samples.into_iter().enumerate().map(|(at, sample)| (sample, images(at))).collect()
}

/// Returns the sample in the same dataset and epoch that is tried in place of a bad sample; `None` after all.
fn replacement(dataset: &Dataset, bad: StepSample, tries: u64) -> Option<StepSample> {
    let samples = dataset.len();
    let others = samples.checked_sub(1).filter(|others| tries < *others)?;
    let distance = 1 + (samples / 2 + tries) % others;
    let place = (dataset.places_below(bad.sample) + distance) % samples;
    Some(StepSample { sample: dataset.sample_number(place), ..bad })
}

fn no_samples(dataset: &Dataset) -> Error {
    let reason = format!("none of {} samples can be delivered", dataset.len());
    Error::Selection(SelectionError::NoSamples { dataset: dataset.display(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Index, IndexOptions};

    #[test]
    fn every_other_sample_is_tried_once() {
        let directory = tempfile::tempdir().unwrap();
        let shards = directory.path().join("shards");
        let mut writer = crate::write::ShardWriter::builder(&shards).build().unwrap();
        (0..9).try_for_each(|key| writer.write(&format!("{key}"), &[("txt", b"a".as_slice())])).unwrap();
        writer.finish().unwrap();
        let shards = crate::shard::expand_shards(&[shards.to_str().unwrap()]).unwrap();
        let all = Dataset::from(Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap()));
        for samples in 1..9 {
            let part = all.clone().at_places(&(0..samples).collect::<Vec<_>>());
            for bad in 0..samples {
                let bad = StepSample { dataset: 0, epoch: 3, sample: bad };
                let tried = (0..).map_while(|tries| replacement(&part, bad, tries));
                let mut tried: Vec<u64> = tried.map(|tried| tried.sample).collect();
                tried.sort_unstable();
                let others: Vec<u64> = (0..samples).filter(|sample| *sample != bad.sample).collect();
                assert_eq!(tried, others);
            }
        }
    }
}
