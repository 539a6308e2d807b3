//! Qwen3-Omni: Qwen3-VL patches without times in the text, and spectrograms with the clip length.

use std::sync::Arc;

use dflop_costmodel::FamilyId;
use dflop_costmodel::model::{AudioSpec, VisionSpec};
use dflop_costmodel::tokens::audio::AudioRule;

use super::processor_family::{AudioInputs, ProcessorFamily, VisionInputs};
use super::qwen_vl::{IMAGE, VIDEO, patches};
use super::{LayerTime, Placeholder};
use crate::audio::ClipProcessor;
use crate::image::Normalization;

/// Audio clip placeholder.
const CLIP: Placeholder = Placeholder {
    token: "<|audio_pad|>",
    markers: Some(["<|audio_start|>", "<|audio_end|>"]),
    has_markers_in_text: true,
};
/// Number of mel bins in all supported checkpoints.
const MELS: u16 = 128;
/// Positions per second in the released checkpoints: one per audio token.
const POSITIONS_PER_SECOND: u32 = 13;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Qwen3OmniFamily];

/// Qwen3-Omni. A video's sound is not part of the video: an audio clip next to it is a separate medium.
///
/// Every clip in a sample is prepared as if it were the only clip; the Hugging Face processor pads clips to
/// the longest, so that the last 10 ms of a shorter clip depend on the longest. Video layers begin at whole
/// positions: the model in transformers 5.24.0 does not round them.
#[derive(Debug)]
struct Qwen3OmniFamily;

impl ProcessorFamily for Qwen3OmniFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("qwen3_omni_moe")
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let time = LayerTime::Seconds { positions: POSITIONS_PER_SECOND };
        patches(vision, [IMAGE, VIDEO], time, Normalization::SIGNED)
    }

    fn audio(&self, audio: &AudioSpec) -> Option<AudioInputs> {
        let AudioRule::Chunks(rule) = audio.rule else { return None };
        Some(AudioInputs { clip: CLIP, processor: Arc::new(ClipProcessor { mels: MELS, rule }) })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/qwen3_omni.jinja")
    }
}
