//! Costs the padding of steps whose microbatches or rows are padded to a fixed number of tokens.
//!
//! Padding costs time: a packed microbatch with N tokens contains the samples followed by one more sequence
//! without targets, which fills up to N tokens. So every microbatch has the linear LLM work for N tokens,
//! whatever the samples, and only the encoder work and the attention inside each sample are left to balance,
//! under the condition that no microbatch exceeds N. The balancer therefore receives as sample time only the
//! time *above* padding of the same length, and one more item per microbatch, with the time for N padding
//! tokens. These items have so many tokens that two do not fit into the same microbatch. A padding token
//! counts with the smallest cost at any length, so that the lower bound stays valid; the plan's makespan is
//! computed with the real padding.
//!
//! With padded layouts every sample is a row with N tokens: the padding is part of the sample cost.

use dflop_costmodel::{CostModel, SampleCost, SampleShape};

use super::config::PadTo;
use super::step_plan::StepPlan;

/// Lengths up to this one are all examined for the cheapest token; longer ones in steps of this fraction.
const LENGTHS_DENSITY: u64 = 64;

/// Fixed length, with the cost model of its padding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Padding<'a> {
    pub(super) to: PadTo,
    pub(super) model: &'a CostModel,
}

impl Padding<'_> {
    /// Returns the LLM time of padding, costed as text without targets.
    pub(super) fn ns(&self, tokens: u64) -> u64 {
        let text_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let cost = self.model.predict(&SampleShape { text_tokens, ..SampleShape::default() });
        // Only media are rejected.
        let times = cost.ok().filter(|_| tokens > 0).map(|cost| cost.module_ns);
        times.and_then(|times| times.as_slice().last().copied()).unwrap_or(0)
    }

    /// Returns the LLM time of a microbatch in addition to the costs of its samples.
    pub(super) fn overhead_ns(&self, samples: usize, tokens: u64) -> u64 {
        if self.to.layout.is_packed() || samples == 0 {
            return self.ns(self.to.padding_tokens(samples, tokens));
        }
        0
    }

    /// Returns the LLM padding time for every planned microbatch, by rank.
    pub(super) fn microbatch_times(&self, plan: &StepPlan) -> Vec<Vec<u64>> {
        let of_microbatch = |places: &Vec<u32>| {
            let is_row = |place: &&u32| !plan.is_refused(**place);
            let tokens = places.iter().map(|&place| u64::from(plan.costs[place as usize].tokens)).sum();
            self.overhead_ns(places.iter().filter(is_row).count(), tokens)
        };
        plan.ranks.iter().map(|rank| rank.iter().map(of_microbatch).collect()).collect()
    }

    /// Adds the padding in each row to the sample cost, with padded layouts.
    pub(super) fn pad_rows(&self, costs: &mut [SampleCost], refused: &[(usize, String)]) {
        if self.to.layout.is_packed() {
            return;
        }
        for (place, cost) in costs.iter_mut().enumerate() {
            if refused.iter().all(|(at, _)| *at != place) {
                cost.module_ns.add_llm(self.ns(self.to.tokens.saturating_sub(cost.tokens.into())));
            }
        }
    }

    /// Returns the smallest cost of a token in one of `stages` stages, as padding of any length up to the
    /// fixed one, or in one of the `samples`, given as tokens and nanoseconds.
    pub(super) fn cheapest_token(&self, stages: u64, samples: impl Iterator<Item = (u64, u64)>) -> TokenRate {
        let mut cheapest = TokenRate { ns: self.ns(1).div_ceil(stages), tokens: 1 };
        let mut length = 1;
        while length <= self.to.tokens {
            let next = length + (length / LENGTHS_DENSITY).max(1);
            // A length between them takes at least the time of the first and has at most the tokens of the
            // last.
            let tokens = (next - 1).min(self.to.tokens);
            cheapest = cheapest.min(TokenRate { ns: self.ns(length).div_ceil(stages), tokens });
            length = next;
        }
        let samples = samples.filter(|&(tokens, _)| tokens > 0);
        samples.fold(cheapest, |least, (tokens, ns)| least.min(TokenRate { ns, tokens }))
    }
}

/// Nanoseconds per token, as a fraction.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenRate {
    ns: u64,
    tokens: u64,
}

impl TokenRate {
    fn min(self, other: Self) -> Self {
        let products = [(self.ns, other.tokens), (other.ns, self.tokens)];
        let [own, others] = products.map(|(ns, tokens)| u128::from(ns) * u128::from(tokens));
        if others < own { other } else { self }
    }

    /// Returns the time of `tokens` tokens, rounded down and up; both saturate.
    pub(super) fn of(self, tokens: u64) -> [u64; 2] {
        let (product, divisor) = (u128::from(self.ns) * u128::from(tokens), u128::from(self.tokens));
        [product / divisor, product.div_ceil(divisor)].map(|ns| u64::try_from(ns).unwrap_or(u64::MAX))
    }
}
