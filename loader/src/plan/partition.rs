//! Partitions the samples in a step into ranks and microbatches, by predicted cost.

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance_pipeline, balance_shard_groups};
use dflop_costmodel::{CostModel, MicrobatchConstants, ModelConstants, SampleCost, SampleShape};

use super::config::{PadTo, PlanConfig};
use super::cost_function::{self, CostInput};
use super::lockstep::{Synchronization, common_constants, serial_ns};
use super::planner::StepPlanner;
use super::rows;
use super::step_plan::{StepPartition, StepSamples};
use crate::error::{Result, error_reason};
use crate::order::StepSample;

impl StepPlanner {
    /// Partitions within the caps. Where no token cap is set, microbatches stay near each other in tokens,
    /// because a shorter makespan is no use if a microbatch does not fit into memory.
    pub(super) fn partition(&self, instance: &Instance) -> Result<StepPartition, dflop_balancer::Error> {
        let PlanConfig { strategy, caps, work, dp_size, .. } = &self.config;
        let solve = |caps: &Caps| {
            let mut budget = Budget::work(*work);
            match self.config.synchronization.filter(|_| self.balances_modules_apart()) {
                Some(synchronization) => {
                    let shard_ranks = synchronization.shard_ranks(*dp_size);
                    balance_shard_groups(instance, *dp_size, shard_ranks, caps, &mut budget)
                }
                None => balance_pipeline(instance, &self.pipeline(), *strategy, caps, &mut budget),
            }
        };
        if strategy.is_blind() || caps.tokens_max.is_some() {
            return Ok(solve(caps)?.into());
        }
        let near = Caps { tokens_max: instance.near_mean_tokens(), ..*caps };
        match solve(&near) {
            // Tokens alone always fit the near-mean cap; together with the byte cap there may be no such
            // partition.
            Err(dflop_balancer::Error::CapUnmet { .. }) => {
                Ok(StepPartition { assignment: solve(caps)?, is_near_mean_cap_dropped: true })
            }
            partition => Ok(partition?.into()),
        }
    }

    /// Returns whether ranks meet in every module and the search balances each module for itself.
    pub(super) fn balances_modules_apart(&self) -> bool {
        let PlanConfig { strategy, synchronization, pad_to, .. } = &self.config;
        synchronization.is_some_and(Synchronization::meets_in_layers)
            && *strategy == Strategy::SEARCH
            && pad_to.is_none()
    }

    /// Creates the partition problem for a step whose modules are balanced apart.
    ///
    /// # Errors
    /// As [`Self::instance`].
    pub(super) fn module_instance(
        &self,
        samples: &[StepSample],
        costs: &[SampleCost],
        constants: &ModelConstants,
    ) -> Result<Instance, dflop_balancer::Error> {
        let modules = self.model.modules().len();
        let times_ns = costs.iter().flat_map(|cost| cost.module_ns.as_slice().iter().copied()).collect();
        let instance = self.with_limits(costs, self.bytes(samples).collect(), (modules, times_ns))?;
        if constants.modules.is_empty() {
            return Ok(instance);
        }
        instance.constants(constants.modules.clone())
    }

    /// Predicts sample costs; samples that the model rejects are free, and listed with the reason.
    pub(super) fn predict_costs(
        &self,
        drawn: &StepSamples,
        model: &CostModel,
    ) -> (Vec<SampleCost>, Vec<(usize, String)>) {
        let (mut shape, mut refused) = (SampleShape::default(), Vec::new());
        let counts_tokens = self.cost_function.as_ref().is_some_and(|function| function.counts_tokens());
        let room = self.config.pad_to.map_or(0, PadTo::capacity_tokens);
        let cost = |(place, sample): (usize, &StepSample)| {
            let span = drawn.spans.get(place).copied();
            if let Some(span) = span.filter(|span| span.is_refused()) {
                refused.push((place, rows::refusal(span, room)));
                return self.zero_cost;
            }
            self.read_shape(*sample, span, &mut shape);
            if counts_tokens {
                return SampleCost { target_tokens: shape.target_tokens, ..self.zero_cost };
            }
            model.predict(&shape).unwrap_or_else(|error| {
                refused.push((place, error_reason(&error)));
                self.zero_cost
            })
        };
        (drawn.samples.iter().enumerate().map(cost).collect(), refused)
    }

    /// Replaces the model's times by the results of the cost function, if there is one.
    pub(super) fn apply_cost_function(
        &self,
        step: u64,
        drawn: &StepSamples,
        refused: &[(usize, String)],
        costs: &mut [SampleCost],
    ) -> Result<()> {
        let samples = &drawn.samples;
        let Some(function) = self.cost_function.as_deref() else { return Ok(()) };
        let is_taken = |place: &usize| refused.binary_search_by_key(place, |(refused, _)| *refused).is_err();
        let places: Vec<usize> = (0..samples.len()).filter(is_taken).collect();
        let shape_of = |&place: &usize| {
            let mut shape = SampleShape::default();
            self.read_shape(samples[place], drawn.spans.get(place).copied(), &mut shape);
            shape
        };
        let shapes: Vec<SampleShape> = places.iter().map(shape_of).collect();
        let input = |(&place, shape)| {
            let StepSample { dataset, sample, .. } = samples[place];
            CostInput { key: self.row(samples[place]).key(), dataset, sample, shape, predicted: costs[place] }
        };
        let inputs: Vec<CostInput<'_>> = places.iter().zip(&shapes).map(input).collect();
        let answer = cost_function::ask(function, step, self.model.modules(), &inputs)?;
        for (place, cost) in places.into_iter().zip(answer) {
            costs[place] = cost;
        }
        Ok(())
    }

    /// Creates the partition problem for a step; times are per stage of each module.
    ///
    /// - `constants`: microbatch costs in addition to the samples
    ///
    /// # Errors
    /// Errors from [`Instance::new`]; times that overflow.
    pub(crate) fn instance(
        &self,
        samples: &[StepSample],
        costs: &[SampleCost],
        constants: &ModelConstants,
    ) -> Result<Instance, dflop_balancer::Error> {
        self.instance_with_bytes(costs, self.bytes(samples).collect(), constants)
    }

    /// Returns the payload bytes of each sample.
    pub(super) fn bytes(&self, samples: &[StepSample]) -> impl Iterator<Item = u64> {
        samples.iter().map(|sample| self.row(*sample).bytes())
    }

    /// Creates the partition problem for items with costs and payload bytes.
    ///
    /// # Errors
    /// As [`Self::instance`].
    pub(super) fn instance_with_bytes(
        &self,
        costs: &[SampleCost],
        bytes: Vec<u64>,
        constants: &ModelConstants,
    ) -> Result<Instance, dflop_balancer::Error> {
        let stages = &self.config.stages;
        let stage_ns = |cost: &SampleCost| -> Vec<u64> {
            if self.config.synchronization.is_some() {
                return vec![serial_ns(cost)];
            }
            if let Some(layers) = &self.config.stage_layers {
                return layers.stage_ns(cost).collect();
            }
            let modules = cost.module_ns.as_slice().iter().zip(stages);
            modules.map(|(ns, stages)| ns.div_ceil(*stages as u64)).collect()
        };
        let times_ns: Vec<u64> = costs.iter().flat_map(stage_ns).collect();
        let instance = self.with_limits(costs, bytes, (stages.len(), times_ns))?;
        let constants = self.stage_constants(costs, constants);
        if constants.is_empty() { Ok(instance) } else { instance.constants(constants) }
    }

    /// Creates a partition problem whose items have tokens and bytes.
    fn with_limits(
        &self,
        costs: &[SampleCost],
        bytes: Vec<u64>,
        (columns, times_ns): (usize, Vec<u64>),
    ) -> Result<Instance, dflop_balancer::Error> {
        let groups = self.config.dp_size * self.config.microbatches;
        // Only the short last batch in an epoch has fewer samples than groups.
        let instance = if costs.len() < groups {
            Instance::with_empty_groups(groups, columns, times_ns)?
        } else {
            Instance::new(groups, columns, times_ns)?
        };
        let tokens = costs.iter().map(|cost| u64::from(cost.tokens)).collect();
        instance.tokens(tokens)?.bytes(bytes)
    }

    /// Returns the microbatch constants for a stage of each kind; none where nothing is known.
    fn stage_constants(&self, costs: &[SampleCost], constants: &ModelConstants) -> Vec<MicrobatchConstants> {
        if self.config.synchronization.is_some() {
            return vec![constants.whole.unwrap_or_else(|| common_constants(costs, &constants.modules))];
        }
        if constants.modules.is_empty() {
            return Vec::new();
        }
        if let Some(layers) = &self.config.stage_layers {
            return layers.constants(&constants.modules);
        }
        let stages = constants.modules.iter().zip(&self.config.stages);
        stages.map(|(constants, stages)| constants.share([1, *stages as u64])).collect()
    }
}
