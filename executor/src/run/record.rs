//! Step records for a run.

use std::path::Path;

use dflop_loader::store::redact;

use super::config::strategy_name;
use super::options::RunEnd;
use super::setup::Setup;
use crate::step_record::{FILE_NAME, Heading, Outcome, StepRecorder};
use crate::{Error, Result};

impl Setup {
    /// Opens the file that rank 0 records steps in, from a step on; `None` if there is none.
    ///
    /// - `earlier`: directory that the earlier run's states were moved into; the record follows them
    pub(super) fn step_recorder(&self, step: u64, earlier: Option<&Path>) -> Result<Option<StepRecorder>> {
        let (config, named) = (&self.config, &self.options.record);
        let default = config.checkpoint.directory.as_ref().map(|directory| directory.join(FILE_NAME));
        let Some(path) = named.as_ref().or(default.as_ref()) else { return Ok(None) };
        if let (Some(earlier), None) = (earlier.filter(|_| path.exists()), named) {
            std::fs::rename(path, earlier.join(FILE_NAME))?;
        }
        let ranks = self.job.world_size();
        let about = vec![
            format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" }),
            self.job.schedule().to_string(),
            format!("{} microbatches", config.parallel.microbatches),
            strategy_name(config.parallel.strategy).to_owned(),
            format!("{} samples a step", config.data.global_batch_size),
        ];
        let end = self.end_step();
        // A model that the configuration contains is in a directory whose name does not identify the model.
        let inline = config.model.config.as_ref().and_then(|config| config["model_type"].as_str());
        let title = inline.unwrap_or(&self.spec.name).to_owned();
        let heading = Heading::new(title, step, Some(end), about);
        let opened = match named {
            Some(_) => StepRecorder::open(path, &heading),
            None => StepRecorder::open_own(path, &heading),
        };
        Ok(Some(opened.map_err(|error| Error::from(error).in_file(path))?))
    }
}

/// Records how the run ended.
pub(super) fn end_record(record: &mut StepRecorder, ended: &Result<RunEnd>) {
    match ended {
        Ok(RunEnd { stopped: None, .. }) => record.end(Outcome::Completed, ""),
        Ok(RunEnd { stopped: Some(reason), .. }) => record.end(Outcome::Stopped, &reason.to_string()),
        Err(error) => record.end(Outcome::Failed, &redact(&error.message())),
    }
}
