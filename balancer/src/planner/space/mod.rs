//! Enumerates every plan that node size, heads, layers and the global batch allow.
//!
//! Plans form *families* that differ only in the number of microbatches. With a given LLM the encoder takes
//! all remaining GPUs: with more ranks its shares of a microbatch are smaller, so fewer ranks are never
//! faster. Several encoders share them (`gpu_shares`), so that the slowest of them is fastest.

mod encoder_parts;
mod gpu_shares;
pub(super) mod joint;
mod options;
mod recomputed;
pub(super) mod shape;

use super::cluster::{Cluster, Placement};
use super::costs::ModuleCosts;
use super::item_size::ENCODERS_MAX;
use super::workload::Workload;
use crate::schedule::{EncoderChain, EncoderChains, ScheduleKind, StepShape};
use gpu_shares::GpuShares;
use joint::{JointModules, JointShape};
use shape::{StageShape, TpTimes};

pub(super) use encoder_parts::{EncoderPart, EncoderParts};
pub use options::{EncoderSplit, SearchSpaceOptions};
pub use recomputed::RecomputedLayers;

/// Plans that differ only in the number of microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Family {
    pub(super) placement: Placement,
    /// Shapes and ranks of the encoders.
    pub(super) encoders: EncoderParts,
    /// Index of the LLM's shape; of the joint shape if placement is joint.
    pub(super) llm: usize,
    pub(super) llm_dp: u32,
    /// Rounds that the encoders run ahead of the schedule.
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
    pub(super) fn is_shared(&self, encoder: usize) -> bool {
        self.placement == Placement::Disaggregated && self.encoders[encoder].dp != self.llm_dp
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
    /// Name of the module, for people.
    pub(super) name: &'static str,
    /// Times at every tensor-parallel degree.
    pub(super) times: Vec<TpTimes>,
    /// All ways to cut the module into stages.
    pub(super) shapes: Vec<StageShape>,
    /// Bytes of one unit that a stage sends to the next one.
    pub(super) border_bytes: f64,
    /// Bytes of gradients by shape and stage.
    pub(super) gradient_bytes: Vec<Vec<f64>>,
}

/// All shapes of all modules, and the cluster that they are placed on.
#[derive(Debug, Clone)]
pub(super) struct SearchSpace<'a> {
    pub(super) encoders: Vec<ModuleSpace>,
    pub(super) llm: ModuleSpace,
    /// Shares of the GPUs beside an LLM between several encoders.
    gpu_shares: GpuShares,
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
        let (gradient_bytes, border_bytes) = (gradients(costs, &shapes), costs.border_bytes());
        Self { name: costs.name(), gradient_bytes, border_bytes, times, shapes }
    }
}

impl<'a> SearchSpace<'a> {
    pub(super) fn new(
        encoders: &[&dyn ModuleCosts],
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
        let encoder_times: Vec<Vec<TpTimes>> = encoders
            .iter()
            .enumerate()
            .map(|(encoder, costs)| {
                let times = |tp| TpTimes::of_encoder(*costs, tp, workload, encoder);
                degrees(*costs).into_iter().map(times).collect()
            })
            .collect();
        let llm_times: Vec<TpTimes> =
            degrees(llm).into_iter().map(|tp| TpTimes::of_llm(llm, tp, workload)).collect();
        let items = f64::from(workload.global_batch());
        let text = ItemMean { units: workload.batch_tokens / items, pairs: 0.0 };
        let of_encoders = encoders.iter().copied().zip(&encoder_times);
        let modules = JointModules {
            encoders: of_encoders.map(|(costs, times)| (costs, times.as_slice())).collect(),
            llm: (llm, &llm_times),
        };
        let joint = if options.is_joint {
            modules.shapes(workload, cluster.gpus, options.recomputations())
        } else {
            Vec::new()
        };
        let module = |(encoder, times): (usize, Vec<TpTimes>)| {
            let media = workload.media(encoder);
            let mean = ItemMean { units: media.batch_units / items, pairs: media.batch_pairs / items };
            let mut module = ModuleSpace::new(encoders[encoder], times, mean, cluster.gpus, options);
            if encoders.len() == 1 {
                module.name = "encoder";
            }
            module
        };
        Self {
            joint,
            encoders: encoder_times.into_iter().enumerate().map(module).collect(),
            llm: ModuleSpace { name: "llm", ..ModuleSpace::new(llm, llm_times, text, cluster.gpus, options) },
            gpu_shares: GpuShares::default(),
            cluster,
            budget_bytes: cluster.memory_bytes as f64,
            options,
            encoder_split: EncoderSplit::Tile,
            slack: 1.0,
            workload,
        }
    }

    /// Returns the space with another factor on mean microbatches in the memory check.
    pub(super) fn with_slack(&self, slack: f64) -> Self {
        Self { slack, ..self.clone() }
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
        let part = EncoderPart { shape: index as u32, dp: llm_dp * self.joint[index].llm.tp };
        let encoders = EncoderParts::alike(part, self.encoders.len());
        Family { placement: Placement::Joint, encoders, llm: index, llm_dp, ahead: 0 }
    }

    /// Returns the shape of an encoder.
    pub(super) fn encoder_shape(&self, family: &Family, encoder: usize) -> &StageShape {
        let shape = family.encoders[encoder].shape as usize;
        match family.placement {
            Placement::Joint => &self.joint[shape].encoders[encoder],
            _ => &self.encoders[encoder].shapes[shape],
        }
    }

    /// Lists the shapes of the encoders.
    pub(super) fn encoder_shapes<'s>(
        &'s self,
        family: &'s Family,
    ) -> impl ExactSizeIterator<Item = &'s StageShape> + Clone {
        (0..family.encoders.len()).map(|encoder| self.encoder_shape(family, encoder))
    }

    /// Returns the times of an encoder at its degree.
    pub(super) fn encoder_times(&self, family: &Family, encoder: usize) -> &TpTimes {
        &self.encoders[encoder].times[self.encoder_shape(family, encoder).times]
    }

    /// Returns the shape of the LLM.
    pub(super) fn llm_shape(&self, family: &Family) -> &StageShape {
        match family.placement {
            Placement::Joint => &self.joint[family.llm].llm,
            _ => &self.llm.shapes[family.llm],
        }
    }

    /// Returns the times of the LLM at its degree.
    pub(super) fn llm_times(&self, family: &Family) -> &TpTimes {
        &self.llm.times[self.llm_shape(family).times]
    }

    /// Returns the shape of a part that is a pipeline of its own, if the encoder has it.
    fn part_shape(&self, encoder: usize, part: EncoderPart) -> Option<&StageShape> {
        self.encoders[encoder].shapes.get(part.shape as usize)
    }

    /// Returns how many of a module's ranks share its optimizer state.
    pub(super) fn optimizer_ranks(&self, dp: u32) -> u32 {
        if self.options.has_sharded_optimizer { dp } else { 1 }
    }

    /// Returns the stages of a step with this many microbatches per rank, and the schedule that runs them.
    pub(super) fn step_shape(&self, family: &Family, slots: u32) -> StepShape {
        let chain = |encoder: &StageShape| EncoderChain {
            stages: encoder.pp as u16,
            has_backward: encoder.has_backward(),
        };
        let encoders = match family.placement {
            Placement::Disaggregated => EncoderChains::new(self.encoder_shapes(family).map(chain)),
            Placement::Colocated | Placement::Joint => EncoderChains::default(),
        };
        let kind = match family.ahead {
            0 => self.options.schedule,
            rounds => ScheduleKind::EncoderAhead { rounds },
        };
        let stages = encoders.stages() + self.llm_shape(family).pp as usize;
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
        let family =
            |placement, encoders: EncoderParts| Family { placement, encoders, llm, llm_dp, ahead: 0 };
        if let [encoder] = &self.encoders[..] {
            for shape in 0..encoder.shapes.len() {
                if let Some(ranks) = self.encoder_ranks(shape, llm, llm_dp) {
                    visit(&family(Placement::Disaggregated, EncoderParts::one(shape, ranks)));
                }
                if let Some(ranks) = self.colocated_ranks(0, shape, llm, llm_dp) {
                    visit(&family(Placement::Colocated, EncoderParts::one(shape, ranks)));
                }
            }
            return;
        }
        self.visit_shares(llm, llm_dp, &mut |encoders| visit(&family(Placement::Disaggregated, encoders)));
        for encoders in self.colocated_parts(llm, llm_dp) {
            visit(&family(Placement::Colocated, encoders));
        }
    }

    /// Calls `visit` with the shares of several encoders on the GPUs beside an LLM.
    fn visit_shares(&self, llm: usize, llm_dp: u32, visit: &mut impl FnMut(EncoderParts)) {
        let used = self.llm.shapes[llm].gpus().checked_mul(llm_dp);
        let left = used.and_then(|used| self.cluster.gpus.checked_sub(used)).unwrap_or(0);
        let has_room = |shares: &&EncoderParts| self.has_room(llm, llm_dp, shares);
        // Nodes may leave gaps that no tensor-parallel group fits.
        let fewer = (left.saturating_sub(self.cluster.gpus_per_node)..=left).rev();
        let found = fewer
            .map(|gpus| self.gpu_shares.of(gpus))
            .find(|shares| shares.iter().any(|shares| has_room(&shares)));
        found.unwrap_or(&[]).iter().filter(has_room).for_each(|shares| visit(*shares));
    }

    /// Whether encoders fit into the nodes beside an LLM.
    fn has_room(&self, llm: usize, llm_dp: u32, encoders: &EncoderParts) -> bool {
        let groups = |shape: &StageShape, dp: u32| (shape.tp, u64::from(shape.pp) * u64::from(dp));
        let mut all = [(1, 0); ENCODERS_MAX + 1];
        all[0] = groups(&self.llm.shapes[llm], llm_dp);
        for (encoder, part) in encoders.iter().enumerate() {
            let Some(shape) = self.part_shape(encoder, *part) else { return false };
            all[encoder + 1] = groups(shape, part.dp);
        }
        self.cluster.has_room(&all[..=encoders.len()])
    }

    /// Whether a plan made up by a search belongs to this space.
    pub(super) fn contains(&self, candidate: &Candidate) -> bool {
        let Family { placement, encoders, llm, llm_dp, ahead } = candidate.family;
        let may_run_ahead = placement == Placement::Disaggregated && self.options.has_encoder_ahead;
        if ahead > 0 && !may_run_ahead {
            return false;
        }
        let items = u64::from(self.workload.global_batch());
        if llm_dp == 0 || encoders.iter().any(|part| part.dp == 0) || candidate.microbatches == 0 {
            return false;
        }
        if u64::from(candidate.microbatches) * u64::from(llm_dp) > items {
            return false;
        }
        match placement {
            Placement::Disaggregated => {
                self.options.is_disaggregated
                    && llm < self.llm.shapes.len()
                    && self.has_room(llm, llm_dp, &encoders)
            }
            Placement::Joint => {
                let gpus = self.joint.get(llm).and_then(|shape| shape.llm.gpus().checked_mul(llm_dp));
                gpus.is_some_and(|gpus| gpus <= self.cluster.gpus)
                    && self.joint_family(llm, llm_dp) == candidate.family
            }
            // A colocated encoder uses all of the LLM's GPUs, never fewer.
            Placement::Colocated => encoders.iter().enumerate().all(|(encoder, part)| {
                self.colocated_ranks(encoder, part.shape as usize, llm, llm_dp) == Some(part.dp)
            }),
        }
    }

    /// Returns the most microbatches of an LLM rank.
    pub(super) fn microbatches_max(&self, family: &Family) -> u32 {
        self.workload.global_batch() / family.llm_dp
    }

    /// Returns the GPUs that a family takes.
    pub(super) fn gpus(&self, family: &Family) -> u32 {
        let llm = self.llm_shape(family).gpus() * family.llm_dp;
        match family.placement {
            Placement::Disaggregated => {
                let parts = self.encoder_shapes(family).zip(family.encoders.iter());
                llm + parts.map(|(shape, part)| shape.gpus() * part.dp).sum::<u32>()
            }
            Placement::Colocated | Placement::Joint => llm,
        }
    }

    /// Returns the most ranks of the only encoder that fit next to an LLM.
    fn encoder_ranks(&self, encoder: usize, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_disaggregated {
            return None;
        }
        let (encoder, llm) = (&self.encoders[0].shapes[encoder], &self.llm.shapes[llm]);
        let left = self.cluster.gpus.checked_sub(llm.gpus().checked_mul(llm_dp)?)?;
        let llm_groups = (llm.tp, u64::from(llm.pp) * u64::from(llm_dp));
        let mut ranks = left / encoder.gpus();
        while ranks > 0 {
            let groups = (encoder.tp, u64::from(encoder.pp) * u64::from(ranks));
            if self.cluster.has_room(&[llm_groups, groups]) {
                return Some(ranks);
            }
            // Nodes may leave gaps that no tensor-parallel group fits.
            ranks -= 1;
        }
        None
    }

    /// Returns the ranks of an encoder on the GPUs of an LLM: all of them, each a tensor-parallel group.
    fn colocated_ranks(&self, encoder: usize, shape: usize, llm: usize, llm_dp: u32) -> Option<u32> {
        if !self.options.is_colocated {
            return None;
        }
        let (shape, llm) = (self.encoders[encoder].shapes.get(shape)?, self.llm.shapes.get(llm)?);
        let gpus = llm.gpus().checked_mul(llm_dp).filter(|gpus| *gpus <= self.cluster.gpus)?;
        let is_whole = shape.pp == 1 && gpus.is_multiple_of(shape.tp);
        let groups = u64::from(gpus / llm.tp);
        (is_whole && self.cluster.has_room(&[(llm.tp, groups)])).then_some(gpus / shape.tp)
    }

    /// Lists several encoders on the GPUs of an LLM, with every combination of their shapes.
    fn colocated_parts(&self, llm: usize, llm_dp: u32) -> Vec<EncoderParts> {
        let mut all = vec![EncoderParts::default()];
        for (encoder, module) in self.encoders.iter().enumerate() {
            let part = |shape: usize| {
                let dp = self.colocated_ranks(encoder, shape, llm, llm_dp)?;
                Some(EncoderPart { shape: shape as u32, dp })
            };
            let parts: Vec<EncoderPart> = (0..module.shapes.len()).filter_map(part).collect();
            let with = |before: &EncoderParts| {
                let before = *before;
                parts.iter().map(move |part| before.iter().copied().chain([*part]).collect())
            };
            all = all.iter().flat_map(with).collect();
        }
        all
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
    for (index, of_degree) in times.iter().enumerate() {
        for pp in 1..=costs.layers().min(gpus / of_degree.tp) {
            for &recomputed in options.recomputations() {
                let cut = (index, of_degree.tp, pp);
                shapes.extend(StageShape::new(costs, cut, recomputed, None));
                if options.has_uneven_layers {
                    let attention = of_degree.sample.at(units) + of_degree.pair_ns * pairs;
                    let layer = of_degree.layer.at(units) + attention;
                    // Recomputed layers take longer, so the work outside them is worth fewer layers.
                    let factor = 1.0 + recomputed.fraction() / 3.0;
                    let outside_as_layers =
                        if layer > 0.0 { of_degree.outside.at(units) / layer / factor } else { 0.0 };
                    shapes.extend(StageShape::new(costs, cut, recomputed, Some(outside_as_layers)));
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
