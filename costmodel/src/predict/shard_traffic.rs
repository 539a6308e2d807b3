//! Predicts the time in which data-parallel ranks gather sharded parameters and sum gradients.
//!
//! In a shard group every layer's parameters are gathered before the forward pass and again before the
//! backward pass, and its gradients are summed and divided after the backward pass. Across groups, and under
//! DDP, gradients are summed once per step, in the last backward pass. Each of these runs while the next
//! layer computes; a layer waits for what takes longer than that.
//!
//! # Source
//! Zhao et al., "`PyTorch` FSDP", 2023, arXiv:2304.11277, section 3.

use super::device_preset::{DeviceLink, DeviceLinks};
use crate::Module;
use crate::memory::ModuleParameters;

/// Fraction of a module's time in the forward pass.
const FORWARD: f64 = 1.0 / 3.0;

/// Data-parallel ranks with one GPU each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankLayout {
    /// Number of data-parallel ranks.
    pub ranks: u32,
    /// Number of consecutive ranks that shard the parameters; 1 for DDP.
    pub shard_ranks: u32,
    /// Number of GPUs in a node.
    pub gpus_per_node: u32,
}

/// Communication for a module on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleTraffic {
    /// Module.
    pub module: Module,
    /// Bytes of parameters that a pass gathers; 0 without sharding.
    pub gathered_bytes: u64,
    /// Bytes of gradients that a microbatch sums and divides; 0 without sharding.
    pub scattered_bytes: u64,
    /// Seconds in which a pass gathers all layers.
    pub gather_seconds: f64,
    /// Seconds in which a microbatch sums and divides the gradients of all layers.
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
        let RankLayout { ranks, shard_ranks, gpus_per_node } = layout;
        let [gathered, gradients] = [parameters.parameter_bytes(), parameters.gradient_bytes()];
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
            gathered_bytes: if is_sharded { gathered } else { 0 },
            scattered_bytes: if is_sharded { gradients } else { 0 },
            gather_seconds: by_layer(gathered, &in_group),
            scatter_seconds: by_layer(gradients, &in_group),
            sum_seconds: by_layer(gradients, &across),
        }
    }

    /// Returns the seconds of communication for a microbatch, hidden or not.
    ///
    /// - `is_last`: whether the microbatch is the last in a step, which sums gradients across groups
    #[must_use]
    pub fn microbatch_seconds(&self, is_last: bool) -> f64 {
        2.0 * self.gather_seconds + self.after_backward_seconds(is_last)
    }

    /// Returns the seconds in which a microbatch waits for communication, with layers that are all alike.
    ///
    /// - `compute_seconds`: microbatch time in the module, forward and backward
    /// - `is_last`: as for [`Self::microbatch_seconds`]
    #[must_use]
    pub fn exposed_seconds(&self, compute_seconds: f64, is_last: bool) -> f64 {
        let forward = compute_seconds * FORWARD;
        let backward = compute_seconds - forward;
        let beside_backward = self.gather_seconds + self.after_backward_seconds(is_last);
        (self.gather_seconds - forward).max(0.0) + (beside_backward - backward).max(0.0)
    }

    fn after_backward_seconds(&self, is_last: bool) -> f64 {
        self.scatter_seconds + if is_last { self.sum_seconds } else { 0.0 }
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
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let modules = ReplicaMemory::new(&spec).modules();
        let layout = RankLayout { ranks, shard_ranks, gpus_per_node: 8 };
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
        assert!(is_near(traffic.microbatch_seconds(false), 3.0 * traffic.gather_seconds));
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
        assert!(is_near(traffic.exposed_seconds(0.0, true), 3.0 * gather));
        // A third of the time hides the first gather, the rest the second and the gradients.
        assert!(traffic.exposed_seconds(3.001 * gather, true).abs() < 1e-12);
        assert!(is_near(traffic.exposed_seconds(1.5 * gather, true), 1.5 * gather));
        let slower = [1, 2, 4, 8].map(|ranks| llm_traffic(8, ranks).exposed_seconds(gather, false));
        assert!(slower.is_sorted(), "{slower:?}");
    }

    #[test]
    fn presets_gather_faster_inside_a_node() {
        let links = DevicePreset::named("h100").unwrap().links().unwrap();
        assert!(links.gather_seconds(1e9, 8, 8) < links.gather_seconds(1e9, 16, 8));
        assert!(links.gather_seconds(1e9, 1, 8).abs() < 1e-12);
    }
}
