//! Resamples any rate and number of channels to 16 kHz mono.
//!
//! Channels are averaged. The rate is changed by a windowed sinc in Fourier transform blocks (crate `rubato`,
//! Blackman-Harris squared window) with the delay removed; the result has ⌈frames x 16000 / rate⌉ samples.
//! The feature extractors in `transformers` accept only 16 kHz.

use std::borrow::Cow;

use dflop_samples::BoxError;
use dflop_samples::media::Audio;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

use super::SAMPLE_RATE_HZ;

/// Supported sample rates in Hz.
const RATES_HZ: std::ops::RangeInclusive<u32> = 1_000..=768_000;
/// Minimum number of frames per resampler block.
const CHUNK_FRAMES: u32 = 512;

/// Resamples the start of a clip to 16 kHz mono.
///
/// - `samples_max`: limit at 16 kHz; the rest is cut off
pub(super) fn to_16_khz(clip: &Audio, samples_max: usize) -> Result<Cow<'_, [f32]>, BoxError> {
    if !RATES_HZ.contains(&clip.sample_rate_hz) {
        return Err(format!(
            "the sample rate of {} Hz is out of range, expected 1,000 to 768,000",
            clip.sample_rate_hz
        )
        .into());
    }
    let samples = resampled_length(clip).min(samples_max);
    if clip.sample_rate_hz == SAMPLE_RATE_HZ {
        let mono = mono(clip, samples);
        return Ok(match mono {
            Cow::Borrowed(mono) => Cow::Borrowed(&mono[..samples]),
            Cow::Owned(mono) => Cow::Owned(mono),
        });
    }
    // The filter reads up to one chunk after the last sample.
    let needed = (samples as u64 * u64::from(clip.sample_rate_hz)).div_ceil(u64::from(SAMPLE_RATE_HZ));
    let frames = clip.frames().min(needed as usize + 8 * chunk_frames(clip.sample_rate_hz));
    let mono: Vec<f64> = mono(clip, frames).iter().map(|sample| f64::from(*sample)).collect();
    let (input, output) = (clip.sample_rate_hz as usize, SAMPLE_RATE_HZ as usize);
    let (chunk, window) = (chunk_frames(clip.sample_rate_hz), WindowFunction::BlackmanHarris2);
    // In 64 bits, like the spectrograms: a single set of Fourier transforms is compiled, not two.
    let mut resampler = Fft::<f64>::new_custom(input, output, chunk, 1, 1, window, FixedSync::Both)?;
    let resampled = resampler.process_all(&InterleavedSlice::new(&mono, 1, frames)?, frames, None)?;
    let mut resampled: Vec<f32> = resampled.take_data().into_iter().map(|sample| sample as f32).collect();
    resampled.resize(samples, 0.0);
    Ok(Cow::Owned(resampled))
}

/// Returns the number of frames per chunk: a multiple of the period in which both rates align, and even, so
/// that the filter has a middle sample and the delay is an integer.
fn chunk_frames(rate_hz: u32) -> usize {
    let (mut divisor, mut rest) = (rate_hz, SAMPLE_RATE_HZ);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    let period = rate_hz / divisor;
    (period * CHUNK_FRAMES.div_ceil(period).next_multiple_of(2)) as usize
}

/// Returns the number of samples in a clip at 16 kHz, rounded up.
pub(super) fn resampled_length(clip: &Audio) -> usize {
    let samples = clip.frames() as u64 * u64::from(SAMPLE_RATE_HZ);
    samples.div_ceil(u64::from(clip.sample_rate_hz.max(1))) as usize
}

/// Returns the channel mean for the first `frames` frames.
fn mono(clip: &Audio, frames: usize) -> Cow<'_, [f32]> {
    let channels = usize::from(clip.channels.max(1));
    let samples = &clip.samples[..clip.samples.len().min(frames * channels)];
    if channels == 1 {
        return Cow::Borrowed(samples);
    }
    let mean = |frame: &[f32]| frame.iter().sum::<f32>() / channels as f32;
    Cow::Owned(samples.chunks_exact(channels).map(mean).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tone(frames: usize, sample_rate_hz: u32) -> Vec<f32> {
        let step = 440.0 / f64::from(sample_rate_hz) * std::f64::consts::TAU;
        (0..frames).map(|frame| (0.5 * (frame as f64 * step).sin()) as f32).collect()
    }

    fn clip(samples: Vec<f32>, channels: u16, sample_rate_hz: u32) -> Audio {
        Audio { sample_rate_hz, channels, samples, is_truncated: false }
    }

    #[test]
    fn a_tone_stays_where_it_is_at_every_rate() {
        let expected = tone(32_000, 16_000);
        for rate in [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 44_101] {
            let clip = clip(tone(2 * rate as usize, rate), 1, rate);
            let resampled = to_16_khz(&clip, usize::MAX).unwrap();
            assert_eq!(resampled.len(), 32_000, "{rate}");
            for (sample, (one, other)) in resampled.iter().zip(&expected).enumerate().skip(2_000).take(28_000)
            {
                assert!((one - other).abs() < 1e-3, "{rate} Hz, sample {sample}: {one} for {other}");
            }
        }
    }

    #[test]
    fn lengths_are_rounded_up_and_cut_to_the_limit() {
        for (frames, rate, samples) in [(0, 8_000, 0), (1, 44_100, 1), (441, 44_100, 160), (443, 44_100, 161)]
        {
            let clip = clip(vec![0.1; frames], 1, rate);
            assert_eq!(to_16_khz(&clip, usize::MAX).unwrap().len(), samples);
            assert_eq!(to_16_khz(&clip, 100).unwrap().len(), samples.min(100));
        }
    }

    #[test]
    fn cutting_early_changes_nothing_before_the_cut() {
        let clip = clip(tone(200_000, 44_100), 1, 44_100);
        let whole = to_16_khz(&clip, usize::MAX).unwrap();
        assert_eq!(to_16_khz(&clip, 16_000).unwrap()[..], whole[..16_000]);
    }

    #[test]
    fn channels_are_averaged() {
        let clip = clip(vec![0.5, -0.5, 0.25, 0.75], 2, 16_000);
        assert_eq!(to_16_khz(&clip, usize::MAX).unwrap()[..], [0.0, 0.5]);
    }

    #[test]
    fn rates_that_no_audio_has_are_refused() {
        for rate in [0, 999, 768_001] {
            assert!(to_16_khz(&clip(vec![0.0; 4], 1, rate), usize::MAX).is_err());
        }
    }
}
