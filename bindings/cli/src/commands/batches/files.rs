//! Writes microbatches as safetensors files, for trainers in any language.

use std::collections::HashMap;
use std::path::Path;

use dflop_loader::loader::Microbatch;
use dflop_loader::prepare::{NamedTensor, TensorValues};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};

use crate::failure::Failure;

/// Writes the tensors of a microbatch to `step-00000012-003.safetensors` in an existing directory. Writes
/// nothing if there are no tensors, because no sample is left and there is no length to pad to.
///
/// The rest is metadata of the file, numbers as decimal text: `step, microbatch, sample_keys` (a JSON list),
/// `tokens, target_tokens, padding_tokens, loss_scale, cu_seqlens` (a JSON list), `max_seqlen`.
pub(crate) fn write(directory: &Path, step: u64, number: usize, of: &Microbatch) -> Result<(), Failure> {
    let Some(inputs) = &of.inputs else { return Ok(()) };
    let path = directory.join(format!("step-{step:08}-{number:03}.safetensors"));
    let bytes: Vec<Vec<u8>> = inputs.tensors.iter().map(|tensor| little_endian(&tensor.values)).collect();
    let views: Vec<(&str, TensorView<'_>)> = inputs
        .tensors
        .iter()
        .zip(&bytes)
        .map(|(tensor, bytes)| Ok((tensor.name, view(tensor, bytes)?)))
        .collect::<Result<_, SafeTensorError>>()
        .map_err(|error| failed(&path, &error))?;
    let keys: Vec<&str> = of.samples.iter().map(|sample| sample.key.as_str()).collect();
    let metadata = [
        ("step", step.to_string()),
        ("microbatch", number.to_string()),
        ("sample_keys", serde_json::json!(keys).to_string()),
        ("tokens", of.tokens.to_string()),
        ("target_tokens", of.target_tokens.to_string()),
        ("padding_tokens", of.padding_tokens.to_string()),
        ("loss_scale", of.loss_scale.to_string()),
        ("cu_seqlens", serde_json::json!(inputs.cu_seqlens).to_string()),
        ("max_seqlen", inputs.max_seqlen.to_string()),
    ];
    let metadata: HashMap<String, String> =
        metadata.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    // Written under another name and renamed, so that a reader that polls the directory never sees half a
    // file.
    let partial = path.with_extension("partial");
    safetensors::serialize_to_file(views, Some(metadata), &partial)
        .map_err(|error| failed(&partial, &error))?;
    std::fs::rename(&partial, &path).map_err(|error| Failure::from(error).in_file(&path))
}

fn view<'a>(tensor: &NamedTensor, bytes: &'a [u8]) -> Result<TensorView<'a>, SafeTensorError> {
    let dtype = match tensor.values {
        TensorValues::I64(_) => Dtype::I64,
        TensorValues::F32(_) => Dtype::F32,
    };
    TensorView::new(dtype, tensor.shape.clone(), bytes)
}

fn little_endian(values: &TensorValues) -> Vec<u8> {
    match values {
        TensorValues::I64(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        TensorValues::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn failed(path: &Path, error: &SafeTensorError) -> Failure {
    Failure::Failed(error.to_string()).in_file(path)
}
