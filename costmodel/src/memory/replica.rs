//! Predicts the memory on a data-parallel rank that runs a whole model.
//!
//! Under DDP every rank holds all parameters, gradients and optimizer state. The ranks in a *shard group*
//! divide the optimizer state (`ZeRO-1`), the gradients as well (`ZeRO-2`), or all three (`ZeRO-3`, FSDP),
//! where each rank gathers a module's layers one by one while it computes. HSDP has several shard groups.
//!
//! # Source
//! Rajbhandari et al., "`ZeRO`", 2020, arXiv:1910.02054, section 5; Zhao et al., "`PyTorch` FSDP", 2023,
//! arXiv:2304.11277, sections 3.2 and 3.3: the next layer is gathered while a layer computes.

use super::rank_layout::{RankLayout, Sharding};
use super::{Execution, ModuleStages, PipelineMemory, SavedActivations, StateBytes, Trainer};
use crate::Module;
use crate::error::Result;
use crate::frozen::FrozenParts;
use crate::model::{EncoderParameters, LlmParameters, ModelSpec};

/// State bytes per parameter: 16-bit parameters and gradients, 32-bit optimizer state.
const STATE: StateBytes = StateBytes::ADAM;

/// Parameters of a module on a rank that runs the whole module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleParameters {
    /// Module; an encoder includes the projector.
    pub module: Module,
    /// Number of transformer layers.
    pub layers: u32,
    /// Number of parameters, including frozen parameters.
    pub parameters: u64,
    /// Number of trained parameters.
    pub trained: u64,
    /// Largest layer, and everything outside the layers, which are gathered at once: parameters, and trained
    /// parameters.
    units: [[u64; 2]; 2],
}

impl ModuleParameters {
    fn from_encoder(module: Module, encoder: &EncoderParameters, frozen: FrozenParts) -> Self {
        let of_tower = |parameters: u64| if frozen.is_tower_frozen(module) { 0 } else { parameters };
        let projector = if frozen.projector { 0 } else { encoder.projector };
        let outside = encoder.outside.saturating_add(encoder.projector);
        Self {
            module,
            layers: encoder.layers,
            parameters: encoder.total(),
            trained: of_tower(encoder.tower()).saturating_add(projector),
            units: [
                [encoder.layer, of_tower(encoder.layer)],
                [outside, of_tower(encoder.outside).saturating_add(projector)],
            ],
        }
    }

    fn from_llm(llm: &LlmParameters, frozen: FrozenParts) -> Self {
        let trained = |parameters: u64| if frozen.llm { 0 } else { parameters };
        let layer = llm.dense_layer.max(llm.sparse_layer);
        let outside = llm.embedding.saturating_add(llm.last_norm).saturating_add(llm.head);
        Self {
            module: Module::Llm,
            layers: llm.layers,
            parameters: llm.total(),
            trained: trained(llm.total()),
            units: [[layer, trained(layer)], [outside, trained(outside)]],
        }
    }

    /// Returns the bytes of all parameters, saturating.
    #[must_use]
    pub fn parameter_bytes(&self) -> u64 {
        self.parameters.saturating_mul(STATE.parameter.into())
    }

    /// Returns the bytes of all trained parameters, saturating.
    #[must_use]
    pub fn trained_bytes(&self) -> u64 {
        self.trained.saturating_mul(STATE.parameter.into())
    }

    /// Returns the bytes of all gradients, saturating.
    #[must_use]
    pub fn gradient_bytes(&self) -> u64 {
        self.trained.saturating_mul(STATE.gradient.into())
    }
}

/// Memory on a data-parallel rank by kind, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RankMemory {
    /// Parameters that the rank keeps.
    pub parameters: u64,
    /// Gradients that the rank keeps.
    pub gradients: u64,
    /// Optimizer state, with 32-bit parameters.
    pub optimizer: u64,
    /// Buffers: gathered parameters of the layer being computed and of the next layer if parameters are
    /// divided, and a layer's gradients before division if gradients are; otherwise 0.
    pub gathered: u64,
    /// Activations saved for the backward pass of a microbatch.
    pub activations: u64,
    /// Memory for the layer, or the LM head, being computed.
    pub working_set: u64,
}

impl RankMemory {
    /// Returns the sum, saturating.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Self { parameters, gradients, optimizer, gathered, activations, working_set } = *self;
        let all = [parameters, gradients, optimizer, gathered, activations, working_set];
        all.into_iter().fold(0, u64::saturating_add)
    }
}

/// Memory model for ranks that run a whole model each, in 16 bits with 32-bit Adam.
///
/// # Examples
/// ```
/// use dflop_costmodel::memory::ReplicaMemory;
/// use dflop_costmodel::{ModelSpec, RankLayout, Sharding};
///
/// let spec = ModelSpec::preset("qwen2.5-vl-7b")?;
/// let memory = ReplicaMemory::new(&spec);
/// let ddp = RankLayout::replicated(8, 8);
/// let rank = |layout| memory.rank(layout, &[4096, 8192]);
/// assert!(rank(ddp.sharded(Sharding::Optimizer, 8))?.optimizer < rank(ddp)?.optimizer / 7);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReplicaMemory<'a> {
    spec: &'a ModelSpec,
    frozen: FrozenParts,
    saved_activations: SavedActivations,
    trainer: Trainer,
}

impl<'a> ReplicaMemory<'a> {
    /// Creates a memory model with everything trained and all activations saved.
    #[must_use]
    pub fn new(spec: &'a ModelSpec) -> Self {
        Self {
            spec,
            frozen: FrozenParts::default(),
            saved_activations: SavedActivations::default(),
            trainer: Trainer::default(),
        }
    }

    /// Sets the trainer, whose kernels save the activations. Default: kernels as in the executor.
    #[must_use]
    pub const fn trainer(mut self, trainer: Trainer) -> Self {
        self.trainer = trainer;
        self
    }

    /// Sets the frozen parts, which hold only parameters. Default: none.
    #[must_use]
    pub const fn frozen(mut self, frozen: FrozenParts) -> Self {
        self.frozen = frozen;
        self
    }

    /// Sets the activations saved for the backward passes. Default: all.
    #[must_use]
    pub const fn saved_activations(mut self, saved_activations: SavedActivations) -> Self {
        self.saved_activations = saved_activations;
        self
    }

    /// Returns the model.
    #[must_use]
    pub const fn spec(&self) -> &'a ModelSpec {
        self.spec
    }

    /// Returns the parameters of every module, encoders first.
    #[must_use]
    pub fn modules(&self) -> Vec<ModuleParameters> {
        let encoders = self.spec.encoder_parameters();
        let encoders = encoders
            .iter()
            .map(|(module, encoder)| ModuleParameters::from_encoder(*module, encoder, self.frozen));
        let llm = ModuleParameters::from_llm(&self.spec.llm_parameters(), self.frozen);
        encoders.chain([llm]).collect()
    }

    /// Returns the activations and the working set for a microbatch, in bytes.
    ///
    /// - `tokens`: tokens inside every module, encoders first
    ///
    /// # Errors
    /// [`Error::Incompatible`](crate::Error::Incompatible) if a module has no number of tokens.
    pub fn activation_bytes(&self, tokens: &[u64]) -> Result<[u64; 2]> {
        let encoders = self.spec.encoders().map(|(_, encoder, _)| encoder.layers);
        let layers = encoders.chain([self.spec.llm.layers]);
        let layout = |(layers, tokens): (u32, &u64)| ModuleStages {
            layers: vec![layers],
            execution: Execution { kernels: self.trainer.kernels(), ..Execution::default() },
            microbatch_tokens: *tokens,
        };
        let layouts: Vec<ModuleStages> = layers.zip(tokens).map(layout).collect();
        let memory =
            PipelineMemory::new(self.spec).frozen(self.frozen).saved_activations(self.saved_activations);
        let stages = memory.stages(&layouts)?;
        let activations = stages.iter().map(|stage| stage.peak.activations).fold(0, u64::saturating_add);
        // Modules run one after the other.
        let working_set = stages.iter().map(|stage| stage.peak.working_set).max().unwrap_or(0);
        Ok([activations, working_set])
    }

    /// Returns the memory on a rank with one microbatch at a time.
    ///
    /// - `tokens`: as for [`Self::activation_bytes`], of the largest microbatch
    ///
    /// # Errors
    /// The errors of [`Self::activation_bytes`].
    pub fn rank(&self, layout: RankLayout, tokens: &[u64]) -> Result<RankMemory> {
        let [activations, working_set] = self.activation_bytes(tokens)?;
        Ok(RankMemory { activations, working_set, ..self.state(layout) })
    }

    /// Returns the memory on a rank without activations and working set.
    fn state(&self, layout: RankLayout) -> RankMemory {
        let modules = self.modules();
        let share = |count: u64, bytes: u32, from: Sharding| {
            let ranks = if layout.sharding >= from { layout.shard_ranks.max(1) } else { 1 };
            count.div_ceil(u64::from(ranks)).saturating_mul(u64::from(bytes))
        };
        let parameters = modules.iter().map(|module| module.parameters).fold(0, u64::saturating_add);
        let trained = modules.iter().map(|module| module.trained).fold(0, u64::saturating_add);
        RankMemory {
            parameters: share(parameters, STATE.parameter, Sharding::Parameters),
            gradients: share(trained, STATE.gradient, Sharding::Gradients),
            optimizer: share(trained, STATE.optimizer, Sharding::Optimizer),
            gathered: if layout.shard_ranks > 1 { gathered_bytes(&modules, layout.sharding) } else { 0 },
            ..RankMemory::default()
        }
    }
}

/// Largest microbatch by activations and working set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LargestMicrobatch {
    bytes: u64,
    tokens: Vec<u64>,
}

impl LargestMicrobatch {
    /// Adds a microbatch.
    ///
    /// - `tokens`: tokens inside every module, encoders first
    ///
    /// # Errors
    /// The errors of [`ReplicaMemory::activation_bytes`].
    pub fn add(&mut self, memory: &ReplicaMemory<'_>, tokens: Vec<u64>) -> Result<()> {
        let is_covered = self.tokens.len() == tokens.len()
            && tokens.iter().zip(&self.tokens).all(|(own, largest)| own <= largest);
        if is_covered {
            return Ok(());
        }
        let [saved, working_set] = memory.activation_bytes(&tokens)?;
        let bytes = saved.saturating_add(working_set);
        if self.tokens.is_empty() || bytes > self.bytes {
            *self = Self { bytes, tokens };
        }
        Ok(())
    }

    /// Returns the tokens inside every module, encoders first; empty before the first microbatch.
    #[must_use]
    pub fn tokens(&self) -> &[u64] {
        &self.tokens
    }
}

/// Returns the bytes for the two largest units' parameters and the largest unit's gradients, if parameters
/// are divided; for the unit with the most gradients, if only gradients are.
fn gathered_bytes(modules: &[ModuleParameters], sharding: Sharding) -> u64 {
    let mut units: Vec<[u64; 2]> = modules.iter().flat_map(|module| module.units).collect();
    units.sort_unstable_by(|one, other| other.cmp(one));
    let (gathered, trained) = match sharding {
        Sharding::Nothing | Sharding::Optimizer => (0, 0),
        Sharding::Gradients => (0, units.iter().map(|[_, trained]| *trained).max().unwrap_or(0)),
        Sharding::Parameters => {
            let two = units.iter().take(2).map(|[parameters, _]| *parameters);
            (two.fold(0, u64::saturating_add), units.first().map_or(0, |[_, trained]| *trained))
        }
    };
    let gradients = trained.saturating_mul(STATE.gradient.into());
    gathered.saturating_mul(STATE.parameter.into()).saturating_add(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    fn layout(sharding: Sharding, ranks: u32) -> RankLayout {
        RankLayout::replicated(ranks, 8).sharded(sharding, ranks)
    }

    #[test]
    fn a_rank_of_ddp_holds_the_whole_state_and_shards_divide_it() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let memory = ReplicaMemory::new(&spec);
            let tokens = vec![1024; memory.modules().len()];
            let rank = |sharding| memory.rank(layout(sharding, 8), &tokens).unwrap();
            let [one, eight] = [Sharding::Nothing, Sharding::Parameters].map(rank);
            let state = |rank: &RankMemory| rank.parameters + rank.gradients + rank.optimizer;
            assert_eq!(state(&one), StateBytes::ADAM.for_parameters(spec.parameters()), "{name}");
            assert!(state(&eight).abs_diff(state(&one) / 8) <= 16, "{name}");
            assert_eq!((one.gathered, one.activations), (0, eight.activations), "{name}");
            assert!(eight.gathered > 0 && eight.total() < one.total(), "{name}");
        }
    }

    /// 16 bytes per parameter: 2 for the parameter, 2 for the gradient, 12 for the optimizer.
    #[test]
    fn every_stage_divides_more_state() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory = ReplicaMemory::new(&spec);
        let (count, llm) = (spec.parameters(), spec.llm_parameters());
        let rank = |sharding| memory.rank(layout(sharding, 64), &[7290, 8192]).unwrap();
        let [none, first, second, third] =
            [Sharding::Nothing, Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters].map(rank);
        let part = count.div_ceil(64);
        let state = |rank: &RankMemory| [rank.parameters, rank.gradients, rank.optimizer];
        assert_eq!(state(&none), [2 * count, 2 * count, 12 * count]);
        assert_eq!(state(&first), [2 * count, 2 * count, 12 * part]);
        assert_eq!(state(&second), [2 * count, 2 * part, 12 * part]);
        assert_eq!(state(&third), [2 * part, 2 * part, 12 * part]);
        // Embedding and LM head are the largest unit, a decoder layer is the next.
        let largest = llm.embedding + llm.last_norm + llm.head;
        let gathered = [none, first, second, third].map(|rank| rank.gathered);
        assert_eq!(gathered, [0, 0, 2 * largest, 2 * (largest + llm.dense_layer) + 2 * largest]);
        let totals = [third, second, first, none].map(|rank| rank.total());
        assert!(totals.is_sorted_by(|one, other| one < other), "{totals:?}");
    }

    #[test]
    fn the_largest_microbatch_is_found_by_bytes() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory = ReplicaMemory::new(&spec);
        let bytes = |tokens: &[u64]| memory.activation_bytes(tokens).unwrap().iter().sum::<u64>();
        let microbatches = [[0, 4096], [729, 4000], [7290, 1024], [700, 300], [7290, 4096], [1, 5000]];
        let mut largest = LargestMicrobatch::default();
        for tokens in &microbatches {
            largest.add(&memory, tokens.to_vec()).unwrap();
        }
        let expected = microbatches.iter().max_by_key(|tokens| bytes(*tokens)).unwrap();
        assert_eq!(largest.tokens(), expected);
    }

    /// Activations are those of a pipeline with one stage per module and one microbatch.
    #[test]
    fn activations_are_those_of_the_stages() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let encoder = spec.vision.unwrap().encoder;
        let one = NonZeroU32::MIN;
        let layouts = [
            ModuleStages::even(encoder.layers, one, one, 7290),
            ModuleStages::even(spec.llm.layers, one, one, 8192),
        ];
        let stages = PipelineMemory::new(&spec).stages(&layouts).unwrap();
        let memory = ReplicaMemory::new(&spec);
        let [activations, working_set] = memory.activation_bytes(&[7290, 8192]).unwrap();
        assert_eq!(activations, stages[0].peak.activations + stages[1].peak.activations);
        assert_eq!(working_set, stages[1].peak.working_set, "the logits");
        assert!(memory.activation_bytes(&[7290]).is_err());
    }

    #[test]
    fn frozen_parts_have_no_gradients() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let memory = ReplicaMemory::new(&spec).frozen("vision,llm".parse().unwrap());
        let (_, encoder) = spec.encoder_parameters()[0];
        let rank = memory.rank(layout(Sharding::Nothing, 1), &[7290, 8192]).unwrap();
        assert_eq!(rank.parameters, 2 * spec.parameters());
        assert_eq!((rank.gradients, rank.optimizer), (2 * encoder.projector, 12 * encoder.projector));
        // Embedding and LM head, then the encoder's stem and projector: nothing of the largest is trained.
        let llm = spec.llm_parameters();
        let largest = llm.embedding + llm.last_norm + llm.head;
        let gathered = |sharding| memory.rank(layout(sharding, 2), &[7290, 8192]).unwrap().gathered;
        assert_eq!(gathered(Sharding::Parameters), 2 * (largest + llm.dense_layer));
        assert_eq!(gathered(Sharding::Gradients), 2 * encoder.projector);
    }
}
