//! Spectrograms: resamples any rate and number of channels to 16 kHz mono, and computes log-mel features.
//!
//! Transforms 400 samples every 160, in double precision; the result is rounded to single precision where the
//! NumPy version rounds, so that values differ only in the last bits of the logarithm.
//!
//! Channels are averaged. The rate is changed by a windowed sinc in Fourier transform blocks (crate `rubato`,
//! Blackman-Harris squared window) with the delay removed; the result has ⌈frames x 16000 / rate⌉ samples.
//! The feature extractors in `transformers` accept only 16 kHz.

use super::{FFT_SAMPLES, HOP_SAMPLES, SAMPLE_RATE_HZ};
use dflop_samples::BoxError;
use dflop_samples::media::Audio;
use realfft::num_complex::Complex64;
use realfft::{RealFftPlanner, RealToComplex};
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};
use std::borrow::Cow;
use std::sync::Arc;

/// Power below which a filter is treated as silent.
const POWER_MIN: f64 = 1e-10;

/// Transform, filters and buffers for a given number of mels.
pub(super) struct LogMel {
    filters: Vec<MelFilter>,
    hann: Vec<f64>,
    transform: Arc<dyn RealToComplex<f64>>,
    scratch: Vec<Complex64>,
    frame: Vec<f64>,
    spectrum: Vec<Complex64>,
    power: [f64; BINS],
}

impl LogMel {
    pub(super) fn new(mels: usize) -> Self {
        let transform = RealFftPlanner::new().plan_fft_forward(FFT_SAMPLES);
        Self {
            filters: mel_filters(mels),
            hann: hann_window(),
            scratch: transform.make_scratch_vec(),
            frame: vec![0.0; FFT_SAMPLES],
            spectrum: transform.make_output_vec(),
            transform,
            power: [0.0; BINS],
        }
    }

    pub(super) fn mels(&self) -> usize {
        self.filters.len()
    }

    /// Writes the first frames of a window's spectrogram.
    ///
    /// - `samples`: 16 kHz mono, at most `window_samples`; silence follows
    /// - `out`: `[mels, frames]`
    pub(super) fn window(&mut self, samples: &[f32], window_samples: usize, out: &mut [f32]) {
        let frames = out.len() / self.mels().max(1);
        if frames == 0 {
            return;
        }
        let silence = (POWER_MIN as f32).log10();
        let mut loudest = silence;
        for frame in 0..frames {
            if !self.cut_frame(samples, window_samples, frame) {
                for row in out.chunks_exact_mut(frames) {
                    row[frame] = silence;
                }
                continue;
            }
            self.transform_frame();
            for (filter, row) in self.filters.iter().zip(out.chunks_exact_mut(frames)) {
                let bins = &self.power[filter.first_bin..];
                let power: f64 = filter.weights.iter().zip(bins).map(|(weight, bin)| weight * bin).sum();
                let value = (power.max(POWER_MIN) as f32).log10();
                loudest = loudest.max(value);
                row[frame] = value;
            }
        }
        // Values are base-10 logarithms of power: 8 are 80 dB.
        let floor = loudest - 8.0;
        for value in out {
            *value = (value.max(floor) + 4.0) / 4.0;
        }
    }

    /// Copies the samples around a frame, reflected at both window ends and weighted by the Hann window;
    /// returns whether there are any.
    fn cut_frame(&mut self, samples: &[f32], window_samples: usize, frame: usize) -> bool {
        let first = (frame * HOP_SAMPLES).checked_sub(FFT_SAMPLES / 2);
        if let Some(samples) = first.and_then(|first| samples.get(first..first + FFT_SAMPLES)) {
            for ((target, sample), weight) in self.frame.iter_mut().zip(samples).zip(&self.hann) {
                *target = f64::from(*sample) * weight;
            }
            return true;
        }
        let mut has_samples = false;
        for (offset, (target, weight)) in self.frame.iter_mut().zip(&self.hann).enumerate() {
            let position = (frame * HOP_SAMPLES + offset).abs_diff(FFT_SAMPLES / 2);
            let position = position.min((2 * (window_samples - 1)).abs_diff(position));
            let sample = samples.get(position);
            has_samples |= sample.is_some();
            *target = sample.map_or(0.0, |sample| f64::from(*sample) * weight);
        }
        has_samples
    }

    fn transform_frame(&mut self) {
        let done =
            self.transform.process_with_scratch(&mut self.frame, &mut self.spectrum, &mut self.scratch);
        debug_assert!(done.is_ok(), "the buffers have the sizes of this transform");
        for (power, bin) in self.power.iter_mut().zip(&self.spectrum) {
            // NumPy's version stores the spectrum in single precision before squaring.
            let [real, imaginary] = [bin.re, bin.im].map(|part| f64::from(part as f32));
            *power = real * real + imaginary * imaginary;
        }
    }
}

/// Number of frequency bins in a real transform.
const BINS: usize = FFT_SAMPLES / 2 + 1;
const FREQUENCY_MAX_HZ: f64 = 8_000.0;
/// Slaney's scale is linear below this frequency: 15 mels up to 1000 Hz.
const LINEAR_HZ: f64 = 1_000.0;
const LINEAR_MELS: f64 = 15.0;

/// Triangular filter over the bins from `first_bin` on.
#[derive(Clone, Debug, PartialEq)]
struct MelFilter {
    first_bin: usize,
    weights: Vec<f64>,
}

/// Returns the mel spectrogram filters, from low to high.
fn mel_filters(mels: usize) -> Vec<MelFilter> {
    let top = hertz_to_mel(FREQUENCY_MAX_HZ);
    let step = top / (mels + 1) as f64;
    let corners: Vec<f64> = (0..mels + 2).map(|corner| mel_to_hertz(corner as f64 * step)).collect();
    corners.windows(3).map(|corners| triangle([corners[0], corners[1], corners[2]])).collect()
}

fn triangle([low, middle, high]: [f64; 3]) -> MelFilter {
    let area = 2.0 / (high - low);
    let weight = |bin: usize| {
        let hertz = bin as f64 * FREQUENCY_MAX_HZ / (BINS - 1) as f64;
        let (rise, fall) = ((hertz - low) / (middle - low), (high - hertz) / (high - middle));
        rise.min(fall).max(0.0) * area
    };
    let is_inside = |bin: &usize| weight(*bin) > 0.0;
    let first_bin = (0..BINS).find(is_inside).unwrap_or(0);
    MelFilter { first_bin, weights: (first_bin..BINS).take_while(is_inside).map(weight).collect() }
}

fn hertz_to_mel(hertz: f64) -> f64 {
    if hertz < LINEAR_HZ {
        return 3.0 * hertz / 200.0;
    }
    LINEAR_MELS + (hertz / LINEAR_HZ).ln() * (27.0 / 6.4_f64.ln())
}

fn mel_to_hertz(mel: f64) -> f64 {
    if mel < LINEAR_MELS {
        return 200.0 * mel / 3.0;
    }
    LINEAR_HZ * ((mel - LINEAR_MELS) * (6.4_f64.ln() / 27.0)).exp()
}

/// Returns a periodic Hann window.
fn hann_window() -> Vec<f64> {
    let angle = |sample: usize| std::f64::consts::TAU * sample as f64 / FFT_SAMPLES as f64;
    (0..FFT_SAMPLES).map(|sample| 0.5 - 0.5 * angle(sample).cos()).collect()
}

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
    use super::super::{WINDOW_FRAMES, WINDOW_SAMPLES};
    use super::*;

    #[test]
    fn silence_is_flat() {
        let mut out = vec![0.0; 80 * WINDOW_FRAMES];
        let samples = vec![0.0; 5_000];
        LogMel::new(80).window(&samples, WINDOW_SAMPLES, &mut out);
        assert!(out.iter().all(|value| (*value + 1.5).abs() < 1e-6));
    }

    #[test]
    fn a_tone_is_loudest_in_its_own_filter() {
        let samples: Vec<f32> = (0..WINDOW_SAMPLES)
            .map(|sample| (sample as f32 * 440.0 / 16_000.0 * std::f32::consts::TAU).sin())
            .collect();
        let mut out = vec![0.0; 80 * WINDOW_FRAMES];
        LogMel::new(80).window(&samples, WINDOW_SAMPLES, &mut out);
        let at = |mel: usize| out[mel * WINDOW_FRAMES + 1_500];
        let loudest = (0..80).max_by(|a, b| at(*a).total_cmp(&at(*b))).unwrap();
        // 440 Hz are 6.6 mels; filter corners are 45.2 / 81 mels apart.
        assert!((10..=12).contains(&loudest), "{loudest}");
    }

    #[test]
    fn the_scale_is_linear_below_a_kilohertz_and_inverts() {
        assert_eq!((hertz_to_mel(200.0), hertz_to_mel(1_000.0)), (3.0, 15.0));
        for hertz in [10.0, 999.0, 1_000.0, 1_001.0, 8_000.0] {
            assert!((mel_to_hertz(hertz_to_mel(hertz)) - hertz).abs() < 1e-9);
        }
    }

    #[test]
    fn every_filter_has_bins_and_they_rise() {
        for mels in [80, 128] {
            let filters = mel_filters(mels);
            assert_eq!(filters.len(), mels);
            assert!(filters.iter().all(|filter| !filter.weights.is_empty()));
            assert!(filters.is_sorted_by_key(|filter| filter.first_bin));
        }
    }

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
