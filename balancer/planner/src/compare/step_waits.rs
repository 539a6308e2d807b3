//! Names the causes of GPU idle time in a method, and the time fraction for each cause.

/// Fractions of GPU time in a method's steps that GPUs wait, by cause, each in `0..=1`.
///
/// The fractions add up to the idle fraction.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct StepWaits {
    /// Exposed communication: messages between stages, gradient sums and weight gathers, as far as no pass
    /// hides them.
    pub messages_fraction: f64,
    /// Ranks with less work in a slot wait for the rank with the most work, directly or through a shared
    /// encoder.
    pub slowest_rank_fraction: f64,
    /// Stages wait because microbatches take unequal times.
    pub unequal_microbatches_fraction: f64,
    /// Stages wait while a pipeline fills and drains, or while the encoder runs no further ahead.
    pub fill_and_drain_fraction: f64,
    /// Stages in a module wait for the stage with the most work in a step.
    pub slowest_stage_fraction: f64,
    /// Encoder GPUs wait for the LLM, which has more work per GPU.
    pub llm_fraction: f64,
    /// LLM GPUs wait for the encoder, which has more work per GPU; with a colocated encoder, GPUs without an
    /// encoder rank.
    pub encoder_fraction: f64,
}

impl StepWaits {
    /// Lists causes with fractions, the largest first; ties in field order.
    #[must_use]
    pub fn largest_first(&self) -> [(&'static str, f64); 7] {
        let mut all = [
            ("messages", self.messages_fraction),
            ("the slowest rank", self.slowest_rank_fraction),
            ("unequal microbatches", self.unequal_microbatches_fraction),
            ("fill and drain", self.fill_and_drain_fraction),
            ("the slowest stage", self.slowest_stage_fraction),
            ("the LLM", self.llm_fraction),
            ("the encoder", self.encoder_fraction),
        ];
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    }
}
