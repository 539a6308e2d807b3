//! Partition problems with two modules.

use dflop_balancer::Instance;

use crate::random::Random;

/// A global batch of `items` samples for `groups` microbatches: encoder and LLM times, log-normal, a fifth of the
/// samples without work for the encoder.
///
/// # Panics
/// If there are fewer items than groups, or no group.
#[must_use]
pub fn instance(items: usize, groups: usize) -> Instance {
    let mut random = Random::new(21);
    let times = |_| {
        let encoder_ns = if random.below(5) == 0 { 0.0 } else { random.log_normal(30e6, 0.7) };
        // The LLM reads what the encoder makes, so the two go together, but for the text.
        let llm_ns = 0.8 * encoder_ns + random.log_normal(40e6, 0.9);
        [encoder_ns as u64, llm_ns as u64]
    };
    Instance::new(groups, 2, (0..items).flat_map(times).collect()).expect("each group gets an item")
}
