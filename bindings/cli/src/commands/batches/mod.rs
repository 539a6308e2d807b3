//! `dflop batches`: prepares samples for a model and prints or writes the tensors of every microbatch.
//!
//! Writes microbatches as safetensors files, for trainers in any language.

use crate::args::mixture::MixtureArgs;
use crate::args::model::preparer;
use crate::args::set::{SetArgs, accepted};
use crate::args::step_plan::{ResumeArgs, StepPlanArgs, check_plan_settings};
use crate::failure::Failure;
use crate::output::{Output, place_file, runtime, write_json};
use clap::Args;
use dflop_loader::error::Skipped;
use dflop_loader::flow::PrepareReport;
use dflop_loader::index::TokenCounts;
use dflop_loader::inputs::{ModelInputs, NamedTensor, TensorValues};
use dflop_loader::processors::Preparer;
use dflop_loader::settings::{DecodeName, PixelTypeName, Settings};
use dflop_loader::{BalancedLoader, LoaderSettings, Microbatch};
use futures::StreamExt;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

accepted!(BatchesAccepted: "processor", "read.fields", "read.decode", "read.workers", "read.buffered_bytes",
    "read.error_budget", "read.stall_seconds", "read.stall_log_seconds", "read.steps_ahead",
    "order", "plan", "cost", "index", "store");

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
    args.check_settings(&settings)?;
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
                    write(directory, step.step, number, microbatch)?;
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
    /// Rejects settings that have no effect beside other settings.
    fn check_settings(&self, settings: &Settings) -> Result<(), Failure> {
        check_plan_settings(&self.set, settings)?;
        if settings.read.decode == DecodeName::Raw {
            self.set.refuse(&["read.decode"], "makes no tensors; leave it out")?;
        }
        let processor = &settings.processor;
        let limits = [processor.long_sample.tokens_max, processor.fixed_tokens(), settings.plan.tokens_max];
        if limits.iter().all(Option::is_none) {
            let reason = "has no effect without a number of tokens, such as `truncate:4096`, without \
                          `processor.length_buckets=fixed:N` and without `plan.tokens_max`; leave it out";
            self.set.refuse(&["processor.long_sample"], reason)?;
        }
        if processor.dtype == PixelTypeName::None {
            let reason = "has no effect with `processor.dtype=none`; leave it out";
            self.set.refuse(&["processor.media_buckets"], reason)?;
        }
        Ok(())
    }

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

/// Writes the tensors of a microbatch to `step-00000012-003.safetensors` in an existing directory. Writes
/// nothing if there are no tensors, because no sample is left and there is no length to pad to.
///
/// The rest is file metadata, numbers as decimal text: `step, microbatch, sample_keys` (a JSON list),
/// `tokens, target_tokens, padding_tokens, loss_scale, cu_seqlens` (a JSON list), `max_seqlen`. Equal
/// microbatches give equal bytes.
pub(crate) fn write(directory: &Path, step: u64, number: usize, of: &Microbatch) -> Result<(), Failure> {
    let Some(inputs) = &of.inputs else { return Ok(()) };
    let keys: Vec<&str> = of.samples.iter().map(|sample| sample.key.as_str()).collect();
    let metadata = BTreeMap::from([
        ("step", step.to_string()),
        ("microbatch", number.to_string()),
        ("sample_keys", json!(keys).to_string()),
        ("tokens", of.tokens.to_string()),
        ("target_tokens", of.target_tokens.to_string()),
        ("padding_tokens", of.padding_tokens.to_string()),
        ("loss_scale", of.loss_scale.to_string()),
        ("cu_seqlens", json!(inputs.cu_seqlens).to_string()),
        ("max_seqlen", inputs.max_seqlen.to_string()),
    ]);
    let path = directory.join(format!("step-{step:08}-{number:03}.safetensors"));
    // A reader that polls the directory never sees half a file.
    place_file(&path, |file| Ok(write_tensors(file, &metadata, &inputs.tensors)?))
}

/// Writes a safetensors file with all names in a fixed order; the `safetensors` crate orders metadata at
/// random.
///
/// # Source
/// The format: safetensors, "Format" in its README: the header length as 8 bytes, the header as JSON padded
/// with spaces, and the tensors without gaps.
fn write_tensors(
    file: &mut impl Write,
    metadata: &BTreeMap<&str, String>,
    tensors: &[NamedTensor],
) -> std::io::Result<()> {
    let mut ordered: Vec<(&NamedTensor, &str, usize)> = tensors.iter().map(described).collect();
    // Elements of 8 bytes first, so that every tensor is aligned.
    ordered.sort_by_key(|(tensor, _, element_bytes)| (8 - element_bytes, tensor.name));
    let (mut header, mut end) = (BTreeMap::from([("__metadata__", json!(metadata))]), 0);
    for (tensor, dtype, element_bytes) in &ordered {
        let begin = end;
        end += tensor.shape.iter().product::<usize>() * element_bytes;
        let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]});
        header.insert(tensor.name, entry);
    }
    let mut text = serde_json::to_string(&header)?;
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(text.as_bytes())?;
    ordered.iter().try_for_each(|(tensor, ..)| write_values(file, &tensor.values))
}

/// Returns a tensor with the element type name and size.
fn described(tensor: &NamedTensor) -> (&NamedTensor, &'static str, usize) {
    match tensor.values {
        TensorValues::I64(_) => (tensor, "I64", 8),
        TensorValues::F32(_) => (tensor, "F32", 4),
        TensorValues::Bf16(_) => (tensor, "BF16", 2),
        TensorValues::U8(_) => (tensor, "U8", 1),
    }
}

fn write_values(file: &mut impl Write, values: &TensorValues) -> std::io::Result<()> {
    match values {
        TensorValues::I64(values) => values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes())),
        TensorValues::F32(values) => values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes())),
        TensorValues::Bf16(values) => {
            values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes()))
        }
        TensorValues::U8(values) => file.write_all(values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;
    use safetensors::tensor::Metadata;

    #[test]
    fn files_are_read_back_and_have_equal_bytes() {
        let tensor = |name, shape, values| NamedTensor { name, shape, values };
        let tensors = [
            tensor("pixel_values", vec![3, 1], TensorValues::F32(vec![0.5, -1.0, 2.0])),
            tensor("labels", vec![2], TensorValues::I64(vec![-100, 7])),
            tensor("input_ids", vec![1, 2], TensorValues::I64(vec![5, i64::MAX])),
        ];
        let metadata = BTreeMap::from([("step", "1".to_owned()), ("loss_scale", "0.25".to_owned())]);
        let bytes = || {
            let mut bytes = Vec::new();
            write_tensors(&mut bytes, &metadata, &tensors).unwrap();
            bytes
        };
        let file = bytes();
        assert_eq!(file, bytes());
        let found = SafeTensors::deserialize(&file).unwrap();
        let (header, of_file): (usize, Metadata) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header % 8, 0);
        let found_metadata = of_file.metadata().as_ref().unwrap();
        assert_eq!((found_metadata.len(), found_metadata["loss_scale"].as_str()), (2, "0.25"));
        assert_eq!(found.len(), tensors.len());
        for tensor in &tensors {
            let view = found.tensor(tensor.name).unwrap();
            let mut values = Vec::new();
            write_values(&mut values, &tensor.values).unwrap();
            assert_eq!((view.shape(), view.data()), (tensor.shape.as_slice(), values.as_slice()));
        }
    }
}
