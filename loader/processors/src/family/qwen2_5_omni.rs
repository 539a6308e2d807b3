//! Qwen2.5-Omni: Qwen2.5-VL patches and spectrograms with the clip length, on a common time axis.

use std::sync::Arc;

use dflop_costmodel::FamilyId;
use dflop_costmodel::model::{AudioSpec, VisionSpec};
use dflop_costmodel::tokens::audio::AudioRule;

use super::processor_family::{AudioInputs, ProcessorFamily, VisionInputs};
use super::qwen_vl::patches;
use super::{LayerTime, Placeholder};
use crate::audio::{AudioProcessor, ClipProcessor};
use crate::image::Normalization;

/// Image placeholder.
const IMAGE: Placeholder = Placeholder {
    token: "<|IMAGE|>",
    markers: Some(["<|vision_bos|>", "<|vision_eos|>"]),
    has_markers_in_text: true,
};
/// Video placeholder.
const VIDEO: Placeholder = Placeholder { token: "<|VIDEO|>", ..IMAGE };
/// Audio clip placeholder.
const CLIP: Placeholder = Placeholder {
    token: "<|AUDIO|>",
    markers: Some(["<|audio_bos|>", "<|audio_eos|>"]),
    has_markers_in_text: true,
};
/// Positions per second in the released checkpoints: one per audio token.
const POSITIONS_PER_SECOND: u32 = 25;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Qwen25OmniFamily];

/// Qwen2.5-Omni. A video's sound is not part of the video: an audio clip next to it is a separate medium.
#[derive(Debug)]
struct Qwen25OmniFamily;

impl ProcessorFamily for Qwen25OmniFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("qwen2_5_omni")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let time = LayerTime::Seconds { positions: POSITIONS_PER_SECOND };
        patches(vision, [IMAGE, VIDEO], time, Normalization::CLIP)
    }

    fn audio(&self, audio: &AudioSpec) -> Option<AudioInputs> {
        let AudioRule::Chunks(rule) = audio.rule else { return None };
        let mels = AudioProcessor::for_encoder(&audio.encoder)?.mels;
        Some(AudioInputs { clip: CLIP, processor: Arc::new(ClipProcessor { mels, rule }) })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/qwen2_5_omni.jinja")
    }
}
