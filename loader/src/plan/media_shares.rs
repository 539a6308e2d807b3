//! Media in a microbatch: shared between the ranks of a tensor-parallel group, and blank for encoders that
//! would have none.
//!
//! In joint placement each GPU in a group holds the entire encoder and encodes a share of the microbatch
//! media, whose rows the group then exchanges. Media are not split: the tiles of an image stay together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use dflop_costmodel::{Module, SampleShape};
use dflop_samples::media::Modality;

use super::planner::StepPlanner;
use super::step_plan::StepPlan;
use crate::dataset::Dataset;

/// Medium in a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SampleMedium {
    /// Sample index in [`StepPlan::samples`].
    pub place: u32,
    /// Modality of the medium.
    pub modality: Modality,
    /// Index among the sample's media in this modality, in order of occurrence.
    pub index: u32,
    /// Predicted time in the entire encoder, forward and backward, in nanoseconds.
    pub cost_ns: u64,
}

impl StepPlanner {
    /// Shares the media in a planned microbatch between `ranks` ranks by LPT: the longest medium first, to
    /// the rank with the smallest predicted time. The same on all ranks, without communication; no rank
    /// exceeds the mean by more than the longest medium.
    ///
    /// - returns the media per rank, in microbatch order; media without a model encoder, and media in
    ///   rejected samples, are left out
    ///
    /// # Panics
    /// If the plan has no such rank or microbatch, is not from this planner's run, or `ranks` is 0.
    #[must_use]
    pub fn media_shares(
        &self,
        plan: &StepPlan,
        [rank, microbatch]: [usize; 2],
        ranks: usize,
    ) -> Vec<Vec<SampleMedium>> {
        assert!(ranks > 0, "media are shared between at least one rank");
        let model = self.step_model(plan.step);
        let mut shape = SampleShape::default();
        let mut media = Vec::new();
        for &place in plan.ranks[rank][microbatch].iter().filter(|place| !plan.is_refused(**place)) {
            self.row(plan.samples[place as usize]).read_shape(&mut shape);
            for (modality, index, alone) in single_media(&shape) {
                let module = if modality == Modality::Audio { Module::Audio } else { Module::Vision };
                let Some(at) = model.modules().iter().position(|own| *own == module) else { continue };
                // The sample was predicted with all media, so each medium can be predicted.
                let cost_ns = model.predict(&alone).map_or(0, |cost| cost.module_ns.as_slice()[at]);
                media.push(SampleMedium { place, modality, index, cost_ns });
            }
        }
        let costs_ns: Vec<u64> = media.iter().map(|medium| medium.cost_ns).collect();
        let mut shares = vec![Vec::new(); ranks];
        for (medium, rank) in media.into_iter().zip(longest_first(&costs_ns, ranks)) {
            shares[rank].push(medium);
        }
        shares
    }
}

/// Lists each medium in a sample with a shape for this medium only.
pub(super) fn single_media(shape: &SampleShape) -> impl Iterator<Item = (Modality, u32, SampleShape)> + '_ {
    let images = shape
        .images
        .iter()
        .map(|image| (Modality::Image, SampleShape { images: vec![*image], ..SampleShape::default() }));
    let videos = shape
        .videos
        .iter()
        .map(|video| (Modality::Video, SampleShape { videos: vec![*video], ..SampleShape::default() }));
    let audio = shape
        .audio
        .iter()
        .map(|clip| (Modality::Audio, SampleShape { audio: vec![*clip], ..SampleShape::default() }));
    let mut next = [0; 3];
    images.chain(videos).chain(audio).map(move |(modality, alone)| {
        let index = &mut next[modality as usize];
        *index += 1;
        (modality, *index - 1, alone)
    })
}

/// Returns the rank for each cost: the longest first, to the rank with the smallest sum; ties go to the lower
/// index.
pub(super) fn longest_first(costs_ns: &[u64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs_ns.len()).collect();
    order.sort_by_key(|&at| Reverse(costs_ns[at]));
    let mut loads: BinaryHeap<Reverse<(u64, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut rank_of = vec![0; costs_ns.len()];
    for at in order {
        if let Some(mut least) = loads.peek_mut() {
            rank_of[at] = least.0.1;
            least.0.0 = least.0.0.saturating_add(costs_ns[at]);
        }
    }
    rank_of
}

/// Microbatches without a medium that receive a blank medium.
///
/// An encoder that runs on only some ranks leaves parameters without gradients (DDP), or ranks that wait for
/// each other (FSDP).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlankMedia {
    /// All microbatches on all ranks, if multiple ranks train on data with such media. A text-only dataset,
    /// or one rank, needs none.
    #[default]
    Auto,
    /// All microbatches, whatever the data and the ranks.
    Always,
    /// None.
    Never,
}

impl BlankMedia {
    /// Returns the model encoders that run in every microbatch.
    pub(super) fn required_encoders(
        self,
        encoders: &[(Module, u64)],
        dp_size: usize,
        datasets: &[Dataset],
    ) -> Vec<Module> {
        let is_run = |module: Module| match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => dp_size > 1 && datasets.iter().any(|set| set.index().has_media(module)),
        };
        encoders.iter().map(|(module, _)| *module).filter(|module| is_run(*module)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_goes_first_and_ties_to_the_lower_index() {
        assert_eq!(longest_first(&[1, 5, 3, 3], 2), [0, 0, 1, 1]);
        assert_eq!(longest_first(&[2, 2, 2], 2), [0, 1, 0]);
        assert!(longest_first(&[], 3).is_empty());
    }

    proptest! {
        #[test]
        fn no_rank_exceeds_the_mean_by_more_than_the_longest(
            costs_ns in prop::collection::vec(0..1_000_u64, 0..40), ranks in 1..9_usize,
        ) {
            let mut loads = vec![0; ranks];
            for (cost_ns, rank) in costs_ns.iter().zip(longest_first(&costs_ns, ranks)) {
                loads[rank] += cost_ns;
            }
            let longest = costs_ns.iter().copied().max().unwrap_or(0);
            let mean = costs_ns.iter().sum::<u64>() / ranks as u64;
            prop_assert!(loads.iter().all(|load| *load <= mean + longest), "{loads:?}");
        }
    }
}
