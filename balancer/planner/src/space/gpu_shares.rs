//! Divides the GPUs that an LLM leaves free between several encoders, minimizing the slowest encoder's time.
//!
//! For every number of GPUs, an encoder has a fastest way to use at most as many. The slowest encoder's time
//! is found by binary search: a time is feasible if the minimum GPU counts for all encoders add up to at most
//! the available GPUs. A division costs `N log G` for `N` encoders on `G` GPUs.
//!
//! Slot times depend on the number of microbatches, and memory on the stages after an encoder; shares are
//! computed for a few values of both.

use super::families::{EncoderPart, EncoderParts};
use super::shape::StageShape;
use super::{Family, SearchSpace, bound, memory};
use dflop_balancer::schedule::{EncoderChains, StepShape};

/// Factor between the numbers of microbatches for which shares are computed.
const STEP: u32 = 4;
/// Numbers of LLM stages for which shares are computed.
const LLM_STAGES: [usize; 2] = [1, 8];

/// Shares for every number of GPUs.
#[derive(Debug, Clone, Default)]
pub(super) struct GpuShares {
    by_gpus: Vec<Vec<EncoderParts>>,
}

/// Fastest encoder part on at most each number of GPUs; the time never rises with the number.
struct FastestParts(Vec<(f64, EncoderPart)>);

impl GpuShares {
    /// Computes the shares for a space with several encoders.
    pub(super) fn new(space: &SearchSpace<'_>) -> Self {
        let mut by_gpus = vec![Vec::new(); space.cluster.gpus as usize];
        let counts = std::iter::successors(Some(1_u32), |count| count.checked_mul(STEP));
        for microbatches in counts.take_while(|count| *count <= space.workload.global_batch()) {
            for llm_stages in LLM_STAGES {
                let encoders = 0..space.encoders.len();
                let fastest: Vec<FastestParts> = encoders
                    .map(|encoder| FastestParts::new(space, encoder, microbatches, llm_stages))
                    .collect();
                let mut times: Vec<f64> = fastest.iter().flat_map(FastestParts::times).collect();
                times.sort_unstable_by(f64::total_cmp);
                times.dedup();
                for (gpus, shares) in by_gpus.iter_mut().enumerate() {
                    let share = share(&fastest, &times, gpus);
                    shares.extend(share.filter(|share| !shares.contains(share)));
                }
            }
        }
        Self { by_gpus }
    }

    /// Lists the shares for this many GPUs.
    pub(super) fn of(&self, gpus: u32) -> &[EncoderParts] {
        self.by_gpus.get(gpus as usize).map_or(&[], Vec::as_slice)
    }
}

/// Divides GPUs between encoders; `None` if there are too few.
fn share(fastest: &[FastestParts], times: &[f64], gpus: usize) -> Option<EncoderParts> {
    let fewest = |ns: f64| fastest.iter().map(move |parts| parts.fewest_gpus(ns));
    let is_too_short = |ns: &f64| fewest(*ns).sum::<usize>() > gpus;
    let ns = *times.get(times.partition_point(is_too_short))?;
    let mut counts: Vec<usize> = fewest(ns).collect();
    let mut left = gpus - counts.iter().sum::<usize>();
    // The other encoders may use what is left, the slowest first.
    let mut order: Vec<usize> = (0..fastest.len()).collect();
    order.sort_by(|one, other| {
        let time = |encoder: &usize| fastest[*encoder].at(counts[*encoder]).0;
        time(other).total_cmp(&time(one))
    });
    for encoder in order {
        let before = counts[encoder];
        counts[encoder] = fastest[encoder].fewest_gpus(fastest[encoder].at(before + left).0).max(before);
        left -= counts[encoder] - before;
    }
    Some(fastest.iter().zip(counts).map(|(parts, gpus)| parts.at(gpus).1).collect())
}

impl FastestParts {
    fn new(space: &SearchSpace<'_>, encoder: usize, microbatches: u32, llm_stages: usize) -> Self {
        let gpus_max = space.cluster.gpus as usize;
        let mut fastest = vec![(f64::INFINITY, EncoderPart::default()); gpus_max];
        for (index, shape) in space.encoders[encoder].shapes.iter().enumerate() {
            let step = StepShape {
                kind: space.options.schedule,
                encoders: EncoderChains::one(shape.pp as usize),
                stages: shape.pp as usize + llm_stages,
                slots: microbatches as usize,
            };
            let in_flight = |stage: u32| step.in_flight(stage as usize) as f64;
            for (ranks, gpus) in (shape.gpus() as usize..gpus_max).step_by(shape.gpus() as usize).enumerate()
            {
                let part = EncoderPart { shape: index as u32, dp: ranks as u32 + 1 };
                let bytes = memory::encoder_bytes(space, encoder, part, part.dp, microbatches, in_flight);
                if bytes > space.budget_bytes {
                    continue;
                }
                let ns = bound::encoder_slot_ns(space, encoder, part, microbatches);
                if ns < fastest[gpus].0 {
                    fastest[gpus] = (ns, part);
                }
            }
        }
        for gpus in 1..fastest.len() {
            if fastest[gpus - 1].0 <= fastest[gpus].0 {
                fastest[gpus] = fastest[gpus - 1];
            }
        }
        Self(fastest)
    }

    /// Lists the times for all GPU counts.
    fn times(&self) -> impl Iterator<Item = f64> + '_ {
        self.0.iter().map(|(ns, _)| *ns).filter(|ns| ns.is_finite())
    }

    fn at(&self, gpus: usize) -> (f64, EncoderPart) {
        self.0[gpus.min(self.0.len() - 1)]
    }

    /// Returns the minimum number of GPUs for which the encoder takes at most this time.
    fn fewest_gpus(&self, ns: f64) -> usize {
        let fewest = self.0.partition_point(|(own_ns, _)| *own_ns > ns);
        if fewest == self.0.len() { usize::MAX / 8 } else { fewest }
    }
}

impl SearchSpace<'_> {
    /// Computes the shares on the GPUs that an LLM leaves free, if several encoders need them.
    pub(crate) fn share_gpus(&mut self) {
        if self.encoders.len() > 1 && self.options.is_disaggregated {
            self.gpu_shares = GpuShares::new(self);
        }
    }

    /// Lists encoders similar to a family's encoders: a neighboring shape for an encoder, a rank removed from
    /// an encoder, or that rank's GPUs moved to a different encoder.
    pub(crate) fn similar_encoders(&self, family: &Family) -> Vec<EncoderParts> {
        let mut found = Vec::new();
        let parts = family.encoders;
        let gpus = |encoder: usize, part: EncoderPart| self.part_shape(encoder, part).map(StageShape::gpus);
        let used = self.gpus(family);
        for (one, part) in parts.iter().enumerate() {
            let Some(rank_gpus) = gpus(one, *part) else { continue };
            for shape in [part.shape.wrapping_sub(1), part.shape + 1] {
                let Some(other_gpus) = gpus(one, EncoderPart { shape, ..*part }) else { continue };
                let mut changed = parts;
                changed[one] = EncoderPart { shape, dp: rank_gpus * part.dp / other_gpus };
                found.push(changed);
            }
            let mut fewer = parts;
            fewer[one].dp = part.dp.saturating_sub(1);
            found.push(fewer);
            for other in (0..parts.len()).filter(|other| *other != one) {
                let Some(other_gpus) = gpus(other, parts[other]) else { continue };
                let spare = self.cluster.gpus.saturating_sub(used) + rank_gpus;
                let mut moved = fewer;
                moved[other].dp += spare / other_gpus;
                found.push(moved);
            }
        }
        found.retain(|parts| parts.iter().all(|part| part.dp > 0));
        found
    }
}
