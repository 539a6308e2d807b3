//! Converts audio clips to Whisper's log-mel spectrograms, the input for Qwen2-Audio and Qwen2.5-Omni.
//!
//! Clips become 16 kHz mono in windows of 30 seconds, or with the clip length ([`ClipProcessor`]): 25 ms
//! transforms every 10 ms, mel filters on Slaney's scale, logarithm, values more than 80 dB below the maximum
//! raised to that level, `(x + 4) / 4`. A window equals, to the last bits, the output of the NumPy version of
//! `WhisperFeatureExtractor` in transformers 4.57.1 (the `PyTorch` version computes in single precision).
//!
//! **Clips over 30 seconds**: Whisper's feature extractor, and therefore Qwen2-Audio's processor, truncates
//! them. The cost model counts every started window, and nothing should be lost silently, so a clip becomes
//! as many windows as needed unless [`LongClips::CutOff`] is set; window tokens follow each other like tokens
//! from separate clips.
//!
//! **Spectrograms with the clip length** ([`ClipProcessor`]), for Qwen2.5-Omni and Qwen3-Omni: a padded
//! spectrogram has a frame per started 10 ms. The values equal the feature extractor's values for the clip
//! followed by silence, up to the length it pads to; silent frames are omitted. A longer clip continues in
//! another spectrogram, where the feature extractor would cut it off. An unpadded spectrogram has a frame per
//! full 10 ms, with the feature extractor's values for a clip without padding.

mod log_mel;

use std::cell::RefCell;

use dflop_costmodel::config::{ConfigFields, PREPROCESSOR_FILE};
use dflop_costmodel::model::EncoderSpec;
use dflop_costmodel::tokens::audio::{AudioChunks, whisper_windows};
use dflop_costmodel::{AudioLength, ModelSpec};
use dflop_samples::inputs::AudioFeatures;
use dflop_samples::media::Audio;
use dflop_samples::{BoxError, Error, Result};
use serde_json::Value;

use self::log_mel::LogMel;

const SAMPLE_RATE_HZ: u32 = 16_000;
const FFT_SAMPLES: usize = 400;
const HOP_SAMPLES: usize = 160;
const WINDOW_SAMPLES: usize = 480_000;
pub(super) const WINDOW_FRAMES: usize = WINDOW_SAMPLES / HOP_SAMPLES;
/// Maximum number of windows, two hours: longer clips are rejected before memory of that size is allocated.
const WINDOWS_MAX: usize = 240;

/// Treatment for clips over 30 seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LongClips {
    /// Uses the number of windows needed, as counted by the cost model. The default.
    #[default]
    Windows,
    /// Uses only the first 30 seconds, as in the feature extractor.
    CutOff,
}

/// Audio processor for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioProcessor {
    /// Number of mel filters: 80, or 128 for Whisper-large-v3 and Qwen2-Audio.
    pub mels: u16,
    /// Treatment for clips over 30 seconds.
    pub long_clips: LongClips,
}

thread_local! {
    static LOG_MEL: RefCell<Option<LogMel>> = const { RefCell::new(None) };
}

/// Calls a function with this thread's filters for a number of mels.
fn with_log_mel(mels: usize, run: impl FnOnce(&mut LogMel)) {
    LOG_MEL.with_borrow_mut(|log_mel| match log_mel {
        Some(log_mel) if log_mel.mels() == mels => run(log_mel),
        other => run(other.insert(LogMel::new(mels))),
    });
}

impl AudioProcessor {
    /// Returns the processor for a model in the cost model; `None` for a model without audio.
    #[must_use]
    pub fn for_model(model: &ModelSpec) -> Option<Self> {
        Self::for_encoder(&model.audio?.encoder)
    }

    /// Returns the processor for a Whisper-like encoder; `None` if the encoder stem has too many mels.
    ///
    /// The number of mels follows from the inputs per token in the encoder stem, `6 * mels + 3 * hidden`: two
    /// outputs of a convolution with width 3 over the mels, and one output of a convolution with width 3 over
    /// the channels.
    #[must_use]
    pub fn for_encoder(encoder: &EncoderSpec) -> Option<Self> {
        let mels = encoder.stem_inputs.saturating_sub(3 * encoder.hidden) / 6;
        Some(Self { mels: u16::try_from(mels).ok()?.clamp(1, 1024), long_clips: LongClips::default() })
    }

    /// Reads a Hugging Face `preprocessor_config.json`; long clips become windows.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not Whisper's, or if rate, hop, transform or window length differs.
    pub fn from_preprocessor_config(json: &Value) -> Result<Self> {
        let read = || {
            let fields = ConfigFields::new(PREPROCESSOR_FILE, json)?;
            let key = "feature_extractor_type";
            if fields.text(key)? != Some("WhisperFeatureExtractor") {
                return Err(fields.invalid(key, "must be `WhisperFeatureExtractor`"));
            }
            for (key, only) in
                [("sampling_rate", 16_000), ("hop_length", 160), ("n_fft", 400), ("chunk_length", 30)]
            {
                if fields.count(key, only)? != only {
                    return Err(fields.invalid(key, format!("must be {only}")));
                }
            }
            for key in ["padding_value", "dither"] {
                if fields.value(key).is_some_and(|value| value.as_f64() != Some(0.0)) {
                    return Err(fields.invalid(key, "must be 0"));
                }
            }
            match fields.count("feature_size", 80)? {
                mels @ 1..=1024 => Ok(Self { mels: mels as u16, long_clips: LongClips::default() }),
                mels => Err(fields.invalid("feature_size", format!("= {mels} is out of range"))),
            }
        };
        read().map_err(|error: dflop_costmodel::Error| Error::Config {
            setting: "preprocessor_config",
            reason: error.to_string(),
        })
    }

    /// Prepares a clip with any rate and any number of channels; an empty clip has no windows.
    ///
    /// # Errors
    /// [`Error::Medium`] if the sample rate is out of range, or the clip is longer than two hours.
    pub fn clip(&self, clip: &Audio) -> Result<AudioFeatures> {
        let refused = |source: BoxError| Error::Medium { medium: "audio clip", source };
        let windows_max = match self.long_clips {
            LongClips::CutOff => 1,
            LongClips::Windows if log_mel::resampled_length(clip) > WINDOWS_MAX * WINDOW_SAMPLES => {
                return Err(refused("the clip is longer than two hours".into()));
            }
            LongClips::Windows => WINDOWS_MAX,
        };
        let samples = log_mel::to_16_khz(clip, windows_max * WINDOW_SAMPLES).map_err(refused)?;
        let length = AudioLength { frames: samples.len() as u64, sample_rate_hz: SAMPLE_RATE_HZ };
        let work = whisper_windows(length).map_err(|refusal| refused(refusal.into()))?;
        let mels = usize::from(self.mels);
        let windows = samples.len().div_ceil(WINDOW_SAMPLES);
        let mut values = vec![0.0; windows * mels * WINDOW_FRAMES];
        let mut attention_mask = vec![0; windows * WINDOW_FRAMES];
        attention_mask[..samples.len().div_ceil(HOP_SAMPLES)].fill(1);
        with_log_mel(mels, |log_mel| {
            let targets = values.chunks_exact_mut(mels * WINDOW_FRAMES);
            for (window, target) in samples.chunks(WINDOW_SAMPLES).zip(targets) {
                log_mel.window(window, WINDOW_SAMPLES, target);
            }
        });
        let tokens = u32::try_from(work.tokens).unwrap_or(u32::MAX);
        Ok(AudioFeatures { values, shape: vec![windows, mels, WINDOW_FRAMES], attention_mask, tokens })
    }
}

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
        if log_mel::resampled_length(clip) > SAMPLES_MAX {
            return Err(refused("the clip is longer than two hours".into()));
        }
        let samples = log_mel::to_16_khz(clip, SAMPLES_MAX).map_err(refused)?;
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
    use serde_json::json;

    use super::*;

    fn clip(frames: usize, sample_rate_hz: u32) -> Audio {
        Audio { sample_rate_hz, channels: 1, samples: vec![0.0; frames], is_truncated: false }
    }

    fn processor(long_clips: LongClips) -> AudioProcessor {
        AudioProcessor { mels: 1, long_clips }
    }

    #[test]
    fn presets_have_the_mels_of_their_encoders() {
        for (name, mels) in [("qwen2-audio-7b", 128), ("omni-7b", 128), ("tiny", 80)] {
            let model = ModelSpec::preset(name).unwrap();
            assert_eq!(AudioProcessor::for_model(&model).unwrap().mels, mels, "{name}");
        }
        assert_eq!(AudioProcessor::for_model(&ModelSpec::preset("qwen2-vl-7b").unwrap()), None);
    }

    #[test]
    fn long_clips_become_windows_or_are_cut_off() {
        let long = clip(560_000, 16_000);
        let windows = processor(LongClips::Windows).clip(&long).unwrap();
        assert_eq!((windows.shape, windows.tokens), (vec![2, 1, 3_000], 875));
        assert_eq!(windows.attention_mask.iter().map(|frame| u32::from(*frame)).sum::<u32>(), 3_500);
        let cut = processor(LongClips::CutOff).clip(&long).unwrap();
        assert_eq!((cut.shape, cut.tokens), (vec![1, 1, 3_000], 750));
    }

    #[test]
    fn an_empty_clip_has_no_window_and_an_endless_one_is_refused() {
        let empty = processor(LongClips::Windows).clip(&clip(0, 16_000)).unwrap();
        assert_eq!((empty.values, empty.shape, empty.tokens), (vec![], vec![0, 1, 3_000], 0));
        let error = processor(LongClips::Windows).clip(&clip(7_300_000, 1_000)).unwrap_err();
        assert_eq!(error.to_string(), "the model cannot take the audio clip");
    }

    #[test]
    fn configurations_of_other_extractors_are_refused() {
        let read = AudioProcessor::from_preprocessor_config;
        let config = json!({"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128,
            "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": 30, "padding_value": 0.0});
        assert_eq!(read(&config).unwrap(), AudioProcessor { mels: 128, long_clips: LongClips::Windows });
        for (key, value) in [
            ("feature_extractor_type", json!("SeamlessM4TFeatureExtractor")),
            ("sampling_rate", json!(24_000)),
            ("hop_length", json!("160")),
            ("padding_value", json!(1.0)),
            ("feature_size", json!(0)),
        ] {
            let mut config = config.clone();
            config[key] = value;
            assert!(read(&config).unwrap_err().to_string().contains(key), "{key}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn tokens_and_windows_are_those_of_the_cost_model(frames in 0usize..2_000_000, rate in 4_000u32..50_000) {
            let features = processor(LongClips::Windows).clip(&clip(frames, rate)).unwrap();
            let length = AudioLength { frames: frames as u64, sample_rate_hz: rate };
            let work = whisper_windows(length).unwrap();
            prop_assert_eq!((features.shape[0] as u64, u64::from(features.tokens)), (work.items, work.tokens));
        }
    }

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
