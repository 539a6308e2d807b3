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

/// How batches are balanced before they are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Balancing {
    /// Greedy on the sum of both modules' times, the longest samples first.
    Quick,
    /// The better of that and [`Strategy::Search`], batch by batch; that alone where it would take too long.
    Search,
}

/// Work units of balancing one batch of a finalist.
const SEARCH_WORK: u64 = 400;
/// Samples times groups up to which finalists are searched for; its first partition takes time in proportion.
const SEARCH_CELLS_MAX: usize = 4_000_000;

/// A plan's makespans, and what it needs.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Score {
    /// In the order of the batches.
    pub(super) makespans_ns: Vec<u64>,
    /// Over all batches.
    pub(super) need: Need,
}

impl Score {
    /// Adds the scores of further batches.
    pub(super) fn append(&mut self, more: Self) {
        self.makespans_ns.extend(more.makespans_ns);
        self.need = self.need.max(more.need);
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
    /// Scores a plan on some batches; `None` if a batch of them does not fit into memory.
    ///
    /// # Errors
    /// [`crate::Error`] if times overflow.
    pub(super) fn score(
        &self,
        candidate: &Candidate,
        batches: Range<usize>,
        balancing: Balancing,
        timeline: &mut Timeline,
    ) -> Result<Option<Score>> {
        let mut score = Score { makespans_ns: Vec::with_capacity(batches.len()), need: Need::default() };
        for batch in &self.load.batches()[batches] {
            let Some((makespan_ns, need)) = self.simulate(candidate, batch, balancing, timeline)? else {
                return Ok(None);
            };
            score.makespans_ns.push(makespan_ns);
            score.need = score.need.max(need);
        }
        Ok(Some(score))
    }

    /// One batch: its makespan and memory, or `None` if it does not fit.
    fn simulate(
        &self,
        candidate: &Candidate,
        batch: &[ItemSize],
        balancing: Balancing,
        timeline: &mut Timeline,
    ) -> Result<Option<(u64, Need)>> {
        let mut best = None;
        let memory_bytes = self.budget_bytes;
        let mut dealt = self.dealt(candidate, batch, balancing)?;
        if dealt.iter().all(|cells| cells.need(self, candidate).most() > memory_bytes) {
            // Even tokens take least memory.
            let tokens: Vec<u64> = batch.iter().map(|item| u64::from(item.tokens)).collect();
            let groups = greedy_groups(&tokens, candidate.groups());
            dealt = vec![self.cells(candidate, batch, &tokens, &groups)];
        }
        for cells in dealt {
            let need = cells.need(self, candidate);
            if need.most() > memory_bytes {
                continue;
            }
            let makespan_ns = self.makespan_ns(candidate, &cells, timeline);
            if best.is_none_or(|(least, _)| makespan_ns < least) {
                best = Some((makespan_ns, need));
            }
        }
        Ok(best)
    }

    /// Every way in which a batch is balanced.
    pub(super) fn dealt(
        &self,
        candidate: &Candidate,
        batch: &[ItemSize],
        balancing: Balancing,
    ) -> Result<Vec<Cells>> {
        let (groups, sizes_ns) = (candidate.groups(), self.sizes_ns(candidate, batch));
        let sums_ns: Vec<u64> = sizes_ns.iter().map(|[encoder, llm]| encoder + llm).collect();
        let mut dealt = vec![self.cells(candidate, batch, &sums_ns, &greedy_groups(&sums_ns, groups))];
        if balancing == Balancing::Quick || batch.len() * groups > SEARCH_CELLS_MAX {
            return Ok(dealt);
        }
        let instance = Instance::new(groups, 2, sizes_ns.concat())?;
        let found = balance(&instance, Strategy::Search, &Caps::default(), &mut Budget::work(SEARCH_WORK))?;
        let mut group_of = vec![0; batch.len()];
        for (group, items) in found.groups.iter().enumerate() {
            for &item in items {
                group_of[item as usize] = group as u32;
            }
        }
        dealt.push(self.cells(candidate, batch, &sums_ns, &group_of));
        Ok(dealt)
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
