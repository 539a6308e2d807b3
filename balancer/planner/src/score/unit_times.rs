//! Estimates the time that a sample adds to a stage, from unit times at the mean microbatch.

use crate::costs::time_table::TimeTable;
use crate::item_size::ENCODERS_MAX;
use crate::space::{Candidate, Family, SearchSpace};
use crate::workload::ItemSize;
use dflop_costmodel::MediaUnits;

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
pub(super) struct UnitTimes<'a> {
    /// Media times per layer, for each encoder.
    pub(super) media: [MediaTimes; ENCODERS_MAX],
    /// Unit time outside the layers, for each encoder.
    unit_end_ns: [f64; ENCODERS_MAX],
    token_ns: f64,
    token_end_ns: f64,
    samples: &'a TimeTable,
}

impl MediaTimes {
    /// Returns the time for a sample's media.
    pub(super) fn of(&self, media: &MediaUnits) -> f64 {
        f64::from(media.units) * self.unit_ns + media.pairs as f64 * self.pair_ns
    }
}

impl<'a> UnitTimes<'a> {
    pub(super) fn new(space: &'a SearchSpace<'_>, candidate: &Candidate) -> Self {
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
            samples: &llm.sample,
        }
    }

    /// Returns the time that a sample adds to a stage.
    pub(super) fn of(&self, stage: &StageLoad, item: &ItemSize) -> u64 {
        let tokens = f64::from(item.tokens);
        let layers = stage.layers * (tokens * self.token_ns + self.samples.at(tokens));
        let media = item.all_media().iter().zip(&stage.media);
        let media: f64 = media.map(|(media, times)| times.of(media)).sum();
        (media + layers + tokens * stage.tokens) as u64
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
