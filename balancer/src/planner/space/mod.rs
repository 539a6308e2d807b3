//! Enumerates every plan that node size, heads, layers and the global batch allow.
//!
//! Plans form *families* that differ only in the number of microbatches. With a given LLM the encoder takes
//! all remaining GPUs: with more ranks its shares of a microbatch are smaller, so fewer ranks are never
//! faster.

pub(super) mod joint;
mod options;
pub(super) mod shape;

use super::cluster::{Cluster, Placement};
use super::costs::ModuleCosts;
use super::workload::Workload;
use crate::schedule::{EncoderChain, EncoderChains, ScheduleKind, StepShape};
use joint::{JointModules, JointShape};
use shape::{StageShape, TpTimes};

pub use options::{EncoderSplit, SearchSpaceOptions};

/// Plans that differ only in the number of microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Family {
    pub(super) placement: Placement,
    /// Index of the encoder's shape; of the joint shape if placement is joint.
    pub(super) encoder: usize,
    /// Ranks that share the media; every GPU if placement is joint.
    pub(super) encoder_dp: u32,
    /// Index of the LLM's shape; of the joint shape if placement is joint.
    pub(super) llm: usize,
    pub(super) llm_dp: u32,
    /// Rounds that the encoder runs ahead of the schedule.
    pub(super) ahead: u16,
}

/// One plan of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) family: Family,
    pub(super) microbatches: u32,
}

impl Family {
    /// Whether the ranks of an encoder that is a pipeline stage share the media of all LLM ranks; with the
    /// LLM's DP degree each belongs to an LLM rank.
    pub(super) fn is_shared(&self) -> bool {
        self.placement == Placement::Disaggregated && self.encoder_dp != self.llm_dp
    }
}

impl Candidate {
    /// Returns the microbatches of all LLM ranks.
    pub(super) fn groups(&self) -> usize {
        self.family.llm_dp as usize * self.microbatches as usize
    }
}

/// One module's side of the search space.
#[derive(Debug, Clone)]
pub(super) struct ModuleSpace {
    /// Times at every tensor-parallel degree.
    pub(super) times: Vec<TpTimes>,
    /// All ways to cut the module into stages.
    pub(super) shapes: Vec<StageShape>,
    /// Bytes of one unit that a stage sends to the next one.
    pub(super) border_bytes: f64,
    /// Bytes of gradients by shape and stage.
    pub(super) gradient_bytes: Vec<Vec<f64>>,
}

/// All shapes of both modules, and the cluster that they are placed on.
#[derive(Debug, Clone)]
pub(super) struct SearchSpace<'a> {
    pub(super) encoder: ModuleSpace,
    pub(super) llm: ModuleSpace,
    /// Shapes of joint placement.
    pub(super) joint: Vec<JointShape>,
    pub(super) cluster: Cluster,
    /// Memory per GPU that plans may use.
    pub(super) budget_bytes: f64,
    pub(super) options: SearchSpaceOptions,
    pub(super) encoder_split: EncoderSplit,
    /// Factor on mean microbatches in the memory check, for microbatches above the mean.
    pub(super) slack: f64,
    pub(super) workload: &'a Workload,
}

/// Mean sample of a module: its units, and query-key pairs of media in native resolution.
#[derive(Clone, Copy)]
struct ItemMean {
    units: f64,
    pairs: f64,
}

impl ModuleSpace {
    fn new(
        costs: &dyn ModuleCosts,
        times: Vec<TpTimes>,
        item: ItemMean,
        gpus: u32,
        options: SearchSpaceOptions,
    ) -> Self {
        let shapes = shapes(costs, &times, item, gpus, options);
        Self { gradient_bytes: gradients(costs, &shapes), border_bytes: costs.border_bytes(), times, shapes }
    }
}

impl<'a> SearchSpace<'a> {
    pub(super) fn new(
        encoder: &dyn ModuleCosts,
        llm: &dyn ModuleCosts,
        workload: &'a Workload,
        cluster: Cluster,
        options: SearchSpaceOptions,
    ) -> Self {
        let degrees = |costs: &dyn ModuleCosts| {
            // A group stays within a node, so its degree must divide the node.
            let fits = |tp: &u32| *tp > 0 && *tp <= cluster.gpus && cluster.gpus_per_node.is_multiple_of(*tp);
            costs.tp_degrees().into_iter().filter(fits).collect::<Vec<u32>>()
        };
        let encoder_times =
            degrees(encoder).into_iter().map(|tp| TpTimes::of_encoder(encoder, tp, workload)).collect();
        let llm_times = degrees(llm).into_iter().map(|tp| TpTimes::of_llm(llm, tp, workload)).collect();
        let items = f64::from(workload.global_batch());
        let media = ItemMean { units: workload.batch_tiles / items, pairs: workload.batch_pairs / items };
        let text = ItemMean { units: workload.batch_tokens / items, pairs: 0.0 };
        let (encoder_times, llm_times): (Vec<TpTimes>, Vec<TpTimes>) = (encoder_times, llm_times);
        let modules = JointModules { encoder: (encoder, &encoder_times), llm: (llm, &llm_times) };
        let joint = if options.is_joint {
            modules.shapes(workload, cluster.gpus, options.has_recomputation)
        } else {
            Vec::new()
        };
        Self {
            joint,
            encoder: ModuleSpace::new(encoder, encoder_times, media, cluster.gpus, options),
            llm: ModuleSpace::new(llm, llm_times, text, cluster.gpus, options),
            cluster,
            budget_bytes: cluster.memory_bytes as f64,
            options,
            encoder_split: EncoderSplit::Tile,
            slack: 1.0,
            workload,
        }
    }

    /// Calls `visit` with every family.
    pub(super) fn visit(&self, mut visit: impl FnMut(&Family)) {
        self.visit_llms(|llm, llm_dp| self.visit_encoders(llm, llm_dp, &mut visit));
        self.joint_families().for_each(|family| visit(&family));
    }

    /// Lists the joint families: more ranks are never slower, so that each shape has as many as fit.
    pub(super) fn joint_families(&self) -> impl Iterator<Item = Family> + '_ {
        (0..self.joint.len()).filter_map(|index| {
            let shape = &self.joint[index].llm;
            let llm_dp = (self.cluster.gpus / shape.gpus()).min(self.workload.global_batch());
            (llm_dp > 0).then(|| self.joint_family(index, llm_dp))
        })
    }

    fn joint_family(&self, index: usize, llm_dp: u32) -> Family {
        let encoder_dp = llm_dp * self.joint[index].llm.tp;
        Family { placement: Placement::Joint, encoder: index, encoder_dp, llm: index, llm_dp, ahead: 0 }
    }

    /// Returns the shapes of encoder and LLM.
    pub(super) fn shapes(&self, family: &Family) -> [&StageShape; 2] {
        match family.placement {
            Placement::Joint => [&self.joint[family.encoder].encoder, &self.joint[family.llm].llm],
            _ => [&self.encoder.shapes[family.encoder], &self.llm.shapes[family.llm]],
        }
    }

    /// Returns the ranks that hold the same parameters of encoder and LLM, if they share optimizer state.
    pub(super) fn optimizer_ranks(&self, family: &Family) -> [u32; 2] {
        if self.options.has_sharded_optimizer { [family.encoder_dp, family.llm_dp] } else { [1, 1] }
    }

    /// Returns the stages of a step with this many microbatches per rank, and the schedule that runs them.
    pub(super) fn step_shape(&self, family: &Family, slots: u32) -> StepShape {
        let [encoder, llm] = self.shapes(family);
        let encoders = match family.placement {
            Placement::Disaggregated => EncoderChains::new([EncoderChain {
                stages: encoder.pp as u16,
                has_backward: encoder.has_backward(),
            }]),
            Placement::Colocated | Placement::Joint => EncoderChains::default(),
        };
        let kind = match family.ahead {
            0 => self.options.schedule,
            rounds => ScheduleKind::EncoderAhead { rounds },
        };
        let stages = encoders.stages() + llm.pp as usize;
        StepShape { kind, encoders, stages, slots: slots as usize }
    }

    /// Calls `visit` with every LLM: the index of its shape, and its ranks in descending order.
    pub(super) fn visit_llms(&self, mut visit: impl FnMut(usize, u32)) {
        for llm in 0..self.llm.shapes.len() {
            let ranks_max =
                (self.cluster.gpus / self.llm.shapes[llm].gpus()).min(self.workload.global_batch());
            for llm_dp in (1..=ranks_max).rev() {
                visit(llm, llm_dp);
            }
        }
    }

    /// Calls `visit` with the families of one LLM.
    pub(super) fn visit_encoders(&self, llm: usize, llm_dp: u32, visit: &mut impl FnMut(&Family)) {
        for encoder in 0..self.encoder.shapes.len() {
            for placement in [Placement::Disaggregated, Placement::Colocated] {
                let encoder_dp = match placement {
                    Placement::Disaggregated => self.encoder_ranks(encoder, llm, llm_dp),
                    Placement::Colocated => self.colocated_ranks(encoder, llm, llm_dp),
                    Placement::Joint => None,
                };
                if let Some(encoder_dp) = encoder_dp {
                    visit(&Family { placement, encoder, encoder_dp, llm, llm_dp, ahead: 0 });
                }
            }
        }
    }

    /// Whether a plan made up by a search belongs to this space.
    pub(super) fn contains(&self, candidate: &Candidate) -> bool {
        let Family { placement, encoder, encoder_dp, llm, llm_dp, ahead } = candidate.family;
        let may_run_ahead = placement == Placement::Disaggregated && self.options.has_encoder_ahead;
        if ahead > 0 && !may_run_ahead {
            return false;
        }
        let items = u64::from(self.workload.global_batch());
        if llm_dp == 0 || encoder_dp == 0 || candidate.microbatches == 0 {
            return false;
        }
        if u64::from(candidate.microbatches) * u64::from(llm_dp) > items {
            return false;
        }
        match placement {
            Placement::Disaggregated => {
                self.encoder_ranks(encoder, llm, llm_dp).is_some_and(|most| encoder_dp <= most)
            }
            Placement::Joint => {
                let gpus = self.joint.get(llm).and_then(|shape| shape.llm.gpus().checked_mul(llm_dp));
                gpus.is_some_and(|gpus| gpus <= self.cluster.gpus)
                    && self.joint_family(llm, llm_dp) == candidate.family
            }
            // A colocated encoder uses all of the LLM's GPUs, never fewer.
            Placement::Colocated => self.colocated_ranks(encoder, llm, llm_dp) == Some(encoder_dp),
        }
    }

    /// Returns the most microbatches of an LLM rank.
    pub(super) fn microbatches_max(&self, family: &Family) -> u32 {
        self.workload.global_batch() / family.llm_dp
    }

    /// Returns the GPUs that a family takes.
    pub(super) fn gpus(&self, family: &Family) -> u32 {
        let [encoder, llm] = self.shapes(family);
        let llm = llm.gpus() * family.llm_dp;
        match family.placement {
            Placement::Disaggregated => llm + encoder.gpus() * family.encoder_dp,
            Placement::Colocated | Placement::Joint => llm,
        }
    }

    /// Returns the most encoder ranks that fit next to an LLM.
    fn encoder_ranks(&self, encoder: usize, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_disaggregated {
            return None;
        }
        let (encoder, llm) = (&self.encoder.shapes[encoder], &self.llm.shapes[llm]);
        let left = self.cluster.gpus.checked_sub(llm.gpus().checked_mul(llm_dp)?)?;
        let llm_groups = (llm.tp, u64::from(llm.pp) * u64::from(llm_dp));
        let mut ranks = left / encoder.gpus();
        while ranks > 0 {
            if self.cluster.has_room(llm_groups, (encoder.tp, u64::from(encoder.pp) * u64::from(ranks))) {
                return Some(ranks);
            }
            // Nodes may leave gaps that no tensor-parallel group fits.
            ranks -= 1;
        }
        None
    }

    /// Returns the encoder ranks on the GPUs of an LLM: all of them, each a tensor-parallel group.
    fn colocated_ranks(&self, encoder: usize, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_colocated {
            return None;
        }
        let (encoder, llm) = (&self.encoder.shapes[encoder], &self.llm.shapes[llm]);
        let gpus = llm.gpus().checked_mul(llm_dp).filter(|gpus| *gpus <= self.cluster.gpus)?;
        let is_whole = encoder.pp == 1 && gpus.is_multiple_of(encoder.tp);
        let groups = u64::from(gpus / llm.tp);
        (is_whole && self.cluster.has_room((llm.tp, groups), (1, 0))).then_some(gpus / encoder.tp)
    }
}

/// Lists every shape of a module: degrees, stages and the enabled options.
fn shapes(
    costs: &dyn ModuleCosts,
    times: &[TpTimes],
    ItemMean { units, pairs }: ItemMean,
    gpus: u32,
    options: SearchSpaceOptions,
) -> Vec<StageShape> {
    let mut shapes = Vec::new();
    let recomputations: &[bool] = if options.has_recomputation { &[false, true] } else { &[false] };
    for (index, of_degree) in times.iter().enumerate() {
        for pp in 1..=costs.layers().min(gpus / of_degree.tp) {
            for &is_recomputed in recomputations {
                let cut = (index, of_degree.tp, pp);
                shapes.extend(StageShape::new(costs, cut, is_recomputed, None));
                if options.has_uneven_layers {
                    let attention = of_degree.sample.at(units) + of_degree.pair_ns * pairs;
                    let layer = of_degree.layer.at(units) + attention;
                    // Recomputed layers take longer, so the work outside them is worth fewer layers.
                    let factor = if is_recomputed { 4.0 / 3.0 } else { 1.0 };
                    let outside_as_layers =
                        if layer > 0.0 { of_degree.outside.at(units) / layer / factor } else { 0.0 };
                    shapes.extend(StageShape::new(costs, cut, is_recomputed, Some(outside_as_layers)));
                }
            }
        }
    }
    shapes
}

/// Returns the bytes of gradients by shape and stage.
fn gradients(costs: &dyn ModuleCosts, shapes: &[StageShape]) -> Vec<Vec<f64>> {
    let of = |shape: &StageShape| {
        let stages = 0..shape.pp as usize;
        stages.map(|stage| costs.gradient_bytes(shape.tp, shape.part(stage))).collect()
    };
    shapes.iter().map(of).collect()
}
