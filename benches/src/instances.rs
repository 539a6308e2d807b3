//! Partition problems with two modules.

use dflop_balancer::Instance;

use crate::random::Random;

/// Longest encoder time, and longest time of a text in the LLM: contexts are finite. No item may outweigh a mean
/// group, or its time alone would be the lower bound and a search would have nothing to do.
const ENCODER_NS_MAX: f64 = 150e6;
const TEXT_NS_MAX: f64 = 250e6;

/// A global batch of `items` samples for `groups` microbatches: encoder and LLM times, log-normal, a fifth of the
/// samples without work for the encoder.
///
/// # Panics
/// If there are fewer items than groups, or no group.
#[must_use]
pub fn instance(items: usize, groups: usize) -> Instance {
    let mut random = Random::new(21);
    let times = |_| {
        let encoder_ns =
            if random.below(5) == 0 { 0.0 } else { random.log_normal(30e6, 0.7).min(ENCODER_NS_MAX) };
        // The LLM reads what the encoder makes, so the two go together, but for the text.
        let llm_ns = 0.8 * encoder_ns + random.log_normal(40e6, 0.9).min(TEXT_NS_MAX);
        [encoder_ns as u64, llm_ns as u64]
    };
    Instance::new(groups, 2, (0..items).flat_map(times).collect()).expect("each group gets an item")
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_balancer::{Budget, Caps, Strategy, balance};

    #[test]
    fn search_has_work_at_every_measured_size() {
        for (items, groups) in [(512, 64), (2_048, 128), (8_192, 1_024)] {
            let found = balance(
                &instance(items, groups),
                Strategy::Search,
                &Caps::default(),
                &mut Budget::work(20_000),
            );
            let found = found.unwrap();
            assert!(found.work_spent >= 20_000, "{items} items: {} units", found.work_spent);
        }
    }
}
