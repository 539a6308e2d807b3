//! Costs of a module to the planner: time and memory of a pipeline stage.
//!
//! A *unit* counts a module's work: tiles of an encoder, or its patches where media come in native
//! resolution, and tokens of an LLM. Units of one microbatch run together in a layer. Attention of an LLM
//! depends on the original samples, and attention over patches on each medium; both are separate costs.

mod builder;
mod experts;
mod model;
pub(super) mod time_table;

pub use builder::ModelCostsBuilder;
pub use experts::ExpertParallel;
pub use model::{ModelCosts, PlannedModel};

/// Part of a module that a stage holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StagePart {
    /// Number of layers.
    pub layers: u32,
    /// Whether it is the module's first stage.
    pub is_first: bool,
    /// Whether it is the module's last stage.
    pub is_last: bool,
}

/// Memory of one GPU of a stage: `fixed + optimizer + kept * units in flight + working * units of the
/// microbatch computed`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageBytes {
    /// Bytes of parameters and gradients.
    pub fixed: f64,
    /// Bytes of optimizer state, which data-parallel ranks may share.
    pub optimizer: f64,
    /// Bytes of optimizer state of experts, which data-parallel ranks with the same experts may share.
    pub expert_optimizer: f64,
    /// Ranks that divide the experts among themselves; 0 and 1 for none.
    pub expert_parallel: u32,
    /// Bytes kept for each unit of the microbatches in flight.
    pub kept_per_unit: f64,
    /// Additional bytes for each unit of the microbatch that is computed.
    pub working_per_unit: f64,
}

impl StageBytes {
    /// Returns the bytes for this many units.
    #[must_use]
    pub fn at(&self, units_in_flight: f64, units_at_once: f64) -> f64 {
        let units = self.kept_per_unit * units_in_flight + self.working_per_unit * units_at_once;
        self.fixed + self.optimizer + self.expert_optimizer + units
    }

    /// Returns the memory where this many ranks share the optimizer state.
    #[must_use]
    pub fn shared_by(self, ranks: u32) -> Self {
        let alike = ranks / self.expert_parallel.max(1);
        Self {
            optimizer: self.optimizer / f64::from(ranks.max(1)),
            expert_optimizer: self.expert_optimizer / f64::from(alike.max(1)),
            ..self
        }
    }
}

/// Time and memory of one module.
///
/// Times are nanoseconds of forward and backward together of a whole tensor-parallel group, everything
/// trained; they must be finite and non-decreasing in units. Only the degrees of
/// [`ModuleCosts::tp_degrees`] are requested.
pub trait ModuleCosts {
    /// Returns the name of the module, which tells the encoders of a model apart.
    fn name(&self) -> &'static str {
        "encoder"
    }

    /// Returns the number of layers, at least 1.
    fn layers(&self) -> u32;

    /// Returns the tensor-parallel degrees that heads and costs allow, ascending.
    fn tp_degrees(&self) -> Vec<u32>;

    /// Returns the time of one layer over the units of a microbatch, without [`ModuleCosts::sample_ns`].
    fn layer_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the time that an original sample of this size adds to one layer, in any packing: attention.
    fn sample_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the time that attention within the media of a sample adds to one layer, in any packing.
    ///
    /// 0 where units have one size. The planner takes the mean time per pair over all samples, in proportion
    /// to pairs.
    ///
    /// - `units`, `pairs`: patches of the sample, and query-key pairs of its media in a mean layer
    fn media_attention_ns(&self, _tp: u32, _units: u64, _pairs: u64) -> f64 {
        0.0
    }

    /// Returns the time outside the layers, which the last stage computes.
    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the time of a backward pass over that of the forward pass, of layers and outside them: 2 where
    /// everything is trained, 0 where no gradient is computed.
    fn backward_ratios(&self) -> [f64; 2] {
        [2.0; 2]
    }

    /// Returns the half width of the 90 % interval around the time of a layer, as a fraction of that time; 0
    /// where it is unknown.
    ///
    /// - `samples`: number of original samples in the microbatch, and units of each
    fn relative_half_width(&self, _tp: u32, _units: f64, _samples: [f64; 2]) -> f64 {
        0.0
    }

    /// Returns the memory of a stage, some of whose layers are recomputed: they keep their inputs alone.
    fn memory(&self, tp: u32, part: StagePart, recomputed_layers: u32) -> StageBytes;

    /// Returns the bytes per unit that a stage sends to the next one, and that return as gradient.
    fn border_bytes(&self) -> f64;

    /// Returns the bytes of gradients on one GPU of a stage, without those of
    /// [`ModuleCosts::expert_gradient_bytes`].
    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64;

    /// Returns the bytes of gradients of the experts on one GPU of a stage, which only ranks with the same
    /// experts sum; 0 where every rank has all experts.
    fn expert_gradient_bytes(&self, _tp: u32, _part: StagePart) -> f64 {
        0.0
    }

    /// Returns the degree of expert parallelism that the costs are of, which divides the DP degree.
    fn expert_parallel(&self) -> u32 {
        1
    }

    /// Returns the degrees of expert parallelism to plan with on this many GPUs, ascending.
    fn expert_parallel_degrees(&self, _gpus: u32) -> Vec<u32> {
        vec![self.expert_parallel()]
    }

    /// Returns the costs at another degree of expert parallelism; `None` where there is no such degree.
    fn at_expert_parallel(&self, _degree: u32) -> Option<Box<dyn ModuleCosts>> {
        None
    }

    /// Returns the load imbalance of ranks that share experts, where each rank has a microbatch of `units`;
    /// `None` for a module without experts.
    fn expert_loads(&self, _units: u64) -> Option<ExpertLoads> {
        None
    }
}

/// Load imbalance of the ranks that share experts: largest load of a rank over the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLoads {
    /// Imbalance that times are planned with.
    pub planned: f64,
    /// Expected imbalance of uniform routing.
    pub expected: f64,
    /// Imbalance if all tokens select the same experts.
    pub worst: f64,
}
