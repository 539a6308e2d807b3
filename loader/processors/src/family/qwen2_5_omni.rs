//! Qwen2.5-Omni: patches of Qwen2.5-VL and spectrograms of a clip's own length, on one axis of time.

use std::sync::Arc;

use dflop_costmodel::FamilyId;
use dflop_costmodel::model::{AudioSpec, VisionSpec};
use dflop_costmodel::tokens::audio::AudioRule;

use super::processor_family::{AudioInputs, ProcessorFamily, VisionInputs};
use super::qwen_vl::patches;
use super::{LayerTime, Placeholder};
use crate::audio::{AudioProcessor, ClipProcessor};
use crate::image::normalize::Normalization;

/// Images.
const IMAGE: Placeholder = Placeholder {
    token: "<|IMAGE|>",
    markers: Some(["<|vision_bos|>", "<|vision_eos|>"]),
    has_markers_in_text: true,
};
/// Videos.
const VIDEO: Placeholder = Placeholder { token: "<|VIDEO|>", ..IMAGE };
/// Audio clips.
const CLIP: Placeholder = Placeholder {
    token: "<|AUDIO|>",
    markers: Some(["<|audio_bos|>", "<|audio_eos|>"]),
    has_markers_in_text: true,
};
/// Positions per second of the released checkpoints: one per token of audio.
const POSITIONS_PER_SECOND: u32 = 25;

/// Qwen2.5-Omni. The sound of a video is not part of the video: a clip next to it is a medium of its own.
#[derive(Debug)]
pub(super) struct Qwen25OmniFamily;

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
