//! Checks the model files: configuration, weights, tokenizer, and the source for predicted times.

use super::Findings;
use crate::checkpoint::open_weights;
use crate::device::Cpu;
use crate::models;
use crate::run::config::RunConfig;
use crate::run::options::RunOptions;
use crate::run::run_files::RunFiles;
use crate::run::setup::Setup;

/// Checks the files and returns the model; `None` if the model cannot be read, or not cut as configured.
pub(super) fn check(report: &mut Findings, config: &RunConfig, options: &RunOptions) -> Option<Setup> {
    let setup = RunFiles::without_dataset(config).and_then(|files| Setup::from_files(config, options, files));
    let setup = setup.map_err(|failure| report.failed("model", failure)).ok()?;
    let parameters = setup.spec.parameters() as f64 / 1e6;
    let place = config
        .model
        .directory
        .as_ref()
        .map_or_else(|| "in the configuration".to_owned(), |directory| format!("`{}`", directory.display()));
    report.ok("model", format!("{place}, {parameters:.2} million parameters"));
    check_weights(report, &setup);
    match setup.preparer().and_then(|builder| Ok(builder.build()?)) {
        Ok(_) => report.ok("tokenizer", "fits the model"),
        Err(failure) => report.failed("tokenizer", failure),
    }
    let predictor = setup.cost_model().and_then(|_| setup.pass_predictor());
    match predictor.and_then(|_| setup.recorded_corrections()) {
        Ok(_) => report.ok("predictor", predictor_name(config)),
        Err(failure) => report.failed("predictor", failure),
    }
    Some(setup)
}

fn predictor_name(config: &RunConfig) -> String {
    match &config.parallel.profile {
        Some(path) => format!("profile `{}`", path.display()),
        None => format!("rates of device `{}`, not measured", config.parallel.device_preset()),
    }
}

/// Checks the names and shapes of the tensors that a run starts with; reads headers only.
fn check_weights(report: &mut Findings, setup: &Setup) {
    const SUBJECT: &str = "weights";
    let config = &setup.config;
    if !config.model.pretrained {
        return report.ok(SUBJECT, format!("random, of seed {}", config.seed));
    }
    let checkpoint = match open_weights(setup.model_directory()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return report.failed(SUBJECT, error),
    };
    match setup.job.model().check::<Cpu>(&checkpoint) {
        Ok(()) => report.ok(SUBJECT, format!("{} tensors of the model", checkpoint.names().count())),
        Err(error @ models::Error::SurplusTensor { .. }) => report.note(SUBJECT, error.to_string()),
        Err(error) => report.failed(SUBJECT, error),
    }
}
