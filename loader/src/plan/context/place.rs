//! Places of samples in a step plan: microbatch, group of ranks, and the ranks that encode the media.

use std::cmp::Reverse;
use std::ops::Range;

use dflop_balancer::ContextPlace;
use dflop_samples::media::Modality;
use serde::{Deserialize, Serialize};

use super::ContextPlan;
use super::samples::Sample;
use crate::plan::step_plan::{StepPlan, digest};

/// Placement of whole and split samples in a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepContext {
    /// Place of every sample, in the order of [`StepPlan::samples`].
    pub places: Vec<SamplePlace>,
    /// Predicted times in nanoseconds by rank, microbatch and module.
    pub times_ns: Vec<Vec<Vec<u64>>>,
}

/// Place of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplePlace {
    /// Microbatch, the same on all ranks in the group.
    pub microbatch: usize,
    /// Ranks in the group, one for a whole sample.
    pub ranks: Range<usize>,
    /// Parts of the media, in the order of the media in the sample.
    pub media: Vec<MediumPart>,
}

/// Part of a medium, or an entire medium, and the rank that encodes it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MediumPart {
    /// Modality of the medium.
    pub modality: Modality,
    /// Index among the sample's media in this modality, in order of occurrence.
    pub index: u32,
    /// Equal parts of the medium: tiles, frames, or layers of patches.
    pub parts: Range<u64>,
    /// Number of equal parts in the medium; 1 if its positions in the encoder see each other.
    pub parts_in_medium: u64,
    /// Rank that encodes these parts.
    pub rank: usize,
}

impl SamplePlace {
    /// Whether several ranks share the sample.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.ranks.len() > 1
    }

    /// Whether a rank encodes a medium, or a part of one. A medium that is not in the plan is encoded by the
    /// first rank.
    #[must_use]
    pub fn encodes(&self, rank: usize, modality: Modality, index: u32) -> bool {
        let mut own = self.media.iter().filter(|part| (part.modality, part.index) == (modality, index));
        let mut is_planned = false;
        own.any(|part| {
            is_planned = true;
            part.rank == rank
        }) || (!is_planned && rank == self.ranks.start)
    }
}

impl StepContext {
    /// Returns the number of samples that several ranks share.
    #[must_use]
    pub fn split_samples(&self) -> usize {
        self.places.iter().filter(|place| place.is_split()).count()
    }
}

impl Sample {
    /// Returns the parts of all media with the ranks that encode them; neighboring parts on the same rank are
    /// one.
    pub(super) fn placed_parts(&mut self, place: &ContextPlace) -> Vec<MediumPart> {
        let mut placed: Vec<MediumPart> = Vec::new();
        for (parts, ranks) in std::mem::take(&mut self.parts).into_iter().zip(&place.media) {
            for (part, &rank) in parts.into_iter().zip(ranks) {
                let part = MediumPart { rank, ..part };
                match placed.last_mut() {
                    Some(last) if last.is_followed_by(&part) => last.parts.end = part.parts.end,
                    _ => placed.push(part),
                }
            }
        }
        placed
    }
}

impl MediumPart {
    fn is_followed_by(&self, next: &Self) -> bool {
        (self.modality, self.index, self.rank, self.parts.end)
            == (next.modality, next.index, next.rank, next.parts.start)
    }
}

impl From<ContextPlan> for StepPlan {
    /// Lists a split sample in the microbatch of every rank in its group. Split samples come first, the
    /// largest groups before smaller ones: the order in which all ranks exchange keys and values.
    fn from(plan: ContextPlan) -> Self {
        let ContextPlan { whole, places, media, times_ns, makespan_ns, bound, .. } = plan;
        let mut ranks: Vec<Vec<Vec<u32>>> =
            whole.ranks.iter().map(|microbatches| vec![Vec::new(); microbatches.len()]).collect();
        let mut order: Vec<u32> = (0..places.len() as u32).collect();
        order.sort_by_key(|&at| (Reverse(places[at as usize].ranks.len()), at));
        for at in order {
            let place = &places[at as usize];
            place.ranks.clone().for_each(|rank| ranks[rank][place.slot].push(at));
        }
        let places = places.into_iter().zip(media).map(|(place, media)| SamplePlace {
            microbatch: place.slot,
            ranks: place.ranks,
            media,
        });
        let places: Vec<SamplePlace> = places.collect();
        let mut digest = digest(whole.step, &ranks, &whole.samples);
        for (at, place) in places.iter().enumerate().filter(|(_, place)| place.is_split()) {
            let encoders = place.media.iter().flat_map(|part| [part.rank as u64, part.parts.end]);
            let words: Vec<u64> =
                [place.ranks.start as u64, place.ranks.end as u64].into_iter().chain(encoders).collect();
            digest.add(whole.step, at, place.microbatch, words);
        }
        let context = Some(StepContext { places, times_ns });
        Self { ranks, digest, makespan_ns, bound, context, ..whole }
    }
}
