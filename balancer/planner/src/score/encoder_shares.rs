//! Estimates the time that a sample adds to a stage, and divides media between encoder ranks.
//!
//! A *pool* holds the media in a slot, in a cell if media stay in their LLM rank, or in the whole batch if
//! the encoder is colocated: its shares are then the same for every LLM. Tiles are divided evenly; media and
//! whole samples are assigned by LPT, those in native resolution by layer time.

use crate::cluster::Placement;
use crate::space::shape::{StageShape, TpTimes};
use crate::space::{Candidate, EncoderSplit, Family, SearchSpace};
use crate::workload::{ENCODERS_MAX, ItemSize};
use dflop_costmodel::MediaUnits;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Media in some samples: tiles or patches, and query-key pairs for native resolution.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MediaLoad {
    pub(crate) tiles: u64,
    pub(crate) pairs: u64,
}

/// Largest rank shares for an encoder in each pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct LargestShares {
    /// Maximum number of tiles on a rank.
    pub(crate) tiles: Vec<u64>,
    /// Slowest rank's time in one layer.
    pub(super) layer_ns: Vec<f64>,
}

/// Media in each pool for an encoder.
pub(super) struct MediaPools<'a> {
    encoder: usize,
    times: &'a TpTimes,
    cells_per_pool: usize,
    sharers: u32,
    pools: Vec<MediaLoad>,
    /// Media that stay on one rank, by pool; empty if tiles are divided.
    whole: Vec<Vec<MediaLoad>>,
    /// Whether a sample's media may have different ranks.
    is_by_medium: bool,
    is_native: bool,
    /// Tile time in a layer, for comparing samples.
    tile_ns: f64,
}

impl MediaLoad {
    /// Adds a sample's media in an encoder.
    pub(crate) fn add(&mut self, media: MediaUnits) {
        self.tiles += u64::from(media.units);
        self.pairs = self.pairs.saturating_add(media.pairs);
    }

    fn layer_ns(self, times: &TpTimes) -> f64 {
        times.layer.at(self.tiles as f64) + self.pairs as f64 * times.pair_ns
    }
}

impl LargestShares {
    /// Adds a pool with these rank shares.
    pub(super) fn push(&mut self, shares: &[MediaLoad], times: &TpTimes) {
        self.tiles.push(shares.iter().map(|share| share.tiles).max().unwrap_or(0));
        self.layer_ns.push(shares.iter().map(|share| share.layer_ns(times)).fold(0.0, f64::max));
    }
}

impl<'a> MediaPools<'a> {
    pub(super) fn new(
        space: &'a SearchSpace<'_>,
        candidate: &Candidate,
        encoder: usize,
        split: EncoderSplit,
    ) -> Self {
        let family = &candidate.family;
        let dp = family.encoders[encoder].dp;
        let (ranks, groups) = (family.llm_dp as usize, candidate.groups());
        let (cells_per_pool, sharers) = match family.placement {
            Placement::Joint => (1, space.llm_shape(family).tp),
            Placement::Disaggregated if family.is_shared(encoder) => (ranks, dp),
            Placement::Disaggregated => (1, 1),
            Placement::Colocated => (groups, dp),
        };
        let pools = Self::empty(space, family, encoder, (groups / cells_per_pool, sharers), split);
        let tile_ns =
            if pools.is_native { UnitTimes::new(space, candidate).media[encoder].unit_ns } else { 1.0 };
        Self { cells_per_pool, tile_ns, ..pools }
    }

    fn empty(
        space: &'a SearchSpace<'_>,
        family: &Family,
        encoder: usize,
        (count, sharers): (usize, u32),
        split: EncoderSplit,
    ) -> Self {
        let is_even = sharers == 1 || split == EncoderSplit::Tile;
        Self {
            encoder,
            times: space.encoder_times(family, encoder),
            cells_per_pool: 1,
            sharers,
            pools: vec![MediaLoad::default(); count],
            whole: vec![Vec::new(); if is_even { 0 } else { count }],
            is_by_medium: split == EncoderSplit::Medium && family.placement == Placement::Joint,
            is_native: space.workload.media(encoder).is_native(),
            tile_ns: 1.0,
        }
    }

    /// Adds the media of a sample in a cell.
    pub(super) fn add(&mut self, cell: usize, item: &ItemSize) {
        let (pool, media) = (cell / self.cells_per_pool, item.media(self.encoder));
        self.pools[pool].add(media);
        let Some(whole) = self.whole.get_mut(pool).filter(|_| media.units > 0) else { return };
        let parts = if self.is_by_medium { media.media.clamp(1, media.units) } else { 1 };
        // Media of one sample are taken to be alike.
        let (tiles, pairs) = (media.units / parts, media.pairs / u64::from(parts));
        let rest = media.units % parts;
        let load = |part: u32| MediaLoad { tiles: u64::from(tiles) + u64::from(part < rest), pairs };
        whole.extend((0..parts).map(load));
    }

    /// Returns the largest shares of the ranks.
    pub(super) fn largest(self) -> LargestShares {
        let mut largest = LargestShares::default();
        if self.whole.is_empty() {
            for MediaLoad { tiles, pairs } in self.pools {
                let tiles = tiles.div_ceil(u64::from(self.sharers));
                let attention_ns = pairs as f64 / f64::from(self.sharers) * self.times.pair_ns;
                largest.tiles.push(tiles);
                largest.layer_ns.push(self.times.layer.at(tiles as f64) + attention_ns);
            }
            return largest;
        }
        let weight = |media: &MediaLoad| {
            (media.tiles as f64 * self.tile_ns + media.pairs as f64 * self.times.pair_ns) as u64
        };
        for whole in self.whole {
            largest.push(&lpt_shares(whole, self.sharers as usize, weight), self.times);
        }
        largest
    }
}

/// Returns the largest shares of the ranks of a colocated encoder; known ones for a batch of the workload.
pub(super) fn phase_shares(
    space: &SearchSpace<'_>,
    family: &Family,
    encoder: usize,
    batch: &[ItemSize],
    split: EncoderSplit,
) -> LargestShares {
    let part = family.encoders[encoder];
    // Other batches are parts of these.
    let key = space.workload.position(batch).map(|at| (at, encoder, part, split == EncoderSplit::Tile));
    let compute = || {
        let mut pools = MediaPools::empty(space, family, encoder, (1, part.dp), split);
        if pools.is_native {
            let share = (space.workload.media(encoder).batch_units / f64::from(part.dp)).max(1.0);
            pools.tile_ns = pools.times.layer.at(share) / share;
        }
        for item in batch {
            pools.add(0, item);
        }
        let LargestShares { tiles, layer_ns } = pools.largest();
        (tiles, layer_ns)
    };
    let (tiles, layer_ns) = match key {
        Some(key) => space.phase_shares.get_or_insert(key, compute),
        None => compute(),
    };
    LargestShares { tiles, layer_ns }
}

/// Assigns media to `ranks` ranks by LPT; returns the rank shares, fewer if there are fewer media.
fn lpt_shares(whole: Vec<MediaLoad>, ranks: usize, weight: impl Fn(&MediaLoad) -> u64) -> Vec<MediaLoad> {
    if whole.len() <= ranks {
        return whole;
    }
    let mut whole: Vec<_> = whole.into_iter().map(|media| Reverse((weight(&media), media))).collect();
    whole.sort_unstable();
    let (seeds, others) = whole.split_at(ranks);
    let mut heap: BinaryHeap<Reverse<(u64, MediaLoad)>> = seeds.to_vec().into();
    for Reverse((weight, media)) in others {
        if let Some(mut least) = heap.peek_mut() {
            let (load, share) = &mut least.0;
            *load += weight;
            share.tiles += media.tiles;
            share.pairs = share.pairs.saturating_add(media.pairs);
        }
    }
    heap.into_iter().map(|Reverse((_, share))| share).collect()
}

/// Time per unit of an encoder's media, and per query-key pair, nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct MediaTimes {
    pub(super) unit_ns: f64,
    pub(super) pair_ns: f64,
}

/// Work in a stage: media per encoder, layer time per token, and time outside the layers per token,
/// nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StageLoad {
    pub(super) media: [MediaTimes; ENCODERS_MAX],
    pub(super) layers: f64,
    pub(super) tokens: f64,
}

/// Unit times at the mean microbatch: the time per unit depends on microbatch size.
pub(super) struct UnitTimes {
    /// Media times per layer, for each encoder.
    pub(super) media: [MediaTimes; ENCODERS_MAX],
    /// Unit time outside the layers, for each encoder.
    unit_end_ns: [f64; ENCODERS_MAX],
    token_ns: f64,
    token_end_ns: f64,
}

impl MediaTimes {
    /// Returns the time for a sample's media.
    pub(super) fn of(&self, media: &MediaUnits) -> f64 {
        f64::from(media.units) * self.unit_ns + media.pairs as f64 * self.pair_ns
    }
}

impl UnitTimes {
    pub(super) fn new(space: &SearchSpace<'_>, candidate: &Candidate) -> Self {
        let family = &candidate.family;
        let llm = space.llm_times(family);
        let tokens = space.workload.batch_tokens / candidate.groups() as f64;
        let (mut media, mut unit_end_ns) = ([MediaTimes::default(); ENCODERS_MAX], [0.0; ENCODERS_MAX]);
        for (encoder, part) in family.encoders.iter().enumerate() {
            let times = space.encoder_times(family, encoder);
            let slots = f64::from(candidate.microbatches) * f64::from(part.dp);
            let share = (space.workload.media(encoder).batch_units / slots).max(1.0);
            media[encoder] = MediaTimes { unit_ns: times.layer.at(share) / share, pair_ns: times.pair_ns };
            unit_end_ns[encoder] = times.outside.at(share) / share;
        }
        Self {
            media,
            unit_end_ns,
            token_ns: llm.layer.at(tokens) / tokens,
            token_end_ns: llm.outside.at(tokens) / tokens,
        }
    }

    /// Returns the time that a sample adds to a stage.
    ///
    /// - `sample_ns`: its attention in one LLM layer
    pub(super) fn of(&self, stage: &StageLoad, item: &ItemSize, sample_ns: f64) -> u64 {
        let tokens = f64::from(item.tokens);
        let layers = stage.layers * (tokens * self.token_ns + sample_ns);
        let media = item.all_media().iter().zip(&stage.media);
        let media: f64 = media.map(|(media, times)| times.of(media)).sum();
        (media + layers + tokens * stage.tokens) as u64
    }

    /// Returns the work in the slowest stage of an LLM with stages of its own: one of layers alone, or the
    /// last, which has the LM head as well.
    pub(super) fn llm_stage(&self, shape: &StageShape) -> StageLoad {
        let inner = StageLoad { layers: shape.inner, ..StageLoad::default() };
        let last = StageLoad { layers: shape.last, tokens: self.token_end_ns, ..StageLoad::default() };
        let token_ns = |stage: &StageLoad| stage.layers * self.token_ns + stage.tokens;
        if token_ns(&inner) > token_ns(&last) { inner } else { last }
    }

    /// Returns the media times in the slowest stage of an encoder with stages of its own: one of layers
    /// alone, or the last, which has the projector as well.
    pub(super) fn encoder_stage(&self, encoder: usize, shape: &StageShape) -> MediaTimes {
        let MediaTimes { unit_ns, pair_ns } = self.media[encoder];
        let last_ns = shape.last * unit_ns + self.unit_end_ns[encoder];
        let is_inner = shape.inner * unit_ns > last_ns;
        let layers = if is_inner { shape.inner } else { shape.last };
        MediaTimes {
            unit_ns: if is_inner { shape.inner * unit_ns } else { last_ns },
            pair_ns: layers * pair_ns,
        }
    }

    /// Lists the stage work for a joint plan; a rank's GPUs share the rank's media.
    pub(super) fn stages_of_joint(&self, space: &SearchSpace<'_>, family: &Family) -> Vec<StageLoad> {
        let llm = space.llm_shape(family);
        let sharers = f64::from(llm.tp);
        let end = |is_end: bool, ns: f64| if is_end { ns } else { 0.0 };
        let of = |stage: usize| {
            let mut load = StageLoad {
                layers: llm.layer_times(stage),
                tokens: end(stage == llm.end(), self.token_end_ns),
                ..StageLoad::default()
            };
            for (encoder, shape) in space.encoder_shapes(family).enumerate() {
                let MediaTimes { unit_ns, pair_ns } = self.media[encoder];
                let end_ns = end(stage == shape.end(), self.unit_end_ns[encoder]);
                load.media[encoder] = MediaTimes {
                    unit_ns: (shape.layer_times(stage) * unit_ns + end_ns) / sharers,
                    pair_ns: shape.layer_times(stage) * pair_ns / sharers,
                };
            }
            load
        };
        (0..llm.layers.len()).map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn largest_share(tiles: &[u64], ranks: usize) -> u64 {
        let samples = tiles.iter().map(|&tiles| MediaLoad { tiles, pairs: 0 }).collect();
        let shares = lpt_shares(samples, ranks, |media| media.tiles);
        shares.iter().map(|share| share.tiles).max().unwrap_or(0)
    }

    #[test]
    fn shares_by_sample_are_whole_samples() {
        assert_eq!(largest_share(&[5, 3, 3, 1], 2), 6);
        assert_eq!(largest_share(&[5, 1], 4), 5);
        assert_eq!(largest_share(&[], 3), 0);
    }

    /// An image with 40 patches takes as long as four with 20, whose attention is a fourth each.
    #[test]
    fn samples_are_shared_by_their_time() {
        let media = |patches: u64| MediaLoad { tiles: patches, pairs: patches * patches };
        let samples = vec![media(20), media(40), media(20), media(20), media(20)];
        let mut shares = lpt_shares(samples, 2, |media| media.pairs);
        shares.sort_unstable();
        assert_eq!(shares, [MediaLoad { tiles: 40, pairs: 1600 }, MediaLoad { tiles: 80, pairs: 1600 }]);
    }
}
