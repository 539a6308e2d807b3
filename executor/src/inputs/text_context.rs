//! Builds an LLM microbatch context from prepared samples.

use crate::error::Result;
use dflop_device::Device;
use dflop_loader::inputs::{MediaRun, PreparedSample, TensorValues};
use dflop_loader::media::Modality;
use dflop_loader::processors::Preparer;
use dflop_models::{LlmConfig, MicrobatchContext, TextBatch};

/// Packs samples in sequence.
pub(super) fn context<D: Device>(
    device: &D,
    llm: &LlmConfig,
    preparer: &Preparer,
    samples: Vec<PreparedSample>,
    loss_scale: f64,
) -> Result<Option<MicrobatchContext<D>>> {
    let media_places = media_places(&samples);
    let Some(inputs) = preparer.pack(samples) else { return Ok(None) };
    let ints = |name: &'static str| {
        let Some(TensorValues::I64(values)) = inputs.tensor(name).map(|tensor| &tensor.values) else {
            let problem = "is missing in the microbatch".to_owned();
            return Err(dflop_models::Error::Input { input: name, problem });
        };
        Ok(values.as_slice())
    };
    let (input_ids, positions) = (ints("input_ids")?, ints("position_ids")?);
    // With positions on several axes, the first axis has the text positions and is not a rotary axis.
    let axes = positions.len() / input_ids.len().max(1);
    let positions = if axes > 1 { &positions[input_ids.len()..] } else { positions };
    let batch = TextBatch {
        input_ids,
        labels: ints("labels")?,
        positions,
        cu_seqlens: &inputs.cu_seqlens,
        media_places: &media_places,
        loss_scale,
    };
    Ok(Some(llm.context(device, &batch)?))
}

/// Returns the packed sample rows for media: per sample images, videos, audio clips.
fn media_places(samples: &[PreparedSample]) -> Vec<u32> {
    let (mut places, mut start) = (Vec::new(), 0);
    for sample in samples {
        for modality in [Modality::Image, Modality::Video, Modality::Audio] {
            let rows = |run: &MediaRun| (start + run.start) as u32..(start + run.start + run.tokens) as u32;
            places.extend(sample.runs.iter().filter(|run| run.modality == modality).flat_map(rows));
        }
        start += sample.tokens();
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_come_sample_by_sample_and_kind_by_kind() {
        let run = |modality, start, tokens| MediaRun { modality, start, tokens, has_markers: false };
        let sample =
            |runs: Vec<MediaRun>| PreparedSample { input_ids: vec![0; 10], runs, ..Default::default() };
        let samples = [
            sample(vec![run(Modality::Audio, 0, 2), run(Modality::Image, 4, 1), run(Modality::Image, 7, 2)]),
            sample(vec![run(Modality::Video, 1, 2)]),
        ];
        assert_eq!(media_places(&samples), [4, 7, 8, 0, 1, 11, 12]);
    }
}
