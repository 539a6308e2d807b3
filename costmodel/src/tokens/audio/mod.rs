//! Cuts audio into log-mel windows or chunks.
//!
//! Audio is resampled to 16 kHz and converted to 100 mel frames per second. [`AudioWindows`] pads a clip to
//! fixed-size windows (Whisper, Qwen2-Audio), [`chunks`] keeps the native length (Qwen2.5-Omni, Qwen3-Omni).
//!
//! Audio is resampled to 16 kHz and converted to 100 mel frames per second. Every started 30-second window is
//! padded to 3000 frames; a convolution with stride 2 leaves 1500 encoder tokens, so the encoder's work does
//! not depend on how full the window is. Pooling by 2 leaves one LLM token per 40 ms of real frames: 750 in a
//! full window. Two marker tokens enclose a clip.

pub mod chunks;

use super::EncoderWork;
use crate::AudioLength;
use crate::error::{Error, Result};
use crate::interned::Interned;
use crate::tokens::table::TokenTable;
use serde::{Deserialize, Serialize};

pub use chunks::AudioChunks;

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
    /// Counted lengths, for a model that was described.
    Table(Interned<TokenTable>),
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
            Self::Table(table) => table.clip(length),
        }
    }

    /// Returns whether clips keep the native length, so that encoder sequences differ in length.
    #[must_use]
    pub const fn is_native(&self) -> bool {
        match self {
            Self::Windows(_) => false,
            Self::Chunks(_) => true,
            Self::Table(table) => table.get().item_tokens.is_none(),
        }
    }

    /// Returns the marker tokens around a clip.
    #[must_use]
    pub const fn marker_tokens(&self) -> u8 {
        match self {
            Self::Windows(rule) => rule.marker_tokens,
            Self::Chunks(rule) => rule.marker_tokens,
            Self::Table(table) => table.get().marker_tokens,
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

/// Mel frames per encoder token.
const STRIDE: u64 = 2;

/// Rule settings; encoder items are fixed-size windows.
///
/// # Source
/// Windows: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022,
/// arXiv:2212.04356. Tokens: Chu et al., "Qwen2-Audio Technical Report", 2024, arXiv:2407.10759.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioWindows {
    /// Encoder tokens per window: 1500 for 30 seconds. 0 counts as 1.
    pub window_tokens: u32,
    /// Maximum number of windows; longer clips are cut off.
    pub windows_max: u32,
    /// Marker tokens around a clip.
    pub marker_tokens: u8,
}

impl AudioWindows {
    /// Qwen2-Audio, with as many windows as a clip needs; the published processor keeps only the first
    /// window.
    pub const QWEN2_AUDIO: Self = Self { window_tokens: 1500, windows_max: u32::MAX, marker_tokens: 2 };

    /// Returns the work for a clip, markers included; a clip with 0 frames has none.
    ///
    /// A clip with fewer than 3 mel frames (20 ms) still fills a window, though pooling may leave it without
    /// LLM tokens except the markers.
    ///
    /// # Errors
    /// [`Error::SampleRate`] if the clip has frames but no sample rate.
    pub fn clip(&self, length: AudioLength) -> Result<EncoderWork> {
        Ok(self.windows(length)?.marked(self.marker_tokens))
    }

    fn windows(&self, length: AudioLength) -> Result<EncoderWork> {
        let window_tokens = u64::from(self.window_tokens.max(1));
        let window_frames = STRIDE * window_tokens;
        let frames_max = u64::from(self.windows_max).saturating_mul(window_frames);
        let frames = mel_frames(length)?.min(frames_max);
        let (full_windows, rest) = (frames / window_frames, frames % window_frames);
        let tokens =
            full_windows.saturating_mul(pooled_tokens(window_frames)).saturating_add(pooled_tokens(rest));
        let windows = full_windows + u64::from(rest > 0);
        Ok(EncoderWork::from_items(windows, window_tokens, tokens))
    }
}

/// Returns the work for a clip without markers, in 30-second windows.
///
/// The published models' feature extractor cuts a clip off at 30 seconds; here it continues in further
/// windows, as the loader prepares it, so that nothing is lost.
///
/// # Errors
/// [`Error::SampleRate`] if the clip has frames but no sample rate.
pub fn whisper_windows(length: AudioLength) -> Result<EncoderWork> {
    AudioWindows::QWEN2_AUDIO.windows(length)
}

/// Returns the LLM tokens for the real mel frames in a window: stride 2, then pooling by 2.
const fn pooled_tokens(mel_frames: u64) -> u64 {
    mel_frames.div_ceil(2) / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use proptest::prelude::*;

    fn work(frames: u64, sample_rate_hz: u32) -> EncoderWork {
        whisper_windows(AudioLength { frames, sample_rate_hz }).unwrap()
    }

    /// Frames, rate, windows, LLM tokens; tokens by `p = (f - 1) // 2 + 1`, `(p - 2) // 2 + 1` by hand.
    #[test]
    fn windows_and_tokens_follow_the_published_formula() {
        for (frames, sample_rate_hz, windows, tokens) in [
            (0, 16_000, 0, 0),
            (0, 0, 0, 0),
            (1, 16_000, 1, 0),                 // f 1, p 1
            (160, 16_000, 1, 0),               // f 1
            (320, 16_000, 1, 0),               // f 2, p 1
            (321, 16_000, 1, 1),               // f 3, p 2
            (16_000, 16_000, 1, 25),           // f 100, p 50
            (44_100, 44_100, 1, 25),           // f 100
            (48_480, 16_000, 1, 76),           // 3.03 s: f 303, p 152
            (219_200, 16_000, 1, 342),         // 13.7 s: f 1370, p 685
            (480_000, 16_000, 1, 750),         // f 3000, p 1500
            (480_001, 16_000, 2, 750),         // and f 1
            (560_000, 16_000, 2, 875),         // 35 s: and f 500, p 250
            (1_323_000, 44_100, 1, 750),       // 30 s
            (57_600_000, 16_000, 120, 90_000), // an hour
        ] {
            let work = work(frames, sample_rate_hz);
            assert_eq!((work.items, work.tokens), (windows, tokens), "{frames} at {sample_rate_hz} Hz");
            assert_eq!(work.encoder_tokens, 1500 * windows);
            assert_eq!(work.attention_pairs, 2_250_000 * windows);
        }
    }

    #[test]
    fn frames_without_a_rate_are_errors() {
        let length = AudioLength { frames: 1, sample_rate_hz: 0 };
        assert_eq!(whisper_windows(length), Err(Error::SampleRate { frames: 1 }));
    }

    proptest! {
        #[test]
        fn tokens_never_shrink_with_length(frames in any::<u64>(), more in 0u64..1 << 40, rate in 1u32..) {
            let (short, long) = (work(frames, rate), work(frames.saturating_add(more), rate));
            prop_assert!(short.items <= long.items && short.tokens <= long.tokens);
        }

        #[test]
        fn pooling_is_the_published_formula(mel_frames in 1i64..3001) {
            let positions = (mel_frames - 1).div_euclid(2) + 1;
            let tokens = (positions - 2).div_euclid(2) + 1;
            prop_assert_eq!(pooled_tokens(mel_frames as u64) as i64, tokens);
        }
    }
}
