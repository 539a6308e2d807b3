//! Lists the media in a planned step by LLM microbatch, before any sample is read.
//!
//! Contexts of encoder and LLM microbatches, from the samples in them.

use crate::error::{Error, Result};
use crate::pipeline::{JobLayout, MediumPlan, MicrobatchPlan, PipelineStepPlan, RankRole};
use dflop_costmodel::{Module, SampleShape};
use dflop_device::Device;
use dflop_loader::inputs::{AudioFeatures, MediaRun, PixelValues, PreparedSample, TensorValues};
use dflop_loader::media::Modality;
use dflop_loader::processors::Preparer;
use dflop_loader::{StepPlan, StepPlanner};
use dflop_models::encoder::{EncoderConfig, EncoderInput, EncoderInputKind, TiledMedium};
use dflop_models::{LlmConfig, MicrobatchContext, ModuleKind, TextBatch};

/// All media in a sample for an encoder; a single medium in the pipeline plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EncoderTask {
    /// Sample index in the step plan.
    pub(super) sample: u32,
    pub(super) module: ModuleKind,
    /// Predicted time for the complete encoder, in nanoseconds.
    pub(super) cost_ns: u64,
}

/// LLM microbatch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct MicrobatchMedia {
    /// Sample indices in the step plan, in order.
    pub(super) samples: Vec<u32>,
    /// Media in the samples; within a sample vision before audio.
    pub(super) media: Vec<EncoderTask>,
}

/// Microbatches in a step, `[rounds * D]`; microbatch `k` on LLM DP rank `d` is at `k * D + d`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepMedia {
    pub(super) step: u64,
    pub(super) microbatches: Vec<MicrobatchMedia>,
}

impl StepMedia {
    /// Lists the media in a planned step from the shapes in the index.
    pub(super) fn new(job: &JobLayout, planner: &StepPlanner, plan: &StepPlan) -> Self {
        let encoders: Vec<(ModuleKind, usize)> = encoders(job, planner).collect();
        let (mut shape, mut microbatches) = (SampleShape::default(), Vec::new());
        let rounds = plan.ranks.iter().map(Vec::len).max().unwrap_or(0);
        for round in 0..rounds {
            for rank in &plan.ranks {
                let samples = rank.get(round).cloned().unwrap_or_default();
                let mut media = Vec::new();
                for &sample in &samples {
                    planner.row(plan.samples[sample as usize]).read_shape(&mut shape);
                    let cost = &plan.costs[sample as usize].module_ns;
                    let own = encoders.iter().filter(|(module, _)| has_media(&shape, *module));
                    media.extend(own.map(|&(module, index)| {
                        // An encoder that the cost model lacks has no times, and costs 0.
                        let cost_ns = cost.as_slice().get(index).copied().unwrap_or(0);
                        EncoderTask { sample, module, cost_ns }
                    }));
                }
                microbatches.push(MicrobatchMedia { samples, media });
            }
        }
        Self { step: plan.step, microbatches }
    }

    /// Builds the pipeline plan from known token counts.
    ///
    /// The assignment of media to replicas depends only on predicted times, so it is the same for any token
    /// counts.
    ///
    /// - `tokens`: number of tokens in a sample
    /// - `medium_tokens`: number of tokens for a medium
    pub(super) fn plan(
        &self,
        job: &JobLayout,
        target_tokens: u64,
        tokens: impl Fn(u32) -> usize,
        medium_tokens: impl Fn(&EncoderTask) -> usize,
    ) -> Result<PipelineStepPlan> {
        let microbatch = |media: &MicrobatchMedia| {
            let medium = |medium: &EncoderTask| MediumPlan {
                module: medium.module,
                tokens: medium_tokens(medium),
                cost_ns: medium.cost_ns,
            };
            MicrobatchPlan {
                tokens: media.samples.iter().map(|&sample| tokens(sample)).sum(),
                media: media.media.iter().map(medium).collect(),
            }
        };
        PipelineStepPlan::new(
            job,
            self.step,
            target_tokens,
            self.microbatches.iter().map(microbatch).collect(),
        )
    }

    /// Lists a role's microbatches, each with the samples that no rank skips, in order.
    pub(super) fn kept(
        &self,
        job: &JobLayout,
        plan: &PipelineStepPlan,
        &RankRole { module, replica, .. }: &RankRole,
        is_kept: impl Fn(u32) -> bool,
    ) -> Result<Vec<(u32, Vec<u32>)>> {
        let encoded = match module {
            ModuleKind::Llm => None,
            encoder => Some(self.encoded_by(job, encoder, replica)?),
        };
        let kept = |(round, microbatch): (usize, u32)| {
            let indices = match &encoded {
                Some(encoded) => &encoded[round],
                None => &self.microbatches[microbatch as usize].samples,
            };
            (microbatch, indices.iter().copied().filter(|&index| is_kept(index)).collect())
        };
        Ok(plan.replica_microbatches(job, module, replica).enumerate().map(kept).collect())
    }

    /// Returns the indices of samples that an encoder replica encodes, by round, in encoding order.
    pub(super) fn encoded_by(
        &self,
        job: &JobLayout,
        module: ModuleKind,
        replica: usize,
    ) -> Result<Vec<Vec<u32>>> {
        let replicas = job.modules().iter().find(|own| own.module == module).map_or(1, |own| own.dp_size);
        Ok(self.encoded(job, module)?.into_iter().skip(replica).step_by(replicas).collect())
    }

    /// Returns the sample indices in every microbatch for an encoder, in encoding order.
    pub(super) fn encoded(&self, job: &JobLayout, module: ModuleKind) -> Result<Vec<Vec<u32>>> {
        // Placeholder counts, as the assignment ignores them: up to two encoders with one token each per
        // sample.
        let plan = self.plan(job, 0, |_| 2, |_| 1)?;
        let (Some(route), Some(own)) =
            (plan.route(job, module), job.modules().iter().find(|own| own.module == module))
        else {
            let problem = format!("the job does not run {module:?}");
            return Err(Error::InvalidSetting { setting: "modules", reason: problem });
        };
        let of_microbatch = |source: usize| {
            let sample = |media: &MicrobatchMedia, medium: usize| media.media[medium].sample;
            let rows = route.source_media(source as u32);
            rows.map(|row| sample(&self.microbatches[row.destination as usize], row.medium)).collect()
        };
        Ok((0..plan.rounds() * own.dp_size).map(of_microbatch).collect())
    }
}

/// Iterates over the encoders in a job with the matching time indices in the cost model.
fn encoders(job: &JobLayout, planner: &StepPlanner) -> impl Iterator<Item = (ModuleKind, usize)> {
    let index = |module| planner.model().modules().iter().position(|own| *own == module);
    let encoders = job.modules().iter().map(|layout| layout.module);
    encoders.filter_map(move |module| match module {
        ModuleKind::Vision => Some((module, index(Module::Vision).unwrap_or(usize::MAX))),
        ModuleKind::Audio => Some((module, index(Module::Audio).unwrap_or(usize::MAX))),
        ModuleKind::Llm => None,
    })
}

fn has_media(shape: &SampleShape, module: ModuleKind) -> bool {
    match module {
        ModuleKind::Vision => !(shape.images.is_empty() && shape.videos.is_empty()),
        ModuleKind::Audio => !shape.audio.is_empty(),
        ModuleKind::Llm => false,
    }
}

/// Joins sample media, in order: for each sample images, then videos, or audio clips.
pub(super) fn media_context<D: Device>(
    device: &D,
    encoder: &EncoderConfig,
    module: ModuleKind,
    samples: &[&PreparedSample],
) -> Result<MicrobatchContext<D>> {
    if module == ModuleKind::Audio {
        return audio(device, encoder, samples.iter().flat_map(|sample| &sample.clips));
    }
    let has_grid = |pixels: &PixelValues| pixels.grid_thw.is_some();
    let mut all = samples.iter().copied().flat_map(pixels);
    match all.next() {
        Some((first, _)) if has_grid(first) => {
            patches(device, encoder, samples.iter().copied().flat_map(pixels))
        }
        _ => tiles(device, encoder, samples.iter().copied().flat_map(pixels)),
    }
}

/// Iterates over images, without a frame count, then over videos with frame counts.
fn pixels(sample: &PreparedSample) -> impl Iterator<Item = (&PixelValues, Option<u32>)> {
    let images = sample.images.iter().map(|image| (image, None));
    images.chain(sample.videos.iter().map(|video| (&video.pixels, Some(video.frames))))
}

fn patches<'a, D: Device>(
    device: &D,
    encoder: &EncoderConfig,
    pixels: impl Iterator<Item = (&'a PixelValues, Option<u32>)>,
) -> Result<MicrobatchContext<D>> {
    let (mut values, mut grids) = (Vec::new(), Vec::new());
    for (image, _) in pixels {
        let Some(grid) = image.grid_thw else {
            let problem = "must have a grid of patches".to_owned();
            return Err(dflop_models::Error::Input { input: "pixel_values", problem }.into());
        };
        values.extend_from_slice(image.values.f32());
        grids.push(grid);
    }
    Ok(encoder.context(device, &EncoderInput::Patches { values: &values, grids: &grids })?)
}

fn tiles<'a, D: Device>(
    device: &D,
    encoder: &EncoderConfig,
    pixels: impl Iterator<Item = (&'a PixelValues, Option<u32>)>,
) -> Result<MicrobatchContext<D>> {
    let (mut values, mut shown) = (Vec::new(), Vec::new());
    for (image, frames) in pixels {
        values.extend_from_slice(image.values.f32());
        let tiles = image.shape.first().copied().unwrap_or(0) as u32;
        // Families that use fixed-size tiles ignore the image size, and have none.
        let [height, width] = image.image_size.unwrap_or([1, 1]);
        shown.push(match frames {
            Some(frames) => TiledMedium::Video { frames },
            None => TiledMedium::Image { height, width, tiles },
        });
    }
    Ok(encoder.context(device, &EncoderInput::Tiles { pixels: &values, shown: &shown })?)
}

fn audio<'a, D: Device>(
    device: &D,
    encoder: &EncoderConfig,
    clips: impl Iterator<Item = &'a AudioFeatures>,
) -> Result<MicrobatchContext<D>> {
    if let EncoderInputKind::Clips { .. } = encoder.input_kind() {
        return whole_clips(device, encoder, clips);
    }
    let (mut features, mut frames) = (Vec::new(), Vec::new());
    for clip in clips {
        features.extend_from_slice(&clip.values);
        let of_window = clip.shape.get(2).copied().unwrap_or(1).max(1);
        let sounding = |window: &[u8]| window.iter().map(|&is_sound| u32::from(is_sound)).sum::<u32>();
        frames.extend(clip.attention_mask.chunks(of_window).map(sounding));
    }
    Ok(encoder.context(device, &EncoderInput::Windows { features: &features, frames: &frames })?)
}

/// Joins clip spectrograms without padding; a long clip has several.
fn whole_clips<'a, D: Device>(
    device: &D,
    encoder: &EncoderConfig,
    clips: impl Iterator<Item = &'a AudioFeatures>,
) -> Result<MicrobatchContext<D>> {
    let (mut features, mut frames) = (Vec::new(), Vec::new());
    for clip in clips {
        let [mels, padded] = [1, 2].map(|axis| clip.shape.get(axis).copied().unwrap_or(1).max(1));
        for (values, mask) in clip.values.chunks(mels * padded).zip(clip.attention_mask.chunks(padded)) {
            let sounding = mask.iter().filter(|&&is_sound| is_sound != 0).count();
            values.chunks(padded).for_each(|row| features.extend_from_slice(&row[..sounding]));
            frames.push(sounding as u32);
        }
    }
    Ok(encoder.context(device, &EncoderInput::Clips { features: &features, frames: &frames })?)
}

/// Packs samples in sequence.
pub(super) fn text_context<D: Device>(
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
pub(super) fn media_places(samples: &[PreparedSample]) -> Vec<u32> {
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
