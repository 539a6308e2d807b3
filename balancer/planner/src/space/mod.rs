//! Space with every plan that node size, heads, layers and the global batch allow; `families` enumerates it.
//!
//! Kinds of plans that a search covers, and assumptions about running plans.
//!
//! Plans form *families* that differ only in the number of microbatches. With a given LLM the encoder uses
//! all remaining GPUs: more ranks have smaller shares of a microbatch, so fewer ranks are never faster.
//! Several encoders share them (`gpu_shares`), minimizing the slowest encoder's time.

pub(super) mod bound;
mod families;
mod gpu_shares;
pub(super) mod joint;
pub(super) mod memory;
pub(super) mod shape;

use super::cluster::{Cluster, Placement};
use super::costs::{ModuleCosts, StagePart};
use super::workload::Workload;
use dflop_balancer::schedule::{EncoderChain, EncoderChains, ScheduleKind, StepShape};
use dflop_costmodel::memory::Trainer;
use gpu_shares::GpuShares;
use joint::{ChainLayers, JointModules, JointShape};
use shape::{StageShape, TpTimes};
use std::fmt;
use std::sync::Arc;

use families::Known;
pub(super) use families::{EncoderPart, EncoderParts};

/// Maximum number of stages that a search puts on an LLM rank.
const CHUNKS_MAX: u16 = 4;

/// Plans that differ only in the number of microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Family {
    pub(super) placement: Placement,
    /// Encoder shapes and ranks.
    pub(super) encoders: EncoderParts,
    /// LLM shape index; joint shape index if placement is joint.
    pub(super) llm: usize,
    pub(super) llm_dp: u32,
    pub(super) schedule: ScheduleKind,
}

/// Plan in the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) family: Family,
    pub(super) microbatches: u32,
}

impl Family {
    /// Whether the ranks of a pipeline-stage encoder share the media from all LLM ranks; with the LLM's DP
    /// degree each encoder rank belongs to an LLM rank.
    pub(super) fn is_shared(&self, encoder: usize) -> bool {
        self.placement == Placement::Disaggregated && self.encoders[encoder].dp != self.llm_dp
    }
}

impl Candidate {
    /// Returns the number of microbatches on all LLM ranks.
    pub(super) fn groups(&self) -> usize {
        self.family.llm_dp as usize * self.microbatches as usize
    }
}

/// Search space for a module.
#[derive(Debug, Clone)]
pub(super) struct ModuleSpace {
    /// Module name for messages.
    pub(super) name: &'static str,
    /// Times for every tensor-parallel degree.
    pub(super) times: Vec<TpTimes>,
    /// All stage cuts for the module; those with several stages per rank are last.
    pub(super) shapes: Vec<StageShape>,
    /// Indexes of the shapes with a single stage.
    single_stages: Vec<u32>,
    /// Bytes per unit that a stage sends to the next stage.
    pub(super) border_bytes: f64,
    /// Gradient bytes by shape and stage.
    pub(super) gradient_bytes: Vec<Vec<f64>>,
    /// Gradient bytes for experts that ranks share, by shape and stage.
    pub(super) expert_gradient_bytes: Vec<Vec<f64>>,
}

/// All module shapes, and the cluster that they are placed on.
#[derive(Debug, Clone)]
pub(super) struct SearchSpace<'a> {
    pub(super) encoders: Vec<ModuleSpace>,
    pub(super) llm: ModuleSpace,
    /// GPU shares for several encoders on the GPUs that an LLM leaves free.
    gpu_shares: GpuShares,
    /// Joint placement shapes.
    pub(super) joint: Vec<JointShape>,
    pub(super) cluster: Cluster,
    /// Number of LLM DP ranks that divide the experts.
    pub(super) expert_parallel: u32,
    /// Memory per GPU that plans may use.
    pub(super) budget_bytes: f64,
    pub(super) options: SearchSpaceOptions,
    pub(super) encoder_split: EncoderSplit,
    /// Factor on mean microbatches in the memory check, for microbatches above the mean.
    pub(super) slack: f64,
    pub(super) workload: &'a Workload,
    /// Tiles, and layer times in nanoseconds, of the largest shares of colocated encoders, which depend on
    /// neither the LLM nor the microbatches.
    pub(super) phase_shares: Known<PhaseKey, (Vec<u64>, Vec<f64>)>,
    /// Colocated encoders by GPU count.
    colocated: Known<u32, Arc<[EncoderParts]>>,
}

/// Batch, encoder, part, and whether tiles are divided.
type PhaseKey = (usize, usize, EncoderPart, bool);

/// Mean sample in a module: units, and query-key pairs in native-resolution media.
#[derive(Clone, Copy)]
struct ItemMean {
    units: f64,
    pairs: f64,
}

impl ModuleSpace {
    fn without_shapes(name: &'static str, costs: &dyn ModuleCosts, times: Vec<TpTimes>) -> Self {
        Self {
            name,
            times,
            shapes: Vec::new(),
            single_stages: Vec::new(),
            border_bytes: costs.border_bytes(),
            gradient_bytes: Vec::new(),
            expert_gradient_bytes: Vec::new(),
        }
    }

    fn set_shapes(&mut self, costs: &dyn ModuleCosts, shapes: Vec<StageShape>) {
        self.gradient_bytes = by_stage(&shapes, |tp, part| costs.gradient_bytes(tp, part));
        self.expert_gradient_bytes = by_stage(&shapes, |tp, part| costs.expert_gradient_bytes(tp, part));
        let single_stages = shapes.iter().zip(0..).filter(|(shape, _)| shape.pp == 1);
        self.single_stages = single_stages.map(|(_, index)| index).collect();
        self.shapes = shapes;
    }

    /// Lists the tensor-parallel degrees that heads, costs and nodes allow.
    pub(crate) fn tp_degrees(&self) -> impl Iterator<Item = u32> + '_ {
        self.times.iter().map(|times| times.tp)
    }

    /// Adds the shape with these layers as the module's only shape; none if the module has no times at the
    /// degree.
    fn set_only_shape(&mut self, costs: &dyn ModuleCosts, tp: u32, module: ChainLayers, chunks: usize) {
        let times = self.times.iter().position(|times| times.tp == tp);
        let ChainLayers { layers, is_recomputed } = module;
        let shape =
            times.map(|times| StageShape::in_chunks(costs, (times, tp), is_recomputed, (layers, chunks)));
        self.set_shapes(costs, shape.into_iter().collect());
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
        let mut space = Self::without_shapes(encoders, llm, workload, cluster, options);
        // Stages in joint plans have no experts that ranks share.
        if options.is_joint && llm.expert_parallel() == 1 {
            let modules = space.joint_modules(encoders, llm);
            space.joint = modules.shapes(workload, cluster.gpus, options.recomputations());
        }
        let items = f64::from(workload.global_batch());
        for (encoder, (module, costs)) in space.encoders.iter_mut().zip(encoders).enumerate() {
            let media = workload.media(encoder);
            let mean = ItemMean { units: media.batch_units / items, pairs: media.batch_pairs / items };
            let shapes = shapes(*costs, &module.times, mean, cluster.gpus, options);
            module.set_shapes(*costs, shapes);
        }
        space.set_llm_shapes(llm);
        space
    }

    fn set_llm_shapes(&mut self, llm: &dyn ModuleCosts) {
        let items = f64::from(self.workload.global_batch());
        let text = ItemMean { units: self.workload.batch_tokens / items, pairs: 0.0 };
        let (gpus, options) = (self.cluster.gpus, self.options);
        let mut of_llm = match options.schedule.chunks() {
            1 => shapes(llm, &self.llm.times, text, gpus, options),
            _ => Vec::new(),
        };
        of_llm.extend(chunked_shapes(llm, &self.llm.times, gpus, options));
        self.llm.set_shapes(llm, of_llm);
    }

    /// Builds the space without any plan: modules with times at the degrees that heads, costs and nodes
    /// allow.
    pub(super) fn without_shapes(
        encoders: &[&dyn ModuleCosts],
        llm: &dyn ModuleCosts,
        workload: &'a Workload,
        cluster: Cluster,
        options: SearchSpaceOptions,
    ) -> Self {
        let degrees = |costs: &dyn ModuleCosts| {
            // A group stays within a node, so its degree must divide the node.
            let tp_max = options.trainer.tp_max().min(cluster.gpus);
            let fits = |tp: &u32| *tp > 0 && *tp <= tp_max && cluster.gpus_per_node.is_multiple_of(*tp);
            costs.tp_degrees().into_iter().filter(fits).collect::<Vec<u32>>()
        };
        let module = |(encoder, costs): (usize, &&dyn ModuleCosts)| {
            let times = |tp| TpTimes::for_encoder(*costs, tp, workload, encoder);
            let name = if encoders.len() == 1 { "encoder" } else { costs.name() };
            ModuleSpace::without_shapes(name, *costs, degrees(*costs).into_iter().map(times).collect())
        };
        let llm_times = degrees(llm).into_iter().map(|tp| TpTimes::for_llm(llm, tp, workload)).collect();
        Self {
            joint: Vec::new(),
            encoders: encoders.iter().enumerate().map(module).collect(),
            llm: ModuleSpace::without_shapes("llm", llm, llm_times),
            gpu_shares: GpuShares::default(),
            cluster,
            expert_parallel: llm.expert_parallel(),
            budget_bytes: cluster.memory_bytes as f64,
            options,
            encoder_split: EncoderSplit::default(),
            slack: 1.0,
            workload,
            phase_shares: Known::default(),
            colocated: Known::default(),
        }
    }

    /// Adds the shapes for modules on separate GPUs, or for encoders on the LLM's GPUs.
    ///
    /// - `modules`: tensor-parallel degree and layers for each encoder and the LLM, which is last
    pub(crate) fn add_separate(
        &mut self,
        encoders: &[&dyn ModuleCosts],
        llm: &dyn ModuleCosts,
        modules: Vec<(u32, ChainLayers)>,
    ) {
        let llm_chunks = self.options.schedule.chunks();
        let spaces = self.encoders.iter_mut().map(|space| (space, 1)).chain([(&mut self.llm, llm_chunks)]);
        let costs = encoders.iter().copied().chain([llm]);
        for (((space, chunks), costs), (tp, module)) in spaces.zip(costs).zip(modules) {
            space.set_only_shape(costs, tp, module, chunks);
        }
    }

    /// Adds the shape for joint stages; none if an encoder has no times on a single GPU, or the LLM has none
    /// at the degree.
    ///
    /// - `modules`: layers of each encoder and the LLM, which is last
    pub(crate) fn add_joint(
        &mut self,
        encoders: &[&dyn ModuleCosts],
        llm: &dyn ModuleCosts,
        llm_tp: u32,
        modules: Vec<ChainLayers>,
    ) {
        let shape = self.joint_modules(encoders, llm).given(llm_tp, modules);
        self.joint.extend(shape);
    }

    /// Returns the modules whose layers form the chain of joint plans.
    fn joint_modules<'s>(
        &'s self,
        encoders: &[&'s dyn ModuleCosts],
        llm: &'s dyn ModuleCosts,
    ) -> JointModules<'s> {
        let encoders = encoders.iter().zip(&self.encoders);
        JointModules {
            encoders: encoders.map(|(costs, module)| (*costs, module.times.as_slice())).collect(),
            llm: (llm, &self.llm.times),
        }
    }

    /// Returns the space with a different LLM, whose experts are divided between ranks: without joint plans,
    /// which support none.
    pub(super) fn with_expert_parallel(&self, llm: &dyn ModuleCosts) -> Self {
        let mut space = Self::without_shapes(&[], llm, self.workload, self.cluster, self.options);
        space.set_llm_shapes(llm);
        let Self { llm, expert_parallel, .. } = space;
        Self { llm, expert_parallel, joint: Vec::new(), ..self.clone() }
    }

    /// Returns the space with fewer placements.
    pub(super) fn only(&self, options: SearchSpaceOptions) -> Self {
        let mut space = Self { options, ..self.clone() };
        if !options.is_joint {
            space.joint.clear();
        }
        if !options.is_disaggregated {
            space.gpu_shares = GpuShares::default();
        }
        space
    }

    /// Returns the space with a different factor on mean microbatches in the memory check.
    pub(super) fn with_slack(&self, slack: f64) -> Self {
        Self { slack, ..self.clone() }
    }

    /// Returns an encoder's shape.
    pub(super) fn encoder_shape(&self, family: &Family, encoder: usize) -> &StageShape {
        let shape = family.encoders[encoder].shape as usize;
        match family.placement {
            Placement::Joint => &self.joint[shape].encoders[encoder],
            _ => &self.encoders[encoder].shapes[shape],
        }
    }

    /// Lists the encoder shapes.
    pub(super) fn encoder_shapes<'s>(
        &'s self,
        family: &'s Family,
    ) -> impl ExactSizeIterator<Item = &'s StageShape> + Clone {
        (0..family.encoders.len()).map(|encoder| self.encoder_shape(family, encoder))
    }

    /// Returns the times for an encoder at the encoder's degree.
    pub(super) fn encoder_times(&self, family: &Family, encoder: usize) -> &TpTimes {
        &self.encoders[encoder].times[self.encoder_shape(family, encoder).times]
    }

    /// Returns the LLM shape.
    pub(super) fn llm_shape(&self, family: &Family) -> &StageShape {
        match family.placement {
            Placement::Joint => &self.joint[family.llm].llm,
            _ => &self.llm.shapes[family.llm],
        }
    }

    /// Returns the times for the LLM at the LLM's degree.
    pub(super) fn llm_times(&self, family: &Family) -> &TpTimes {
        &self.llm.times[self.llm_shape(family).times]
    }

    /// Returns the shape for a part that is a separate pipeline, if the encoder has it.
    fn part_shape(&self, encoder: usize, part: EncoderPart) -> Option<&StageShape> {
        self.encoders[encoder].shapes.get(part.shape as usize)
    }

    /// Returns the number of a module's ranks that share optimizer state.
    pub(super) fn optimizer_ranks(&self, dp: u32) -> u32 {
        if self.options.has_sharded_optimizer { dp } else { 1 }
    }

    /// Returns the stages in a step with this many microbatches per rank, and the schedule.
    pub(super) fn step_shape(&self, family: &Family, slots: u32) -> StepShape {
        let chain = |encoder: &StageShape| EncoderChain {
            stages: encoder.pp as u16,
            has_backward: encoder.has_backward(),
        };
        let encoders = match family.placement {
            Placement::Disaggregated => EncoderChains::new(self.encoder_shapes(family).map(chain)),
            Placement::Colocated | Placement::Joint => EncoderChains::default(),
        };
        let stages = encoders.stages() + self.llm_shape(family).layers.len();
        StepShape { kind: family.schedule, encoders, stages, slots: slots as usize }
    }

    /// Returns the maximum number of microbatches per LLM rank.
    pub(super) fn microbatches_max(&self, family: &Family) -> u32 {
        self.workload.global_batch() / family.llm_dp
    }

    /// Whether two families differ in placement or in the degrees of a module, not only in layers,
    /// recomputation or schedule.
    pub(super) fn has_other_degrees(&self, one: &Family, other: &Family) -> bool {
        let shape = |shape: &StageShape| (shape.tp, shape.pp);
        let encoders = |family: &Family| {
            let parts = self.encoder_shapes(family).zip(family.encoders.iter());
            parts.map(|(of, part)| (shape(of), part.dp)).collect::<Vec<_>>()
        };
        (one.placement, one.llm_dp) != (other.placement, other.llm_dp)
            || shape(self.llm_shape(one)) != shape(self.llm_shape(other))
            || encoders(one) != encoders(other)
    }

    /// Returns the number of GPUs that a family uses.
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
}

/// Lists every module shape: degrees, stages and the enabled options.
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
            for &is_recomputed in options.recomputations() {
                let cut = (index, of_degree.tp, pp);
                shapes.extend(StageShape::new(costs, cut, is_recomputed, None));
                if options.has_uneven_layers {
                    let attention = of_degree.sample.at(units) + of_degree.pair_ns * pairs;
                    let layer = of_degree.layer.at(units) + attention;
                    // Recomputed layers take longer, so the work outside them is worth fewer layers.
                    let factor = 1.0 + f64::from(is_recomputed) / 3.0;
                    let outside_as_layers =
                        if layer > 0.0 { of_degree.outside.at(units) / layer / factor } else { 0.0 };
                    shapes.extend(StageShape::new(costs, cut, is_recomputed, Some(outside_as_layers)));
                }
            }
        }
    }
    shapes
}

/// Lists the LLM shapes whose ranks hold several stages with equally many layers.
fn chunked_shapes(
    costs: &dyn ModuleCosts,
    times: &[TpTimes],
    gpus: u32,
    options: SearchSpaceOptions,
) -> Vec<StageShape> {
    let mut shapes = Vec::new();
    for (index, of_degree) in times.iter().enumerate() {
        for pp in 2..=costs.layers().min(gpus / of_degree.tp) {
            for &is_recomputed in options.recomputations() {
                for chunks in options.chunks() {
                    let stages = pp * u32::from(chunks);
                    if costs.layers().is_multiple_of(stages) {
                        let layers = vec![costs.layers() / stages; stages as usize];
                        let (cut, layers) = ((index, of_degree.tp), (layers, usize::from(chunks)));
                        shapes.push(StageShape::in_chunks(costs, cut, is_recomputed, layers));
                    }
                }
            }
        }
    }
    shapes
}

/// Returns a quantity for each stage in each shape.
fn by_stage(shapes: &[StageShape], of_part: impl Fn(u32, StagePart) -> f64) -> Vec<Vec<f64>> {
    let of = |shape: &StageShape| {
        let stages = 0..shape.layers.len();
        stages.map(|stage| of_part(shape.tp, shape.part(stage))).collect()
    };
    shapes.iter().map(of).collect()
}

/// Kinds of plans that are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each enables one kind of plan, by itself")]
pub struct SearchSpaceOptions {
    /// Whether encoder and LLM may have separate GPUs.
    pub is_disaggregated: bool,
    /// Whether the encoder may run on the LLM's GPUs, before and after it.
    pub is_colocated: bool,
    /// Whether every rank may hold layers of both modules.
    pub is_joint: bool,
    /// Whether stages may differ in layers beyond rounding.
    pub has_uneven_layers: bool,
    /// Whether the activations in all layers of a module may be recomputed in the backward pass.
    pub has_recomputation: bool,
    /// Whether encoders on GPUs of their own may run ahead of the LLM.
    pub has_encoder_ahead: bool,
    /// Whether the fastest plans may run under other schedules where the executor runs them: `zb-h1` without
    /// recomputation, and `interleaved` on the GPUs of the LLM.
    pub has_other_schedules: bool,
    /// Whether a module's data-parallel ranks share optimizer state (`ZeRO` stage 1).
    pub has_sharded_optimizer: bool,
    /// Schedule for the plans; `interleaved` only on the GPUs of the LLM.
    pub schedule: ScheduleKind,
    /// Trainer that runs the plans, and only plans that it runs.
    pub trainer: Trainer,
}

impl Default for SearchSpaceOptions {
    fn default() -> Self {
        Self {
            is_disaggregated: true,
            is_colocated: false,
            is_joint: false,
            has_uneven_layers: false,
            has_recomputation: false,
            has_encoder_ahead: false,
            has_other_schedules: false,
            has_sharded_optimizer: false,
            schedule: ScheduleKind::OneForwardOneBackward,
            trainer: Trainer::default(),
        }
    }
}

impl SearchSpaceOptions {
    /// Splits the options by placement.
    pub(super) fn each_placement(self) -> impl Iterator<Item = Self> {
        let only = |is_disaggregated, is_colocated, is_joint| Self {
            is_disaggregated,
            is_colocated,
            is_joint,
            ..self
        };
        [
            self.is_disaggregated.then(|| only(true, false, false)),
            self.is_colocated.then(|| only(false, true, false)),
            self.is_joint.then(|| only(false, false, true)),
        ]
        .into_iter()
        .flatten()
    }

    /// Lists whether the layers of a module may be recomputed. With split backward passes, the rows of all
    /// layers are kept for the weight gradients in any case.
    fn recomputations(&self) -> &'static [bool] {
        let is_split = self.schedule == ScheduleKind::ZeroBubble;
        if self.has_recomputation && !is_split { &[false, true] } else { &[false] }
    }

    /// Lists the numbers of stages on an LLM rank, above 1.
    fn chunks(&self) -> impl Iterator<Item = u16> + use<> {
        let (least, most) = match self.schedule {
            ScheduleKind::Interleaved { chunks } => (chunks, chunks),
            _ if self.has_other_schedules && self.is_colocated => (2, CHUNKS_MAX),
            _ => (1, 1),
        };
        (least..=most).filter(|chunks| *chunks > 1)
    }

    /// Returns the minimum share of a microbatch's time in all stages that is sequential under the searched
    /// schedules: split backward passes delay weight gradients, at most a third of that time.
    pub(super) fn path_share(&self) -> f64 {
        let is_split = self.schedule == ScheduleKind::ZeroBubble || self.has_other_schedules;
        if is_split { 2.0 / 3.0 } else { 1.0 }
    }
}

impl fmt::Display for SearchSpaceOptions {
    /// Describes the searched plans, which lower bounds are about.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schedule = match self.schedule {
            ScheduleKind::OneForwardOneBackward => "1F1B".to_owned(),
            other => other.to_string(),
        };
        let layers = if self.has_uneven_layers { "even or uneven" } else { "even" };
        let places = [
            (self.is_disaggregated, "on separate GPUs"),
            (self.is_colocated, "on the GPUs of the LLM"),
            (self.is_joint, "in the LLM's stages"),
        ];
        let places: Vec<&str> = places.into_iter().filter(|place| place.0).map(|place| place.1).collect();
        let recomputed = if self.has_recomputation { ", with or without recomputation" } else { "" };
        let ahead = if self.has_encoder_ahead { ", with or without running ahead" } else { "" };
        let other = if self.has_other_schedules { ", the fastest also under other schedules" } else { "" };
        let sharded = if self.has_sharded_optimizer { ", sharded optimizer state" } else { "" };
        let places = places.join(" or ");
        let trainer = match self.trainer {
            Trainer::Dflop => String::new(),
            Trainer::Torch => ", by trainer torch: without tensor and expert parallelism".to_owned(),
        };
        write!(
            formatter,
            "{schedule}, {layers} layers, encoder {places}{recomputed}{ahead}{other}{sharded}{trainer}"
        )
    }
}

/// How ranks split the media in a slot. The same rule is used for every plan and every baseline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum EncoderSplit {
    /// Medium by medium between the ranks of a tensor-parallel group with joint placement, whole samples
    /// between encoder ranks.
    #[default]
    Medium,
    /// Tile by tile, across samples.
    Tile,
    /// Whole samples, by LPT, as the executor does.
    Sample,
}

impl EncoderSplit {
    /// Returns `tile` or `sample`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Medium => "medium",
            Self::Tile => "tile",
            Self::Sample => "sample",
        }
    }
}
