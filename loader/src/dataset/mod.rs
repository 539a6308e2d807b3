//! Defines a dataset: an index or a split of an index, repeated without end or for some epochs.

mod cost_table;
mod split;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result, Skipped};
use crate::index::Index;
use crate::shard::Shard;

pub use self::cost_table::cost_table;
pub use self::split::{SPLITS_FILE, Splits};

/// Number of samples per filter call.
const FILTERED_TOGETHER: u64 = 1 << 12;
/// Maximum number of parts that a dataset is divided into; each is a dataset in the states of a run.
const PARTS_MAX: usize = 1 << 12;

/// Dataset to draw from.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use dflop_loader::{Dataset, Splits};
/// # use dflop_loader::index::{Index, IndexOptions};
/// # fn main() -> dflop_loader::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let mut writer = dflop_loader::write::ShardWriter::builder(&directory.path().join("shards")).build()?;
/// # (0..20).try_for_each(|key| writer.write(&format!("kite-{key}"), &[("txt", b"a red kite")]))?;
/// # writer.finish()?;
/// # let pattern = directory.path().join("shards").display().to_string();
/// let shards = dflop_loader::shard::expand_shards(&[pattern])?;
/// let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default())?);
/// let text = r#"{"splits": {"train": {"fraction": [0, 0.5]}, "held_out": {"fraction": [0.5, 1]}}}"#;
/// let splits = Splits::parse(text)?;
/// let train = Dataset::from(index.clone()).split(&splits, "train")?.repeat(3);
/// let held_out = Dataset::from(index.clone()).split(&splits, "held_out")?;
/// assert_eq!(train.len() + held_out.len(), index.len());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Dataset {
    index: Arc<Index>,
    selection: Arc<Selection>,
    split: Option<Arc<str>>,
    skipped: Arc<[Skipped]>,
    repeat: Option<u64>,
    filtered: u64,
    name: Option<Arc<str>>,
}

impl From<Arc<Index>> for Dataset {
    /// Selects all samples in an index, without end.
    fn from(index: Arc<Index>) -> Self {
        let selection = Arc::new(Selection::All { samples: index.len() });
        let skipped = index.skipped().into();
        Self { index, selection, split: None, skipped, repeat: None, filtered: 0, name: None }
    }
}

impl Dataset {
    /// Keeps the samples in a split.
    ///
    /// # Errors
    /// [`crate::error::Error::Config`] if there is no split with this name, if it is empty, or if it names
    /// shards or keys that the index does not have.
    pub fn split(mut self, splits: &Splits, name: &str) -> Result<Self> {
        let (selection, skipped) = splits.select(name, &self.index)?;
        (self.selection, self.skipped) = (Arc::new(selection), skipped.into());
        self.split = Some(name.into());
        Ok(self)
    }

    /// Keeps the samples that a function selects. The function is called with runs of sample numbers in the
    /// index, and must be pure and identical on all ranks; a state contains a digest of the kept samples.
    ///
    /// # Errors
    /// The function error; [`Error::Config`] if the function returns a wrong number of answers, or keeps no
    /// sample.
    pub fn filter(mut self, keep: impl FnMut(&[u64]) -> Result<Vec<bool>>) -> Result<Self> {
        let samples = self.len();
        let answers = self.answers("filter", keep)?;
        let kept = answers.into_iter().filter(|(_, is_kept)| *is_kept).map(|(number, _)| number);
        let kept: Vec<u32> = kept.collect();
        if kept.is_empty() {
            let reason = format!("it keeps none of {samples} samples of {}", self.display());
            return Err(Error::Config { setting: "filter", reason });
        }
        self.filtered += samples - kept.len() as u64;
        Ok(self.part(kept, "filtered"))
    }

    /// Divides the samples by label into datasets, in label order. The function is called as by
    /// [`Self::filter`].
    ///
    /// # Errors
    /// The function error; [`Error::Config`] if the function returns a wrong number of labels, or more than
    /// 4,096 different labels.
    pub(crate) fn parts<L: Ord + Display>(
        &self,
        setting: &'static str,
        label: impl FnMut(&[u64]) -> Result<Vec<L>>,
    ) -> Result<Vec<(L, Self)>> {
        let mut parts: BTreeMap<L, Vec<u32>> = BTreeMap::new();
        for (number, label) in self.answers(setting, label)? {
            parts.entry(label).or_default().push(number);
            if parts.len() > PARTS_MAX {
                let reason = format!("more than {PARTS_MAX} different values divide {}", self.display());
                return Err(Error::Config { setting, reason });
            }
        }
        let (name, mut rest) = (self.name(), self.clone());
        let part = |(label, numbers): (L, Vec<u32>)| {
            let part = rest.clone().part(numbers, &label.to_string()).named(format!("{name}/{label}"));
            // Samples that are left out are counted once, with the first part.
            (rest.skipped, rest.filtered) = (Arc::default(), 0);
            (label, part)
        };
        Ok(parts.into_iter().map(part).collect())
    }

    /// Returns the answers of a function for all samples, by sample number.
    fn answers<T>(
        &self,
        setting: &'static str,
        mut ask: impl FnMut(&[u64]) -> Result<Vec<T>>,
    ) -> Result<Vec<(u32, T)>> {
        let mut answers = Vec::new();
        let (mut place, samples) = (0, self.len());
        while place < samples {
            let end = samples.min(place + FILTERED_TOGETHER);
            let numbers: Vec<u64> = (place..end).map(|place| self.sample_number(place)).collect();
            let answer = ask(&numbers)?;
            if answer.len() != numbers.len() {
                let reason = format!("it returned {} values for {} samples", answer.len(), numbers.len());
                return Err(Error::Config { setting, reason });
            }
            for (number, answer) in numbers.into_iter().zip(answer) {
                let number = u32::try_from(number).map_err(|_| {
                    let reason = "an index of more than 2^32 samples cannot be filtered or divided".into();
                    Error::Config { setting, reason }
                })?;
                answers.push((number, answer));
            }
            place = end;
        }
        Ok(answers)
    }

    /// Keeps ascending sample numbers, which `name` describes in messages and states.
    fn part(mut self, numbers: Vec<u32>, name: &str) -> Self {
        self.selection = Arc::new(Selection::List(numbers));
        let name = self.split.as_deref().map_or_else(|| name.to_owned(), |split| format!("{split}, {name}"));
        self.split = Some(name.into());
        self
    }

    /// Keeps the samples at ascending `places`, counted over the dataset samples.
    ///
    /// # Panics
    /// If a place is not below [`Self::len`].
    #[must_use]
    pub fn at_places(mut self, places: &[u64]) -> Self {
        let numbers: Vec<u64> = places.iter().map(|&place| self.sample_number(place)).collect();
        let runs = numbers.into_iter().map(|number| number..number + 1);
        self.selection = Arc::new(Selection::ranges(runs));
        self.split = Some(self.split.as_deref().unwrap_or("places").into());
        self
    }

    /// Sets the dataset name in metrics and microbatches. Default: the first shard's directory.
    #[must_use]
    pub fn named(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Returns the dataset name.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        self.name.clone().unwrap_or_else(|| directory_name(self.index.shards()))
    }

    /// Returns the number of samples that filters removed.
    #[must_use]
    pub fn filtered(&self) -> u64 {
        self.filtered
    }

    /// Sets the number of dataset epochs that a run draws. Default: without end.
    #[must_use]
    pub fn repeat(mut self, epochs: u64) -> Self {
        self.repeat = Some(epochs);
        self
    }

    /// Returns the index.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Returns the split name; `None` for a whole index.
    #[must_use]
    pub fn split_name(&self) -> Option<&str> {
        self.split.as_deref()
    }

    /// Returns the number of samples.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty split is refused")]
    pub fn len(&self) -> u64 {
        self.selection.len()
    }

    /// Returns the number of epochs that a run draws; `None` if it has no end.
    #[must_use]
    pub fn epochs(&self) -> Option<u64> {
        self.repeat
    }

    /// Returns the index number of the sample at `place`, counted over the split samples in index order.
    ///
    /// # Panics
    /// If `place` is not below [`Self::len`].
    #[must_use]
    pub fn sample_number(&self, place: u64) -> u64 {
        assert!(place < self.len(), "sample {place} is outside a dataset of {}", self.len());
        self.selection.sample_at(place)
    }

    /// Returns the dataset samples and shards whose headers show damage.
    #[must_use]
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Returns the selected index samples.
    pub(crate) fn selection(&self) -> &Arc<Selection> {
        &self.selection
    }

    /// Counts the dataset samples below an index sample number.
    pub(crate) fn places_below(&self, sample: u64) -> u64 {
        self.selection.places_below(sample)
    }

    /// Returns the digest of the selected samples; `None` for a whole index.
    pub(crate) fn split_digest(&self) -> Option<u64> {
        self.split.is_some().then(|| self.selection.digest())
    }

    /// Returns whether `other` has the same samples.
    pub(crate) fn has_same_samples(&self, other: &Self) -> bool {
        self.index.fingerprint() == other.index.fingerprint() && self.selection == other.selection
    }

    /// Describes the dataset in messages: first shard and split.
    pub(crate) fn display(&self) -> String {
        let shards = crate::shard::display_shards(self.index.shards());
        self.split.as_ref().map_or(shards.clone(), |split| format!("{shards} (split `{split}`)"))
    }
}

/// Returns the name of the directory that contains the first shard, or the shard name if there is no
/// directory.
fn directory_name(shards: &[Shard]) -> Arc<str> {
    let Some(first) = shards.first() else { return "nothing".into() };
    let path = first.url.split(['?', '#']).next().unwrap_or_default();
    let path = path.split_once("://").map_or(path, |(_, path)| path);
    let mut parts = path.rsplit('/').filter(|part| !part.is_empty() && *part != ".");
    let shard = parts.next().unwrap_or(path);
    parts.next().unwrap_or(shard).into()
}

/// Makes names unique: a repeated name receives a number, as in `photos#2`.
pub(crate) fn make_unique(names: impl Iterator<Item = Arc<str>>) -> Vec<Arc<str>> {
    let mut unique: Vec<Arc<str>> = Vec::new();
    for name in names {
        let numbered = |number: usize| -> Arc<str> { format!("{name}#{number}").into() };
        let candidates = std::iter::once(name.clone()).chain((2..).map(numbered));
        unique.extend(candidates.into_iter().find(|candidate| !unique.contains(candidate)));
    }
    unique
}

/// Index samples in index order, renumbered from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Every sample.
    All { samples: u64 },
    /// Ascending, non-empty ranges of sample numbers, each with the number of selected samples before it.
    Ranges { ranges: Vec<(u64, Range<u64>)>, samples: u64 },
    /// Sample numbers, ascending.
    List(Vec<u32>),
}

impl Selection {
    /// Selects ascending ranges.
    pub(crate) fn ranges(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut samples = 0;
        let counted = ranges.into_iter().filter(|range| !range.is_empty()).map(|range| {
            let before = samples;
            samples += range.end - range.start;
            (before, range)
        });
        let ranges = counted.collect();
        Self::Ranges { ranges, samples }
    }

    /// Returns the number of selected samples.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::All { samples } | Self::Ranges { samples, .. } => *samples,
            Self::List(list) => list.len() as u64,
        }
    }

    /// Returns the index number of the sample at a place in the selection, which is below the selection
    /// length.
    pub(crate) fn sample_at(&self, place: u64) -> u64 {
        match self {
            Self::All { .. } => place,
            Self::Ranges { ranges, .. } => {
                let (before, range) = &ranges[ranges.partition_point(|(before, _)| *before <= place) - 1];
                range.start + place - before
            }
            Self::List(list) => u64::from(list[place as usize]),
        }
    }

    /// Counts the selected samples below a sample number.
    pub(crate) fn places_below(&self, sample: u64) -> u64 {
        match self {
            Self::All { .. } => sample,
            Self::Ranges { ranges, .. } => {
                let at = ranges.partition_point(|(_, range)| range.start < sample);
                let Some((before, range)) = at.checked_sub(1).map(|at| &ranges[at]) else { return 0 };
                before + sample.min(range.end) - range.start
            }
            Self::List(list) => list.partition_point(|&listed| u64::from(listed) < sample) as u64,
        }
    }

    /// Returns a digest over the selected samples.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        match self {
            Self::All { samples } => hasher.update(&samples.to_le_bytes()),
            Self::Ranges { ranges, .. } => ranges.iter().for_each(|(_, range)| {
                hasher.update(&range.start.to_le_bytes());
                hasher.update(&range.end.to_le_bytes());
            }),
            Self::List(list) => list.iter().for_each(|sample| hasher.update(&sample.to_le_bytes())),
        }
        hasher.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::expand_shards;

    #[test]
    fn the_directory_of_the_first_shard_names_a_dataset() {
        let directory = tempfile::tempdir().unwrap();
        let photos = directory.path().join("photos");
        std::fs::create_dir(&photos).unwrap();
        std::fs::write(photos.join("000.tar"), []).unwrap();
        let shards = expand_shards(&[photos.display().to_string()]).unwrap();
        assert_eq!(&*directory_name(&shards), "photos");
        assert_eq!(&*directory_name(&[]), "nothing");
    }

    #[test]
    fn equal_names_are_numbered() {
        let names = ["a", "b", "a", "a#2", "a"].map(Arc::from);
        let unique = make_unique(names.into_iter());
        let unique: Vec<&str> = unique.iter().map(|name| &**name).collect();
        assert_eq!(unique, ["a", "b", "a#2", "a#2#2", "a#3"]);
    }
}
