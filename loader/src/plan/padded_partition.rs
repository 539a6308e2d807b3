//! Partitions steps whose microbatches or rows are padded to a fixed number of tokens.

use dflop_balancer::{Budget, Caps, Instance, PipelineAssignment, Strategy, balance_pipeline};
use dflop_costmodel::{ModelConstants, SampleCost};

use super::config::PadTo;
use super::padding::Padding;
use super::planner::StepPlanner;
use super::step_context::StepContext;
use super::step_plan::{StepPartition, StepPlan};
use crate::error::{Error, PlanError, Result};
use crate::order::StepSample;

/// Items by rank and microbatch.
type Ranks = Vec<Vec<Vec<u32>>>;

/// Step to partition, with its limits.
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
    /// Returns the maximum tokens of all samples of a packed microbatch.
    fn tokens_max(&self) -> u64 {
        let capacity = self.padding.to.capacity_tokens();
        self.caps.tokens_max.map_or(capacity, |cap| cap.min(capacity))
    }
}

impl StepPlanner {
    /// Returns the fixed length in tokens of microbatches or rows, if there is one.
    #[must_use]
    pub fn pad_to(&self) -> Option<PadTo> {
        self.config.pad_to
    }

    /// Returns the LLM time of a microbatch in addition to the costs of its samples, in nanoseconds: its
    /// padding, or 0.
    ///
    /// - `samples`, `tokens`: content of the microbatch; padding of rows is part of the costs of samples
    #[must_use]
    pub fn padding_ns(&self, step: u64, samples: usize, tokens: u64) -> u64 {
        let Some(to) = self.config.pad_to else { return 0 };
        Padding { to, model: &self.step_model(step) }.overhead_ns(samples, tokens)
    }

    /// Partitions a step into microbatches that have room for their samples.
    ///
    /// # Errors
    /// [`Error::Plan`] that names the tokens that would do, if the samples do not fit.
    pub(super) fn partition_padded(
        &self,
        step: u64,
        padding: Padding<'_>,
        samples: &[StepSample],
        costs: &[SampleCost],
    ) -> Result<StepPartition> {
        use dflop_balancer::Error::{CapItem, CapTotal, CapUnmet};
        let (strategy, caps, work) = (self.config.strategy, self.config.caps, self.config.work);
        let padded = PaddedStep { padding, samples, costs, caps, strategy, work };
        let (longest, tokens_max) = (longest(costs), padded.tokens_max());
        if padding.to.layout.is_packed() {
            return self.partition_packed(padded).map(StepPartition::from).map_err(|source| match source {
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
        let instance = instance.and_then(|instance| self.partition(&instance));
        instance.map_err(|source| Error::Plan(PlanError::Unsolved { step, source }))
    }

    /// Partitions into packed microbatches of a fixed length.
    fn partition_packed(&self, padded: PaddedStep<'_>) -> Result<PipelineAssignment, dflop_balancer::Error> {
        let PaddedStep { samples, costs, strategy, .. } = padded;
        let constants = padded.padding.model.microbatch_constants();
        let (plain, tokens_max) = (self.instance(samples, costs, &constants)?, padded.tokens_max());
        let mut caps = Caps { tokens_max: Some(tokens_max), ..padded.caps };
        let mut budget = Budget::work(padded.work);
        if strategy.is_blind() {
            return balance_pipeline(&plain, &self.pipeline(), strategy, &caps, &mut budget);
        }
        // The item of a padding fits together with samples of `tokens_max`, and two such items do not.
        caps.tokens_max = Some(2 * tokens_max + 1);
        let instance = self.with_padding_items(padded, &plain, tokens_max + 1)?;
        let mut cut = balance_pipeline(&instance, &self.pipeline(), strategy, &caps, &mut budget)?;
        for places in cut.ranks.iter_mut().flatten() {
            places.retain(|&place| (place as usize) < costs.len());
        }
        Ok(cut)
    }

    /// Makes a problem of the samples, by their time over that of padding, and an item for the padding of
    /// each microbatch.
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

    /// Returns the samples, padding and constants of a planned step as a partition problem, and its ranks,
    /// with an item for the padding of each microbatch where there is padding. Where modules share a device,
    /// the item is for the constants, too.
    pub(crate) fn as_run(&self, plan: &StepPlan) -> Result<(Instance, Ranks), dflop_balancer::Error> {
        if self.config.synchronization.is_some() {
            return self.as_lockstep_run(plan);
        }
        if let Some(context) = &plan.context {
            return self.as_shared_run(context);
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

    /// Makes a problem with one item per microbatch, whose LLM takes the longest of the ranks that share
    /// samples.
    fn as_shared_run(&self, context: &StepContext) -> Result<(Instance, Ranks), dflop_balancer::Error> {
        let mut ranks_ns = context.times_ns.clone();
        let Some(llm) = self.config.stages.len().checked_sub(1) else { unreachable!("models have an LLM") };
        for place in context.places.iter().filter(|place| place.is_split()) {
            let ns = |rank: usize| context.times_ns[rank][place.microbatch][llm];
            let longest_ns = place.ranks.clone().map(ns).max().unwrap_or(0);
            for rank in place.ranks.clone() {
                let own = &mut ranks_ns[rank][place.microbatch][llm];
                *own = longest_ns.max(*own);
            }
        }
        let stage_ns = |(ns, stages): (&u64, &usize)| ns.div_ceil(*stages as u64);
        let slots = ranks_ns.iter().flatten();
        let times_ns: Vec<u64> =
            slots.flat_map(|slot| slot.iter().zip(&self.config.stages).map(stage_ns)).collect();
        let (microbatches, groups) = (self.config.microbatches, self.config.microbatches * ranks_ns.len());
        let items: Vec<Vec<u32>> = (0..groups as u32).map(|item| vec![item]).collect();
        let ranks = items.chunks(microbatches).map(<[_]>::to_vec).collect();
        Ok((Instance::new(groups, llm + 1, times_ns)?, ranks))
    }

    /// Makes a problem of one module, with one item for what each microbatch takes besides its samples.
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
            self.partition_packed(PaddedStep { padding, caps, strategy, work: 0, ..padded }).is_ok()
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
