//! What a plan takes on sampled batches: each is balanced, dealt out and simulated.

use super::cluster::Placement;
use super::deal::{cells, greedy_groups};
use super::fit::Need;
use super::space::{Candidate, Space};
use super::step::Cells;
use super::timeline::Timeline;
use super::workload::ItemSize;
use crate::balance::balance;
use crate::budget::Budget;
use crate::constraint::Caps;
use crate::error::Result;
use crate::instance::Instance;
use crate::strategy::Strategy;
use std::ops::Range;

/// How encoder ranks share the media of a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum EncoderShare {
    /// Tile by tile, whatever sample it belongs to.
    #[default]
    Tile,
    /// Whole samples, by LPT.
    Sample,
}

impl EncoderShare {
    /// Returns `tile` or `sample`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tile => "tile",
            Self::Sample => "sample",
        }
    }
}

/// Work units of balancing one batch of a finalizt.
const SEARCH_WORK: u64 = 400;
/// Samples times groups up to which finalizts are searched for; its first partition takes time in proportion.
const SEARCH_CELLS_MAX: usize = 4_000_000;

/// What is called far behind, as a factor: plans differ by about a percent more or less from batch to batch.
const FAR_BEHIND: f64 = 1.05;

/// A plan's makespans, and what it needs, in the order of the batches.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Score {
    pub(super) makespans_ns: Vec<u64>,
    needs: Vec<Need>,
}

impl Score {
    /// Adds the score of a further batch.
    pub(super) fn push(&mut self, makespan_ns: u64, need: Need) {
        self.makespans_ns.push(makespan_ns);
        self.needs.push(need);
    }

    /// Adds the scores of further batches.
    pub(super) fn append(&mut self, mut more: Self) {
        self.makespans_ns.append(&mut more.makespans_ns);
        self.needs.append(&mut more.needs);
    }

    /// Whether a score on the first batches is so much worse than another's on the same ones that more would not turn it.
    pub(super) fn is_far_behind(&self, other: &Self) -> bool {
        let batches = 0..self.makespans_ns.len().min(other.makespans_ns.len());
        self.range(batches.clone()).mean_ns() > FAR_BEHIND * other.range(batches).mean_ns()
    }

    /// The score on some of the batches.
    pub(super) fn range(&self, batches: Range<usize>) -> Self {
        Self {
            makespans_ns: self.makespans_ns[batches.clone()].to_vec(),
            needs: self.needs[batches].to_vec(),
        }
    }

    /// Over all batches.
    pub(super) fn need(&self) -> Need {
        self.needs.iter().copied().fold(Need::default(), Need::max)
    }

    pub(super) fn mean_ns(&self) -> f64 {
        let sum: u128 = self.makespans_ns.iter().map(|ns| u128::from(*ns)).sum();
        sum as f64 / self.makespans_ns.len().max(1) as f64
    }

    /// The smallest makespan that 95 % of the batches do not exceed.
    pub(super) fn p95_ns(&self) -> u64 {
        let mut sorted = self.makespans_ns.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * 95).div_ceil(100);
        rank.checked_sub(1).map_or(0, |at| sorted[at])
    }
}

impl Space<'_> {
    /// Scores a plan on some batches, balanced greedily; `None` if a batch of them does not fit into memory.
    pub(super) fn score(
        &self,
        candidate: &Candidate,
        batches: Range<usize>,
        timeline: &mut Timeline,
    ) -> Option<Score> {
        let mut score = Score::default();
        for batch in &self.load.batches()[batches] {
            let sizes_ns = sums(&self.sizes_ns(candidate, batch));
            let dealt = self.fitting(candidate, self.greedy(candidate, batch, &sizes_ns)).or_else(|| {
                // Even tokens take least memory.
                let tokens: Vec<u64> = batch.iter().map(|item| u64::from(item.tokens)).collect();
                self.fitting(candidate, self.greedy(candidate, batch, &tokens))
            });
            let (cells, need) = dealt?;
            score.push(self.makespan_ns(candidate, &cells, timeline), need);
        }
        Some(score)
    }

    /// Replaces a score on some batches by that of [`Strategy::Search`], where that is better and fits.
    ///
    /// # Errors
    /// [`crate::Error`] if times overflow.
    pub(super) fn improve(
        &self,
        candidate: &Candidate,
        batches: Range<usize>,
        score: &mut Score,
        timeline: &mut Timeline,
    ) -> Result<()> {
        for at in batches {
            let searched = self.searched(candidate, &self.load.batches()[at])?;
            let Some((cells, need)) = searched.and_then(|cells| self.fitting(candidate, cells)) else {
                continue;
            };
            let makespan_ns = self.makespan_ns(candidate, &cells, timeline);
            if makespan_ns < score.makespans_ns[at] {
                (score.makespans_ns[at], score.needs[at]) = (makespan_ns, need);
            }
        }
        Ok(())
    }

    /// What a batch needs as it is dealt out, if it fits.
    fn fitting(&self, candidate: &Candidate, cells: Cells) -> Option<(Cells, Need)> {
        let need = cells.need(self, candidate);
        (need.most() <= self.budget_bytes).then_some((cells, need))
    }

    /// A batch balanced greedily on the sum of both modules' times, the longest samples first.
    pub(super) fn greedily(&self, candidate: &Candidate, batch: &[ItemSize]) -> Cells {
        self.greedy(candidate, batch, &sums(&self.sizes_ns(candidate, batch)))
    }

    fn greedy(&self, candidate: &Candidate, batch: &[ItemSize], sizes: &[u64]) -> Cells {
        self.cells(candidate, batch, sizes, &greedy_groups(sizes, candidate.groups()))
    }

    /// A batch balanced by [`Strategy::Search`]; `None` where that would take too long or has no choice.
    pub(super) fn searched(&self, candidate: &Candidate, batch: &[ItemSize]) -> Result<Option<Cells>> {
        let groups = candidate.groups();
        if groups >= batch.len() || batch.len() * groups > SEARCH_CELLS_MAX {
            return Ok(None);
        }
        let sizes_ns = self.sizes_ns(candidate, batch);
        let sums_ns = sums(&sizes_ns);
        let instance = Instance::new(groups, 2, sizes_ns.concat())?;
        let found = balance(&instance, Strategy::Search, &Caps::default(), &mut Budget::work(SEARCH_WORK))?;
        let mut group_of = vec![0; batch.len()];
        for (group, items) in found.groups.iter().enumerate() {
            for &item in items {
                group_of[item as usize] = group as u32;
            }
        }
        Ok(Some(self.cells(candidate, batch, &sums_ns, &group_of)))
    }

    pub(super) fn makespan_ns(&self, candidate: &Candidate, cells: &Cells, timeline: &mut Timeline) -> u64 {
        let pipeline_ns = timeline.makespan_ns(&cells.times(self, candidate));
        match candidate.family.placement {
            Placement::Disaggregated => pipeline_ns,
            Placement::Colocated => {
                pipeline_ns + cells.phase_ns(self, candidate) + self.phase_reduce_ns(candidate)
            }
        }
    }

    /// What a sample adds to the slowest stage of each module, about; the encoder's ranks serve all LLM ranks.
    pub(super) fn sizes_ns(&self, candidate: &Candidate, batch: &[ItemSize]) -> Vec<[u64; 2]> {
        let family = &candidate.family;
        let (encoder, llm) = (&self.encoder_shapes[family.encoder], &self.llm_shapes[family.llm]);
        let llm_times = &self.llm_times[llm.times];
        let tokens = self.load.batch_tokens / candidate.groups() as f64;
        let token_ns = llm_times.layer.at(tokens) / tokens;
        let layers = llm.inner.max(llm.last);
        let tile_ns = match family.placement {
            Placement::Colocated => 0.0,
            Placement::Disaggregated => {
                let times = &self.encoder_times[encoder.times];
                let slots = f64::from(candidate.microbatches) * f64::from(family.encoder_dp);
                let share = (self.load.batch_tiles / slots).max(1.0);
                let slowest = encoder.inner.max(encoder.last);
                let ranks = f64::from(family.llm_dp) / f64::from(family.encoder_dp);
                slowest * times.layer.at(share) / share * ranks
            }
        };
        let size = |item: &ItemSize| {
            let tokens = f64::from(item.tokens);
            let llm_ns = layers * (tokens * token_ns + llm_times.sample.at(tokens));
            [(f64::from(item.tiles) * tile_ns) as u64, llm_ns as u64]
        };
        batch.iter().map(size).collect()
    }

    fn cells(&self, candidate: &Candidate, batch: &[ItemSize], sums_ns: &[u64], group_of: &[u32]) -> Cells {
        let mut group_ns = vec![0; candidate.groups()];
        for (&group, &sum_ns) in group_of.iter().zip(sums_ns) {
            group_ns[group as usize] += sum_ns;
        }
        let cell_of = cells(&group_ns, candidate.family.llm_dp as usize);
        Cells::new(self, candidate, batch, |item| cell_of[group_of[item] as usize], self.share)
    }
}

/// Both modules' times together.
fn sums(sizes_ns: &[[u64; 2]]) -> Vec<u64> {
    sizes_ns.iter().map(|[encoder, llm]| encoder + llm).collect()
}
