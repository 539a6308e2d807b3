//! Module costs for the planner: time and memory per pipeline stage.
//!
//! A *unit* counts a module's work: encoder tiles, encoder patches for native-resolution media, and LLM
//! tokens. All units in a microbatch run together in a layer. LLM attention depends on the original samples,
//! and attention over patches on each medium; both are separate costs.

mod builder;
mod experts;
mod model;
pub(super) mod time_table;

pub use builder::ModelCostsBuilder;
pub use experts::ExpertParallel;
pub use model::{ModelCosts, PlannedModel};

/// Part of a module held by a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StagePart {
    /// Number of layers.
    pub layers: u32,
    /// Whether this is the module's first stage.
    pub is_first: bool,
    /// Whether this is the module's last stage.
    pub is_last: bool,
}

/// GPU memory for a stage:
/// `fixed + optimizer + kept * units in flight + working * units of the microbatch computed`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageBytes {
    /// Bytes for parameters and gradients.
    pub fixed: f64,
    /// Optimizer state bytes, which data-parallel ranks may share.
    pub optimizer: f64,
    /// Optimizer state bytes for experts, which data-parallel ranks with the same experts may share.
    pub expert_optimizer: f64,
    /// Number of ranks that divide the experts; 0 and 1 for none.
    pub expert_parallel: u32,
    /// Bytes kept per unit in all microbatches in flight.
    pub kept_per_unit: f64,
    /// Additional bytes per unit in the microbatch being computed.
    pub working_per_unit: f64,
}

impl StageBytes {
    /// Returns the bytes for this many units.
    #[must_use]
    pub fn at(&self, units_in_flight: f64, units_at_once: f64) -> f64 {
        let units = self.kept_per_unit * units_in_flight + self.working_per_unit * units_at_once;
        self.fixed + self.optimizer + self.expert_optimizer + units
    }

    /// Returns the memory if this many ranks share the optimizer state.
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

/// Time and memory for one module.
///
/// Times are nanoseconds for forward and backward together, for a whole tensor-parallel group, with
/// everything trained; they must be finite and non-decreasing in units. Only degrees in
/// [`ModuleCosts::tp_degrees`] are requested.
pub trait ModuleCosts {
    /// Returns the module name, unique among a model's encoders.
    fn name(&self) -> &'static str {
        "encoder"
    }

    /// Returns the number of layers, at least 1.
    fn layers(&self) -> u32;

    /// Returns the tensor-parallel degrees that heads and costs allow, ascending.
    fn tp_degrees(&self) -> Vec<u32>;

    /// Returns the time for one layer over a microbatch's units, without [`ModuleCosts::sample_ns`].
    fn layer_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the attention time that an original sample with this size adds to one layer, in any packing.
    fn sample_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the time that attention within a sample's media adds to one layer, in any packing.
    ///
    /// 0 if all units have the same size. The planner uses the mean time per pair over all samples, in
    /// proportion to pairs.
    ///
    /// - `units`, `pairs`: patches in the sample, and query-key pairs in its media in a mean layer
    fn media_attention_ns(&self, _tp: u32, _units: u64, _pairs: u64) -> f64 {
        0.0
    }

    /// Returns the time outside the layers, which the last stage computes.
    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the backward time divided by the forward time, for layers and outside layers: 2 if everything
    /// is trained, 0 if no gradient is computed.
    fn backward_ratios(&self) -> [f64; 2] {
        [2.0; 2]
    }

    /// Returns the half width of the 90 % interval around the layer time, as a fraction of that time; 0 if
    /// unknown.
    ///
    /// - `samples`: number of original samples in the microbatch, and units per sample
    fn relative_half_width(&self, _tp: u32, _units: f64, _samples: [f64; 2]) -> f64 {
        0.0
    }

    /// Returns the memory of a stage; recomputed layers keep their inputs alone.
    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes;

    /// Returns the bytes per unit that a stage sends to the next stage, and that return as gradient.
    fn border_bytes(&self) -> f64;

    /// Returns the gradient bytes on one GPU of a stage, without [`ModuleCosts::expert_gradient_bytes`].
    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64;

    /// Returns the expert gradient bytes on one GPU of a stage, which only ranks with the same experts sum; 0
    /// if every rank has all experts.
    fn expert_gradient_bytes(&self, _tp: u32, _part: StagePart) -> f64 {
        0.0
    }

    /// Returns the expert-parallel degree for these costs, which divides the DP degree.
    fn expert_parallel(&self) -> u32 {
        1
    }

    /// Returns the expert-parallel degrees to plan with on this many GPUs, ascending.
    fn expert_parallel_degrees(&self, _gpus: u32) -> Vec<u32> {
        vec![self.expert_parallel()]
    }

    /// Returns the costs at a different expert-parallel degree; `None` if the degree is not available.
    fn at_expert_parallel(&self, _degree: u32) -> Option<Box<dyn ModuleCosts>> {
        None
    }

    /// Returns the load imbalance between ranks that share experts, if each rank has a microbatch with
    /// `units`; `None` for a module without experts.
    fn expert_loads(&self, _units: u64) -> Option<ExpertLoads> {
        None
    }
}

/// Load imbalance between ranks that share experts: largest rank load divided by the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLoads {
    /// Imbalance used for planned times.
    pub planned: f64,
    /// Expected imbalance with uniform routing.
    pub expected: f64,
    /// Imbalance if all tokens select the same experts.
    pub worst: f64,
}
