//! Saves and restores the state of a run, as small JSON that is equal on all ranks.
//!
//! A state names the datasets, the draw rules, and the progress in each. It does not depend on ranks, workers
//! or microbatches: a run continues with the same global batches on any number of ranks. Restoring computes
//! no position before the saved position.
//!
//! A changed dataset is rejected, and the shard named, unless the caller accepts it: then that dataset
//! continues with the next epoch, or the current epoch if nothing was drawn from it, and the remaining
//! datasets exactly where they were. A change that keys, offsets and lengths do not show, such as changed
//! pixels in a file of the same length, is not noticed. Different frames from the same videos have different
//! costs and inputs: they are rejected as well, and if they are accepted the run continues exactly where it
//! was.

mod rows;
mod shards;

use std::fmt;

use dflop_samples::media::VideoSampling;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::rows::RowState;
pub(crate) use self::rows::{RowCursors, RowSettings};
use self::shards::ShardList;
use super::epoch::Shuffle;
use super::mixture::{MixRules, Origin, POSITION_MAX};
use super::steps::{StepPositions, StepPositionsInput, Tail};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::index::Index;

/// Increases with every change to the meaning of a state.
const VERSION: u32 = 1;

/// Position of a run.
///
/// Serializes with `serde`, or with [`Self::to_json`] and [`Self::from_json`].
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
/// # use dflop_loader::index::{Index, IndexOptions};
/// # use dflop_loader::{LoaderState, Mixture, StepPlanner};
/// # fn index(samples: usize) -> dflop_loader::Result<Arc<Index>> {
/// #     let directory = tempfile::tempdir().unwrap().keep().join("shards");
/// #     let mut writer = dflop_loader::write::ShardWriter::builder(&directory).build()?;
/// #     (0..samples).try_for_each(|key| writer.write(&format!("kite-{key}"), &[("txt", b"a red kite")]))?;
/// #     writer.finish()?;
/// #     let shards = dflop_loader::shard::expand_shards(&[directory.display().to_string()])?;
/// #     let index = Index::open_or_build(shards, &IndexOptions::default())?;
/// #     std::fs::remove_dir_all(directory.parent().unwrap()).unwrap();
/// #     Ok(Arc::new(index))
/// # }
/// # fn main() -> dflop_loader::Result<()> {
/// # let (photos, clips) = (index(20)?, index(30)?);
/// # let model = || CostModel::new(ModelSpec::preset("omni-7b").unwrap(), DeviceRate::preset("h100").unwrap());
/// let mixture = Mixture::new().dataset(photos, 0.7).dataset(clips, 0.3);
/// let run = StepPlanner::builder(mixture.clone(), model()).global_batch(8).dp_size(2).build()?;
/// let saved: String = run.state(1_000)?.to_json();
///
/// let state = LoaderState::from_json(&saved)?;
/// let again = StepPlanner::builder(mixture, model()).global_batch(8).dp_size(4).restore(state).build()?;
/// assert_eq!(again.first_step(), 1_000);
/// assert_eq!(again.plan(1_000)?.samples, run.plan(1_000)?.samples);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    version: u32,
    /// The next step.
    pub step: u64,
    seed: u64,
    global_batch: u64,
    tail: Tail,
    shuffle: Shuffle,
    first_epoch: u64,
    mixture: MixRules,
    origin: Origin,
    /// Rows of the steps, and the position in them; omitted where steps consist of samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rows: Option<RowState>,
    #[serde(rename = "data_sets")]
    datasets: Vec<DatasetState>,
}

/// A dataset and the progress in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DatasetState {
    fingerprint: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<SplitState>,
    samples: u64,
    /// Epoch and offset of the next draw.
    epoch: u64,
    offset: u64,
    /// Sampling of the counted video frames; null if there are no videos or they were not read.
    #[serde(default, skip_serializing_if = "SavedSampling::is_none")]
    video_sampling: SavedSampling,
    /// Shards of the index; omitted if an earlier dataset has the same index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shards: Option<ShardList>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitState {
    name: String,
    digest: String,
}

/// Settings of the run whose state is saved or restored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunSettings<'a> {
    pub(crate) datasets: &'a [Dataset],
    pub(crate) rules: &'a MixRules,
    pub(crate) seed: u64,
    pub(crate) global_batch: u64,
    pub(crate) tail: Tail,
    pub(crate) shuffle: Shuffle,
    pub(crate) rows: Option<RowSettings>,
}

/// Origin of a restored run, and the step at which it continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Restored {
    pub(crate) origin: Origin,
    pub(crate) first_epoch: u64,
    pub(crate) step: u64,
    pub(crate) rows: RowCursors,
}

fn unfit<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::State { reason: reason.into() })
}

impl LoaderState {
    /// Returns the state as single-line JSON.
    ///
    /// # Panics
    /// Never: it holds only numbers and text.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and text can be written")
    }

    /// Reads a state.
    ///
    /// # Errors
    /// [`Error::State`] if the text is not a state, or has a different version.
    pub fn from_json(document: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let version = serde_json::from_str(document).map(|Versioned { version }| version);
        if let Ok(version) = version
            && version != VERSION
        {
            return unfit(format!("version {version} is not supported, expected {VERSION}"));
        }
        serde_json::from_str(document).or_else(|error| unfit(format!("it is no loader state: {error}")))
    }

    /// Returns the epoch whose first sample begins step 0.
    #[must_use]
    pub fn first_epoch(&self) -> u64 {
        self.first_epoch
    }

    /// Saves the run position before a step; `rows` is the position of a run of rows.
    pub(crate) fn save(
        run: RunSettings<'_>,
        pace: &StepPositions,
        first_epoch: u64,
        step: u64,
        rows: Option<RowCursors>,
    ) -> Result<Self> {
        let draws = match rows {
            Some(rows) => pace.draws_at(rows.next.position),
            None => pace.draws_before(step)?,
        };
        let datasets = run.datasets.iter().zip(draws).enumerate().map(|(at, (dataset, draws))| {
            let state = DatasetState::new(dataset, draws);
            // Parts of an index, such as classes, would repeat the list.
            let is_listed = |other: &Dataset| other.index().fingerprint() == state.fingerprint;
            let shards = state.shards.filter(|_| !run.datasets[..at].iter().any(is_listed));
            DatasetState { shards, ..state }
        });
        Ok(Self {
            version: VERSION,
            step,
            seed: run.seed,
            global_batch: run.global_batch,
            tail: run.tail,
            shuffle: run.shuffle,
            first_epoch,
            mixture: run.rules.clone(),
            origin: pace.origin.clone(),
            datasets: datasets.collect(),
            rows: run.rows.zip(rows).map(|(settings, at)| RowState::new(settings, at, run.datasets)),
        })
    }

    /// Finds the step at which `run` continues from this state.
    pub(crate) fn restore(&self, run: RunSettings<'_>, accepts_changed_data: bool) -> Result<Restored> {
        self.check_settings(&run)?;
        let saved = self.saved_pace(run.rules)?;
        let position = self.position(&saved)?;
        let draws = saved.draws_at(position);
        let counted = self.datasets.iter().map(DatasetState::draws);
        if !draws.iter().copied().eq(counted) {
            return unfit("its epochs and offsets are not those of its step; it was edited");
        }
        let mut changed = Vec::with_capacity(draws.len());
        for (number, (saved, dataset)) in self.datasets.iter().zip(run.datasets).enumerate() {
            let change = saved.change(dataset);
            if let (Some(change), false) = (&change, accepts_changed_data) {
                let reason = format!("dataset {number}, {}, has changed: {change}", dataset.display());
                return unfit(format!("{reason}; accept changed data to go on with its next epoch"));
            }
            let sampling = saved.video_sampling.change(&SavedSampling::of(dataset.index()));
            if let (Some(change), false) = (sampling, accepts_changed_data) {
                let reason = format!("the videos of dataset {number}, {}, {change}", dataset.display());
                return unfit(format!("{reason}; sample them as before, or accept changed data"));
            }
            changed.push(change.is_some());
        }
        let (first_epoch, step, is_changed) = (self.first_epoch, self.step, changed.contains(&true));
        let has_same_rows = self.rows.as_ref().is_none_or(|rows| rows.has_layout(run.rows));
        if self.global_batch == run.global_batch && has_same_rows && !is_changed {
            let rows = self.rows.as_ref().map_or_else(RowCursors::default, RowState::cursors);
            return Ok(Restored { origin: self.origin.clone(), first_epoch, step, rows });
        }
        let next_epoch = |at: usize| self.datasets[at].epoch + u64::from(self.datasets[at].offset > 0);
        let goes_on = |at: usize| {
            if changed[at] { next_epoch(at).saturating_mul(run.datasets[at].len()) } else { draws[at] }
        };
        let phase = saved.layout.phase_at(position);
        let rows = self.rows.as_ref().filter(|_| !is_changed);
        Ok(Restored {
            origin: Origin { step, draws: (0..draws.len()).map(goes_on).collect(), phase },
            first_epoch,
            step,
            rows: rows.map_or_else(RowCursors::default, RowState::moved_origin),
        })
    }

    /// Returns the position of the next draw.
    fn position(&self, pace: &StepPositions) -> Result<u64> {
        match &self.rows {
            Some(rows) => Ok(rows.cursors().next.position),
            None => pace.position(self.step),
        }
    }

    fn check_settings(&self, run: &RunSettings<'_>) -> Result<()> {
        let datasets = self.datasets.len();
        if self.version != VERSION {
            return unfit(format!("version {} is not supported, expected {VERSION}", self.version));
        }
        if self.seed != run.seed {
            return unfit(format!("it has seed {}, and this run has {}", self.seed, run.seed));
        }
        if self.shuffle != run.shuffle {
            return unfit(format!("it has a shuffle {}, and this run has one {}", self.shuffle, run.shuffle));
        }
        if self.tail != run.tail {
            let (saved, asked) = (self.tail.name(), run.tail.name());
            return unfit(format!("it has tail `{saved}`, and this run has `{asked}`"));
        }
        if self.global_batch != run.global_batch && self.tail != Tail::Carry {
            let batches = format!("{}, and this run has {}", self.global_batch, run.global_batch);
            return unfit(format!(
                "it has a global batch of {batches}; only under tail `carry` can it change"
            ));
        }
        if datasets != run.datasets.len() {
            return unfit(format!("it has {datasets} datasets, and this run has {}", run.datasets.len()));
        }
        RowState::check(self.rows.as_ref(), run)?;
        let most = POSITION_MAX / (datasets.max(1) as u64);
        let is_sound = |dataset: &DatasetState| {
            (1..=most).contains(&dataset.samples) && dataset.offset < dataset.samples
        };
        let row = self.rows.as_ref().map_or(0, |rows| rows.cursors().next.position);
        let counts = [self.step, self.first_epoch, self.origin.step, self.origin.phase, row];
        let is_small = counts.iter().chain(&self.origin.draws).all(|&count| count <= POSITION_MAX);
        let fits = self.mixture.fits(datasets) && self.origin.draws.len() == datasets;
        // No dataset was drawn from before the first epoch.
        let is_behind = self.datasets.iter().zip(&self.origin.draws).all(|(dataset, &draws)| {
            self.first_epoch.checked_mul(dataset.samples).is_some_and(|start| draws >= start)
        });
        if self.global_batch == 0 || !is_small || !fits || !is_behind || !self.datasets.iter().all(is_sound) {
            return unfit("its numbers do not fit each other; it was edited");
        }
        Ok(())
    }

    /// Returns the saved run's steps; an error if `rules` would have drawn different samples.
    fn saved_pace(&self, rules: &MixRules) -> Result<StepPositions> {
        let sizes: Vec<u64> = self.datasets.iter().map(|dataset| dataset.samples).collect();
        let pace = |rules: &MixRules| {
            StepPositions::new(StepPositionsInput {
                sizes: &sizes,
                rules,
                origin: &self.origin,
                first_epoch: self.first_epoch,
                global_batch: self.global_batch,
                tail: self.tail,
                seed: self.seed,
            })
        };
        let saved = pace(&self.mixture)?;
        if *rules != self.mixture {
            let position = self.position(&saved)?;
            if !pace(rules)?.layout.agrees_until(&saved.layout, position) {
                let hint = "weights may change from a later step on, and epochs be added";
                return unfit(format!(
                    "by the rules of this mixture its steps would have been others; {hint}"
                ));
            }
        }
        Ok(saved)
    }
}

impl DatasetState {
    fn new(dataset: &Dataset, draws: u64) -> Self {
        let split = dataset.split_name().zip(dataset.split_digest());
        let split =
            split.map(|(name, digest)| SplitState { name: name.into(), digest: format!("{digest:016x}") });
        Self {
            fingerprint: dataset.index().fingerprint().to_owned(),
            split,
            samples: dataset.len(),
            epoch: draws / dataset.len(),
            offset: draws % dataset.len(),
            video_sampling: SavedSampling::of(dataset.index()),
            shards: Some(ShardList::new(dataset.index())),
        }
    }

    fn draws(&self) -> u64 {
        self.epoch.saturating_mul(self.samples).saturating_add(self.offset)
    }

    /// Describes how the dataset has changed since; `None` if it has not.
    fn change(&self, dataset: &Dataset) -> Option<String> {
        let now = Self::new(dataset, 0);
        let lists = self.shards.as_ref().zip(now.shards.as_ref());
        let mut changes = lists.map_or_else(Vec::new, |(saved, now)| saved.changes(now));
        if changes.is_empty() && self.fingerprint != now.fingerprint {
            changes.push("its fingerprint is another".into());
        }
        let name = |split: &Option<SplitState>| split.as_ref().map(|split| split.name.clone());
        if name(&self.split) != name(&now.split) {
            let shown = |split: &Option<SplitState>| {
                name(split).map_or("no split".into(), |name| format!("split `{name}`"))
            };
            changes.push(format!("it is {} now, and was {}", shown(&now.split), shown(&self.split)));
        } else if changes.is_empty() && (self.split != now.split || self.samples != now.samples) {
            changes.push(format!(
                "its split has {} samples and not the same {} as before",
                now.samples, self.samples
            ));
        }
        let first = changes.first()?.clone();
        let more = changes.len() - 1;
        Some(if more == 0 { first } else { format!("{first}, and {more} more changes") })
    }
}

/// Video sampling in an index, in the form in which a state stores it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct SavedSampling(Option<Value>);

impl SavedSampling {
    fn of(index: &Index) -> Self {
        Self(index.video_sampling().and_then(|sampling| serde_json::to_value(sampling).ok()))
    }

    fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Describes how the sampling has changed; `None` if it has not.
    fn change(&self, now: &Self) -> Option<String> {
        (self != now).then(|| format!("were sampled as {self}, and are now as {now}"))
    }
}

impl fmt::Display for SavedSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(value) = &self.0 else { return f.write_str("nothing, undecoded") };
        match serde_json::from_value::<VideoSampling>(value.clone()) {
            Ok(sampling) => write!(f, "{sampling}"),
            Err(_) => write!(f, "{value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(sampling: Option<VideoSampling>) -> SavedSampling {
        SavedSampling(sampling.map(|sampling| serde_json::to_value(sampling).unwrap()))
    }

    #[test]
    fn a_change_names_both() {
        let (rate, spread) = (VideoSampling::default(), VideoSampling::Uniform { frames: 8 });
        let change = saved(Some(rate)).change(&saved(Some(spread))).unwrap();
        let expected =
            "were sampled as 2 frames per second, 64 at most, and are now as 8 frames evenly spread";
        assert_eq!(change, expected);
        let change = saved(None).change(&saved(Some(rate))).unwrap();
        assert_eq!(
            change,
            "were sampled as nothing, undecoded, and are now as 2 frames per second, 64 at most"
        );
        assert_eq!(saved(Some(rate)).change(&saved(Some(rate))), None);
    }

    #[test]
    fn it_comes_back_from_json() {
        let sampling = saved(Some(VideoSampling::Fps { per_second: 0.1, frames_max: 7 }));
        let text = serde_json::to_string(&sampling).unwrap();
        assert_eq!(serde_json::from_str::<SavedSampling>(&text).unwrap(), sampling);
    }
}
