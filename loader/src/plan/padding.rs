//! Plans steps whose microbatches or rows are padded to a fixed number of tokens.
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

use dflop_balancer::{Budget, Caps, Instance, PipelineAssignment, Strategy, balance_pipeline};
use dflop_costmodel::{CostModel, ModelConstants, SampleCost, SampleShape};
use dflop_samples::sample::BatchLayout;

use super::cut::StepCut;
use super::planner::StepPlanner;
use super::step_plan::StepPlan;
use crate::error::{Error, PlanError, Result};
use crate::order::StepSample;

/// Items by rank and microbatch.
type Ranks = Vec<Vec<Vec<u32>>>;

/// Largest fixed length in tokens: `cu_seqlens` are 32-bit.
pub(super) const PAD_TO_TOKENS_MAX: u64 = i32::MAX as u64;
/// Lengths up to this value are all examined for the cheapest token; longer lengths in steps of this
/// fraction.
const LENGTHS_DENSITY: u64 = 64;

/// Fixed length in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PadTo {
    /// Tokens in a packed microbatch, `[1, tokens]`, or in every row of a padded microbatch,
    /// `[samples, tokens]`.
    pub tokens: u64,
    /// Layout of the padded tensors.
    pub layout: BatchLayout,
    /// Tokens in a packed microbatch that samples leave free, for blank media
    /// ([`StepPlannerBuilder::blank_media`](super::StepPlannerBuilder::blank_media)).
    pub blank_tokens: u64,
}

impl PadTo {
    /// Returns the maximum number of sample tokens in a packed microbatch, or in a row.
    #[must_use]
    pub fn room(self) -> u64 {
        self.tokens.saturating_sub(if self.layout.is_packed() { self.blank_tokens } else { 0 })
    }

    /// Returns the number of padding tokens in a microbatch with `samples` samples and `tokens` tokens; with
    /// padded layouts a microbatch without a sample has one row.
    #[must_use]
    pub fn padding_tokens(self, samples: usize, tokens: u64) -> u64 {
        let rows = if self.layout.is_packed() { 1 } else { samples.max(1) as u64 };
        (rows * self.tokens).saturating_sub(tokens)
    }
}

/// Fixed length, with the cost model for padding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Padding<'a> {
    pub(super) to: PadTo,
    pub(super) model: &'a CostModel,
}

impl Padding<'_> {
    /// Returns the LLM time for padding, costed as text without targets.
    fn ns(&self, tokens: u64) -> u64 {
        let text_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let cost = self.model.predict(&SampleShape { text_tokens, ..SampleShape::default() });
        // Only media are rejected.
        let times = cost.ok().filter(|_| tokens > 0).map(|cost| cost.module_ns);
        times.and_then(|times| times.as_slice().last().copied()).unwrap_or(0)
    }

    /// Returns the LLM time of a microbatch in addition to the sample costs.
    fn besides_ns(&self, samples: usize, tokens: u64) -> u64 {
        if self.to.layout.is_packed() || samples == 0 {
            return self.ns(self.to.padding_tokens(samples, tokens));
        }
        0
    }

    /// Returns the LLM padding time for every planned microbatch, by rank.
    pub(super) fn of_microbatches(&self, plan: &StepPlan) -> Vec<Vec<u64>> {
        let of_microbatch = |places: &Vec<u32>| {
            let is_row = |place: &&u32| !plan.is_refused(**place);
            let tokens = places.iter().map(|&place| u64::from(plan.costs[place as usize].tokens)).sum();
            self.besides_ns(places.iter().filter(is_row).count(), tokens)
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

    /// Returns the smallest token cost in one of `stages` stages, as padding with any length up to the fixed
    /// length, or in one of the `samples`, given as tokens and nanoseconds.
    fn cheapest_token(&self, stages: u64, samples: impl Iterator<Item = (u64, u64)>) -> TokenRate {
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
struct TokenRate {
    ns: u64,
    tokens: u64,
}

impl TokenRate {
    fn min(self, other: Self) -> Self {
        let products = [(self.ns, other.tokens), (other.ns, self.tokens)];
        let [own, others] = products.map(|(ns, tokens)| u128::from(ns) * u128::from(tokens));
        if others < own { other } else { self }
    }

    /// Returns the time for `tokens` tokens, rounded down and up; both saturate.
    fn of(self, tokens: u64) -> [u64; 2] {
        let (product, divisor) = (u128::from(self.ns) * u128::from(tokens), u128::from(self.tokens));
        [product / divisor, product.div_ceil(divisor)].map(|ns| u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

/// Step to cut, with limits.
#[derive(Clone, Copy)]
struct PaddedStep<'a> {
    padding: Padding<'a>,
    samples: &'a [StepSample],
    costs: &'a [SampleCost],
    caps: Caps,
    strategy: Strategy,
    work: u64,
}

impl PaddedStep<'_> {
    /// Returns the maximum number of tokens over all samples in a packed microbatch.
    fn tokens_max(&self) -> u64 {
        let room = self.padding.to.room();
        self.caps.tokens_max.map_or(room, |cap| cap.min(room))
    }
}

impl StepPlanner {
    /// Returns the fixed length in tokens for microbatches or rows, if there is one.
    #[must_use]
    pub fn pad_to(&self) -> Option<PadTo> {
        self.config.pad_to
    }

    /// Returns the LLM time of a microbatch in addition to the sample costs, in nanoseconds: the padding
    /// time, or 0.
    ///
    /// - `samples`, `tokens`: microbatch content; row padding is part of the sample costs
    #[must_use]
    pub fn padding_ns(&self, step: u64, samples: usize, tokens: u64) -> u64 {
        let Some(to) = self.config.pad_to else { return 0 };
        Padding { to, model: &self.model_of(step) }.besides_ns(samples, tokens)
    }

    /// Cuts a step into microbatches that have room for the samples.
    ///
    /// # Errors
    /// [`Error::Plan`] with a sufficient number of tokens, if the samples do not fit.
    pub(super) fn cut_padded(
        &self,
        step: u64,
        padding: Padding<'_>,
        samples: &[StepSample],
        costs: &[SampleCost],
    ) -> Result<StepCut> {
        use dflop_balancer::Error::{CapItem, CapTotal, CapUnmet};
        let (strategy, caps, work) = (self.config.strategy, self.config.caps, self.config.work);
        let padded = PaddedStep { padding, samples, costs, caps, strategy, work };
        let (longest, tokens_max) = (longest(costs), padded.tokens_max());
        if padding.to.layout.is_packed() {
            return self.cut_packed(padded).map(StepCut::from).map_err(|source| match source {
                CapItem { .. } | CapTotal { .. } | CapUnmet { .. } => self.too_long(step, padded, &source),
                source => Error::Plan(PlanError::Unsolved { step, source }),
            });
        }
        if longest > padding.to.tokens {
            let source = CapItem { item: 0, unit: "tokens", value: longest, max: tokens_max };
            return Err(self.too_long(step, padded, &source));
        }
        let as_row = |cost: &SampleCost| SampleCost { tokens: padding.to.tokens as u32, ..*cost };
        let rows: Vec<SampleCost> = costs.iter().map(as_row).collect();
        let constants = padding.model.microbatch_constants();
        let instance = self.instance(samples, &rows, &constants);
        let instance = instance.and_then(|instance| self.cut(&instance, &rows));
        instance.map_err(|source| Error::Plan(PlanError::Unsolved { step, source }))
    }

    /// Cuts into packed microbatches with a fixed length.
    fn cut_packed(&self, padded: PaddedStep<'_>) -> Result<PipelineAssignment, dflop_balancer::Error> {
        let PaddedStep { samples, costs, strategy, .. } = padded;
        let constants = padded.padding.model.microbatch_constants();
        let (plain, tokens_max) = (self.instance(samples, costs, &constants)?, padded.tokens_max());
        let mut caps = Caps { tokens_max: Some(tokens_max), ..padded.caps };
        let mut budget = Budget::work(padded.work);
        if strategy.is_blind() {
            return balance_pipeline(&plain, &self.pipeline(), strategy, &caps, &mut budget);
        }
        // A padding item fits together with samples of `tokens_max`, and two such items do not.
        caps.tokens_max = Some(2 * tokens_max + 1);
        let instance = self.with_padding_items(padded, &plain, tokens_max + 1)?;
        let mut cut = balance_pipeline(&instance, &self.pipeline(), strategy, &caps, &mut budget)?;
        for places in cut.ranks.iter_mut().flatten() {
            places.retain(|&place| (place as usize) < costs.len());
        }
        Ok(cut)
    }

    /// Creates a problem from the samples, by the time above padding, and a padding item per microbatch.
    fn with_padding_items(
        &self,
        padded: PaddedStep<'_>,
        plain: &Instance,
        item_tokens: u64,
    ) -> Result<Instance, dflop_balancer::Error> {
        let (groups, modules) = (plain.groups(), plain.modules());
        let (llm, items) = (modules - 1, plain.items());
        let tokens_of = |item: usize| u64::from(padded.costs[item].tokens);
        let llm_ns = (0..items).map(|item| (tokens_of(item), plain.times_ns(item as u32)[llm]));
        let rate = padded.padding.cheapest_token(self.config.stages[llm] as u64, llm_ns);
        let mut times_ns = Vec::with_capacity((items + groups) * modules);
        for item in 0..items {
            times_ns.extend(plain.times_ns(item as u32));
            times_ns[item * modules + llm] -= rate.of(tokens_of(item))[1].min(times_ns[item * modules + llm]);
        }
        let [base_ns, _] = rate.of(padded.padding.to.tokens);
        for _ in 0..groups {
            times_ns.extend(std::iter::repeat_n(0, llm).chain([base_ns]));
        }
        let of_samples = (0..items).map(tokens_of);
        let tokens = of_samples.chain(std::iter::repeat_n(item_tokens, groups)).collect();
        let bytes = padded.samples.iter().map(|sample| self.row(*sample).bytes());
        let bytes = bytes.chain(std::iter::repeat_n(0, groups)).collect();
        Instance::new(groups, modules, times_ns)?.like(plain)?.tokens(tokens)?.bytes(bytes)
    }

    /// Returns the samples, padding and constants in a planned step as a partition problem, and the ranks,
    /// with a padding item per microbatch where there is padding. Where modules share a device, the item
    /// includes the constants.
    pub(crate) fn as_run(&self, plan: &StepPlan) -> Result<(Instance, Ranks), dflop_balancer::Error> {
        if self.config.synchronization.is_some() {
            return self.as_lockstep_run(plan);
        }
        let plain = self.instance(&plan.samples, &plan.costs, &plan.constants)?;
        let mut ranks = plan.ranks.clone();
        if plan.padding_ns.is_empty() {
            return Ok((plain, ranks));
        }
        let (modules, items, stages) = (plain.modules(), plain.items(), &self.config.stages);
        let mut times_ns: Vec<u64> =
            (0..items).flat_map(|item| plain.times_ns(item as u32)).copied().collect();
        let padding_ns = plan.padding_ns.iter().flatten();
        for (number, (places, padding_ns)) in ranks.iter_mut().flatten().zip(padding_ns).enumerate() {
            let llm_ns = padding_ns.div_ceil(stages[modules - 1] as u64);
            times_ns.extend(std::iter::repeat_n(0, modules - 1).chain([llm_ns]));
            places.push((items + number) as u32);
        }
        Ok((Instance::with_empty_groups(plain.groups(), modules, times_ns)?.like(&plain)?, ranks))
    }

    /// Creates a problem with one module, with one item for the costs of each microbatch in addition to
    /// the samples.
    fn as_lockstep_run(&self, plan: &StepPlan) -> Result<(Instance, Ranks), dflop_balancer::Error> {
        let plain = self.instance(&plan.samples, &plan.costs, &ModelConstants::default())?;
        let mut times_ns: Vec<u64> =
            (0..plain.items()).flat_map(|item| plain.times_ns(item as u32)).copied().collect();
        let mut ranks = plan.ranks.clone();
        for (rank, microbatches) in ranks.iter_mut().enumerate() {
            for (slot, places) in microbatches.iter_mut().enumerate() {
                let all_ns = plan.microbatch_ns(rank, slot).into_iter().fold(0, u64::saturating_add);
                times_ns.push(all_ns.saturating_sub(plain.load_ns(places)[0]));
                places.push(times_ns.len() as u32 - 1);
            }
        }
        Ok((Instance::with_empty_groups(plain.groups(), 1, times_ns)?, ranks))
    }

    /// Returns the makespan of the slowest rank, padding included.
    pub(super) fn makespan_ns(&self, plan: &StepPlan) -> Result<u64> {
        let run =
            self.as_run(plan).and_then(|(instance, ranks)| self.pipeline().makespan_ns(&instance, &ranks));
        run.map_err(|source| Error::Plan(PlanError::Unsolved { step: plan.step, source }))
    }

    /// Explains why a step does not fit, and names a sufficient length.
    fn too_long(&self, step: u64, padded: PaddedStep<'_>, cause: &dflop_balancer::Error) -> Error {
        let PaddedStep { samples, costs, .. } = padded;
        let longest = longest(costs);
        let reason = if let dflop_balancer::Error::CapItem { .. } = cause {
            let place = costs.iter().position(|cost| u64::from(cost.tokens) == longest).unwrap_or(0);
            let row = self.row(samples[place]);
            let shard = &self.datasets()[samples[place].dataset].index().shards()[row.shard].url;
            format!("sample `{}` of shard `{shard}` alone has {longest}", row.key())
        } else {
            format!("the longest sample has {longest}, and no partition was found")
        };
        Error::Plan(PlanError::StepTooLong {
            step,
            tokens: total(costs),
            microbatches: self.config.dp_size * self.config.microbatches,
            tokens_max: padded.tokens_max(),
            tokens_needed: self.tokens_needed(padded),
            reason,
        })
    }

    /// Returns the smallest fixed length at which a partition of the step was found.
    fn tokens_needed(&self, padded: PaddedStep<'_>) -> u64 {
        let (longest, total) = (longest(padded.costs), total(padded.costs));
        if !padded.padding.to.layout.is_packed() {
            return longest;
        }
        let groups = (self.config.dp_size * self.config.microbatches) as u64;
        let strategy = if padded.strategy.is_blind() { padded.strategy } else { Strategy::MULTI_LPT };
        let fits = |tokens| {
            let to = PadTo { tokens, ..padded.padding.to };
            let caps = Caps { tokens_max: None, ..padded.caps };
            let padding = Padding { to, ..padded.padding };
            self.cut_packed(PaddedStep { padding, caps, strategy, work: 0, ..padded }).is_ok()
        };
        let blank = padded.padding.to.blank_tokens;
        let (mut low, mut high) = (longest.max(total.div_ceil(groups)) + blank, total + blank);
        while low < high {
            let middle = low + (high - low) / 2;
            if fits(middle) { high = middle } else { low = middle + 1 }
        }
        low
    }
}

fn longest(costs: &[SampleCost]) -> u64 {
    costs.iter().map(|cost| u64::from(cost.tokens)).max().unwrap_or(0)
}

fn total(costs: &[SampleCost]) -> u64 {
    costs.iter().map(|cost| u64::from(cost.tokens)).sum()
}
