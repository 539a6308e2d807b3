//! Predicts the time in which data-parallel ranks gather sharded parameters and sum gradients.
//!
//! With divided parameters, every layer's parameters are gathered before the forward pass and again before
//! the backward pass, and its gradients are summed and divided after the backward pass. With whole parameters
//! and divided gradients (`ZeRO-2`), parameters are gathered in the first forward pass of a step only. With a
//! divided optimizer alone (`ZeRO-1`), gradients are summed and divided in the last backward pass of a step,
//! and parameters are gathered after the update. Across groups, and under DDP, gradients are summed once per
//! step, in the last backward pass. Communication runs while the next layer computes; a layer waits for what
//! takes longer than that. After the update nothing computes, so everything waits.
//!
//! # Source
//! Rajbhandari et al., "`ZeRO`", 2020, arXiv:1910.02054, section 7; Zhao et al., "`PyTorch` FSDP", 2023,
//! arXiv:2304.11277, section 3. `ZeroRedundancyOptimizer` in `PyTorch` and stage 1 in `DeepSpeed` exchange
//! parameters after the update.

use super::device::{DeviceLink, DeviceLinks};
use crate::Module;
use crate::memory::{ModuleParameters, RankLayout, Sharding};

/// Fraction of a module's time in the forward pass.
const FORWARD: f64 = 1.0 / 3.0;

/// Communication for a module on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleTraffic {
    /// Module.
    pub module: Module,
    /// State that ranks divide, which determines how often they gather and sum.
    pub sharding: Sharding,
    /// Bytes of parameters in a gather; 0 without sharding.
    pub gathered_bytes: u64,
    /// Bytes of gradients that are summed and divided at once inside a shard group; 0 without sharding.
    pub scattered_bytes: u64,
    /// Seconds for a gather over all layers.
    pub gather_seconds: f64,
    /// Seconds to sum and divide the gradients of all layers.
    pub scatter_seconds: f64,
    /// Seconds in which a step sums gradients across shard groups.
    pub sum_seconds: f64,
}

impl DeviceLinks {
    /// Returns the seconds for an all-reduce of `bytes` on each of `ranks` ranks that are `gpus_per_rank`
    /// GPUs apart.
    ///
    /// Inside a node this is a single ring. Between nodes, the ranks in each node first sum parts locally,
    /// every rank then sums its part across nodes over its own network card, and the ranks in a node exchange
    /// the sums.
    ///
    /// # Source
    /// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; Jia
    /// et al., "Highly scalable deep learning training system with mixed-precision", 2018, arXiv:1807.11205,
    /// section 4.3.
    #[must_use]
    pub fn all_reduce_seconds(&self, bytes: f64, ranks: u32, gpus_per_rank: u32, gpus_per_node: u32) -> f64 {
        let gpus = gpus_per_rank.saturating_mul(ranks);
        if gpus_per_node.is_multiple_of(gpus.max(1)) {
            return ring_seconds(&self.nvlink, bytes, ranks);
        }
        let in_node = (gpus_per_node / gpus_per_rank.max(1)).clamp(1, ranks.max(1));
        let part = bytes / f64::from(in_node);
        ring_seconds(&self.nvlink, bytes, in_node)
            + ring_seconds(&self.infiniband, part, ranks.div_ceil(in_node))
    }

    /// Returns the seconds in which `ranks` neighboring ranks gather `bytes` of which each has an equal part,
    /// or sum and divide as many: half an all-reduce.
    #[must_use]
    pub fn gather_seconds(&self, bytes: f64, ranks: u32, gpus_per_node: u32) -> f64 {
        self.all_reduce_seconds(bytes, ranks, 1, gpus_per_node) / 2.0
    }
}

/// Returns the seconds for a ring all-reduce: `2 (p - 1)` steps of `bytes / p` each.
fn ring_seconds(link: &DeviceLink, bytes: f64, ranks: u32) -> f64 {
    if ranks < 2 {
        return 0.0;
    }
    let step = link.latency_seconds + bytes / f64::from(ranks) / link.bytes_per_second;
    2.0 * f64::from(ranks - 1) * step
}

impl ModuleTraffic {
    /// Predicts the communication for a module, layer by layer; what is outside the layers counts as part of
    /// them.
    #[must_use]
    pub fn new(parameters: &ModuleParameters, layout: RankLayout, links: &DeviceLinks) -> Self {
        let RankLayout { ranks, shard_ranks, gpus_per_node, sharding } = layout;
        let gradients = parameters.gradient_bytes();
        let gathered = match sharding {
            // Only trained parameters change.
            Sharding::Optimizer => parameters.trained_bytes(),
            _ => parameters.parameter_bytes(),
        };
        let layers = f64::from(parameters.layers.max(1));
        let by_layer = |bytes: u64, seconds: &dyn Fn(f64) -> f64| {
            if bytes == 0 { 0.0 } else { layers * seconds(bytes as f64 / layers) }
        };
        let in_group = |bytes: f64| links.gather_seconds(bytes, shard_ranks, gpus_per_node);
        let groups = ranks / shard_ranks.max(1);
        let across = |bytes: f64| {
            let part = bytes / f64::from(shard_ranks.max(1));
            links.all_reduce_seconds(part, groups, shard_ranks, gpus_per_node)
        };
        let is_sharded = shard_ranks > 1;
        Self {
            module: parameters.module,
            sharding,
            gathered_bytes: if is_sharded { gathered } else { 0 },
            scattered_bytes: if is_sharded { gradients } else { 0 },
            gather_seconds: by_layer(gathered, &in_group),
            scatter_seconds: by_layer(gradients, &in_group),
            sum_seconds: by_layer(gradients, &across),
        }
    }

    /// Returns the bytes of parameters that a step gathers, saturating.
    ///
    /// - `microbatches`: number of microbatches per rank
    #[must_use]
    pub const fn step_gathered_bytes(&self, microbatches: u64) -> u64 {
        self.gathered_bytes.saturating_mul(self.sharding.gathers(microbatches))
    }

    /// Returns the bytes of gradients that a step sums and divides inside a shard group, saturating.
    ///
    /// - `microbatches`: as for [`Self::step_gathered_bytes`]
    #[must_use]
    pub const fn step_scattered_bytes(&self, microbatches: u64) -> u64 {
        self.scattered_bytes.saturating_mul(self.sharding.scatters(microbatches))
    }

    /// Returns the seconds of communication for a step, hidden or not.
    ///
    /// - `microbatches`: as for [`Self::step_gathered_bytes`]
    #[must_use]
    pub fn step_seconds(&self, microbatches: u64) -> f64 {
        self.gather_seconds * self.sharding.gathers(microbatches) as f64
            + self.scatter_seconds * self.sharding.scatters(microbatches) as f64
            + self.sum_seconds
    }

    /// Returns the seconds in which a microbatch waits for communication, with layers that are all alike.
    ///
    /// - `compute_seconds`: microbatch time in the module, forward and backward
    /// - `microbatch`, `microbatches`: position in the step, from 0, and number per rank
    #[must_use]
    pub fn exposed_seconds(&self, compute_seconds: f64, [microbatch, microbatches]: [usize; 2]) -> f64 {
        let (is_first, is_last) = (microbatch == 0, microbatch + 1 == microbatches);
        let forward = compute_seconds * FORWARD;
        let backward = compute_seconds - forward;
        let counted = |is_done: bool, seconds: f64| if is_done { seconds } else { 0.0 };
        let gathers_in_passes = self.sharding == Sharding::Parameters;
        let gathers_in_forward = gathers_in_passes || (self.sharding == Sharding::Gradients && is_first);
        let scatters = match self.sharding {
            Sharding::Nothing => false,
            Sharding::Optimizer => is_last,
            Sharding::Gradients | Sharding::Parameters => true,
        };
        let beside_forward = counted(gathers_in_forward, self.gather_seconds);
        let beside_backward = counted(gathers_in_passes, self.gather_seconds)
            + counted(scatters, self.scatter_seconds)
            + counted(is_last, self.sum_seconds);
        (beside_forward - forward).max(0.0) + (beside_backward - backward).max(0.0)
    }

    /// Returns the seconds in which a step gathers parameters after the update, when nothing computes.
    #[must_use]
    pub fn after_update_seconds(&self) -> f64 {
        if self.sharding == Sharding::Optimizer { self.gather_seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::ReplicaMemory;
    use crate::model::ModelSpec;
    use crate::predict::DevicePreset;

    fn links() -> DeviceLinks {
        let link = |bytes_per_second| DeviceLink { bytes_per_second, latency_seconds: 0.0 };
        DeviceLinks { nvlink: link(1e12), infiniband: link(1e10) }
    }

    fn llm_traffic(ranks: u32, shard_ranks: u32) -> ModuleTraffic {
        traffic(RankLayout::replicated(ranks, 8).sharded(Sharding::Parameters, shard_ranks))
    }

    fn traffic(layout: RankLayout) -> ModuleTraffic {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let modules = ReplicaMemory::new(&spec).modules();
        ModuleTraffic::new(&modules[1], layout, &links())
    }

    fn is_near(one: f64, other: f64) -> bool {
        (one / other - 1.0).abs() < 1e-9
    }

    /// Each rank receives seven eighths of the parameters.
    #[test]
    fn a_gather_inside_a_node_takes_the_other_ranks_parts() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let bytes = 2 * spec.llm_parameters().total();
        let traffic = llm_traffic(8, 8);
        assert_eq!([traffic.gathered_bytes, traffic.scattered_bytes], [bytes; 2]);
        assert!(is_near(traffic.gather_seconds, bytes as f64 * 7.0 / 8.0 / 1e12));
        assert!(is_near(traffic.step_seconds(5), 15.0 * traffic.gather_seconds));
        assert_eq!(
            [traffic.step_gathered_bytes(5), traffic.step_scattered_bytes(5)],
            [10 * bytes, 5 * bytes]
        );
        assert!(traffic.sum_seconds.abs() < 1e-12);
    }

    /// Two nodes: an eighth of the parameters crosses the network on every card.
    #[test]
    fn a_gather_between_nodes_uses_all_network_cards() {
        let bytes = llm_traffic(16, 16).gathered_bytes as f64;
        let expected = bytes * 7.0 / 8.0 / 1e12 + bytes / 8.0 / 2.0 / 1e10;
        assert!(is_near(llm_traffic(16, 16).gather_seconds, expected));
        // Groups within the nodes gather over NVLink only, and sum an eighth of the gradients between them.
        let grouped = llm_traffic(16, 8);
        assert!(is_near(grouped.gather_seconds, bytes * 7.0 / 8.0 / 1e12));
        assert!(is_near(grouped.sum_seconds, 2.0 * bytes / 8.0 / 2.0 / 1e10));
        let copies = llm_traffic(16, 1);
        assert_eq!((copies.gathered_bytes, copies.scattered_bytes), (0, 0));
        assert!(copies.gather_seconds.abs() < 1e-12 && is_near(copies.sum_seconds, 2.0 * expected));
    }

    #[test]
    fn computing_hides_communication_up_to_its_own_length() {
        let traffic = llm_traffic(8, 8);
        let gather = traffic.gather_seconds;
        assert!(is_near(traffic.exposed_seconds(0.0, [0, 1]), 3.0 * gather));
        // A third of the time hides the first gather, the rest the second and the gradients.
        assert!(traffic.exposed_seconds(3.001 * gather, [0, 1]).abs() < 1e-12);
        assert!(is_near(traffic.exposed_seconds(1.5 * gather, [0, 1]), 1.5 * gather));
        let slower = [1, 2, 4, 8].map(|ranks| llm_traffic(8, ranks).exposed_seconds(gather, [0, 2]));
        assert!(slower.is_sorted(), "{slower:?}");
    }

    /// A gather of `p` bytes on 8 ranks moves seven eighths of `p`, and so does a sum of as many gradients
    /// that ends divided; an all-reduce moves both. With four microbatches, DDP moves 2 `p`, `ZeRO-1` as
    /// much, `ZeRO-2` 5 `p` and FSDP 12 `p`.
    #[test]
    fn every_stage_moves_more_in_a_step() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let once = 2.0 * spec.llm_parameters().total() as f64 * 7.0 / 8.0 / 1e12;
        let ddp = RankLayout::replicated(8, 8);
        let stages = [Sharding::Nothing, Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters];
        for (sharding, times) in stages.into_iter().zip([2.0, 2.0, 5.0, 12.0]) {
            let traffic = traffic(ddp.sharded(sharding, 8));
            assert!(is_near(traffic.step_seconds(4), times * once), "{sharding:?}");
            // Nothing is hidden if nothing is computed.
            let waits = (0..4).map(|slot| traffic.exposed_seconds(0.0, [slot, 4])).sum::<f64>();
            assert!(is_near(waits + traffic.after_update_seconds(), times * once), "{sharding:?}");
        }
    }

    #[test]
    fn stages_wait_where_they_communicate() {
        let ddp = RankLayout::replicated(8, 8);
        let gather = llm_traffic(8, 8).gather_seconds;
        let waits = |sharding| {
            let traffic = traffic(ddp.sharded(sharding, 8));
            let gathers = |seconds: f64| (seconds / gather).round() as u64;
            let slots = [0, 1, 2].map(|slot| gathers(traffic.exposed_seconds(0.0, [slot, 3])));
            (slots, gathers(traffic.after_update_seconds()))
        };
        assert_eq!(waits(Sharding::Nothing), ([0, 0, 2], 0));
        assert_eq!(waits(Sharding::Optimizer), ([0, 0, 1], 1));
        assert_eq!(waits(Sharding::Gradients), ([2, 1, 1], 0));
        assert_eq!(waits(Sharding::Parameters), ([3, 3, 3], 0));
    }

    /// Updated parameters are gathered, frozen parameters are not; FSDP gathers all.
    #[test]
    fn frozen_parameters_stay_where_they_are_whole() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let frozen = ReplicaMemory::new(&spec).frozen("llm".parse().unwrap()).modules();
        let ddp = RankLayout::replicated(8, 8);
        let [first, third] = [Sharding::Optimizer, Sharding::Parameters]
            .map(|sharding| ModuleTraffic::new(&frozen[1], ddp.sharded(sharding, 8), &links()));
        assert_eq!([first.gathered_bytes, first.scattered_bytes], [0, 0]);
        assert!(first.step_seconds(4).abs() < 1e-12 && third.step_seconds(4) > 0.0);
        assert_eq!(third.scattered_bytes, 0);
    }

    #[test]
    fn presets_gather_faster_inside_a_node() {
        let links = DevicePreset::named("h100").unwrap().links().unwrap();
        assert!(links.gather_seconds(1e9, 8, 8) < links.gather_seconds(1e9, 16, 8));
        assert!(links.gather_seconds(1e9, 1, 8).abs() < 1e-12);
    }
}
