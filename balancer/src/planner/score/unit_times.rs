//! Estimates the time that a sample adds to a stage, from times of units at the mean microbatch.

use crate::planner::costs::time_table::TimeTable;
use crate::planner::space::{Candidate, Family, SearchSpace};
use crate::planner::workload::ItemSize;

/// Work of a stage: of a tile, of a pair of its media, of a token in layer times, and of a token outside the
/// layers, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct StageLoad {
    pub(super) tiles: f64,
    pub(super) pairs: f64,
    pub(super) layers: f64,
    pub(super) tokens: f64,
}

/// Times of units at the mean microbatch: the time per unit depends on its size.
pub(super) struct UnitTimes<'a> {
    /// Time of a tile in one layer.
    pub(super) tile_ns: f64,
    /// Time of a query-key pair of the media in one layer.
    pub(super) pair_ns: f64,
    /// Time of a tile outside the layers.
    tile_end_ns: f64,
    token_ns: f64,
    token_end_ns: f64,
    samples: &'a TimeTable,
}

impl<'a> UnitTimes<'a> {
    pub(super) fn new(space: &'a SearchSpace<'_>, candidate: &Candidate) -> Self {
        let family = &candidate.family;
        let [encoder, llm] = space.shapes(family);
        let (encoder, llm) = (&space.encoder.times[encoder.times], &space.llm.times[llm.times]);
        let tokens = space.workload.batch_tokens / candidate.groups() as f64;
        let slots = f64::from(candidate.microbatches) * f64::from(family.encoder_dp);
        let share = (space.workload.batch_tiles / slots).max(1.0);
        Self {
            tile_ns: encoder.layer.at(share) / share,
            pair_ns: encoder.pair_ns,
            tile_end_ns: encoder.outside.at(share) / share,
            token_ns: llm.layer.at(tokens) / tokens,
            token_end_ns: llm.outside.at(tokens) / tokens,
            samples: &llm.sample,
        }
    }

    /// Returns the time that a sample adds to a stage.
    pub(super) fn of(&self, stage: &StageLoad, item: &ItemSize) -> u64 {
        let tokens = f64::from(item.tokens);
        let layers = stage.layers * (tokens * self.token_ns + self.samples.at(tokens));
        let media = f64::from(item.tiles) * stage.tiles + item.pairs as f64 * stage.pairs;
        (media + layers + tokens * stage.tokens) as u64
    }

    /// Lists the work of the stages of a joint plan; a rank's GPUs share its tiles.
    pub(super) fn stages_of_joint(&self, space: &SearchSpace<'_>, family: &Family) -> Vec<StageLoad> {
        let [encoder, llm] = space.shapes(family);
        let end = |is_end: bool, ns: f64| if is_end { ns } else { 0.0 };
        let of = |stage: usize| {
            let tiles =
                encoder.layer_times(stage) * self.tile_ns + end(stage == encoder.end(), self.tile_end_ns);
            StageLoad {
                tiles: tiles / f64::from(llm.tp),
                pairs: encoder.layer_times(stage) * self.pair_ns / f64::from(llm.tp),
                layers: llm.layer_times(stage),
                tokens: end(stage == llm.end(), self.token_end_ns),
            }
        };
        (0..llm.layers.len()).map(of).collect()
    }
}
