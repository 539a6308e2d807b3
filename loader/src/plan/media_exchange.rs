//! Exchange of media between data-parallel ranks: the rank that encodes each medium in a microbatch.
//!
//! Ranks that meet in every layer wait for the slowest encoder. Where ranks send media to each other before
//! the encoder, and features back, each encodes an equal share of all media in a microbatch. Every rank
//! computes the same assignment from the step plan, so no sizes are exchanged.

use std::cmp::Reverse;
use std::ops::Range;

use dflop_costmodel::tokens::MediaRule;
use dflop_costmodel::{Module, SampleShape};
use dflop_samples::media::Modality;

use super::media_shares::{SampleMedium, longest_first, single_media};
use super::planner::StepPlanner;
use super::step_plan::StepPlan;

/// Medium in a microbatch, and the rank that encodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangedMedium {
    /// Medium.
    pub medium: SampleMedium,
    /// DP rank whose microbatch has the medium.
    pub rank: usize,
    /// DP rank that encodes the medium.
    pub encoder_rank: usize,
    /// Encoder items: patches or tiles, the rows in the pixel tensor.
    pub items: u64,
    /// Patch layers, rows and columns; `None` for tiles.
    pub grid: Option<[u64; 3]>,
}

impl StepPlanner {
    /// Assigns the media that an encoder processes in the microbatches of several ranks to these ranks.
    ///
    /// The slowest rank is as fast as by LPT over all media; as many media as that permits stay where they
    /// are, the longest first. The same on all ranks, without communication.
    ///
    /// - `microbatch`: microbatch index, the same on every rank
    /// - `ranks`: consecutive DP ranks that exchange media
    /// - `module`: encoder
    /// - returns the media by rank, then in microbatch order; media in rejected samples are left out, and a
    ///   module that the model does not have has no media
    ///
    /// # Panics
    /// If the plan has no such rank or microbatch, is not from this planner's run, or there are no ranks.
    #[must_use]
    pub fn media_exchange(
        &self,
        plan: &StepPlan,
        microbatch: usize,
        ranks: Range<usize>,
        module: Module,
    ) -> Vec<ExchangedMedium> {
        assert!(!ranks.is_empty(), "media are exchanged between at least one rank");
        let model = self.step_model(plan.step);
        let encoder = model.spec().encoders().find(|(own, ..)| *own == module);
        let at = model.modules().iter().position(|own| *own == module);
        let Some(((_, _, rule), at)) = encoder.zip(at) else { return Vec::new() };
        let (mut shape, mut media) = (SampleShape::default(), Vec::new());
        for rank in ranks.clone() {
            for &place in plan.ranks[rank][microbatch].iter().filter(|place| !plan.is_refused(**place)) {
                self.row(plan.samples[place as usize]).read_shape(&mut shape);
                for (modality, index, alone) in single_media(&shape) {
                    if (modality == Modality::Audio) != (module == Module::Audio) {
                        continue;
                    }
                    // The sample was predicted with all media, so each medium can be predicted.
                    let cost_ns = model.predict(&alone).map_or(0, |cost| cost.module_ns.as_slice()[at]);
                    let items = rule.work(&alone).map_or(0, |work| work.items);
                    let grid = match rule {
                        MediaRule::Vision(rule) => rule.patch_grid(&alone).ok().flatten(),
                        MediaRule::Audio(_) => None,
                    };
                    let medium = SampleMedium { place, modality, index, cost_ns };
                    media.push(ExchangedMedium { medium, rank, encoder_rank: rank, items, grid });
                }
            }
        }
        let costs_ns: Vec<u64> = media.iter().map(|medium| medium.medium.cost_ns).collect();
        let owners: Vec<usize> = media.iter().map(|medium| medium.rank - ranks.start).collect();
        for (medium, rank) in media.iter_mut().zip(assign(&costs_ns, &owners, ranks.len())) {
            medium.encoder_rank = ranks.start + rank;
        }
        media
    }
}

/// Returns the rank for each cost: the owner where the makespan of LPT permits it.
fn assign(costs_ns: &[u64], owners: &[usize], ranks: usize) -> Vec<usize> {
    let anywhere = longest_first(costs_ns, ranks);
    let limit_ns = makespan_ns(costs_ns, &anywhere, ranks);
    let near = owner_first(costs_ns, owners, ranks, limit_ns);
    if makespan_ns(costs_ns, &near, ranks) <= limit_ns { near } else { anywhere }
}

/// Keeps costs with the owners up to a limit, the longest first; the rest goes to the rank with the smallest
/// sum.
fn owner_first(costs_ns: &[u64], owners: &[usize], ranks: usize, limit_ns: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs_ns.len()).collect();
    order.sort_by_key(|&at| Reverse(costs_ns[at]));
    let (mut loads, mut rank_of) = (vec![0_u64; ranks], owners.to_vec());
    order.retain(|&at| {
        let load = loads[owners[at]].saturating_add(costs_ns[at]);
        let is_kept = load <= limit_ns;
        if is_kept {
            loads[owners[at]] = load;
        }
        !is_kept
    });
    for at in order {
        let least = (0..ranks).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[least] = loads[least].saturating_add(costs_ns[at]);
        rank_of[at] = least;
    }
    rank_of
}

fn makespan_ns(costs_ns: &[u64], rank_of: &[usize], ranks: usize) -> u64 {
    let mut loads = vec![0_u64; ranks];
    for (cost_ns, &rank) in costs_ns.iter().zip(rank_of) {
        loads[rank] = loads[rank].saturating_add(*cost_ns);
    }
    loads.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn media_stay_where_the_makespan_permits_it() {
        assert_eq!(assign(&[4, 4, 4], &[0, 1, 2], 3), [0, 1, 2]);
        // A rank with all media keeps the longest.
        assert_eq!(assign(&[5, 3, 2], &[1, 1, 1], 2), [1, 0, 0]);
        assert!(assign(&[], &[], 2).is_empty());
    }

    proptest! {
        #[test]
        fn no_rank_is_slower_than_by_lpt_alone(
            media in prop::collection::vec((0..1_000_u64, 0..8_usize), 0..40), ranks in 1..9_usize,
        ) {
            let costs_ns: Vec<u64> = media.iter().map(|medium| medium.0).collect();
            let owners: Vec<usize> = media.iter().map(|medium| medium.1 % ranks).collect();
            let near = assign(&costs_ns, &owners, ranks);
            let lpt = longest_first(&costs_ns, ranks);
            prop_assert_eq!(near.len(), costs_ns.len());
            prop_assert!(makespan_ns(&costs_ns, &near, ranks) <= makespan_ns(&costs_ns, &lpt, ranks));
        }
    }
}
