//! Rules that settings must meet.

use super::RunConfig;
use crate::device::Cpu;
use crate::run::compute_device::{AttentionName, ComputeDevice, TransportName};
use crate::run::options::{CorrectionSource, RunOptions};
use crate::{Error, Result};

impl RunConfig {
    /// Checks the settings that no other part of a run checks, without reading files.
    ///
    /// # Errors
    /// [`Error::Config`] with the first fault.
    pub fn check(&self) -> Result<()> {
        self.problems(&RunOptions::default())
            .into_iter()
            .next()
            .map_or(Ok(()), |problem| Err(Error::Config(problem)))
    }

    /// Returns all setting faults that no other part of a run checks.
    pub(in crate::run) fn problems(&self, options: &RunOptions) -> Vec<String> {
        let Self { model, data, parallel, .. } = self;
        let rules = [
            (self.steps > 0 && options.until != Some(0), "invalid `steps`: must be at least 1"),
            (
                model.directory.is_some() != model.config.is_some(),
                "`model` needs either `directory` or `config`",
            ),
            (data.shards.is_empty() == data.generate.is_some(), "`data` needs either `shards` or `generate`"),
            (!model.pretrained || model.directory.is_some(), "`model.pretrained` needs `model.directory`"),
            (
                data.generate.is_some() || data.tokenizer.is_some() || model.directory.is_some(),
                "`data.tokenizer` is missing",
            ),
        ];
        let mut problems = faults(&rules);
        for (setting, threads) in [("parallel.threads", parallel.threads), ("data.workers", data.workers)] {
            if !(1..=Cpu::THREADS_MAX).contains(&threads) {
                let expected = Cpu::THREADS_MAX;
                problems.push(format!("invalid `{setting}`: expected 1 to {expected}, found {threads}"));
            }
        }
        for (setting, seconds) in [
            ("parallel.timeout_seconds", parallel.timeout_seconds),
            ("parallel.slow_seconds", parallel.slow_seconds),
        ] {
            if !(seconds > 0.0 && seconds < 1e9) {
                problems.push(format!("invalid `{setting}`: must be above 0"));
            }
        }
        let rules = [
            (
                parallel.memory_gib.is_none_or(|memory| memory > 0.0 && memory < 1e9),
                "invalid `parallel.memory_gib`: must be above 0",
            ),
            (
                parallel.attention == AttentionName::Own || parallel.compute_device != ComputeDevice::Cpu,
                "`parallel.attention` needs a CUDA device in `parallel.compute_device`",
            ),
            (
                parallel.transport == TransportName::Tcp || parallel.compute_device != ComputeDevice::Cpu,
                "`parallel.transport = \"nccl\"` needs CUDA devices in `parallel.compute_device`",
            ),
            (
                options.corrections != Some(CorrectionSource::Measured) || self.correction.enabled,
                "`--corrections measured` needs `correction.enabled = true`",
            ),
            (self.optimizer.zero_stage <= 1, "invalid `optimizer.zero_stage`: 0 and 1 are supported"),
            (self.checkpoint.every != Some(0), "invalid `checkpoint.every`: must be at least 1"),
        ];
        problems.extend(faults(&rules));
        problems
    }
}

/// Returns the fault texts for rules that do not hold.
fn faults(rules: &[(bool, &str)]) -> Vec<String> {
    rules.iter().filter(|(holds, _)| !holds).map(|(_, fault)| (*fault).to_owned()).collect()
}
