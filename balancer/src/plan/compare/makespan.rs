//! Our balancing: the makespan of the pipeline is the objective.

use super::{Outcome, group_of};
use crate::budget::Budget;
use crate::constraint::Caps;
use crate::error::Result;
use crate::instance::Instance;
use crate::pipeline::{PipelineConfig, balance_pipeline};
use crate::plan::cluster::Placement;
use crate::plan::space::{Candidate, Space};
use crate::plan::step::Cells;
use crate::plan::timeline::Timeline;
use crate::plan::workload::ItemSize;
use crate::strategy::Strategy;

/// Work units for one batch.
pub(super) const WORK: u64 = 20_000;

impl Space<'_> {
    /// The best of the planner's own ways and of a search for the makespan; one that fits, if any does.
    pub(super) fn by_makespan(
        &self,
        candidate: &Candidate,
        batch: &[ItemSize],
        timeline: &mut Timeline,
    ) -> Result<Outcome> {
        let mut dealt = vec![self.greedily(candidate, batch)];
        dealt.extend(self.searched(candidate, batch)?);
        if candidate.family.placement == Placement::Disaggregated {
            dealt.push(self.searched_for_makespan(candidate, batch)?);
        }
        let outcomes = dealt.iter().map(|cells| self.run(candidate, cells, timeline));
        let rank = |outcome: &Outcome| (outcome.bytes > self.budget_bytes, outcome.makespan_ns);
        let best = outcomes.min_by_key(rank);
        Ok(best.unwrap_or(Outcome { makespan_ns: 0, busy_ns: 0.0, bytes: 0.0 }))
    }

    /// Cells by [`balance_pipeline`], which knows of encoders with a DP size of their own.
    fn searched_for_makespan(&self, candidate: &Candidate, batch: &[ItemSize]) -> Result<Cells> {
        let family = &candidate.family;
        let (ranks, encoder_ranks) = (family.llm_dp as usize, family.encoder_dp as usize);
        let stages = [self.encoder_shapes[family.encoder].pp, self.llm_shapes[family.llm].pp];
        // Of a partition, an encoder's time is what its ranks take of it; here, what one of them would take.
        let alone = |[encoder_ns, llm_ns]: [u64; 2]| {
            [encoder_ns.saturating_mul(encoder_ranks as u64) / ranks as u64, llm_ns]
        };
        let sizes_ns: Vec<[u64; 2]> = self.sizes_ns(candidate, batch).into_iter().map(alone).collect();
        let instance = Instance::new(candidate.groups(), 2, sizes_ns.concat())?;
        let config = PipelineConfig::new(ranks, stages.map(|stages| stages as usize).to_vec());
        let config = config.module_dp_sizes(vec![encoder_ranks, ranks]);
        let found = balance_pipeline(
            &instance,
            &config,
            Strategy::Search,
            &Caps::default(),
            &mut Budget::work(WORK),
        )?;
        let by_cell: Vec<Vec<u32>> = (0..candidate.microbatches as usize)
            .flat_map(|slot| found.ranks.iter().map(move |rank| rank[slot].clone()))
            .collect();
        let cell_of = group_of(&by_cell, batch.len());
        Ok(Cells::new(self, candidate, batch, |item| cell_of[item], self.share))
    }
}
