//! Describes layouts of data-parallel ranks that run a whole model each: DDP, `ZeRO` stages, FSDP and HSDP.
//!
//! # Source
//! Stages: Rajbhandari et al., "`ZeRO`", 2020, arXiv:1910.02054, section 5. FSDP strategies: Zhao et al.,
//! "`PyTorch` FSDP", 2023, arXiv:2304.11277, section 3.2: `FULL_SHARD`, `SHARD_GRAD_OP`, `HYBRID_SHARD` and
//! `_HYBRID_SHARD_ZERO2`.

use std::fmt::{self, Write};

/// State that the ranks in a shard group divide; each variant includes the state in the variants before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sharding {
    /// Nothing, as under DDP: gradients are summed once per step.
    Nothing,
    /// Optimizer state, as in `ZeRO-1`: gradients are summed and divided once per step, and updated
    /// parameters are gathered after the update.
    Optimizer,
    /// Gradients as well, as in `ZeRO-2`: every microbatch sums and divides gradients, and parameters are
    /// gathered once per step, in the first forward pass.
    Gradients,
    /// Parameters as well, as in `ZeRO-3` and FSDP: every pass gathers the parameters of a layer before the
    /// layer computes.
    Parameters,
}

/// Data-parallel ranks with one GPU each.
///
/// # Examples
/// ```
/// use dflop_costmodel::{RankLayout, Sharding};
///
/// let layout = RankLayout { ranks: 16, shard_ranks: 8, gpus_per_node: 8, sharding: Sharding::Parameters };
/// assert_eq!(layout.to_string(), "HSDP over 16 GPUs in shard groups of 8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RankLayout {
    /// Number of data-parallel ranks.
    pub ranks: u32,
    /// Number of consecutive ranks in a shard group; 1 for DDP.
    pub shard_ranks: u32,
    /// Number of GPUs in a node.
    pub gpus_per_node: u32,
    /// State that the ranks in a shard group divide.
    pub sharding: Sharding,
}

impl Sharding {
    /// Returns the number of times that a step gathers every parameter.
    ///
    /// - `microbatches`: number of microbatches per rank
    #[must_use]
    pub const fn gathers(self, microbatches: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Optimizer | Self::Gradients => 1,
            Self::Parameters => microbatches.saturating_mul(2),
        }
    }

    /// Returns the number of times that a step sums and divides every gradient inside a shard group.
    ///
    /// - `microbatches`: as for [`Self::gathers`]
    #[must_use]
    pub const fn scatters(self, microbatches: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Optimizer => 1,
            Self::Gradients | Self::Parameters => microbatches,
        }
    }

    /// Returns whether the ranks in a shard group wait for each other before the end of a step.
    #[must_use]
    pub const fn meets_in_microbatches(self) -> bool {
        matches!(self, Self::Gradients | Self::Parameters)
    }
}

impl RankLayout {
    /// Returns the layout without shards: DDP.
    #[must_use]
    pub const fn replicated(ranks: u32, gpus_per_node: u32) -> Self {
        Self { ranks, shard_ranks: 1, gpus_per_node, sharding: Sharding::Nothing }
    }

    /// Returns the same ranks with the state divided inside shard groups; DDP for groups with one rank.
    #[must_use]
    pub const fn sharded(self, sharding: Sharding, shard_ranks: u32) -> Self {
        if shard_ranks < 2 || matches!(sharding, Sharding::Nothing) {
            Self::replicated(self.ranks, self.gpus_per_node)
        } else {
            Self { shard_ranks, sharding, ..self }
        }
    }

    /// Lists the layouts that trainers have, the least divided state first: DDP, `ZeRO-1`, `ZeRO-2` and FSDP
    /// over all ranks, and the latter two inside shard groups.
    ///
    /// - `group_ranks`: number of ranks in a shard group; without effect unless between 1 and all ranks, and
    ///   a divisor
    #[must_use]
    pub fn all(ranks: u32, gpus_per_node: u32, group_ranks: u32) -> Vec<Self> {
        let ddp = Self::replicated(ranks, gpus_per_node);
        let is_grouped = group_ranks > 1 && group_ranks < ranks && ranks.is_multiple_of(group_ranks);
        let mut layouts = vec![ddp];
        if ranks < 2 {
            return layouts;
        }
        layouts.push(ddp.sharded(Sharding::Optimizer, ranks));
        for sharding in [Sharding::Gradients, Sharding::Parameters] {
            layouts.extend(is_grouped.then(|| ddp.sharded(sharding, group_ranks)));
            layouts.push(ddp.sharded(sharding, ranks));
        }
        layouts
    }

    /// Returns whether shard groups hold a copy of the state each.
    #[must_use]
    pub const fn has_groups(&self) -> bool {
        self.shard_ranks > 1 && self.shard_ranks < self.ranks
    }
}

impl fmt::Display for RankLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.sharding {
            Sharding::Nothing => "DDP",
            Sharding::Optimizer => "ZeRO-1",
            Sharding::Gradients => "ZeRO-2",
            Sharding::Parameters if self.has_groups() => "HSDP",
            Sharding::Parameters => "FSDP",
        };
        let unit = if self.ranks == 1 { "GPU" } else { "GPUs" };
        let mut text = format!("{name} over {} {unit}", self.ranks);
        if self.has_groups() {
            write!(text, " in shard groups of {}", self.shard_ranks)?;
        }
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_listed_by_divided_state() {
        let names = |ranks, group| -> Vec<String> {
            RankLayout::all(ranks, 8, group).iter().map(RankLayout::to_string).collect()
        };
        assert_eq!(names(1, 1), ["DDP over 1 GPU"]);
        let over_eight = ["DDP", "ZeRO-1", "ZeRO-2", "FSDP"].map(|name| format!("{name} over 8 GPUs"));
        for group in [0, 1, 3, 8, 16] {
            assert_eq!(names(8, group), over_eight, "{group}");
        }
        let grouped = names(16, 8);
        assert_eq!(
            grouped[2..],
            [
                "ZeRO-2 over 16 GPUs in shard groups of 8",
                "ZeRO-2 over 16 GPUs",
                "HSDP over 16 GPUs in shard groups of 8",
                "FSDP over 16 GPUs",
            ]
        );
    }

    #[test]
    fn a_group_of_one_rank_is_ddp() {
        let ddp = RankLayout::replicated(4, 8);
        assert_eq!(ddp.sharded(Sharding::Parameters, 1), ddp);
        assert_eq!(ddp.sharded(Sharding::Nothing, 4), ddp);
    }
}
