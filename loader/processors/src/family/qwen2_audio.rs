//! Qwen2-Audio: Whisper's log-mel spectrograms.

use std::sync::Arc;

use dflop_costmodel::FamilyId;
use dflop_costmodel::model::AudioSpec;

use super::Placeholder;
use super::processor_family::{AudioInputs, ProcessorFamily};
use crate::audio::AudioProcessor;

/// Audio clip placeholder.
const CLIP: Placeholder = Placeholder {
    token: "<|AUDIO|>",
    markers: Some(["<|audio_bos|>", "<|audio_eos|>"]),
    has_markers_in_text: true,
};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ProcessorFamily] = &[&Qwen2AudioFamily];

/// Qwen2-Audio.
#[derive(Debug)]
struct Qwen2AudioFamily;

impl ProcessorFamily for Qwen2AudioFamily {
    fn id(&self) -> FamilyId {
        FamilyId::new("qwen2_audio")
    }

    fn audio(&self, audio: &AudioSpec) -> Option<AudioInputs> {
        let processor = AudioProcessor::for_encoder(&audio.encoder)?;
        Some(AudioInputs { clip: CLIP, processor: Arc::new(processor) })
    }

    fn chat_template(&self) -> &'static str {
        include_str!("templates/qwen2_audio.jinja")
    }
}
