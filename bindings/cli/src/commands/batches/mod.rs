//! `dflop batches`: prepares samples for a model and prints or writes the tensors of every microbatch.

mod files;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use dflop_loader::error::Skipped;
use dflop_loader::flow::PrepareReport;
use dflop_loader::index::TokenCounts;
use dflop_loader::inputs::{ModelInputs, NamedTensor, TensorValues};
use dflop_loader::processors::Preparer;
use dflop_loader::settings::Settings;
use dflop_loader::{BalancedLoader, LoaderSettings, Microbatch};
use futures::StreamExt;
use serde::Serialize;

use crate::args::mixture::MixtureArgs;
use crate::args::set::{SetArgs, accepted};
use crate::args::step_plan::{ResumeArgs, StepPlanArgs};
use crate::args::tokenizer::preparer;
use crate::failure::Failure;
use crate::output::{Output, runtime, write_json};

/// Number of token ids that a line shows.
const FIRST_IDS: usize = 16;

/// Prepare samples for a model and print the tensors in every microbatch on a rank.
///
/// Images and audio become the tensors of the model's processor. The last line accounts for the samples that
/// were skipped, truncated or dropped.
#[derive(Debug, Args)]
pub(crate) struct BatchesArgs {
    #[command(flatten)]
    data: MixtureArgs,
    #[command(flatten)]
    plan: StepPlanArgs,
    /// Model tokenizer: `tokenizer.json`, or the directory that holds it.
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Data-parallel rank whose microbatches are printed, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: usize,
    #[command(flatten)]
    resume: ResumeArgs,
    /// First step [default: 0, or the step in the resumed state].
    #[arg(long, value_name = "T", conflicts_with = "resume")]
    from_step: Option<u64>,
    /// Number of steps.
    #[arg(long, value_name = "K", default_value_t = 1)]
    steps: u64,
    #[command(flatten)]
    set: SetArgs<BatchesAccepted>,
    /// Also write the tensors for every microbatch to this directory, as `step-TTTTTTTT-MMM.safetensors`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
    /// Print all values in integer tensors, with `--json`.
    #[arg(long, requires = "json")]
    values: bool,
}

accepted!(BatchesAccepted: "processor", "read.fields", "read.strict", "read.workers", "read.buffered_bytes",
    "read.error_budget", "read.error_count", "read.stall_seconds", "read.stall_log_seconds", "read.steps_ahead",
    "read.microbatch_bytes", "order", "plan", "cost", "index", "store");

#[derive(Debug, Serialize)]
struct BatchLine<'a> {
    step: u64,
    microbatch: usize,
    keys: Vec<&'a str>,
    tokens: u64,
    target_tokens: u64,
    padding_tokens: u64,
    planned_tokens: u64,
    planned_target_tokens: u64,
    loss_scale: f64,
    cu_seqlens: &'a [i32],
    max_seqlen: u32,
    tensors: Vec<TensorLine<'a>>,
}

#[derive(Debug, Serialize)]
struct TensorLine<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "<[i64]>::is_empty")]
    first: &'a [i64],
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<&'a [i64]>,
}

#[derive(Debug, Serialize)]
struct LastLine {
    report: PrepareReport,
    skipped: Vec<Skipped>,
    /// Number of skipped samples, summed over epochs.
    skipped_samples: u64,
}

pub(crate) fn run(args: &BatchesArgs, out: &mut Output) -> Result<(), Failure> {
    args.set
        .refuse(&["processor.token_counts", "processor.blank_media"], "has no effect here; leave it out")?;
    let settings = args.set.settings()?;
    let preparer = args.preparer(&settings)?;
    let token_counts = TokenCounts::IfPresent(Arc::new(preparer.text_counter()));
    let planner = args.plan.planner(&settings, args.data.open(&settings, token_counts)?, &args.resume)?;
    let from_step = args.from_step.unwrap_or(planner.first_step());
    let builder = BalancedLoader::builder(planner, args.rank)
        .settings(settings.read.apply(LoaderSettings::default())?)
        .from_step(from_step)
        .steps(args.steps)
        .preparer(Arc::new(preparer));
    let loader = settings.read.apply_to_steps(builder).build()?;
    if let Some(directory) = &args.out {
        std::fs::create_dir_all(directory).map_err(|error| Failure::from(error).in_file(directory))?;
    }
    runtime()?.block_on(async {
        let mut steps = loader.stream();
        while let Some(step) = steps.next().await {
            let step = step?;
            for (number, microbatch) in step.microbatches.iter().enumerate() {
                if let Some(directory) = &args.out {
                    files::write(directory, step.step, number, microbatch)?;
                }
                let line = line(step.step, number, microbatch, args.values);
                if args.json { write_json(out, &line)? } else { print(out, &line)? }
            }
        }
        Ok::<(), Failure>(())
    })?;
    let skipped_samples = loader.skip_log().skipped_samples();
    let last = LastLine { report: loader.prepare_report(), skipped: loader.skipped(), skipped_samples };
    if args.json { write_json(out, &last) } else { print_last(out, &last) }
}

impl BatchesArgs {
    fn preparer(&self, settings: &Settings) -> Result<Preparer, Failure> {
        let model = self.plan.model.spec()?;
        let mut builder = settings.processor.apply(preparer(&model, &self.tokenizer, settings)?);
        if let Some(images) = self.plan.model.image_processor(&model)? {
            builder = builder.image_processor(images);
        }
        Ok(builder.build()?)
    }
}

fn line(step: u64, microbatch: usize, of: &Microbatch, has_values: bool) -> BatchLine<'_> {
    let inputs = of.inputs.as_ref();
    let tensors = inputs.map_or(&[][..], |inputs: &ModelInputs| &inputs.tensors);
    BatchLine {
        step,
        microbatch,
        keys: of.samples.iter().map(|sample| sample.key.as_str()).collect(),
        tokens: of.tokens,
        target_tokens: of.target_tokens,
        padding_tokens: of.padding_tokens,
        planned_tokens: of.planned_tokens,
        planned_target_tokens: of.planned_target_tokens,
        loss_scale: of.loss_scale,
        cu_seqlens: inputs.map_or(&[], |inputs| &inputs.cu_seqlens),
        max_seqlen: inputs.map_or(0, |inputs| inputs.max_seqlen),
        tensors: tensors.iter().map(|tensor| tensor_line(tensor, has_values)).collect(),
    }
}

fn tensor_line(tensor: &NamedTensor, has_values: bool) -> TensorLine<'_> {
    let values: &[i64] = match &tensor.values {
        TensorValues::I64(values) => values,
        TensorValues::F32(_) | TensorValues::Bf16(_) | TensorValues::U8(_) => &[],
    };
    TensorLine {
        name: tensor.name,
        dtype: tensor.values.type_name(),
        shape: &tensor.shape,
        first: &values[..values.len().min(FIRST_IDS)],
        values: (has_values && !values.is_empty()).then_some(values),
    }
}

fn print(out: &mut Output, line: &BatchLine<'_>) -> Result<(), Failure> {
    use std::io::Write;
    let BatchLine { step, microbatch, tokens, target_tokens, planned_tokens, .. } = line;
    writeln!(
        out,
        "step {step} microbatch {microbatch}: {tokens} tokens ({planned_tokens} planned), {target_tokens} learned; {}",
        line.keys.join(" ")
    )?;
    for tensor in &line.tensors {
        let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        let first: Vec<String> = tensor.first.iter().map(ToString::to_string).collect();
        let (name, dtype) = (tensor.name, tensor.dtype);
        writeln!(out, "  {name} {dtype} [{}]  {}", shape.join(", "), first.join(" "))?;
    }
    Ok(())
}

fn print_last(out: &mut Output, last: &LastLine) -> Result<(), Failure> {
    use std::io::Write;
    let PrepareReport { samples, tokens, planned_tokens, truncated_samples, dropped_samples, .. } =
        last.report;
    writeln!(
        out,
        "{samples} samples, {tokens} tokens ({planned_tokens} planned), {truncated_samples} cut, {dropped_samples} \
         dropped, {} left out",
        last.skipped_samples
    )?;
    for skipped in &last.skipped {
        let key = skipped.key.as_deref().unwrap_or("unknown");
        writeln!(out, "  {} {key}: {}", skipped.shard, skipped.reason)?;
    }
    Ok(())
}
