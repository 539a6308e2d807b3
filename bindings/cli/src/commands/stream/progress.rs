//! Shows how much of a stream is done: samples if an index has counted them, else bytes of the shards.
//!
//! The amount is looked up beside the stream, which does not wait for it, and only for a bar that is visible.
//! A stream whose amount is unknown, such as a pipe, shows the number of samples alone.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use dflop_loader::flow::in_parallel;
use dflop_loader::index::{FoundIndex, Index, IndexOptions, shard_bytes};
use dflop_loader::sample::Sample;
use dflop_loader::shard::Shard;
use indicatif::ProgressBar;

use crate::output::{bar, byte_bar};

/// Number of shards whose lengths are asked for at the same time.
const REQUESTS: usize = 16;

/// What is known about the amount of a stream before anything is read.
#[derive(Debug, Clone)]
pub(super) enum Expected {
    /// The stream has this many samples, unless it ends early.
    Samples(u64),
    /// Every epoch reads these shards.
    Shards { shards: Vec<Shard>, epochs: u64 },
    /// Nothing.
    Unknown,
}

/// Amount of a stream.
#[derive(Debug, PartialEq, Eq)]
enum Total {
    Samples(u64),
    /// Length of each shard in bytes, by URL, and the bytes in all epochs.
    Bytes(HashMap<Arc<str>, u64>, u64),
}

impl Total {
    /// Looks up the amount: in the index if there is one that fits the shards, else as shard lengths. `None`
    /// for streams, unreadable shards, which the stream reports, and streams without end.
    fn find(shards: &[Shard], epochs: u64) -> Option<Self> {
        let options = IndexOptions::default();
        if let FoundIndex::Fresh(_) = Index::find(shards, &options).ok()? {
            let index = Index::open_or_build(shards.to_vec(), &options).ok()?;
            let entries = index.len() + index.skipped().len() as u64;
            return Some(Self::Samples(entries.checked_mul(epochs)?));
        }
        let lengths = in_parallel(REQUESTS, shards, |shard| shard_bytes(shard).ok());
        let lengths: Vec<u64> = lengths.into_iter().collect::<Option<_>>()?;
        let bytes = lengths.iter().sum::<u64>().checked_mul(epochs)?;
        Some(Self::Bytes(shards.iter().map(|shard| shard.url.clone()).zip(lengths).collect(), bytes))
    }
}

/// Bar over a stream.
#[derive(Debug)]
pub(super) struct StreamBar {
    bar: ProgressBar,
    /// The amount, once it is known.
    total: Arc<OnceLock<Total>>,
    has_total: bool,
    read: ReadBytes,
    samples: u64,
}

impl StreamBar {
    /// Draws the bar, and starts to look up the amount.
    pub(super) fn start(expected: Expected) -> Self {
        let total = Arc::new(OnceLock::new());
        let known = match expected {
            Expected::Samples(samples) => Some(samples),
            Expected::Shards { .. } | Expected::Unknown => None,
        };
        let bar = bar("samples", known);
        if let (Expected::Shards { shards, epochs }, false) = (expected, bar.is_hidden()) {
            let total = total.clone();
            // Not waited for: it ends with the process.
            std::thread::spawn(move || Total::find(&shards, epochs).map(|found| total.set(found)));
        }
        Self { bar, total, has_total: known.is_some(), read: ReadBytes::default(), samples: 0 }
    }

    /// Advances by the samples in a batch; `skipped` is the number of skipped samples so far.
    pub(super) fn advance(&mut self, batch: &[Sample], skipped: u64) {
        self.samples += batch.len() as u64;
        if self.bar.is_hidden() {
            return;
        }
        self.read.add(batch);
        let total = self.total.clone();
        match total.get() {
            Some(Total::Samples(samples)) => {
                self.show_total("samples", *samples, bar);
                self.bar.set_position(self.samples + skipped);
            }
            Some(Total::Bytes(lengths, bytes)) => {
                self.show_total("", *bytes, byte_bar);
                self.bar.set_message(format!("{} samples", self.samples));
                self.bar.set_position(self.read.within(lengths));
            }
            None => self.bar.set_position(self.samples),
        }
    }

    /// Replaces the bar by one with a total, once.
    fn show_total(&mut self, what: &str, total: u64, make: fn(&str, Option<u64>) -> ProgressBar) {
        if !self.has_total {
            self.has_total = true;
            let elapsed = self.bar.elapsed();
            self.bar.finish_and_clear();
            self.bar = make(what, Some(total)).with_elapsed(elapsed);
        }
    }

    /// Leaves the bar as it is, above an error.
    pub(super) fn abandon(&self) {
        self.bar.abandon();
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// End of the last sample that was delivered, for every shard and epoch.
#[derive(Debug, Default)]
struct ReadBytes(HashMap<(Arc<str>, u64), u64>);

impl ReadBytes {
    fn add(&mut self, samples: &[Sample]) {
        for sample in samples {
            let end = self.0.entry((sample.shard.clone(), sample.epoch)).or_default();
            *end = (*end).max(sample.offset + sample.bytes);
        }
    }

    /// Sums the ends; offsets in compressed shards, which may be larger than the shard, end with it.
    fn within(&self, lengths: &HashMap<Arc<str>, u64>) -> u64 {
        self.0.iter().map(|((shard, _), end)| lengths.get(shard).map_or(0, |length| *end.min(length))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::shard::expand_shards;
    use dflop_tests::dataset::{Compression, TempDataset};

    fn sample(shard: &Arc<str>, epoch: u64, offset: u64) -> Sample {
        Sample { key: "kite".into(), shard: shard.clone(), offset, epoch, bytes: 10, fields: Vec::new() }
    }

    #[test]
    fn bytes_are_counted_by_shard_and_epoch_in_any_order() {
        let (first, second): (Arc<str>, Arc<str>) = ("a.tar".into(), "b.tar".into());
        let lengths = HashMap::from([(first.clone(), 100), (second.clone(), 50)]);
        let mut read = ReadBytes::default();
        read.add(&[sample(&second, 0, 20), sample(&first, 0, 60), sample(&first, 0, 30)]);
        assert_eq!(read.within(&lengths), 30 + 70);
        read.add(&[sample(&first, 1, 0), sample(&second, 0, 4_000), sample(&"pipe".into(), 0, 8)]);
        assert_eq!(read.within(&lengths), 50 + 70 + 10);
    }

    #[test]
    fn the_amount_comes_from_the_index_else_from_the_lengths_of_the_shards() {
        let data = TempDataset::new(2, 8, Compression::Plain);
        let shards = expand_shards(&[data.pattern()]).unwrap();
        let bytes: u64 = shards.iter().map(|shard| shard.path().unwrap().metadata().unwrap().len()).sum();
        let Some(Total::Bytes(lengths, all)) = Total::find(&shards, 3) else { panic!("no index") };
        assert_eq!((lengths.len(), all), (2, 3 * bytes));
        Index::open_or_build(shards.clone(), &IndexOptions::default()).unwrap();
        assert_eq!(Total::find(&shards, 3), Some(Total::Samples(3 * 16)));
        assert_eq!(Total::find(&shards, u64::MAX), None);
        assert_eq!(Total::find(&expand_shards(&["-"]).unwrap(), 1), None);
    }
}
