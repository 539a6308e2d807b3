//! Cuts audio into log-mel windows or chunks.
//!
//! Audio is resampled to 16 kHz and converted to 100 mel frames per second. [`windows`] pads a clip to
//! fixed-size windows (Whisper, Qwen2-Audio), [`chunks`] keeps the native length (Qwen2.5-Omni, Qwen3-Omni).

pub mod chunks;
pub mod windows;

use serde::{Deserialize, Serialize};

pub use self::chunks::AudioChunks;
pub use self::windows::{AudioWindows, whisper_windows};
use super::EncoderWork;
use crate::error::{Error, Result};
use crate::shape::AudioLength;

/// Mel frames per second of audio.
pub(crate) const MEL_FRAMES_PER_SECOND: u32 = 100;
/// Samples per second of resampled audio.
const SAMPLES_PER_SECOND: u32 = 16_000;
/// Number of samples between mel frames.
const HOP_SAMPLES: u32 = SAMPLES_PER_SECOND / MEL_FRAMES_PER_SECOND;

/// Rule that converts audio clips to encoder items and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AudioRule {
    /// Fixed-size padded windows: Whisper, Qwen2-Audio.
    Windows(AudioWindows),
    /// Chunks in a clip with native length: Qwen2.5-Omni, Qwen3-Omni.
    Chunks(AudioChunks),
}

impl Default for AudioRule {
    fn default() -> Self {
        Self::QWEN2_AUDIO
    }
}

impl AudioRule {
    /// Qwen2-Audio, with as many windows as a clip needs.
    pub const QWEN2_AUDIO: Self = Self::Windows(AudioWindows::QWEN2_AUDIO);

    /// Returns the work for a clip, markers included; a clip with 0 frames has none.
    ///
    /// # Errors
    /// [`Error::SampleRate`] if the clip has frames but no sample rate.
    pub fn clip(&self, length: AudioLength) -> Result<EncoderWork> {
        match self {
            Self::Windows(rule) => rule.clip(length),
            Self::Chunks(rule) => rule.clip(length),
        }
    }

    /// Returns the marker tokens around a clip.
    #[must_use]
    pub const fn marker_tokens(&self) -> u8 {
        match self {
            Self::Windows(rule) => rule.marker_tokens,
            Self::Chunks(rule) => rule.marker_tokens,
        }
    }
}

/// Adds markers to a clip's work.
trait MarkedClip {
    /// Returns the work with marker tokens, if there is any work.
    fn marked(self, marker_tokens: u8) -> Self;
}

impl MarkedClip for EncoderWork {
    fn marked(self, marker_tokens: u8) -> Self {
        let markers = if self.items > 0 { u64::from(marker_tokens) } else { 0 };
        Self { tokens: self.tokens.saturating_add(markers), ..self }
    }
}

/// Returns the number of mel frames in real audio, the last frame possibly not full; saturating.
///
/// # Errors
/// [`Error::SampleRate`] if the clip has frames but no sample rate.
pub fn mel_frames(length: AudioLength) -> Result<u64> {
    if length.frames == 0 {
        return Ok(0);
    }
    if length.sample_rate_hz == 0 {
        return Err(Error::SampleRate { frames: length.frames });
    }
    let hundredfold = u128::from(length.frames) * u128::from(MEL_FRAMES_PER_SECOND);
    Ok(u64::try_from(hundredfold.div_ceil(u128::from(length.sample_rate_hz))).unwrap_or(u64::MAX))
}
