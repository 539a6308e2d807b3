//! Measured times of microbatches, from which tables are learned.

use serde::Serialize;

use super::constants::MicrobatchConstants;
use crate::module::Module;

/// Measured time of one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Measured module; `None` for all modules of the microbatch together.
    pub module: Option<Module>,
    /// Data-parallel rank that ran it.
    pub rank: u32,
    /// Measured forward and backward in nanoseconds.
    pub measured_ns: u64,
    /// Time of the microbatch besides its samples, **without** correction.
    pub constants: MicrobatchConstants,
    /// Samples with work for the module.
    pub samples: Vec<SampleTime>,
}

/// What a sample adds to a microbatch in one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SampleTime {
    /// The module.
    pub module: Module,
    /// Tokens inside the module.
    pub size: u64,
    /// Nanoseconds **without** correction, as [`crate::CostModel::predict_uncorrected`] returns them.
    pub ns: u64,
}
