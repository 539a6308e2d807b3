//! Cuts audio into windows or chunks of log-mel frames.
//!
//! Audio is resampled to 16 kHz and turned into 100 mel frames per second. [`windows`] pads a clip to windows
//! of one size (Whisper, Qwen2-Audio), [`chunks`] keeps its own length (Qwen2.5-Omni, Qwen3-Omni).

pub mod chunks;
pub mod windows;

use serde::{Deserialize, Serialize};

pub use self::chunks::AudioChunks;
pub use self::windows::{AudioWindows, whisper_windows};
use super::EncoderWork;
use crate::error::{Error, Result};
use crate::shape::AudioLength;

/// Mel frames of a second of audio.
pub(crate) const MEL_FRAMES_PER_SECOND: u32 = 100;
/// Samples of a second of resampled audio.
const SAMPLES_PER_SECOND: u32 = 16_000;
/// Samples from a mel frame to the next.
const HOP_SAMPLES: u32 = SAMPLES_PER_SECOND / MEL_FRAMES_PER_SECOND;

/// Rule by which a model turns audio clips into encoder items and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AudioRule {
    /// Windows of one size, which are padded: Whisper, Qwen2-Audio.
    Windows(AudioWindows),
    /// Chunks of a clip of its own length: Qwen2.5-Omni, Qwen3-Omni.
    Chunks(AudioChunks),
}

impl Default for AudioRule {
    fn default() -> Self {
        Self::QWEN2_AUDIO
    }
}

impl AudioRule {
    /// Qwen2-Audio, with as many windows as a clip takes.
    pub const QWEN2_AUDIO: Self = Self::Windows(AudioWindows::QWEN2_AUDIO);

    /// Returns the work of one clip, markers included; a clip of 0 frames has none.
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

/// Adds markers to the work of a clip.
trait MarkedClip {
    /// Returns the work with marker tokens, if there is any.
    fn marked(self, marker_tokens: u8) -> Self;
}

impl MarkedClip for EncoderWork {
    fn marked(self, marker_tokens: u8) -> Self {
        let markers = if self.items > 0 { u64::from(marker_tokens) } else { 0 };
        Self { tokens: self.tokens.saturating_add(markers), ..self }
    }
}

/// Returns the mel frames of real audio, the last one possibly not full; saturating.
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
