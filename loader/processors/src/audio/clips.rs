//! Converts audio clips to log-mel spectrograms with the clip length: Qwen2.5-Omni, Qwen3-Omni.
//!
//! A padded spectrogram has a frame per started 10 ms. The values equal the feature extractor's values for
//! the clip followed by silence, up to the length it pads to; silent frames are omitted. A longer clip
//! continues in another spectrogram, where the feature extractor would cut it off. An unpadded spectrogram
//! has a frame per full 10 ms, with the feature extractor's values for a clip without padding.

use dflop_costmodel::AudioLength;
use dflop_costmodel::tokens::audio::AudioChunks;
use dflop_samples::inputs::AudioFeatures;
use dflop_samples::media::Audio;
use dflop_samples::{BoxError, Error, Result};

use super::{HOP_SAMPLES, SAMPLE_RATE_HZ, WINDOW_SAMPLES, WINDOWS_MAX, resample, with_log_mel};

/// Maximum number of samples per clip, two hours: longer clips are rejected before memory of that size is
/// allocated.
const SAMPLES_MAX: usize = WINDOWS_MAX * WINDOW_SAMPLES;

/// Audio processor for models that accept clips with variable length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClipProcessor {
    /// Number of mel filters.
    pub mels: u16,
    /// Token rule, including the spectrogram length.
    pub rule: AudioChunks,
}

impl ClipProcessor {
    /// Prepares a clip with any rate and any number of channels; an empty clip has no spectrogram.
    ///
    /// The features are `[1, mels, frames]`, or, for a clip with several spectrograms,
    /// `[spectrograms, mels, frames per full spectrogram]`, with zeros after the last frame.
    ///
    /// # Errors
    /// [`Error::Medium`] if the sample rate is out of range, or the clip is longer than two hours or too
    /// short.
    pub fn clip(&self, clip: &Audio) -> Result<AudioFeatures> {
        let refused = |source: BoxError| Error::Medium { medium: "audio clip", source };
        if resample::resampled_length(clip) > SAMPLES_MAX {
            return Err(refused("the clip is longer than two hours".into()));
        }
        let samples = resample::to_16_khz(clip, SAMPLES_MAX).map_err(refused)?;
        let length = AudioLength { frames: samples.len() as u64, sample_rate_hz: SAMPLE_RATE_HZ };
        let frames = self.rule.frames(length).map_err(|error| refused(error.into()))? as usize;
        let (mels, whole) = (usize::from(self.mels), self.rule.spectrogram_frames.max(1) as usize);
        let spectrograms = frames.div_ceil(whole);
        let width = frames.min(whole);
        let mut values = vec![0.0; spectrograms * mels * width];
        let mut attention_mask = vec![0; spectrograms * width];
        attention_mask[..frames].fill(1);
        let window_samples = whole * HOP_SAMPLES;
        with_log_mel(mels, |log_mel| {
            let targets = values.chunks_exact_mut((mels * width).max(1));
            let windows = samples.chunks(window_samples).zip((0..frames).step_by(whole));
            for ((window, first), target) in windows.zip(targets) {
                let own = (frames - first).min(whole);
                let mut spectrogram = vec![0.0; mels * own];
                let until = if self.rule.is_padded { window_samples } else { window.len() };
                log_mel.window(window, until, &mut spectrogram);
                for (row, made) in target.chunks_exact_mut(width).zip(spectrogram.chunks_exact(own)) {
                    row[..own].copy_from_slice(made);
                }
            }
        });
        let tokens = u32::try_from(self.rule.feature_tokens(frames as u64)).unwrap_or(u32::MAX);
        Ok(AudioFeatures { values, shape: vec![spectrograms, mels, width], attention_mask, tokens })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHORT: AudioChunks = AudioChunks { spectrogram_frames: 400, ..AudioChunks::QWEN2_5_OMNI };

    fn sine(frames: usize, sample_rate_hz: u32) -> Audio {
        let samples = (0..frames).map(|at| (at as f32 * 0.07).sin()).collect();
        Audio { sample_rate_hz, channels: 1, samples, is_truncated: false }
    }

    #[test]
    fn a_clip_keeps_its_length_and_continues_in_further_spectrograms() {
        let processor = ClipProcessor { mels: 2, rule: SHORT };
        let short = processor.clip(&sine(16_001, 16_000)).unwrap();
        assert_eq!((short.shape, short.tokens), (vec![1, 2, 101], 25));
        let long = processor.clip(&sine(160_000, 16_000)).unwrap();
        assert_eq!((long.shape, long.tokens), (vec![3, 2, 400], 250));
        assert_eq!(long.attention_mask.iter().map(|&frame| u32::from(frame)).sum::<u32>(), 1_000);
        assert!(long.values[2 * 2 * 400 + 200..2 * 2 * 400 + 400].iter().all(|&value| value == 0.0));
        let first = processor.clip(&sine(64_000, 16_000)).unwrap();
        assert_eq!(first.values, long.values[..2 * 400]);
        let whole = ClipProcessor { mels: 2, rule: AudioChunks::QWEN3_OMNI };
        let whole = whole.clip(&sine(160_100, 16_000)).unwrap();
        assert_eq!((whole.shape, whole.tokens), (vec![1, 2, 1_000], 130));
        let empty = processor.clip(&sine(0, 16_000)).unwrap();
        assert_eq!((empty.values, empty.tokens), (Vec::new(), 0));
        assert!(processor.clip(&sine(7_300_000, 1_000)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn tokens_are_those_of_the_cost_model(frames in 700usize..300_000, rate in 4_000u32..50_000) {
            for rule in [SHORT, AudioChunks::QWEN3_OMNI] {
                let features = ClipProcessor { mels: 1, rule }.clip(&sine(frames, rate)).unwrap();
                let work = rule.clip(AudioLength { frames: frames as u64, sample_rate_hz: rate }).unwrap();
                prop_assert_eq!(u64::from(features.tokens) + 2, work.tokens);
            }
        }
    }
}
