//! What the planner asks of a module: time and memory of a pipeline stage.
//!
//! A *unit* is what a module counts its work in: tiles of an encoder, tokens of an LLM. Units of one
//! microbatch run together in a layer; attention of an LLM goes by original sample and is asked for apart.

mod model;
pub(super) mod time_table;

pub use model::{ModelCosts, ModelCostsBuilder};

/// Which part of a module a stage holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StagePart {
    /// Layers.
    pub layers: u32,
    /// Whether it is the module's first stage.
    pub is_first: bool,
    /// Whether it is the module's last stage.
    pub is_last: bool,
}

/// Memory of one GPU of a stage: `fixed + kept * units in flight + working * units of the microbatch
/// computed`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageBytes {
    /// Parameters, gradients, optimizer.
    pub fixed: f64,
    /// Kept for each unit of the microbatches in flight.
    pub kept_per_unit: f64,
    /// Besides, for each unit of the microbatch that is computed.
    pub working_per_unit: f64,
}

impl StageBytes {
    /// Returns the bytes for this many units.
    #[must_use]
    pub fn at(&self, units_in_flight: f64, units_at_once: f64) -> f64 {
        self.fixed + self.kept_per_unit * units_in_flight + self.working_per_unit * units_at_once
    }
}

/// Time and memory of one module.
///
/// Times are nanoseconds of forward and backward together of a whole tensor-parallel group; they must not
/// fall with units and be finite. Only degrees that [`ModuleCosts::tp_degrees`] names are asked for.
pub trait ModuleCosts {
    /// Layers, at least 1.
    fn layers(&self) -> u32;

    /// Tensor-parallel degrees that heads allow and that costs are known for, ascending.
    fn tp_degrees(&self) -> Vec<u32>;

    /// Time of one layer over the units of a microbatch, without [`ModuleCosts::sample_ns`].
    fn layer_ns(&self, tp: u32, units: u64) -> f64;

    /// Time of one layer that an original sample of this size adds, whatever it is packed with: attention.
    fn sample_ns(&self, tp: u32, units: u64) -> f64;

    /// Time of what is outside the layers, which the last stage computes.
    fn ends_ns(&self, tp: u32, units: u64) -> f64;

    /// Memory of a stage; with `is_recomputed`, layers keep their inputs alone.
    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes;

    /// Bytes of one unit that go from a stage to the next one, and as gradient back.
    fn border_bytes(&self) -> f64;

    /// Bytes of gradients on one GPU of a stage.
    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64;
}
