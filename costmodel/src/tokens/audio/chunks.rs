//! Encodes audio at native length in chunks, the Qwen2.5-Omni and Qwen3-Omni rule.
//!
//! A clip's mel frames are cut into chunks, the last chunk shorter. Convolutions with stride 2 read within a
//! chunk, and attention stays within a window of one or several chunks. Neighboring encoder tokens may be
//! averaged to one LLM token. Two marker tokens enclose a clip. Only the last chunk is padded, for the
//! convolutions, as in a batch with a clip of a full chunk, so the work grows with the clip.

use serde::{Deserialize, Serialize};

use super::{HOP_SAMPLES, MarkedClip, SAMPLES_PER_SECOND, mel_frames};
use crate::AudioLength;
use crate::error::{Error, Result};
use crate::tokens::EncoderWork;

/// Minimum number of samples for a spectrogram without padding: the ends are reflected over half a transform.
const SAMPLES_MIN: u64 = 201;

/// Rule settings; encoder items are encoder tokens.
///
/// # Source
/// Xu et al., "Qwen2.5-Omni Technical Report", 2025, arXiv:2503.20215, section 2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioChunks {
    /// Mel frames per full chunk. 0 counts as 1.
    pub chunk_frames: u32,
    /// Number of convolutions with stride 2, each of which halves a chunk's frames, rounding up.
    pub halvings: u8,
    /// Number of full chunks whose tokens attend to each other. 0 counts as 1.
    pub window_chunks: u32,
    /// Number of encoder tokens that become one LLM token. 0 counts as 1.
    pub pooled_tokens: u32,
    /// Number of mel frames that are normalized together, full chunks; a longer clip continues in a new
    /// spectrogram. 0 counts as 1.
    pub spectrogram_frames: u32,
    /// Marker tokens around a clip.
    pub marker_tokens: u8,
    /// Whether silence fills up a spectrogram, so that every started frame counts (Qwen2.5-Omni); otherwise
    /// only full frames count (Qwen3-Omni).
    #[serde(default = "padded")]
    pub is_padded: bool,
}

/// Default for rules that were saved before this field existed.
const fn padded() -> bool {
    true
}

impl AudioChunks {
    /// Qwen2.5-Omni as released: 2-second chunks, 25 LLM tokens per second, 5-minute spectrograms.
    pub const QWEN2_5_OMNI: Self = Self {
        chunk_frames: 200,
        halvings: 1,
        window_chunks: 1,
        pooled_tokens: 2,
        spectrogram_frames: 30_000,
        marker_tokens: 2,
        is_padded: true,
    };

    /// Qwen3-Omni as released: 1-second chunks with 13 LLM tokens each, which attend to each other within 8
    /// seconds; a clip is a single spectrogram.
    ///
    /// # Source
    /// Xu et al., "Qwen3-Omni Technical Report", 2025, arXiv:2509.17765, section 2.2.
    pub const QWEN3_OMNI: Self = Self {
        chunk_frames: 100,
        halvings: 3,
        window_chunks: 8,
        pooled_tokens: 1,
        spectrogram_frames: u32::MAX / 100 * 100,
        marker_tokens: 2,
        is_padded: false,
    };

    /// Returns a clip's mel frames.
    ///
    /// # Errors
    /// [`Error::SampleRate`] if the clip has frames but no sample rate; [`Error::ShortAudio`] if the clip is
    /// not empty, but too short for a spectrogram without padding.
    pub fn frames(&self, length: AudioLength) -> Result<u64> {
        let started = mel_frames(length)?;
        if self.is_padded || started == 0 {
            return Ok(started);
        }
        // a clip is resampled first, to so many samples
        let samples = u128::from(length.frames) * u128::from(SAMPLES_PER_SECOND);
        let samples = samples.div_ceil(u128::from(length.sample_rate_hz));
        let samples = u64::try_from(samples).unwrap_or(u64::MAX);
        if samples < SAMPLES_MIN {
            return Err(Error::ShortAudio { samples, samples_min: SAMPLES_MIN });
        }
        Ok(samples / u64::from(HOP_SAMPLES))
    }

    /// Returns the work for a clip, markers included; a clip with 0 frames has none.
    ///
    /// A clip too short for an LLM token still has markers.
    ///
    /// # Errors
    /// As [`frames`](Self::frames).
    pub fn clip(&self, length: AudioLength) -> Result<EncoderWork> {
        Ok(self.features(self.frames(length)?).marked(self.marker_tokens))
    }

    /// Returns the LLM tokens for mel frames, without markers.
    #[must_use]
    pub fn feature_tokens(&self, frames: u64) -> u64 {
        self.features(frames).tokens
    }

    fn features(&self, frames: u64) -> EncoderWork {
        let spectrogram = u64::from(self.spectrogram_frames.max(1));
        let mut work = self.spectrogram(spectrogram).repeat(frames / spectrogram);
        work += self.spectrogram(frames % spectrogram);
        work
    }

    /// Returns the encoder tokens per full chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> u64 {
        self.halved(u64::from(self.chunk_frames.max(1)))
    }

    /// Returns the tokens per full attention window.
    #[must_use]
    pub fn window_tokens(&self) -> u64 {
        self.chunk_tokens().saturating_mul(u64::from(self.window_chunks.max(1)))
    }

    /// Returns the work for the frames in a spectrogram, without markers.
    fn spectrogram(&self, frames: u64) -> EncoderWork {
        let chunk = u64::from(self.chunk_frames.max(1));
        let full = (frames / chunk).saturating_mul(self.chunk_tokens());
        let encoder_tokens = full.saturating_add(self.halved(frames % chunk));
        let is_cut = !frames.is_multiple_of(chunk);
        let padded_tokens =
            if is_cut { self.chunk_tokens().saturating_sub(self.halved(frames % chunk)) } else { 0 };
        let window = self.window_tokens();
        let rest = encoder_tokens % window;
        let window_pairs = window.saturating_mul(window).saturating_mul(encoder_tokens / window);
        let attention_pairs = window_pairs.saturating_add(rest.saturating_mul(rest));
        EncoderWork {
            items: encoder_tokens,
            encoder_tokens,
            tokens: encoder_tokens / u64::from(self.pooled_tokens.max(1)),
            attention_pairs,
            window_pairs: attention_pairs,
            padded_tokens,
        }
    }

    fn halved(&self, frames: u64) -> u64 {
        (0..self.halvings).fold(frames, |frames, _| frames.div_ceil(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULE: AudioChunks = AudioChunks::QWEN2_5_OMNI;

    fn work(frames: u64, sample_rate_hz: u32) -> EncoderWork {
        RULE.clip(AudioLength { frames, sample_rate_hz }).unwrap()
    }

    /// Frames, rate, encoder tokens, LLM tokens, pairs; by hand.
    #[test]
    fn chunks_are_of_two_seconds_and_the_last_is_shorter() {
        for (frames, sample_rate_hz, encoder_tokens, tokens, pairs) in [
            (1, 16_000, 1, 0, 1),
            (321, 16_000, 2, 1, 4),                              // 3 mel frames
            (16_000, 16_000, 50, 25, 2500),                      // 1 s
            (32_000, 16_000, 100, 50, 10_000),                   // 2 s
            (32_160, 16_000, 101, 50, 10_001),                   // 2.01 s: an odd token
            (240_000, 48_000, 250, 125, 22_500),                 // 5 s
            (4_800_001, 16_000, 15_001, 7500, 150 * 10_000 + 1), // 5 minutes and a frame
            (9_600_000, 16_000, 30_000, 15_000, 300 * 10_000),   // 10 minutes
        ] {
            let work = work(frames, sample_rate_hz);
            assert_eq!((work.encoder_tokens, work.tokens), (encoder_tokens, tokens + 2), "{frames}");
            assert_eq!((work.items, work.attention_pairs), (encoder_tokens, pairs), "{frames}");
            assert_eq!(work.window_pairs, pairs);
        }
        assert_eq!(work(0, 0), EncoderWork::default());
        let length = AudioLength { frames: 1, sample_rate_hz: 0 };
        assert_eq!(RULE.clip(length), Err(Error::SampleRate { frames: 1 }));
    }

    /// Frames, rate, tokens, pairs for Qwen3-Omni; by hand.
    #[test]
    fn chunks_are_of_a_second_and_only_full_frames_count() {
        for (frames, sample_rate_hz, tokens, pairs) in [
            (201, 16_000, 1, 1),
            (1_439, 16_000, 1, 1),               // 8 mel frames
            (1_440, 16_000, 2, 4),               // 9 mel frames
            (16_000, 16_000, 13, 169),           // 1 s
            (16_160, 16_000, 14, 196),           // 1.01 s
            (44_100, 44_100, 13, 169),           // 1 s
            (79_380, 44_100, 23, 529),           // 1.8 s
            (128_000, 16_000, 104, 10_816),      // 8 s: a full window
            (136_000, 16_000, 111, 10_816 + 49), // 8.5 s
        ] {
            let work = AudioChunks::QWEN3_OMNI.clip(AudioLength { frames, sample_rate_hz }).unwrap();
            assert_eq!((work.encoder_tokens, work.tokens), (tokens, tokens + 2), "{frames}");
            assert_eq!((work.attention_pairs, work.window_pairs), (pairs, pairs), "{frames}");
            assert!((tokens + work.padded_tokens).is_multiple_of(13) && work.padded_tokens < 13, "{frames}");
        }
        let short = AudioChunks::QWEN3_OMNI.clip(AudioLength { frames: 200, sample_rate_hz: 16_000 });
        assert_eq!(short, Err(Error::ShortAudio { samples: 200, samples_min: 201 }));
    }

    #[test]
    fn settings_of_zero_do_not_panic() {
        let zero = AudioChunks {
            chunk_frames: 0,
            window_chunks: 0,
            pooled_tokens: 0,
            spectrogram_frames: 0,
            ..RULE
        };
        assert!(zero.clip(AudioLength { frames: u64::MAX, sample_rate_hz: 1 }).is_ok());
    }

    proptest! {
        #[test]
        fn tokens_never_shrink_with_length(frames in any::<u64>(), more in 0u64..1 << 40, rate in 1u32..) {
            let (short, long) = (work(frames, rate), work(frames.saturating_add(more), rate));
            prop_assert!(short.items <= long.items && short.tokens <= long.tokens);
            prop_assert!(short.attention_pairs <= short.encoder_tokens.saturating_mul(100));
        }
    }
}
