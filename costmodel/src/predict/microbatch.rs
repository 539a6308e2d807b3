//! Sums the work over the samples that a module runs together in a microbatch.

use super::predicted_time::whole_ns;
use super::profile_timing::ProfileTiming;
use super::workload::{ModuleWorkload, SampleWork};
use crate::module::Module;
use crate::tokens::EncoderWork;

/// Module work, summed over a microbatch's samples.
#[derive(Default)]
pub(super) struct MicrobatchWork {
    work: EncoderWork,
    tokens: f64,
    targets: u64,
    /// Sum of tokens, weighted by each sample's correction.
    corrected_tokens: f64,
    /// Sum of attention, weighted by each sample's correction: encoder pairs, LLM nanoseconds.
    corrected_attention: f64,
}

impl MicrobatchWork {
    pub(super) fn add(&mut self, work: &SampleWork, module: Module, factor: f64, timing: &ProfileTiming) {
        let attention = match work.encoder(module) {
            Some(work) => {
                self.work += *work;
                work.attention_pairs as f64
            }
            None => timing.linear_and_attention_ns(module, &work.workload(module))[1],
        };
        let size = work.size(module) as f64;
        self.tokens += size;
        self.targets = self.targets.saturating_add(work.targets);
        self.corrected_tokens += size * factor;
        self.corrected_attention += attention * factor;
    }

    pub(super) fn ns(&self, module: Module, timing: &ProfileTiming) -> u64 {
        if self.tokens <= 0.0 {
            return 0;
        }
        // Linear work has a single time for the whole pack, so sample corrections are weighted by tokens.
        let linear_factor = self.corrected_tokens / self.tokens;
        if module == Module::Llm {
            let packed = ModuleWorkload::from_llm(self.tokens as u64, self.targets);
            let [linear_ns, _] = timing.linear_and_attention_ns(module, &packed);
            return whole_ns(linear_ns * linear_factor + self.corrected_attention);
        }
        let batch = ModuleWorkload::from_encoder(&self.work);
        let [linear_ns, attention_ns] = timing.linear_and_attention_ns(module, &batch);
        let attention_factor = self.corrected_attention / (self.work.attention_pairs as f64).max(1.0);
        whole_ns(linear_ns * linear_factor + attention_ns * attention_factor)
    }
}
