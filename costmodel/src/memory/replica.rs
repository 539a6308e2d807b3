//! Predicts the memory on a data-parallel rank that runs a whole model.
//!
//! Under DDP every rank holds all parameters, gradients and optimizer state. Under FSDP, which is `ZeRO`
//! stage 3, the ranks in a *shard group* divide all three, and each rank gathers a module's layers one by one
//! while it computes. HSDP has several shard groups.
//!
//! # Source
//! Rajbhandari et al., "`ZeRO`", 2020, arXiv:1910.02054, section 5; Zhao et al., "`PyTorch` FSDP", 2023,
//! arXiv:2304.11277, sections 3.2 and 3.3: the next layer is gathered while a layer computes.

use std::num::NonZeroU32;

use super::{Execution, ModuleStages, PipelineMemory, SavedActivations, StateBytes};
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
    /// Gathered parameters of the layer being computed and of the next layer, and a layer's gradients before
    /// they are divided; 0 without sharding.
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
/// use std::num::NonZeroU32;
///
/// use dflop_costmodel::ModelSpec;
/// use dflop_costmodel::memory::ReplicaMemory;
///
/// let spec = ModelSpec::preset("qwen2.5-vl-7b")?;
/// let memory = ReplicaMemory::new(&spec);
/// let rank = |ranks| memory.rank(NonZeroU32::new(ranks).expect("above 0"), &[4096, 8192]);
/// assert!(rank(8)?.optimizer < rank(1)?.optimizer / 7);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReplicaMemory<'a> {
    spec: &'a ModelSpec,
    frozen: FrozenParts,
    saved_activations: SavedActivations,
}

impl<'a> ReplicaMemory<'a> {
    /// Creates a memory model with everything trained and all activations saved.
    #[must_use]
    pub fn new(spec: &'a ModelSpec) -> Self {
        Self { spec, frozen: FrozenParts::default(), saved_activations: SavedActivations::default() }
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
            execution: Execution::default(),
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
    /// - `shard_ranks`: number of ranks that divide parameters, gradients and optimizer state: 1 for DDP, all
    ///   ranks for FSDP
    /// - `tokens`: as for [`Self::activation_bytes`], of the largest microbatch
    ///
    /// # Errors
    /// The errors of [`Self::activation_bytes`].
    pub fn rank(&self, shard_ranks: NonZeroU32, tokens: &[u64]) -> Result<RankMemory> {
        let [activations, working_set] = self.activation_bytes(tokens)?;
        let modules = self.modules();
        let share = |count: u64, bytes: u32| {
            count.div_ceil(u64::from(shard_ranks.get())).saturating_mul(u64::from(bytes))
        };
        let parameters = modules.iter().map(|module| module.parameters).fold(0, u64::saturating_add);
        let trained = modules.iter().map(|module| module.trained).fold(0, u64::saturating_add);
        Ok(RankMemory {
            parameters: share(parameters, STATE.parameter),
            gradients: share(trained, STATE.gradient),
            optimizer: share(trained, STATE.optimizer),
            gathered: if shard_ranks.get() > 1 { gathered_bytes(&modules) } else { 0 },
            activations,
            working_set,
        })
    }
}

/// Returns the bytes for the two largest units' parameters and the largest unit's gradients.
fn gathered_bytes(modules: &[ModuleParameters]) -> u64 {
    let mut units: Vec<[u64; 2]> = modules.iter().flat_map(|module| module.units).collect();
    units.sort_unstable_by(|one, other| other.cmp(one));
    let parameters = units.iter().take(2).map(|[parameters, _]| *parameters).fold(0, u64::saturating_add);
    let trained = units.first().map_or(0, |[_, trained]| *trained);
    let gradients = trained.saturating_mul(STATE.gradient.into());
    parameters.saturating_mul(STATE.parameter.into()).saturating_add(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(count: u32) -> NonZeroU32 {
        NonZeroU32::new(count).unwrap()
    }

    #[test]
    fn a_rank_of_ddp_holds_the_whole_state_and_shards_divide_it() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let memory = ReplicaMemory::new(&spec);
            let tokens = vec![1024; memory.modules().len()];
            let [one, eight] = [1, 8].map(|count| memory.rank(ranks(count), &tokens).unwrap());
            let state = |rank: &RankMemory| rank.parameters + rank.gradients + rank.optimizer;
            assert_eq!(state(&one), StateBytes::ADAM.for_parameters(spec.parameters()), "{name}");
            assert!(state(&eight).abs_diff(state(&one) / 8) <= 16, "{name}");
            assert_eq!((one.gathered, one.activations), (0, eight.activations), "{name}");
            assert!(eight.gathered > 0 && eight.total() < one.total(), "{name}");
        }
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
        let rank = memory.rank(ranks(1), &[7290, 8192]).unwrap();
        assert_eq!(rank.parameters, 2 * spec.parameters());
        assert_eq!((rank.gradients, rank.optimizer), (2 * encoder.projector, 12 * encoder.projector));
        // Embedding and LM head, then the encoder's stem and projector: nothing of the largest is trained.
        let llm = spec.llm_parameters();
        let largest = llm.embedding + llm.last_norm + llm.head;
        let gathered = memory.rank(ranks(2), &[7290, 8192]).unwrap().gathered;
        assert_eq!(gathered, 2 * (largest + llm.dense_layer));
    }
}
