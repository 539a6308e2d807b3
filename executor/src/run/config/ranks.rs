//! Ranks for the modules in a run.

use dflop_costmodel::ModelSpec;

use super::{ModuleTable, ParallelTable, PlacementName, RunConfig};
use crate::{Error, Result};

impl RunConfig {
    /// Returns the number of ranks for the modules in a model, saturating.
    pub(in crate::run) fn ranks(&self, spec: &ModelSpec) -> u64 {
        let ranks = |table: &ModuleTable| {
            let stages = table.layers.as_ref().map_or(table.stages, Vec::len);
            let degrees = [stages, table.dp, table.tp].into_iter().map(|degree| degree as u64);
            degrees.fold(1, u64::saturating_mul)
        };
        let ParallelTable { vision, audio, llm, placement, .. } = &self.parallel;
        if *placement != PlacementName::Disaggregated {
            return ranks(llm);
        }
        let encoders = [spec.vision.map(|_| ranks(vision)), spec.audio.map(|_| ranks(audio))];
        encoders.into_iter().flatten().fold(ranks(llm), u64::saturating_add)
    }

    /// Assigns a single stage to every module.
    pub fn one_stage_each(&mut self) {
        let ParallelTable { vision, audio, llm, .. } = &mut self.parallel;
        for table in [vision, audio, llm] {
            (table.stages, table.layers) = (1, None);
        }
    }

    /// Sets the number of pipeline stages for all modules together; encoders in the configuration keep their
    /// stages.
    ///
    /// # Errors
    /// [`Error::Config`] if the LLM would have no stage.
    pub fn pipeline_stages(&mut self, stages: usize) -> Result<()> {
        if self.parallel.placement != PlacementName::Disaggregated {
            // Encoders are on the LLM's ranks; encoder layers in a joint chain move to the first stage.
            let ParallelTable { vision, audio, llm, placement, .. } = &mut self.parallel;
            (llm.stages, llm.layers) = (stages, None);
            if *placement == PlacementName::Joint {
                (vision.layers, audio.layers) = (None, None);
            }
            return Ok(());
        }
        let has = |name: &str| {
            let config = self.model.config.as_ref();
            config.is_none_or(|config| config.get(name).is_some())
        };
        let mut encoders = 0;
        for (table, name) in
            [(&self.parallel.vision, "vision_config"), (&self.parallel.audio, "audio_config")]
        {
            encoders += if has(name) { table.stages } else { 0 };
        }
        let Some(llm) = stages.checked_sub(encoders).filter(|llm| *llm > 0) else {
            let reason =
                format!("invalid `stages` {stages}: encoders have {encoders}, the LLM needs one more");
            return Err(Error::Config(reason));
        };
        (self.parallel.llm.stages, self.parallel.llm.layers) = (llm, None);
        Ok(())
    }
}
