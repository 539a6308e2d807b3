//! Plans steps by token counts alone, as trainers without a cost model do.
//!
//! Samples are partitioned into microbatches of about as many LLM tokens by the largest-differencing method,
//! with any number of samples each; microbatches with similar tokens run at the same time. Encoder work and
//! the squared length of attention do not count, so the plan shows what they cost.
//!
//! # Source
//! `verl`, `verl/utils/seqlen_balancing.py`: Karmarkar-Karp without equal counts, as for its dynamic
//! microbatches.

use std::cmp::Reverse;

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};

use super::config::PadTo;
use super::lockstep::step_ns;
use super::padding::Padding;
use super::planner::StepPlanner;
use super::step_plan::{StepPlan, digest};
use crate::error::{Error, PlanError, Result};

impl StepPlanner {
    /// Plans a step by LLM tokens; the step time is the predicted time, as in [`Self::plan`].
    ///
    /// Microbatches are sorted by tokens and dealt to the ranks slot by slot, forward and backward in turn.
    /// [`StepPlan::bound`] is a bound on data-blind plans.
    ///
    /// # Errors
    /// [`Error::Config`] if the planner is for a pipeline; the errors of [`Self::plan`].
    pub fn plan_by_tokens(&self, step: u64) -> Result<StepPlan> {
        let Some(synchronization) = self.synchronization() else {
            let reason = "a plan by tokens is for ranks without a pipeline".into();
            return Err(Error::Config { setting: "strategy", reason });
        };
        if self.rows().is_some() {
            let reason = "a plan by tokens is for whole samples: rows have equal numbers of tokens".into();
            return Err(Error::Config { setting: "rows", reason });
        }
        let mut plan = self.clone().strategy(Strategy::ROUND_ROBIN).plan_whole(step)?.0;
        let microbatches = self.balance_tokens(&plan);
        let microbatches =
            microbatches.map_err(|source| Error::Plan(PlanError::Unsolved { step, source }))?;
        plan.ranks = deal(microbatches, self.dp_size());
        plan.digest = digest(step, &plan.ranks, &plan.samples, &[]);
        if let Some(to) = self.pad_to() {
            plan.padding_ns = Padding { to, model: &self.step_model(step) }.microbatch_times(&plan);
        }
        plan.makespan_ns = step_ns(&plan, synchronization);
        Ok(plan)
    }

    /// Returns microbatches with about as many tokens, the most tokens first.
    fn balance_tokens(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>, dflop_balancer::Error> {
        let tokens: Vec<u64> = plan.costs.iter().map(|cost| u64::from(cost.tokens)).collect();
        let bytes = plan.samples.iter().map(|sample| self.row(*sample).bytes()).collect();
        let groups = self.dp_size() * self.microbatches();
        let instance = Instance::with_empty_groups(groups, 1, tokens.clone())?;
        let instance = instance.tokens(tokens.clone())?.bytes(bytes)?;
        let capacity = self.pad_to().filter(|to| to.layout.is_packed()).map(PadTo::capacity_tokens);
        let tokens_max = [self.caps().tokens_max, capacity].into_iter().flatten().min();
        let caps = Caps { tokens_max, ..self.caps() };
        let found = balance(&instance, Strategy::KARMARKAR_KARP, &caps, &mut Budget::work(0))?;
        let mut microbatches = found.groups;
        microbatches
            .sort_by_key(|places| Reverse(places.iter().map(|place| tokens[*place as usize]).sum::<u64>()));
        Ok(microbatches)
    }
}

/// Deals microbatches to the ranks slot by slot; every second slot starts with the last rank, so that no rank
/// has the most tokens in all slots.
fn deal(microbatches: Vec<Vec<u32>>, dp_size: usize) -> Vec<Vec<Vec<u32>>> {
    let mut ranks = vec![Vec::with_capacity(microbatches.len() / dp_size); dp_size];
    for (place, microbatch) in microbatches.into_iter().enumerate() {
        let (slot, rank) = (place / dp_size, place % dp_size);
        ranks[if slot % 2 == 0 { rank } else { dp_size - 1 - rank }].push(microbatch);
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microbatches_are_dealt_forward_and_backward() {
        let microbatches = (0..6).map(|number| vec![number]).collect();
        assert_eq!(deal(microbatches, 3), [[[0], [5]], [[1], [4]], [[2], [3]]]);
    }
}
