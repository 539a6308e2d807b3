//! Selects the index samples that belong to a dataset: all, whole shards, or a list.

use std::ops::Range;

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
