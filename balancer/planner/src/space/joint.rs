//! Joint placement shapes: every rank holds layers of all modules, cut anywhere.
//!
//! Encoder and LLM layers form a single chain; a stage holds consecutive layers, possibly from several
//! modules. The LLM's layers are tensor-parallel. An encoder is small, so each GPU in a tensor-parallel group
//! holds the stage's encoder layers whole and processes a share of the microbatch's media.

use super::shape::{StageShape, TpTimes};
use crate::costs::{ModuleCosts, StageBytes};
use crate::workload::Workload;
use dflop_costmodel::memory::split_layers;

/// Maximum number of stages: a module has far more layers than a joint pipeline needs.
const STAGES_MAX: u32 = 32;
/// Microbatches per stage assumed when layers are cut.
const MICROBATCHES_PER_STAGE: u32 = 4;
/// Number of halvings for the range of a stage's time.
const HALVINGS: usize = 40;

/// Encoders and LLM cut into the same stages.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JointShape {
    /// Encoder layers by stage; the tensor-parallel degree is 1.
    pub(crate) encoders: Vec<StageShape>,
    /// LLM layers by stage.
    pub(crate) llm: StageShape,
    /// Gradient bytes by module and stage, LLM last.
    pub(crate) gradient_bytes: Vec<Vec<f64>>,
    /// Whether the first stage holds the whole encoders and all stages hold even LLM shares, as in plans made
    /// by hand.
    pub(crate) is_by_hand: bool,
}

/// Modules with times by degree.
pub(super) struct JointModules<'a> {
    pub(super) encoders: Vec<(&'a dyn ModuleCosts, &'a [TpTimes])>,
    pub(super) llm: (&'a dyn ModuleCosts, &'a [TpTimes]),
}

/// A module's layers by chain stage.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChainLayers {
    /// Number of layers in each stage; stages may be empty.
    pub(crate) layers: Vec<u32>,
    /// Whether the backward pass recomputes the layers.
    pub(crate) is_recomputed: bool,
}

/// LLM degree, stages, and whether encoders and LLM are recomputed.
#[derive(Clone, Copy)]
struct JointCut {
    degree: usize,
    pp: u32,
    again: [bool; 2],
}

impl JointCut {
    /// Adds recomputation to each module's layers, LLM last.
    fn modules(self, layers: Vec<Vec<u32>>) -> Vec<ChainLayers> {
        let llm = layers.len().saturating_sub(1);
        let module = |(index, layers): (usize, Vec<u32>)| ChainLayers {
            layers,
            is_recomputed: self.again[usize::from(index == llm)],
        };
        layers.into_iter().enumerate().map(module).collect()
    }
}

impl JointModules<'_> {
    /// Lists the shapes for every degree of the LLM, number of stages and choice of recomputation; none if
    /// an encoder has no times on a single GPU.
    pub(super) fn shapes(&self, workload: &Workload, gpus: u32, choices: &[bool]) -> Vec<JointShape> {
        let Some(singles) = self.singles() else { return Vec::new() };
        let both = |llm: &bool| choices.iter().map(move |encoder| [*encoder, *llm]).collect();
        let recomputed: Vec<[bool; 2]> =
            choices.iter().flat_map(|llm| -> Vec<[bool; 2]> { both(llm) }).collect();
        let llm_layers = self.llm.0.layers();
        let layers: Vec<u32> =
            self.encoders.iter().map(|(costs, _)| costs.layers()).chain([llm_layers]).collect();
        let mut shapes: Vec<JointShape> = Vec::new();
        for (degree, times) in self.llm.1.iter().enumerate() {
            let most = STAGES_MAX.min(gpus / times.tp).min(llm_layers);
            for pp in 1..=most {
                for &again in &recomputed {
                    let cut = JointCut { degree, pp, again };
                    let by_hand = by_hand(&layers, pp);
                    let balanced = self.chain(workload, &singles, cut, gpus).cut(&layers, pp as usize);
                    if balanced != by_hand {
                        shapes.push(self.shape(cut.modules(balanced), &singles, degree, false));
                    }
                    shapes.push(self.shape(cut.modules(by_hand), &singles, degree, true));
                }
            }
        }
        shapes
    }

    /// Builds the shape with these layers, LLM last; `None` if an encoder has no times on a single GPU, or
    /// the LLM has none at the degree.
    pub(super) fn given(&self, llm_tp: u32, modules: Vec<ChainLayers>) -> Option<JointShape> {
        let degree = self.llm.1.iter().position(|times| times.tp == llm_tp)?;
        Some(self.shape(modules, &self.singles()?, degree, false))
    }

    /// Returns the index of each encoder's times on a single GPU.
    fn singles(&self) -> Option<Vec<usize>> {
        let single = |(_, times): &(_, &[TpTimes])| times.iter().position(|times| times.tp == 1);
        self.encoders.iter().map(single).collect()
    }

    /// Builds a shape from the layers of each module, LLM last.
    fn shape(
        &self,
        modules: Vec<ChainLayers>,
        singles: &[usize],
        degree: usize,
        is_by_hand: bool,
    ) -> JointShape {
        let stages: Vec<usize> = (0..modules.first().map_or(0, |module| module.layers.len())).collect();
        let gradients = |costs: &dyn ModuleCosts, shape: &StageShape| {
            let of = |stage: &usize| {
                let part = shape.part(*stage);
                if part.layers == 0 { 0.0 } else { costs.gradient_bytes(shape.tp, part) }
            };
            stages.iter().map(of).collect::<Vec<f64>>()
        };
        let mut modules = modules.into_iter();
        let mut gradient_bytes = Vec::with_capacity(self.encoders.len() + 1);
        let mut shape = |(costs, _): (&dyn ModuleCosts, &[TpTimes]), (index, tp)| {
            let ChainLayers { layers, is_recomputed } = modules.next().unwrap_or_default();
            let shape = StageShape::from_layers(costs, (index, tp), is_recomputed, layers, &stages);
            gradient_bytes.push(gradients(costs, &shape));
            shape
        };
        let encoders = self.encoders.iter().zip(singles);
        let encoders = encoders.map(|(module, single)| shape(*module, (*single, 1))).collect();
        let llm = shape(self.llm, (degree, self.llm.1[degree].tp));
        JointShape { encoders, llm, gradient_bytes, is_by_hand }
    }

    /// Returns the layer times for a rank's mean microbatch.
    fn chain(
        &self,
        workload: &Workload,
        singles: &[usize],
        JointCut { degree, pp, again }: JointCut,
        gpus: u32,
    ) -> ChainWork {
        let llm = &self.llm.1[degree];
        let ranks = (gpus / (llm.tp * pp)).clamp(1, workload.global_batch());
        let microbatches = (workload.global_batch() / ranks).clamp(1, MICROBATCHES_PER_STAGE * pp);
        let groups = f64::from(ranks * microbatches);
        let factor = |costs: &dyn ModuleCosts, is_again: bool| {
            let ratio = costs.backward_ratios()[0];
            (1.0 + ratio + f64::from(is_again && ratio > 0.0)) / 3.0
        };
        let mut work = ChainWork { layer_ns: Vec::new(), end_ns: Vec::new() };
        for (index, ((costs, times), single)) in self.encoders.iter().zip(singles).enumerate() {
            let encoder = &times[*single];
            let share = workload.media(index).batch_units / groups / f64::from(llm.tp);
            let layer_ns = encoder.layer.at(share) + encoder.samples_ns / (groups * f64::from(llm.tp));
            work.layer_ns.push(factor(*costs, again[0]) * layer_ns);
            work.end_ns.push(encoder.outside.at(share));
        }
        let tokens = workload.batch_tokens / groups;
        let layer_ns = llm.layer.at(tokens) + llm.samples_ns / groups;
        work.layer_ns.push(factor(self.llm.0, again[1]) * layer_ns);
        work.end_ns.push(llm.outside.at(tokens));
        work
    }
}

/// Time per layer in each module, and time for the work after the module's last layer.
struct ChainWork {
    layer_ns: Vec<f64>,
    end_ns: Vec<f64>,
}

impl ChainWork {
    /// Cuts the chain to minimize the slowest stage's time; returns each module's layers by stage.
    fn cut(&self, layers: &[u32], stages: usize) -> Vec<Vec<u32>> {
        let all_ns: f64 = layers
            .iter()
            .zip(self.layer_ns.iter().zip(&self.end_ns))
            .map(|(layers, (layer_ns, end_ns))| f64::from(*layers) * layer_ns + end_ns)
            .sum();
        let (mut low, mut high) = (all_ns / stages as f64, all_ns);
        let mut best = self.fill(layers, stages, f64::INFINITY);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            let found = self.fill(layers, stages, middle);
            if found.is_some() {
                (high, best) = (middle, found);
            } else {
                low = middle;
            }
        }
        best.unwrap_or_else(|| by_hand(layers, stages as u32))
    }

    /// Fills stages up to a time limit, with at least one remaining layer each; `None` if layers remain.
    fn fill(&self, layers: &[u32], stages: usize, limit_ns: f64) -> Option<Vec<Vec<u32>>> {
        let mut cut = vec![Vec::with_capacity(stages); layers.len()];
        let mut left = layers.to_vec();
        for stages_after in (0..stages as u32).rev() {
            let mut used_ns = 0.0;
            for of_module in &mut cut {
                of_module.push(0);
            }
            for module in 0..layers.len() {
                while left[module] > 0 && left.iter().sum::<u32>() > stages_after {
                    let end_ns = if left[module] == 1 { self.end_ns[module] } else { 0.0 };
                    let next_ns = used_ns + self.layer_ns[module] + end_ns;
                    if next_ns > limit_ns {
                        break;
                    }
                    used_ns = next_ns;
                    left[module] -= 1;
                    if let Some(layers) = cut[module].last_mut() {
                        *layers += 1;
                    }
                }
                if left[module] > 0 {
                    break;
                }
            }
        }
        left.iter().all(|left| *left == 0).then_some(cut)
    }
}

/// Puts the whole encoders before even LLM shares.
fn by_hand(layers: &[u32], stages: u32) -> Vec<Vec<u32>> {
    let Some((llm, encoders)) = layers.split_last() else { return Vec::new() };
    let first = |layers: &u32| {
        let mut of_encoder = vec![0; stages as usize];
        of_encoder[0] = *layers;
        of_encoder
    };
    encoders.iter().map(first).chain([split_layers(*llm, stages)]).collect()
}

impl JointShape {
    /// Returns the memory for a stage's part of an encoder.
    pub(crate) fn encoder_memory(&self, encoder: usize, stage: usize) -> StageBytes {
        self.encoders[encoder].memory[stage].1
    }

    /// Returns the memory for a stage's part of the LLM.
    pub(crate) fn llm_memory(&self, stage: usize) -> StageBytes {
        self.llm.memory[stage].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_cut_across_the_border() {
        let work = ChainWork { layer_ns: vec![1.0, 3.0], end_ns: vec![0.0, 3.0] };
        // 6 + 15 + 3 = 24 in two stages of 12: six layers and two, then three and the head.
        assert_eq!(work.cut(&[6, 5], 2), [vec![6, 0], vec![2, 3]]);
        assert_eq!(work.cut(&[6, 5], 1), [vec![6], vec![5]]);
        let even = ChainWork { layer_ns: vec![1.0; 3], end_ns: vec![0.0; 3] };
        assert_eq!(even.cut(&[4, 2], 3), [vec![2, 2, 0], vec![0, 0, 2]]);
        assert_eq!(even.cut(&[4, 1, 4], 3), [vec![3, 1, 0], vec![0, 1, 0], vec![0, 1, 3]]);
    }

    #[test]
    fn every_stage_has_a_layer_and_none_is_lost() {
        for (layers, stages) in
            [(vec![3, 5], 8), (vec![27, 28], 7), (vec![1, 80], 32), (vec![2, 4], 5), (vec![2, 1, 3], 4)]
        {
            let work = ChainWork { layer_ns: vec![0.1, 2.0, 1.0], end_ns: vec![0.3, 9.0, 1.0] };
            let cut = work.cut(&layers, stages);
            assert!((0..stages).all(|stage| cut.iter().any(|of_module| of_module[stage] > 0)), "{cut:?}");
            let sums: Vec<u32> = cut.iter().map(|of_module| of_module.iter().sum()).collect();
            assert_eq!(sums, layers);
        }
    }
}
