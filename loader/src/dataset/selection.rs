//! Which samples of an index belong to a dataset: all, whole shards, or a list.

use std::ops::Range;

use crate::order::Shuffle;

/// Samples of an index, in its order, renumbered from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Every sample.
    All { samples: u64 },
    /// Ranges of sample numbers, ascending, none empty; each with the number of selected samples before it.
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

    /// Number of samples selected.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::All { samples } | Self::Ranges { samples, .. } => *samples,
            Self::List(list) => list.len() as u64,
        }
    }

    /// Number in the index of the sample at a place of the selection, which is below its length.
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

    /// Number of selected samples below a sample number.
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

    /// Cuts the selection, in its own numbers, into the blocks of a shuffle. `shards` are the samples of every
    /// shard of the index, and whether it is compressed.
    pub(crate) fn blocks(&self, shuffle: Shuffle, shards: &[(Range<u64>, bool)]) -> Vec<Range<u64>> {
        let is_seekable = shards.iter().all(|(_, is_compressed)| !is_compressed);
        let places = |range: &Range<u64>| self.places_below(range.start)..self.places_below(range.end);
        match shuffle {
            Shuffle::None => vec![0..self.len()],
            Shuffle::Global if is_seekable => vec![0..self.len()],
            Shuffle::Global => shards.iter().map(|(range, _)| places(range)).collect(),
            Shuffle::Blocks { block_samples, .. } => {
                let runs = shards.iter().flat_map(|(range, is_compressed)| {
                    let Range { start, end } = places(range);
                    let length = if *is_compressed { end - start } else { block_samples };
                    let starts = (start..end).step_by(length.max(1) as usize);
                    starts.map(move |at| at..end.min(at.saturating_add(length)))
                });
                runs.collect()
            }
        }
    }

    /// A digest of what is selected.
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

    #[test]
    fn a_list_and_the_ranges_that_it_fills_are_cut_alike() {
        let shards = [(0..10, false), (10..16, true), (16..30, false)];
        let ranges = Selection::ranges([2..5, 5..5, 12..16, 20..21]);
        let list = Selection::List(vec![2, 3, 4, 12, 13, 14, 15, 20]);
        assert_eq!((ranges.len(), list.len()), (8, 8));
        for place in 0..8 {
            assert_eq!(ranges.sample_at(place), list.sample_at(place));
        }
        for shuffle in [Shuffle::Global, Shuffle::Blocks { block_samples: 2, open_blocks: 1 }, Shuffle::None]
        {
            assert_eq!(ranges.blocks(shuffle, &shards), list.blocks(shuffle, &shards), "{shuffle:?}");
        }
        let runs = list.blocks(Shuffle::Blocks { block_samples: 2, open_blocks: 1 }, &shards);
        assert_eq!(runs, [0..2, 2..3, 3..7, 7..8]);
    }
}
