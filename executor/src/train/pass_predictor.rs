//! Predicts a step's passes from a measured profile, stage by stage.
//!
//! A stage's time is proportional to the share of module layers in the stage. Work outside the layers is
//! counted where the pipeline runs it: the embedding in the first LLM stage; last norm, LM head and loss in
//! the last LLM stage; everything outside encoder layers in the last encoder stage. Linear work is predicted
//! for the packed microbatch, attention for each sample.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use dflop_balancer::schedule::{Action, Part, PassKind};
use dflop_balancer::split_time;
use dflop_costmodel::profile::{Part as ProfilePart, Phase};
use dflop_costmodel::{CostModel, FrozenParts, ModelSpec, Module, Profile, ProfileOptions, SampleShape};
use dflop_loader::{StepPlan, StepPlanner};

use crate::error::Result;
use crate::inputs::{PredictedTimes, costed};
use crate::pipeline::{Job, PassTimes, RankRole, simulate};

/// Modules with recomputed layers, each with the number of layers from one of these to the next.
pub type RecomputedLayers = Vec<(Module, NonZeroU32)>;

/// Predicts forward and backward passes for every stage and microbatch in a job.
#[derive(Debug, Clone)]
pub struct PassPredictor {
    layers: PartModels,
    outside_layers: PartModels,
    head: PartModels,
    /// Linear work in the layers, without recomputed forward passes.
    linear: PartModels,
}

/// Cost models for a set of parts, for all modules.
#[derive(Debug, Clone)]
struct PartModels {
    forward: CostModel,
    /// Forward and backward passes, recomputed layers included.
    both: CostModel,
}

/// Forward and backward pass times for a module and microbatch, by part, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ModulePasses {
    layers: [u64; 2],
    outside_layers: [u64; 2],
    head: [u64; 2],
    /// Layer weight gradients, included in the layer backward pass.
    weights: u64,
}

impl PassPredictor {
    /// Divides a profile by parts and passes.
    ///
    /// # Errors
    /// [`crate::Error::Model`] if the profile lacks a module, or a frozen part does not exist.
    pub fn new(
        spec: &ModelSpec,
        profile: &Profile,
        recomputed: &RecomputedLayers,
        frozen: FrozenParts,
    ) -> Result<Self> {
        let parts =
            |is_of: fn(ProfilePart) -> bool| PartModels::new(spec, profile, recomputed, frozen, is_of);
        Ok(Self {
            layers: parts(|part| !matches!(part, ProfilePart::OutsideLayers | ProfilePart::Head))?,
            outside_layers: parts(|part| part == ProfilePart::OutsideLayers)?,
            head: parts(|part| part == ProfilePart::Head)?,
            linear: PartModels::new(spec, profile, &RecomputedLayers::new(), frozen, |part| {
                part == ProfilePart::Linear
            })?,
        })
    }

    /// Predicts all passes in a step.
    ///
    /// Where measured times have corrected a module's planned times, the predicted passes add up to the
    /// planned microbatch time; the correction has learned from packed microbatches.
    pub(super) fn passes(
        &self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        predicted: &PredictedTimes,
    ) -> Result<PassTimes> {
        let is_corrected = planner.model().correction_table().is_some();
        let mut by_module = Vec::with_capacity(job.modules().len());
        for (index, (layout, microbatches)) in job.modules().iter().zip(predicted.samples()).enumerate() {
            let mut passes = Vec::with_capacity(microbatches.len());
            for (microbatch, samples) in microbatches.iter().enumerate() {
                let shape = |&sample: &u32| {
                    let mut shape = SampleShape::default();
                    planner.row(plan.samples[sample as usize]).read_shape(&mut shape);
                    shape
                };
                let shapes: Vec<SampleShape> = samples.iter().map(shape).collect();
                let own = self.module(costed(layout.module), &shapes)?;
                let planned = is_corrected.then(|| predicted.module_ns(index, microbatch as u32));
                passes.push(planned.map_or(own, |planned_ns| own.scaled_to(planned_ns)));
            }
            by_module.push(passes);
        }
        PassTimes::zero(job, predicted.rounds()).fill_split(|part| {
            let module = job.stages()[usize::from(part.stage)].module();
            Ok(stage_times(job, part, &by_module[module][part.microbatch as usize]))
        })
    }

    fn module(&self, module: Module, shapes: &[SampleShape]) -> Result<ModulePasses> {
        let layers = self.layers.passes(module, shapes)?;
        let [forward, linear] = self.linear.passes(module, shapes)?;
        Ok(ModulePasses {
            layers,
            weights: weights_ns(layers[1], [forward, linear]),
            outside_layers: self.outside_layers.passes(module, shapes)?,
            head: self.head.passes(module, shapes)?,
        })
    }
}

impl PartModels {
    fn new(
        spec: &ModelSpec,
        profile: &Profile,
        recomputed: &RecomputedLayers,
        frozen: FrozenParts,
        is_of: fn(ProfilePart) -> bool,
    ) -> Result<Self> {
        let model =
            |profile: &Profile| CostModel::from_profile(spec.clone(), profile, ProfileOptions::default());
        let forward = profile.only(|setting| is_of(setting.part) && setting.phase == Phase::Forward);
        let both = model(&profile.only(|setting| is_of(setting.part)))?;
        // A frozen part still runs forward, so its forward pass needs no setting.
        let with = |model: CostModel, &(module, every): &(Module, NonZeroU32)| {
            model.recomputed_layers(module, Some(every))
        };
        let both = recomputed.iter().fold(both, with).frozen(frozen)?;
        Ok(Self { forward: model(&forward)?, both })
    }

    fn passes(&self, module: Module, shapes: &[SampleShape]) -> Result<[u64; 2]> {
        let of = |model: &CostModel| -> Result<u64> {
            let times = model.predict_microbatch(shapes)?;
            let index = model.modules().iter().position(|own| *own == module);
            Ok(index.map_or(0, |index| times.as_slice()[index]))
        };
        let (forward, both) = (of(&self.forward)?, of(&self.both)?);
        Ok([forward, both.saturating_sub(forward)])
    }
}

impl ModulePasses {
    /// Scales all passes alike, so that they add up to a time.
    fn scaled_to(self, total_ns: u64) -> Self {
        let parts = [self.layers, self.outside_layers, self.head];
        let sum: u128 = parts.iter().flatten().map(|&ns| u128::from(ns)).sum();
        let scaled =
            |passes: [u64; 2]| passes.map(|ns| (u128::from(ns) * u128::from(total_ns) / sum.max(1)) as u64);
        let [layers, outside_layers, head] = parts.map(scaled);
        let [weights, _] = scaled([self.weights, 0]);
        Self { layers, outside_layers, head, weights }
    }
}

/// Returns the time for weight gradients in a layer backward pass: half the time for linear backward work,
/// which has twice as many multiplications as the forward pass (for weights and for inputs). A backward pass
/// not longer than the forward pass computes no weight gradients, as with frozen layers.
///
/// - `linear`: forward and backward times for linear work; 0 where the profile does not separate linear work
///   from attention, in which case half the entire backward pass is returned
fn weights_ns(backward: u64, [forward, linear]: [u64; 2]) -> u64 {
    if forward == 0 { backward / 2 } else { linear.saturating_sub(forward).min(linear / 2) }
}

/// Returns a stage's times for forward pass, backward pass and weight gradients: the stage's share in the
/// layers, plus the stage's parts outside the layers.
fn stage_times(job: &Job, part: Part, module: &ModulePasses) -> [u64; 3] {
    let stage = &job.stages()[usize::from(part.stage)];
    let all = job.model().layers(stage.range.module).max(1);
    let is_last = stage.range.layers.end == all;
    let has_outside =
        if costed(stage.range.module) == Module::Llm { stage.range.layers.start == 0 } else { is_last };
    let pass = |index: usize| {
        // Nanoseconds times layers may exceed 64 bits.
        let layers = u128::from(module.layers[index]) * stage.range.layers.len() as u128 / all as u128;
        let outside = if has_outside { module.outside_layers[index] } else { 0 };
        let head = if is_last { module.head[index] } else { 0 };
        layers as u64 + outside + head
    };
    let weights = u128::from(module.weights) * stage.range.layers.len() as u128 / all as u128;
    let of_head = if is_last { module.head[1] / 2 } else { 0 };
    let backward = if stage.has_backward { pass(1) } else { 0 };
    [pass(0), backward, (weights as u64 + of_head).min(backward)]
}

/// Predicted step schedule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forecast {
    /// Time when the last rank ends, in nanoseconds, with free messages and gradient sums.
    pub makespan_ns: u64,
    /// Pass time ranges on this rank, in nanoseconds since the step start.
    passes: BTreeMap<(PassKind, Part), Range<u64>>,
}

impl Forecast {
    /// Simulates a job's schedule.
    ///
    /// - `roles`: rank roles
    /// - `rounds`: microbatches per LLM DP rank
    pub(super) fn new(job: &Job, roles: &[RankRole], rounds: usize, times: &PassTimes) -> Result<Self> {
        let (makespan_ns, events) = simulate(job, rounds, times)?;
        let is_own = |rank: usize| roles.iter().any(|role| role.pipeline_rank == rank);
        let own = events.into_iter().filter(|(rank, ..)| is_own(*rank));
        let passes = own.map(|(_, pass, range)| ((pass.kind, pass.part), range)).collect();
        Ok(Self { makespan_ns, passes })
    }

    /// Returns the predicted time range of an action, if it is a pass of this rank.
    #[must_use]
    pub fn range(&self, action: Action) -> Option<Range<u64>> {
        let pass = action.pass()?;
        self.passes.get(&(pass.kind, pass.part)).cloned()
    }
}

/// Divides planned module times: a stage's time is the module time multiplied by the stage's share in the
/// layers; a third is forward, or everything if nothing is trained in this or earlier stages.
pub(super) fn planned_passes(job: &Job, predicted: &PredictedTimes) -> Result<PassTimes> {
    PassTimes::zero(job, predicted.rounds()).fill(|part: Part| {
        let stage = &job.stages()[usize::from(part.stage)];
        let layers = job.model().layers(stage.range.module).max(1) as u128;
        let module_ns = u128::from(predicted.module_ns(stage.module(), part.microbatch));
        // Nanoseconds times layers may exceed 64 bits.
        let stage_ns = (module_ns * stage.range.layers.len() as u128 / layers) as u64;
        let (forward, backward) = if stage.has_backward { split_time(stage_ns) } else { (stage_ns, 0) };
        Ok([forward, backward])
    })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use dflop_balancer::schedule::ScheduleKind;
    use dflop_costmodel::ImageSize;
    use dflop_models::{FrozenModules, ModuleKind};

    use super::*;
    use crate::pipeline::ModuleParallelism;
    use crate::profile::MeasuredModel;

    /// Rows of two layers, 4 us a token forward and 8 backward; 1 and 2 us outside them; 10 and 20 us a
    /// target.
    fn profile() -> Profile {
        let mut text =
            "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n".to_owned();
        let mut row = |part: &str, layers: u32, tokens: u32, forward: u32| {
            for module in ["vision", "audio", "llm"] {
                for (phase, share) in [("forward", 1), ("backward", 2)] {
                    let time = share * forward * tokens;
                    writeln!(text, "{module},{part},{phase},1,{layers},1,{tokens},{time}").unwrap();
                }
            }
        };
        for tokens in [64, 4096] {
            row("linear", 2, tokens, 4);
            row("attention", 1, tokens, 1);
            row("ends", 0, tokens, 1);
            row("head", 0, tokens, 10);
        }
        Profile::parse([("made.csv", text.as_str())]).unwrap()
    }

    /// - `every`: layers from one recomputed LLM layer to the next; 0 for none
    fn predictor(every: u32, frozen: FrozenParts) -> PassPredictor {
        let spec = ModelSpec::preset("tiny").unwrap();
        let recomputed = NonZeroU32::new(every).map(|every| (Module::Llm, every)).into_iter().collect();
        PassPredictor::new(&spec, &profile(), &recomputed, frozen).unwrap()
    }

    fn job(stages: usize, frozen: FrozenModules) -> Job {
        let model = MeasuredModel::from_spec(ModelSpec::preset("tiny").unwrap()).unwrap().config;
        let layouts = model.modules().into_iter().map(|module| {
            let stages = if module == ModuleKind::Llm { stages } else { 1 };
            ModuleParallelism::even(module, model.layers(module), stages)
        });
        let layouts = layouts.collect();
        Job::new(model, frozen, layouts, ScheduleKind::OneForwardOneBackward).unwrap()
    }

    fn shapes() -> Vec<SampleShape> {
        let images = vec![ImageSize { width: 200, height: 300 }];
        let text = SampleShape { text_tokens: 300, target_tokens: 299, ..SampleShape::default() };
        vec![text, SampleShape { text_tokens: 50, target_tokens: 49, images, ..SampleShape::default() }]
    }

    #[test]
    fn passes_of_all_stages_add_up_to_the_module() {
        let spec = ModelSpec::preset("tiny").unwrap();
        let whole = CostModel::from_profile(spec, &profile(), ProfileOptions::default()).unwrap();
        let expected = whole.predict_microbatch(&shapes()).unwrap();
        let predictor = predictor(0, FrozenParts::default());
        let job = job(2, FrozenModules::default());
        for (index, &module) in whole.modules().iter().enumerate() {
            let passes = predictor.module(module, &shapes()).unwrap();
            let of_module = |stage: &usize| costed(job.stages()[*stage].range.module) == module;
            let stages = (0..job.stages().len()).filter(of_module);
            let sum: u64 = stages
                .map(|stage| stage_times(&job, Part { microbatch: 0, stage: stage as u16 }, &passes))
                .map(|[forward, backward, _]| forward + backward)
                .sum();
            assert!(sum.abs_diff(expected.as_slice()[index]) < 10, "{module}: {sum}, {expected:?}");
        }
    }

    #[test]
    fn the_head_is_in_the_last_stage_and_a_third_is_forward() {
        let predictor = predictor(0, FrozenParts::default());
        let (job, passes) =
            (job(2, FrozenModules::default()), predictor.module(Module::Llm, &shapes()).unwrap());
        let last = job.stages().len() as u16 - 1;
        let [first, last] =
            [last - 1, last].map(|stage| stage_times(&job, Part { microbatch: 0, stage }, &passes));
        assert_eq!(passes.head, [3_480_000, 6_960_000], "348 targets");
        let layers = passes.layers[0] / 2;
        // 4 of 12 us a token in the backward pass of layers, whose forward pass takes 6, and half of the
        // head's.
        for weights in [first[2], last[2] - passes.head[1] / 2] {
            assert!(weights.abs_diff(layers * 2 / 3) < 10, "{weights} of {layers}");
        }
        assert_eq!([first[0] - layers, last[0] - layers], [passes.outside_layers[0], passes.head[0]]);
        for pass in [first, last] {
            assert!(pass[1].abs_diff(2 * pass[0]) < 10, "{pass:?}");
        }
    }

    #[test]
    fn recomputed_layers_run_forward_in_the_backward_pass() {
        let of = |every| predictor(every, FrozenParts::default()).module(Module::Llm, &shapes()).unwrap();
        let (stored, recomputed, half) = (of(0), of(1), of(2));
        assert_eq!((recomputed.layers[0], recomputed.head), (stored.layers[0], stored.head));
        assert!(recomputed.layers[1].abs_diff(stored.layers[1] + stored.layers[0]) < 10);
        assert!(half.layers[1].abs_diff(stored.layers[1] + stored.layers[0] / 2) < 10);
        let encoder =
            |every| predictor(every, FrozenParts::default()).module(Module::Vision, &shapes()).unwrap();
        assert_eq!(encoder(1), encoder(0));
    }

    #[test]
    fn a_stage_before_everything_trained_has_no_backward_pass() {
        let parts = FrozenParts { vision: true, audio: true, projector: true, llm: false };
        let encoder = dflop_models::encoder::FrozenEncoder { encoder: true, projector: true };
        let frozen = FrozenModules { vision: encoder, audio: encoder, is_llm_frozen: false };
        let passes = predictor(0, parts).module(Module::Vision, &shapes()).unwrap();
        let [forward, backward, weights] =
            stage_times(&job(1, frozen), Part { microbatch: 0, stage: 0 }, &passes);
        assert!(forward > 0 && backward == 0 && weights == 0);
    }

    #[test]
    fn scaled_passes_add_up_to_the_planned_time() {
        let passes = ModulePasses { layers: [10, 20], outside_layers: [0, 0], head: [30, 40], weights: 7 };
        let scaled = passes.scaled_to(200);
        let expected = ModulePasses { layers: [20, 40], outside_layers: [0, 0], head: [60, 80], weights: 14 };
        assert_eq!(scaled, expected);
        let none = ModulePasses { layers: [0; 2], outside_layers: [0; 2], head: [0; 2], weights: 0 };
        assert_eq!(none.scaled_to(0), none);
    }
}
