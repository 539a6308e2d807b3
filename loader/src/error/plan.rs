//! Errors in planned steps.

use serde::Serialize;

/// Reason why a step cannot be planned, or delivered as planned.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PlanError {
    /// A global batch cannot be planned.
    #[error("could not plan step {step}")]
    Unsolved {
        step: u64,
        #[serde(skip)]
        source: dflop_balancer::Error,
    },
    /// Microbatches with a fixed number of tokens have no room for the samples in a step.
    #[error(
        "could not plan step {step}: {tokens} tokens in {microbatches} microbatches of at most {tokens_max}; \
         {reason}; a `pad_to_tokens` (and `tokens_max`, if set) of {tokens_needed} would do for this step, as more \
         microbatches or a smaller global batch might"
    )]
    StepTooLong {
        step: u64,
        tokens: u64,
        microbatches: usize,
        tokens_max: u64,
        tokens_needed: u64,
        reason: String,
    },
    /// The counted tokens in a microbatch exceed the fixed number. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {tokens} tokens, over `pad_to_tokens` of \
         {pad_to_tokens}: {planned_tokens} were planned; count texts in the index with the model's tokenizer, so that plans \
         are exact, or set `pad_to_tokens` to {tokens_needed} at least for this rank's step, or a `tokens_max` below it \
         that leaves room, or cut or drop samples by `long_sample`"
    )]
    MicrobatchTooLong {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        tokens: u64,
        planned_tokens: u64,
        pad_to_tokens: u64,
        tokens_needed: u64,
    },
    /// A step has no target tokens. Ends the stream.
    #[error(
        "step {step} has no training target in any of its {samples} samples: their texts are empty, or have a layout that \
         is not read{}; a run that only needs inputs sets `require_targets` to false",
        not_used(unused)
    )]
    NoTargets { step: u64, samples: usize, unused: String },
    /// The samples in a microbatch do not fit into memory, estimated from the index shapes. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {samples} samples, which take about {} decoded \
         and prepared, of {} available; use more microbatches or a smaller global batch",
        readable_bytes(*bytes), readable_bytes(*bytes_max)
    )]
    MicrobatchTooLarge {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        samples: usize,
        bytes: u64,
        bytes_max: u64,
    },
}

impl PlanError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsolved { .. } => "plan",
            Self::StepTooLong { .. } => "step_too_long",
            Self::MicrobatchTooLong { .. } => "microbatch_too_long",
            Self::NoTargets { .. } => "no_targets",
            Self::MicrobatchTooLarge { .. } => "microbatch_too_large",
        }
    }
}

fn not_used(unused: &str) -> String {
    if unused.is_empty() { String::new() } else { format!(" (not used: {unused})") }
}

/// Formats a byte count with a decimal unit.
fn readable_bytes(bytes: u64) -> String {
    let (unit, name) = if bytes < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    format!("{:.1} {name}", bytes as f64 / unit)
}
