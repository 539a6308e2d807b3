//! Names the microbatches that take as long as the host needs for kernel launches.

use std::fmt;

use serde::Serialize;

use super::microbatch_curve::MicrobatchCurve;
use crate::module::Module;

/// Microbatch size below which launches limit a module.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LaunchLimit {
    /// Limited module.
    pub module: Module,
    /// Minimum microbatch time in the module, forward and backward.
    pub seconds: f64,
    /// Tokens in short sequences inside the module that take as long.
    pub tokens: u64,
}

impl LaunchLimit {
    /// Returns a curve's limit; `None` without a floor.
    pub(super) fn new(module: Module, curve: &MicrobatchCurve) -> Option<Self> {
        let tokens = curve.floor_tokens();
        let has_limit = tokens >= 1.0 && tokens.is_finite();
        has_limit.then(|| Self { module, seconds: curve.floor_ns / 1e9, tokens: tokens as u64 })
    }
}

impl fmt::Display for LaunchLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module, seconds, tokens } = self;
        write!(
            formatter,
            "{module} is limited by launches below {tokens} tokens a microbatch ({:.0} ms)",
            1e3 * seconds
        )
    }
}
