//! Costs for experts divided among ranks.
//!
//! In an LLM stage, each of `ep` consecutive DP ranks holds a share of the experts, and sends every token to
//! the ranks that hold the token's experts and back, forward and backward: four all-to-all exchanges per
//! layer with experts. Ranks at the same position in their TP groups exchange whole rows, as each rank has a
//! slice of its experts. The slowest rank in a group, the rank with the largest load, sets the time.
//!
//! # Source
//! Lepikhin et al., 2020, arXiv:2006.16668, section 3; expert parallelism inside data
//! parallelism: Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach", 2023, arXiv:2303.06318, and
//! Megatron-Core.

use super::ExpertLoads;
use crate::cluster::Links;
use dflop_costmodel::model::{ExpertsSpec, LlmSpec};
use dflop_costmodel::{ExpertImbalance, LayerTimes};

/// Exchanges per layer: to the experts and back, forward and backward.
const EXCHANGES: f64 = 4.0;
/// Bytes per activation or gradient element.
const BYTES: f64 = 2.0;

/// Expert-parallel degrees to plan with, and time settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertParallel {
    /// Single degree to plan with; `None` for every divisor of the number of experts.
    pub degree: Option<u32>,
    /// Load imbalance between ranks that share experts.
    pub imbalance: ExpertImbalance,
    /// Links for token exchanges; `None` for free exchanges.
    pub links: Option<Links>,
    /// GPUs per node.
    pub gpus_per_node: u32,
}

impl Default for ExpertParallel {
    /// No expert parallelism.
    fn default() -> Self {
        let imbalance = ExpertImbalance::default();
        Self { degree: Some(1), imbalance, links: None, gpus_per_node: 1 }
    }
}

/// Experts in an LLM at one expert-parallel degree.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertCosts {
    experts: ExpertsSpec,
    hidden: u32,
    /// Share of layers with experts.
    sparse_share: f64,
    settings: ExpertParallel,
    pub(super) degree: u32,
}

impl ExpertCosts {
    /// Creates the costs for an LLM; `None` if it has no experts.
    pub(super) fn new(llm: &LlmSpec, settings: ExpertParallel) -> Option<Self> {
        let experts = llm.experts?;
        let sparse_share = f64::from(llm.sparse_layer_count()) / f64::from(llm.layers.max(1));
        let degree = settings.degree.unwrap_or(1);
        Some(Self { experts, hidden: llm.hidden, sparse_share, settings, degree })
    }

    /// Lists the degrees to plan with on this many GPUs.
    pub(super) fn degrees(&self, gpus: u32) -> Vec<u32> {
        match self.settings.degree {
            Some(degree) => vec![degree],
            None => (1..=gpus.min(self.experts.experts)).filter(|degree| self.divides(*degree)).collect(),
        }
    }

    /// Returns the costs at a different degree; `None` if it does not divide the number of experts.
    pub(super) fn at(self, degree: u32) -> Option<Self> {
        (degree > 0 && self.divides(degree)).then_some(Self { degree, ..self })
    }

    fn divides(&self, degree: u32) -> bool {
        self.experts.experts.is_multiple_of(degree)
    }

    /// Returns the load imbalance if each rank in a group has a microbatch with this many tokens.
    pub(super) fn loads(&self, tokens: u64) -> ExpertLoads {
        let all = tokens.saturating_mul(u64::from(self.degree));
        ExpertLoads {
            planned: self.settings.imbalance.factor(&self.experts, self.degree, all),
            expected: ExpertImbalance::expected(&self.experts, self.degree, all),
            worst: ExpertImbalance::worst(&self.experts, self.degree),
        }
    }

    /// Returns the layer time relative to a rank with all experts and only its own tokens. It may be
    /// negative, because fewer experts are read.
    pub(super) fn additional_ns(&self, times: &LayerTimes, tp: u32, tokens: u64) -> f64 {
        if self.degree < 2 || tokens == 0 {
            return 0.0;
        }
        let imbalance = self.loads(tokens).planned;
        let not_read = times.expert_read_ns() * (1.0 - 1.0 / f64::from(self.degree));
        let load_ns = times.experts_ns(tokens as f64) * (imbalance - 1.0);
        load_ns - not_read + self.sparse_share * self.exchange_ns(tp, tokens, imbalance)
    }

    /// Returns the time for all exchanges in a layer with experts.
    ///
    /// Groups within a node exchange over the node link, groups across nodes over the network as well,
    /// sequentially.
    fn exchange_ns(&self, tp: u32, tokens: u64, imbalance: f64) -> f64 {
        let Some(links) = &self.settings.links else { return 0.0 };
        let copies = tokens as f64 * f64::from(self.experts.experts_per_token) * imbalance;
        let bytes = copies * f64::from(self.hidden) * BYTES;
        let ranks_of_node = (self.settings.gpus_per_node / tp.max(1)).clamp(1, self.degree);
        let part = |ranks: u32| bytes * f64::from(ranks) / f64::from(self.degree);
        let mut once_ns = 0.0;
        if ranks_of_node > 1 {
            once_ns += links.nvlink.send_ns(part(ranks_of_node - 1));
        }
        if ranks_of_node < self.degree {
            once_ns += links.infiniband.send_ns(part(self.degree - ranks_of_node));
        }
        EXCHANGES * once_ns
    }
}
