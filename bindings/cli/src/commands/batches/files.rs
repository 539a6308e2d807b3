//! Writes microbatches as safetensors files, for trainers in any language.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use dflop_loader::Microbatch;
use dflop_loader::inputs::{NamedTensor, TensorValues};
use serde_json::json;

use crate::failure::Failure;
use crate::output::place_file;

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
