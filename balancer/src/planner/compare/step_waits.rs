//! Names what the GPUs of a method wait for, and the fraction of their time that each takes.

/// Fractions of the GPU time of a method's steps in which GPUs wait, each in `0..=1`, by what they wait for.
///
/// Their sum is the idle fraction.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct StepWaits {
    /// Exposed communication: messages between stages, sums of gradients and gathers of weights, as far as no
    /// pass hides them.
    pub messages_fraction: f64,
    /// Ranks with less work in a slot wait for the one with the most, directly or through the encoder that
    /// they share.
    pub slowest_rank_fraction: f64,
    /// Stages wait because microbatches take unequal times.
    pub unequal_microbatches_fraction: f64,
    /// Stages wait while a pipeline fills and drains, or while its encoder runs no further ahead.
    pub fill_and_drain_fraction: f64,
    /// Stages of a module wait for the stage that has the most work of a step.
    pub slowest_stage_fraction: f64,
    /// GPUs of the encoder wait for the LLM, which has more work per GPU.
    pub llm_fraction: f64,
    /// GPUs of the LLM wait for the encoder, which has more work per GPU; with a colocated encoder, GPUs
    /// without a rank of it.
    pub encoder_fraction: f64,
}

impl StepWaits {
    /// Lists what is waited for with its fraction, the largest first; equal ones as the fields are.
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
