//! Describes a cluster's GPUs and links.

use dflop_balancer::{Error, Result};
use dflop_costmodel::{DeviceLink, DeviceLinks};

/// GPU cluster with equal nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cluster {
    /// Total number of GPUs; the last node may have fewer than the others.
    pub gpus: u32,
    /// GPUs per node; a tensor-parallel group stays within a node.
    pub gpus_per_node: u32,
    /// Memory per GPU, bytes.
    pub memory_bytes: u64,
    /// Links between GPUs; `None` for free communication.
    pub links: Option<Links>,
}

/// Links inside a node and between nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Link inside a node.
    pub nvlink: Link,
    /// Link between nodes.
    pub infiniband: Link,
}

/// Link with independent directions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bandwidth per GPU and direction.
    pub bytes_per_second: f64,
    /// Time before the first byte arrives.
    pub latency_seconds: f64,
}

/// Encoder placement relative to the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Each module has separate GPUs; the encoder's stages come before the LLM's.
    Disaggregated,
    /// The encoder runs on the LLM's GPUs: all media in a step forward first, backward last.
    Colocated,
    /// Every rank holds layers of both modules: its stages are cut from the chain of all layers, and the GPUs
    /// in a tensor-parallel group share a microbatch's media.
    Joint,
}

impl Placement {
    /// Returns `disaggregated`, `colocated` or `joint`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disaggregated => "disaggregated",
            Self::Colocated => "colocated",
            Self::Joint => "joint",
        }
    }
}

impl Link {
    /// Returns the message time, nanoseconds.
    #[must_use]
    pub fn send_ns(&self, bytes: f64) -> f64 {
        (self.latency_seconds + bytes / self.bytes_per_second) * 1e9
    }

    /// Returns the time for a ring all-reduce of `bytes` on each of `ranks` ranks, nanoseconds.
    ///
    /// # Source
    /// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009:
    /// `2 (p - 1)` steps of `bytes / p` each.
    #[must_use]
    pub fn all_reduce_ns(&self, bytes: f64, ranks: u32) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        2.0 * f64::from(ranks - 1) * self.send_ns(bytes / f64::from(ranks))
    }

    fn is_sound(&self) -> bool {
        self.bytes_per_second.is_finite()
            && self.bytes_per_second > 0.0
            && self.latency_seconds.is_finite()
            && self.latency_seconds >= 0.0
    }
}

impl From<DeviceLink> for Link {
    fn from(DeviceLink { bytes_per_second, latency_seconds }: DeviceLink) -> Self {
        Self { bytes_per_second, latency_seconds }
    }
}

impl From<DeviceLinks> for Links {
    fn from(DeviceLinks { nvlink, infiniband }: DeviceLinks) -> Self {
        Self { nvlink: nvlink.into(), infiniband: infiniband.into() }
    }
}

impl From<Links> for DeviceLinks {
    fn from(Links { nvlink, infiniband }: Links) -> Self {
        let link =
            |Link { bytes_per_second, latency_seconds }| DeviceLink { bytes_per_second, latency_seconds };
        Self { nvlink: link(nvlink), infiniband: link(infiniband) }
    }
}

impl Links {
    /// Returns the time for an all-reduce of `bytes` on each of `ranks` ranks with `gpus_per_rank` adjacent
    /// GPUs, nanoseconds.
    ///
    /// Inside a node this is a single ring. Between nodes, the ranks in each node first sum parts locally,
    /// every rank then sums its part across nodes over its own network card, and the ranks in a node exchange
    /// the sums.
    ///
    /// # Source
    /// NCCL's rings and trees use the network cards of all GPUs in a group and node; Jia et al., "Highly
    /// scalable deep learning training system with mixed-precision", 2018, arXiv:1807.11205, section 4.3.
    #[must_use]
    pub fn all_reduce_ns(&self, bytes: f64, ranks: u32, gpus_per_rank: u32, gpus_per_node: u32) -> f64 {
        let gpus = gpus_per_rank.saturating_mul(ranks);
        if gpus_per_node.is_multiple_of(gpus.max(1)) {
            return self.nvlink.all_reduce_ns(bytes, ranks);
        }
        let in_node = (gpus_per_node / gpus_per_rank.max(1)).clamp(1, ranks.max(1));
        let part = bytes / f64::from(in_node);
        let in_nodes_ns = 2.0 * f64::from(in_node - 1) * self.nvlink.send_ns(part);
        in_nodes_ns + self.infiniband.all_reduce_ns(part, ranks.div_ceil(in_node))
    }

    /// Returns the link between neighbors this many GPUs apart: a divisor of the node size stays inside the
    /// node.
    #[must_use]
    pub fn spanning(&self, gpus: u32, gpus_per_node: u32) -> &Link {
        if gpus_per_node.is_multiple_of(gpus.max(1)) { &self.nvlink } else { &self.infiniband }
    }
}

impl Cluster {
    /// Checks the sizes.
    ///
    /// # Errors
    /// [`Error::Config`] if a size is 0 or not finite.
    pub fn check(&self) -> Result<()> {
        let counts = [("gpus", self.gpus), ("gpus_per_node", self.gpus_per_node)];
        for (setting, count) in counts {
            if count == 0 {
                return Err(Error::Config { setting, reason: "must be at least 1".to_owned() });
            }
        }
        if self.memory_bytes == 0 {
            return Err(Error::Config { setting: "memory", reason: "must be above 0".to_owned() });
        }
        if self.links.is_some_and(|links| !links.nvlink.is_sound() || !links.infiniband.is_sound()) {
            let reason = "a bandwidth must be above 0, a latency at least 0, both finite".to_owned();
            return Err(Error::Config { setting: "links", reason });
        }
        Ok(())
    }

    /// Returns whether the tensor-parallel groups of several modules fit into the nodes together, with no
    /// group across nodes.
    ///
    /// - `modules`: GPUs per group and number of groups, for each module
    ///
    /// The largest groups fill the nodes in order; smaller groups use the remaining GPUs in each node.
    #[must_use]
    pub fn has_room(&self, modules: &[(u32, u64)]) -> bool {
        let node = self.gpus_per_node.min(self.gpus);
        let is_part = |(tp, _): &(u32, u64)| tp.is_power_of_two() && *tp <= node;
        if node.is_power_of_two() && self.gpus.is_multiple_of(node) && modules.iter().all(is_part) {
            // Such groups leave no gaps.
            let gpus = modules.iter().map(|(tp, groups)| u64::from(*tp).saturating_mul(*groups));
            return gpus.fold(0, u64::saturating_add) <= u64::from(self.gpus);
        }
        if let [one, other] = modules {
            return self.has_room_for_two(*one, *other);
        }
        let node = u64::from(node);
        let (nodes, short) = (u64::from(self.gpus) / node, u64::from(self.gpus) % node);
        let mut modules = modules.to_vec();
        modules.sort_unstable_by(|one, other| other.cmp(one));
        // Free GPUs in a node, and number of nodes with as many.
        let mut free = vec![(node, nodes), (short, 1)];
        for (tp, mut groups) in modules {
            let tp = u64::from(tp);
            let mut after = Vec::with_capacity(free.len() + 2);
            for (gpus, nodes) in free {
                let per_node = gpus / tp;
                let full = groups.checked_div(per_node).map_or(0, |full| full.min(nodes));
                groups -= full * per_node;
                after.push((gpus - per_node * tp, full));
                // Node in which the groups end.
                let here = if full < nodes { groups.min(per_node) } else { 0 };
                groups -= here;
                let ends = u64::from(here > 0);
                after.extend([(gpus - here * tp, ends), (gpus, nodes - full - ends)]);
            }
            if groups > 0 {
                return false;
            }
            free = after;
            free.retain(|(gpus, nodes)| *gpus > 0 && *nodes > 0);
        }
        true
    }

    /// [`Cluster::has_room`] for two modules, without allocation: a search calls this very often.
    fn has_room_for_two(&self, one: (u32, u64), other: (u32, u64)) -> bool {
        let (large, small) = if one.0 >= other.0 { (one, other) } else { (other, one) };
        let node = u64::from(self.gpus_per_node.min(self.gpus));
        let (nodes, short) = (u64::from(self.gpus) / node, u64::from(self.gpus) % node);
        let (large_tp, small_tp) = (u64::from(large.0), u64::from(small.0));
        let per_node = node / large_tp;
        let full = large.1.checked_div(per_node).map_or(0, |full| full.min(nodes));
        let mut left = large.1 - full * per_node;
        let mut small_groups = full * ((node - per_node * large_tp) / small_tp);
        if full < nodes {
            // Node in which the larger groups end.
            let here = left.min(per_node);
            left -= here;
            small_groups += (node - here * large_tp) / small_tp;
            small_groups += (nodes - full - 1) * (node / small_tp);
        }
        let here = left.min(short / large_tp);
        left -= here;
        small_groups += (short - here * large_tp) / small_tp;
        left == 0 && small_groups >= small.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cluster(gpus: u32, gpus_per_node: u32) -> Cluster {
        Cluster { gpus, gpus_per_node, memory_bytes: 1, links: None }
    }

    #[test]
    fn no_group_crosses_a_node() {
        assert!(cluster(16, 8).has_room(&[(8, 1), (1, 8)]));
        assert!(cluster(16, 8).has_room(&[(1, 3), (4, 3)]), "3 + 12, the larger first");
        assert!(!cluster(12, 6).has_room(&[(4, 2), (3, 1)]), "4 + 2 in each node: no three are left");
        assert!(cluster(12, 6).has_room(&[(4, 2), (2, 2)]));
        assert!(!cluster(12, 8).has_room(&[(8, 1), (8, 1)]), "the second node is short");
        assert!(cluster(12, 8).has_room(&[(4, 2), (4, 1)]));
        assert!(cluster(4, 8).has_room(&[(2, 1), (2, 1)]), "less than a node");
        assert!(cluster(16, 8).has_room(&[(4, 2), (2, 3), (1, 2)]));
        assert!(!cluster(16, 8).has_room(&[(4, 2), (2, 3), (1, 3)]));
        assert!(!cluster(12, 6).has_room(&[(4, 2), (1, 3), (2, 1)]), "4 and 2 in a node, 4 and two of 1");
    }

    proptest! {
        #[test]
        fn powers_of_two_leave_no_gaps(
            nodes in 1u32..5, powers in prop::collection::vec((0u32..4, 0u64..9), 2..5),
        ) {
            let modules: Vec<(u32, u64)> = powers.into_iter().map(|(power, groups)| (1 << power, groups)).collect();
            // The largest first, each at the first place: no group begins behind the end of a node.
            let gpus: u64 = modules.iter().map(|(tp, groups)| u64::from(*tp) * groups).sum();
            let has_room = cluster(8 * nodes, 8).has_room(&modules);
            prop_assert_eq!(has_room, gpus <= u64::from(8 * nodes));
            // A node that is one GPU short takes the other way.
            prop_assert!(!has_room || cluster(8 * nodes + 1, 8).has_room(&modules));
        }

        #[test]
        fn a_module_without_groups_changes_nothing(
            gpus in 1u32..40, node in 1u32..9, one in (1u32..9, 0u64..9), other in (1u32..9, 0u64..9),
        ) {
            let cluster = cluster(gpus, node);
            prop_assert_eq!(cluster.has_room(&[one, other, (1, 0)]), cluster.has_room(&[one, other]));
        }

        #[test]
        fn fewer_groups_need_no_more_room(
            gpus in 1u32..40, node in 1u32..9, one in (1u32..9, 0u64..9), other in (1u32..9, 1u64..9),
        ) {
            let cluster = cluster(gpus, node);
            let fewer = (other.0, other.1 - 1);
            prop_assert!(!cluster.has_room(&[one, other]) || cluster.has_room(&[one, fewer]));
        }
    }

    /// Ranks without a pipeline are costed by the same formula.
    #[test]
    fn sums_take_as_long_as_for_ranks_without_a_pipeline() {
        let links = dflop_costmodel::DevicePreset::named("h100").unwrap().links().unwrap();
        for (ranks, gpus_per_rank) in [(8, 1), (16, 1), (4, 2), (2, 8), (6, 1), (8, 4)] {
            let seconds = links.all_reduce_seconds(1e9, ranks, gpus_per_rank, 8);
            let planned_ns = Links::from(links).all_reduce_ns(1e9, ranks, gpus_per_rank, 8);
            assert!((planned_ns / 1e9 / seconds - 1.0).abs() < 1e-9, "{ranks} {gpus_per_rank}");
        }
    }

    #[test]
    fn every_card_of_a_node_sends_its_part() {
        let link = |bytes_per_second| Link { bytes_per_second, latency_seconds: 0.0 };
        let links = Links { nvlink: link(1e12), infiniband: link(1e10) };
        // 16 ranks with a GPU each in two nodes of 8: parts of 1/8, twice 7/8 inside and once between.
        let all = links.all_reduce_ns(8e9, 16, 1, 8);
        assert!((all - (2.0 * 7.0 * 1e9 / 1e12 + 1e9 / 1e10) * 1e9).abs() < 10.0, "{all}");
        // One rank per node: a ring between nodes.
        assert!((links.all_reduce_ns(8e9, 2, 8, 8) - 0.8e9).abs() < 10.0);
        assert!((links.all_reduce_ns(8e9, 4, 2, 8) - 2.0 * 3.0 * 2e9 / 1e12 * 1e9).abs() < 10.0);
        assert!(links.all_reduce_ns(8e9, 1, 1, 8).abs() < 1e-9);
    }

    #[test]
    fn a_ring_sends_nearly_all_twice() {
        let link = Link { bytes_per_second: 1e9, latency_seconds: 0.0 };
        assert!((link.all_reduce_ns(4e9, 4) - 6e9).abs() < 1.0);
        assert!(link.all_reduce_ns(4e9, 1).abs() < 1e-12);
    }
}
