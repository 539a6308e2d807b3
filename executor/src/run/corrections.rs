//! Cost model corrections in a run: the source for plans, and the run's record.

use std::path::Path;

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTable};
use dflop_loader::StepPlanner;
use dflop_loader::model::read_profile;

use super::cache_directory::digest;
use super::config::RunConfig;
use super::options::CorrectionSource;
use super::setup::Setup;
use crate::Result;
use crate::checkpoint::SavedCheckpoint;
use crate::train::{CorrectionRecorder, CorrectionSettings, CorrectionSubject, RecordedCorrections};

/// Record name in the saved-state directory.
const RECORD_FILE: &str = "corrections.jsonl";

impl Setup {
    /// Reads the tables to replay; none if plans do not use a record.
    ///
    /// # Errors
    /// [`Error::CorrectionRecord`](crate::Error::CorrectionRecord) if the record cannot be read, is
    /// malformed, belongs to another run or is too short.
    pub(super) fn recorded_corrections(&self) -> Result<Vec<CorrectionTable>> {
        let Some(CorrectionSource::Record(path)) = &self.options.corrections else { return Ok(Vec::new()) };
        let record = RecordedCorrections::read(path)?;
        record.check(&self.correction_subject()?, self.end_step())?;
        Ok(record.tables().to_vec())
    }

    /// Prepares the planner for the corrections that plans use, and returns the settings for learning
    /// corrections in this run; `None` if the run learns none.
    pub(super) fn corrections(
        &self,
        planner: &StepPlanner,
        saved: Option<&SavedCheckpoint>,
    ) -> Result<Option<CorrectionSettings>> {
        let table = &self.config.correction;
        if let Some(CorrectionSource::Record(_)) = self.options.corrections {
            for table in self.recorded_corrections()? {
                planner.correct(table)?;
            }
            return Ok(None);
        }
        if !table.enabled {
            return Ok(None);
        }
        let restored = saved.map_or_else(Vec::new, |saved| saved.run().corrections.clone());
        let is_applied = self.options.corrections == Some(CorrectionSource::Measured);
        for table in restored.iter().filter(|_| is_applied) {
            planner.correct(table.clone())?;
        }
        let options = CorrectionOptions {
            interval_steps: table.interval_steps,
            tracking_cost: 0.0,
            ..CorrectionOptions::default()
        };
        Ok(Some(CorrectionSettings { options, is_applied, restored }))
    }

    /// Opens the file that rank 0 records learned tables in, from a step on; `None` if there is none.
    ///
    /// - `earlier`: directory that the earlier run's states were moved into; the record follows them
    pub(super) fn correction_recorder(
        &self,
        step: u64,
        earlier: Option<&Path>,
    ) -> Result<Option<CorrectionRecorder>> {
        if !self.config.correction.enabled
            || matches!(self.options.corrections, Some(CorrectionSource::Record(_)))
        {
            return Ok(None);
        }
        let default =
            || self.config.checkpoint.directory.as_ref().map(|directory| directory.join(RECORD_FILE));
        let is_default = self.config.correction.record.is_none();
        // What the user names may be a link.
        let named = self.config.correction.record.clone();
        let named = named.map(|path| std::fs::canonicalize(&path).unwrap_or(path));
        let Some(path) = named.or_else(default) else { return Ok(None) };
        if let Some(earlier) = earlier.filter(|_| is_default && path.exists()) {
            std::fs::rename(&path, earlier.join(RECORD_FILE))?;
        }
        let subject = self.correction_subject()?;
        let recorder = match step {
            0 => CorrectionRecorder::create(&path, &subject, 0)?,
            _ => CorrectionRecorder::resume(&path, &subject, step)?,
        };
        Ok(Some(recorder))
    }

    /// Describes the setup that this run's correction tables belong to.
    fn correction_subject(&self) -> Result<CorrectionSubject> {
        Ok(CorrectionSubject {
            model: self.model_digest(),
            layout: self.layout(),
            predictor: predictor_name(&self.config)?,
        })
    }
}

/// Names the predictor for module times: a device preset, or a profile by digest; then the configuration
/// parts that change the prediction.
fn predictor_name(config: &RunConfig) -> Result<String> {
    let rates = match &config.parallel.profile {
        Some(path) => format!("profile {}", digest(format!("{:?}", read_profile(path)?).as_bytes())),
        None => config.parallel.device_preset().to_owned(),
    };
    let recomputed = if config.model.recompute_layers { ", layers recomputed" } else { "" };
    let frozen = config.model.freeze.as_ref().map_or_else(String::new, |parts| format!(", {parts} frozen"));
    Ok(format!("{rates}{recomputed}{frozen}"))
}
