//! Shapes of joint placement: every rank holds layers of both modules, cut anywhere.
//!
//! The layers of encoder and LLM are one chain; a stage holds a run of it, which may cross the border. The
//! LLM's layers are tensor-parallel. An encoder is small, so each GPU of a tensor-parallel group holds the
//! stage's encoder layers whole and takes a share of the microbatch's media.

use super::shape::{StageShape, TpTimes};
use crate::planner::costs::{ModuleCosts, StageBytes};
use crate::planner::workload::Workload;
use dflop_costmodel::memory::split_layers;

/// Most stages: the layers of a module are far more than a joint pipeline needs.
const STAGES_MAX: u32 = 32;
/// Microbatches per stage for which layers are cut.
const MICROBATCHES_PER_STAGE: u32 = 4;
/// Halvings of the range of a stage's time.
const HALVINGS: usize = 40;

/// Encoder and LLM cut into the same stages.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::planner) struct JointShape {
    /// Encoder layers of each stage; its degree is 1.
    pub(in crate::planner) encoder: StageShape,
    /// LLM layers of each stage.
    pub(in crate::planner) llm: StageShape,
    /// Bytes of gradients of both modules, by stage.
    pub(in crate::planner) gradient_bytes: [Vec<f64>; 2],
    /// Whether the first stage holds the whole encoder and all stages even shares of the LLM, as plans made
    /// by hand do.
    pub(in crate::planner) is_by_hand: bool,
}

/// Modules with their times by degree.
#[derive(Clone, Copy)]
pub(super) struct JointModules<'a> {
    pub(super) encoder: (&'a dyn ModuleCosts, &'a [TpTimes]),
    pub(super) llm: (&'a dyn ModuleCosts, &'a [TpTimes]),
}

impl JointModules<'_> {
    /// Lists the shapes for every degree of the LLM, number of stages and choice of recomputation; none if
    /// the encoder has no times on a single GPU.
    pub(super) fn shapes(&self, workload: &Workload, gpus: u32, has_recomputation: bool) -> Vec<JointShape> {
        let Some(single) = self.encoder.1.iter().position(|times| times.tp == 1) else { return Vec::new() };
        let recomputed: &[[bool; 2]] = if has_recomputation {
            &[[false, false], [true, false], [false, true], [true, true]]
        } else {
            &[[false, false]]
        };
        let layers = [self.encoder.0.layers(), self.llm.0.layers()];
        let mut shapes: Vec<JointShape> = Vec::new();
        for (degree, times) in self.llm.1.iter().enumerate() {
            let most = STAGES_MAX.min(gpus / times.tp).min(layers[1]);
            for pp in 1..=most {
                for &choice in recomputed {
                    let work = self.chain(workload, [single, degree], pp, gpus, choice);
                    let by_hand = by_hand(layers, pp);
                    let balanced = work.cut(layers, pp as usize);
                    let is_by_hand = balanced == by_hand;
                    let degrees = [single, degree];
                    if !is_by_hand {
                        shapes.push(self.shape(balanced, degrees, choice, false));
                    }
                    shapes.push(self.shape(by_hand, degrees, choice, true));
                }
            }
        }
        shapes
    }

    fn shape(
        &self,
        [encoder, llm]: [Vec<u32>; 2],
        [single, degree]: [usize; 2],
        [encoder_again, llm_again]: [bool; 2],
        is_by_hand: bool,
    ) -> JointShape {
        let stages: Vec<usize> = (0..llm.len()).collect();
        let tp = self.llm.1[degree].tp;
        let encoder = StageShape::of_layers(self.encoder.0, (single, 1), encoder_again, encoder, &stages);
        let llm = StageShape::of_layers(self.llm.0, (degree, tp), llm_again, llm, &stages);
        let gradients = |costs: &dyn ModuleCosts, shape: &StageShape| {
            let of = |stage: &usize| {
                let part = shape.part(*stage);
                if part.layers == 0 { 0.0 } else { costs.gradient_bytes(shape.tp, part) }
            };
            stages.iter().map(of).collect::<Vec<f64>>()
        };
        let gradient_bytes = [gradients(self.encoder.0, &encoder), gradients(self.llm.0, &llm)];
        JointShape { encoder, llm, gradient_bytes, is_by_hand }
    }

    /// Returns the times of layers for the mean microbatch of a rank.
    fn chain(
        &self,
        workload: &Workload,
        [single, degree]: [usize; 2],
        pp: u32,
        gpus: u32,
        again: [bool; 2],
    ) -> ChainWork {
        let (encoder, llm) = (&self.encoder.1[single], &self.llm.1[degree]);
        let ranks = (gpus / (llm.tp * pp)).clamp(1, workload.global_batch());
        let microbatches = (workload.global_batch() / ranks).clamp(1, MICROBATCHES_PER_STAGE * pp);
        let groups = f64::from(ranks * microbatches);
        let (tokens, tiles) = (workload.batch_tokens / groups, workload.batch_tiles / groups);
        let share = tiles / f64::from(llm.tp);
        let factor = |costs: &dyn ModuleCosts, again: bool| {
            let ratio = costs.backward_ratios()[0];
            (1.0 + ratio + if again && ratio > 0.0 { 1.0 } else { 0.0 }) / 3.0
        };
        let encoder_layer_ns = encoder.layer.at(share) + encoder.samples_ns / (groups * f64::from(llm.tp));
        let llm_layer_ns = llm.layer.at(tokens) + llm.samples_ns / groups;
        ChainWork {
            layer_ns: [
                factor(self.encoder.0, again[0]) * encoder_layer_ns,
                factor(self.llm.0, again[1]) * llm_layer_ns,
            ],
            end_ns: [encoder.outside.at(share), llm.outside.at(tokens)],
        }
    }
}

/// Times of one layer of each module, and of what follows its last layer.
struct ChainWork {
    layer_ns: [f64; 2],
    end_ns: [f64; 2],
}

impl ChainWork {
    /// Cuts the chain so that the slowest stage is fast; returns the layers of both modules by stage.
    fn cut(&self, layers: [u32; 2], stages: usize) -> [Vec<u32>; 2] {
        let all_ns: f64 = (0..2)
            .map(|module| f64::from(layers[module]) * self.layer_ns[module] + self.end_ns[module])
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

    /// Fills stages up to a time, each with at least one layer of what is left; `None` if layers remain.
    fn fill(&self, layers: [u32; 2], stages: usize, limit_ns: f64) -> Option<[Vec<u32>; 2]> {
        let mut cut = [Vec::with_capacity(stages), Vec::with_capacity(stages)];
        let mut left = layers;
        for stages_after in (0..stages as u32).rev() {
            let mut used_ns = 0.0;
            for of_module in &mut cut {
                of_module.push(0);
            }
            for module in 0..2 {
                while left[module] > 0 && left[0] + left[1] > stages_after {
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
        (left == [0, 0]).then_some(cut)
    }
}

/// Puts the whole encoder before even shares of the LLM.
fn by_hand([encoder, llm]: [u32; 2], stages: u32) -> [Vec<u32>; 2] {
    let mut of_encoder = vec![0; stages as usize];
    of_encoder[0] = encoder;
    [of_encoder, split_layers(llm, stages)]
}

impl JointShape {
    /// Returns the memory of a stage's encoder part and of its LLM part.
    pub(in crate::planner) fn memory(&self, stage: usize) -> [StageBytes; 2] {
        [self.encoder.memory[stage].1, self.llm.memory[stage].1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_cut_across_the_border() {
        let work = ChainWork { layer_ns: [1.0, 3.0], end_ns: [0.0, 3.0] };
        // 6 + 15 + 3 = 24 in two stages of 12: six layers and two, then three and the head.
        assert_eq!(work.cut([6, 5], 2), [vec![6, 0], vec![2, 3]]);
        assert_eq!(work.cut([6, 5], 1), [vec![6], vec![5]]);
        let even = ChainWork { layer_ns: [1.0, 1.0], end_ns: [0.0, 0.0] };
        assert_eq!(even.cut([4, 2], 3), [vec![2, 2, 0], vec![0, 0, 2]]);
    }

    #[test]
    fn every_stage_has_a_layer_and_none_is_lost() {
        for (layers, stages) in [([3, 5], 8), ([27, 28], 7), ([1, 80], 32), ([2, 4], 5)] {
            let work = ChainWork { layer_ns: [0.1, 2.0], end_ns: [0.3, 9.0] };
            let [encoder, llm] = work.cut(layers, stages);
            assert!(encoder.iter().zip(&llm).all(|(one, other)| one + other > 0), "{encoder:?} {llm:?}");
            assert_eq!([encoder.iter().sum::<u32>(), llm.iter().sum::<u32>()], layers);
        }
    }
}
