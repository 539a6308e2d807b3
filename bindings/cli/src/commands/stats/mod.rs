//! `dflop stats`: shows a dataset's data profile.

mod collect;
mod report;

use std::collections::BTreeMap;

use clap::Args;
use dflop_costmodel::{CostModel, Histogram, LaunchLimit, Module, Quantiles, SKETCH_ERROR};
use dflop_loader::Dataset;
use dflop_loader::index::UnusedPart;
use serde::Serialize;

use crate::args::ReportArgs;
use crate::args::dataset::IndexedArgs;
use crate::args::model::{ModelArgs, TokenizerArgs};
use crate::args::set::{SetArgs, accepted};
use crate::failure::Failure;
use crate::output::{Output, write_json};
use crate::report::write_report;

use collect::{Certainty, Collected, DealtBatches, Divisible, Refused, Sampling};

/// Number of bins per histogram.
const CLASSES: usize = 24;

/// Show the distribution of shapes, tokens and predicted costs in a dataset.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    dataset: IndexedArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    set: SetArgs<StatsAccepted>,
    /// Number of samples to profile, drawn at random without repetition [default: all].
    #[arg(long, value_name = "N")]
    sample: Option<u64>,
    /// Seed for the random draw.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    report: ReportArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(StatsAccepted: "cost", "processor.chat_template", "processor.caption_prompt", "index", "store");

#[derive(Debug, Serialize)]
struct StatsReport {
    samples: u64,
    model: String,
    device: String,
    /// Whether times come from a measured profile; otherwise from a stated rate.
    is_measured: bool,
    /// Predicted encoder seconds over predicted LLM seconds.
    encoder_to_llm_ratio: f64,
    modules: Vec<Module>,
    /// Microbatch sizes below which launches limit a module.
    launch_limits: Vec<LaunchLimit>,
    /// Number of samples in which no token is a training target, over all samples in the index.
    samples_without_target: u64,
    /// Sample parts that nothing uses.
    unused: Vec<UnusedPart>,
    /// Samples that the model does not support, and the reasons.
    refused: Vec<Refused>,
    sampling: Sampling,
    /// Maximum relative quantile error, sampling not included.
    quantile_error: f64,
    /// Quantity names, in table order.
    #[serde(skip)]
    names: Vec<String>,
    quantiles: BTreeMap<String, Quantiles>,
    histograms: BTreeMap<String, Histogram>,
    /// Most expensive samples far above the rest; below, the number of such samples.
    outliers: Vec<NamedOutlier>,
    outlier_count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    certainty: Option<Certainty>,
    /// Random microbatches on the GPUs of a node.
    data_parallel: Option<DealtBatches>,
    /// Samples that GPUs in a node can share, by GPU count.
    context: Vec<Divisible>,
}

/// A sample that costs far more than the rest.
#[derive(Debug, Serialize)]
struct NamedOutlier {
    key: String,
    shard: String,
    offset: u64,
    cost_seconds: f64,
    /// Cost over the median cost.
    times_median: f64,
    module_seconds: Vec<f64>,
}

pub(crate) fn run(args: &StatsArgs, out: &mut Output) -> Result<(), Failure> {
    if args.sample == Some(0) {
        return Err(Failure::Misuse("invalid `sample`: must be at least 1".into()));
    }
    let settings = args.set.settings()?;
    let model = args.model.cost_model(&settings)?;
    let token_counts = args.tokenizer.token_counts(Some(model.spec()), &settings)?;
    let dataset = args.dataset.open(&settings, token_counts)?;
    let sampling = Sampling::new(dataset.len(), args.sample, args.seed);
    let collected = collect::collect(&dataset, &model, sampling, args.model.key_exchange().as_ref());
    let most_expensive = collected.profile.most_expensive();
    let report = report(args, (&dataset, &model), collected, sampling);
    if let Some(path) = args.report.path() {
        write_report(path, &report::page(args, &dataset, &model, &report, &most_expensive)?)?;
    }
    if args.json {
        write_json(out, &report)
    } else {
        report::print(out, &report, &args.model.times_from(&settings))
    }
}

fn report(
    args: &StatsArgs,
    (dataset, model): (&Dataset, &CostModel),
    collected: Collected,
    sampling: Sampling,
) -> StatsReport {
    let Collected { profile, refused, certainty, dealt, divisible } = collected;
    let summary = profile.summarize(CLASSES);
    let names = summary.iter().map(|(name, ..)| name.clone()).collect();
    let quantiles = summary.iter().map(|(name, quantiles, _)| (name.clone(), quantiles.clone())).collect();
    let histograms = summary.into_iter().map(|(name, _, histogram)| (name, histogram)).collect();
    let (outliers, outlier_count) = profile.outliers();
    let named = outliers.into_iter().map(|outlier| {
        let row = dataset.index().sample(dataset.sample_number(outlier.number));
        NamedOutlier {
            key: row.key().to_owned(),
            shard: dataset.index().shards()[row.shard].url.to_string(),
            offset: row.offset(),
            cost_seconds: outlier.cost_seconds,
            times_median: outlier.times_median,
            module_seconds: outlier.module_seconds,
        }
    });
    StatsReport {
        samples: dataset.len(),
        model: args.model.name(),
        device: args.model.device_name(),
        is_measured: args.model.profile.is_given(),
        encoder_to_llm_ratio: profile.encoder_to_llm_ratio(),
        modules: profile.modules().to_vec(),
        launch_limits: model.launch_limits(),
        samples_without_target: dataset.index().samples_without_target(),
        unused: dataset.index().unused().to_vec(),
        refused,
        sampling,
        quantile_error: SKETCH_ERROR,
        names,
        quantiles,
        histograms,
        outliers: named.collect(),
        outlier_count,
        certainty,
        data_parallel: dealt,
        context: divisible,
    }
}
