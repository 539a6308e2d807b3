//! Computes Whisper's mel filters and window: Slaney's scale and area normalization, 0 to 8000 Hz.

use super::FFT_SAMPLES;

/// Number of frequency bins in a real transform.
pub(super) const BINS: usize = FFT_SAMPLES / 2 + 1;
const FREQUENCY_MAX_HZ: f64 = 8_000.0;
/// Slaney's scale is linear below this frequency: 15 mels up to 1000 Hz.
const LINEAR_HZ: f64 = 1_000.0;
const LINEAR_MELS: f64 = 15.0;

/// Triangular filter over the bins from `first_bin` on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MelFilter {
    pub(super) first_bin: usize,
    pub(super) weights: Vec<f64>,
}

/// Returns the mel spectrogram filters, from low to high.
pub(super) fn mel_filters(mels: usize) -> Vec<MelFilter> {
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
pub(super) fn hann_window() -> Vec<f64> {
    let angle = |sample: usize| std::f64::consts::TAU * sample as f64 / FFT_SAMPLES as f64;
    (0..FFT_SAMPLES).map(|sample| 0.5 - 0.5 * angle(sample).cos()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
