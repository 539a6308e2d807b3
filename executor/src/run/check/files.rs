//! Checks the files that a run reads: configuration, weights and tokenizer of the model, the source for
//! predicted times, every shard, and whether the index fits the shards.

use dflop_costmodel::memory::format_bytes;
use dflop_loader::flow::{in_parallel, start_runtime};
use dflop_loader::index::{FoundIndex, Index, IndexOptions, shard_bytes};
use dflop_loader::media::{self, DecodeLimits};
use dflop_loader::settings::DatasetSettings;
use dflop_loader::shard::{Shard, ShardAccess, ShardItem, scan_shards};
use dflop_loader::{Dataset, Error, StepPlanner};
use futures::StreamExt;

use super::Findings;
use crate::checkpoint::open_weights;
use crate::device::Cpu;
use crate::models;
use crate::run::config::RunConfig;
use crate::run::options::RunOptions;
use crate::run::run_files::RunFiles;
use crate::run::setup::Setup;

const SHARDS: &str = "shards";
const INDEX: &str = "index";
/// Stores that are asked at the same time.
const REQUESTS: usize = 16;
/// Maximum number of faults that are listed separately.
const FAULTS_SHOWN: usize = 8;

/// Checks the files and returns the model; `None` if the model cannot be read, or not cut as configured.
pub(super) fn check_model(report: &mut Findings, config: &RunConfig, options: &RunOptions) -> Option<Setup> {
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

/// Checks shards and index; returns the planner of the run if the index is there and up to date.
pub(super) fn check_shards(report: &mut Findings, setup: &Setup) -> Option<StepPlanner> {
    let config = &setup.config;
    let access = Setup::shard_access().map_err(|failure| report.failed(SHARDS, failure)).ok()?;
    // A tokenizer that cannot be read was reported.
    let options = setup.index_options().ok()?;
    let own = config.evaluation.as_ref().is_some_and(|evaluation| !evaluation.shards.is_empty());
    if let Some(dataset) = setup.evaluation_dataset().filter(|_| own)
        && check_dataset(report, (&dataset, "evaluation.shards"), &access, &options)
    {
        check_evaluation(report, setup);
    }
    if config.data.generate.is_some() {
        report.skipped(SHARDS, "the run generates them");
        return None;
    }
    let datasets = setup.mixture().map_or_else(Vec::new, |mixture| mixture.datasets);
    let mut has_indexes = true;
    for dataset in &datasets {
        has_indexes &= check_dataset(report, (dataset, "data.shards"), &access, &options);
    }
    if has_indexes && !own {
        check_evaluation(report, setup);
    }
    has_indexes.then(|| planner(report, setup)).flatten()
}

/// Checks the samples of evaluations when the index exists.
fn check_evaluation(report: &mut Findings, setup: &Setup) {
    match setup.evaluation_planner() {
        Ok(Some(planner)) => {
            let samples: u64 = planner.datasets().iter().map(Dataset::len).sum();
            report.ok("evaluation", format!("{samples} samples"));
        }
        Ok(None) => {}
        Err(failure) => report.failed("evaluation", failure),
    }
}

/// Checks the shards and the index of a dataset; returns whether the index is there and up to date.
///
/// - `setting`: setting that names the shards
fn check_dataset(
    report: &mut Findings,
    (dataset, setting): (&DatasetSettings, &str),
    access: &ShardAccess,
    options: &IndexOptions,
) -> bool {
    let shards = match dataset.expand(access) {
        Ok(shards) => shards,
        Err(failure) => {
            report.failed(SHARDS, failure);
            return false;
        }
    };
    if !check_readable(report, &shards, setting) {
        report.skipped(INDEX, "a shard cannot be read");
        return false;
    }
    let command = || format!("`dflop index {} --rebuild`", dataset.shards.join(" "));
    match Index::find(&shards, &dataset.index_options(options)) {
        Ok(FoundIndex::Fresh(path)) => {
            report.ok(INDEX, format!("`{}` fits the shards", path.display()));
            return true;
        }
        Ok(FoundIndex::Uncounted(path)) => {
            let path = path.display();
            report.note(INDEX, format!("`{path}` has no counts of this tokenizer; the run adds them"));
        }
        Ok(FoundIndex::Stale(path)) => report.wrong(
            INDEX,
            format!("`{}` is stale: shards have changed since it was built", path.display()),
            format!("if that is meant, build it again: {}", command()),
        ),
        Ok(FoundIndex::Missing) => {
            report.note(INDEX, "there is none; the run builds it before its first step");
        }
        Err(error) => report.failed(INDEX, error),
    }
    false
}

/// Builds the run planner when the index exists.
fn planner(report: &mut Findings, setup: &Setup) -> Option<StepPlanner> {
    let planner = setup.planner(None).map_err(|failure| report.failed("plan", failure)).ok()?;
    let samples: u64 = planner.datasets().iter().map(Dataset::len).sum();
    report.ok("plan", format!("{samples} samples, {} microbatches per DP rank", planner.microbatches()));
    Some(planner)
}

/// Checks that every shard can be read; returns whether all can.
///
/// Requests the length and version of every shard. The first sample in local shards is read and decoded, and
/// the first sample in the first remote shard.
///
/// - `setting`: setting that names the shards
pub(super) fn check_readable(report: &mut Findings, shards: &[Shard], setting: &str) -> bool {
    let runtime = match start_runtime("dflop", 2) {
        Ok(runtime) => runtime,
        Err(failure) => {
            report.failed(SHARDS, failure);
            return false;
        }
    };
    let (mut bytes, mut faults) = (0, Vec::new());
    let first_remote = shards.iter().position(|shard| shard.remote().is_some());
    for (at, (shard, length)) in shards.iter().zip(lengths(shards)).enumerate() {
        let is_decoded = shard.remote().is_none() || first_remote == Some(at);
        let checked = length.and_then(|length| {
            bytes += length;
            if is_decoded { runtime.block_on(decode_first(shard)) } else { Ok(()) }
        });
        faults.extend(checked.err());
    }
    // A reading thread may still wait for a store.
    runtime.shutdown_background();
    if faults.is_empty() {
        let (shards, bytes) = (shards.len(), format_bytes(bytes));
        report.ok(SHARDS, format!("{shards} shards, {bytes}, can be read"));
        return true;
    }
    let more = faults.len().saturating_sub(FAULTS_SHOWN);
    for fault in faults.into_iter().take(FAULTS_SHOWN) {
        report.wrong(SHARDS, fault, format!("restore the shard, or correct `{setting}`"));
    }
    if more > 0 {
        report.note(SHARDS, format!("{more} more of {} shards cannot be read", shards.len()));
    }
    false
}

/// Returns the lengths of all shards, or why a shard has none; asks stores for several at a time.
fn lengths(shards: &[Shard]) -> Vec<Result<u64, String>> {
    in_parallel(REQUESTS, shards, shard_length)
}

fn message(error: Error) -> String {
    crate::Error::from(error).in_one_line()
}

fn shard_length(shard: &Shard) -> Result<u64, String> {
    match shard_bytes(shard).map_err(message)? {
        0 => Err(format!("shard `{}` is empty", shard.url)),
        bytes => Ok(bytes),
    }
}

/// Reads and decodes the first sample in a shard.
async fn decode_first(shard: &Shard) -> Result<(), String> {
    let name = &shard.url;
    let sample = match scan_shards(vec![shard.clone()]).next().await {
        Some(Ok(ShardItem::Sample(sample))) => sample,
        Some(Ok(ShardItem::Skipped(skipped))) => return Err(format!("shard `{name}`: {}", skipped.reason)),
        Some(Err(error)) => return Err(message(error)),
        None => return Err(format!("shard `{name}` has no sample")),
    };
    for field in &sample.fields {
        let payload = field.payload.clone().unwrap_or_default();
        if let Err(error) = media::decode(&field.extension, payload, &DecodeLimits::default()) {
            return Err(format!(
                "shard `{name}`, sample `{}`, field `{}`: {error}",
                sample.key, field.extension
            ));
        }
    }
    Ok(())
}
