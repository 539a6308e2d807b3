//! Frequencies for long contexts: long waves are stretched, short waves stay, medium waves are interpolated.
//!
//! # Source
//! Peng et al.: "`YaRN`", 2023, arXiv:2309.00071; with the fields and defaults in transformers 5.24.0.

use dflop_costmodel::config::ConfigFields;

use crate::error::Result;

/// Original context tokens, stretch factor, and bounds between waves.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    factor: f64,
    tokens: f64,
    /// Rotations within the original context: for the shortest waves that are not kept and for the longest
    /// waves that are not stretched in full.
    rotations: [f64; 2],
    /// Whether bounds are rounded to complete pairs.
    is_truncated: bool,
}

/// Stretches frequencies, and returns the cosine and sine factor.
pub(super) fn stretch(scaling: &ConfigFields<'_>, theta: f64, frequencies: &mut [f32]) -> Result<f64> {
    let tokens = scaling.number("original_max_position_embeddings", 0.0)?;
    if tokens <= 0.0 {
        return Err(scaling.invalid("original_max_position_embeddings", "is missing").into());
    }
    if !scaling.has("factor") {
        return Err(scaling.invalid("factor", "is missing").into());
    }
    let factor = scaling.number("factor", 1.0)?;
    let rotations = [scaling.number("beta_fast", 32.0)?, scaling.number("beta_slow", 1.0)?];
    let is_truncated = scaling.flag("truncate", true)?;
    if !(factor > 0.0 && rotations.iter().all(|&rotations| rotations > 0.0) && theta > 1.0) {
        return Err(scaling
            .invalid("factor", format!("= {factor} must be positive, and so must betas"))
            .into());
    }
    Stretch { factor, tokens, rotations, is_truncated }.apply(theta, frequencies);
    if scaling.has("attention_factor") {
        return Ok(scaling.number("attention_factor", 1.0)?);
    }
    let [scale, scale_all] = [scaling.number("mscale", 0.0)?, scaling.number("mscale_all_dim", 0.0)?];
    Ok(if scale != 0.0 && scale_all != 0.0 {
        magnitude(factor, scale) / magnitude(factor, scale_all)
    } else {
        magnitude(factor, 1.0)
    })
}

/// Returns the query and key factor that keeps the attention entropy in a stretched context.
pub(crate) fn magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 }
}

impl Stretch {
    fn apply(&self, theta: f64, frequencies: &mut [f32]) {
        let dim = 2.0 * frequencies.len() as f64;
        // pair that rotates this often within the original context
        let pair = |rotations: f64| {
            dim * libm::log(self.tokens / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(theta))
        };
        let [mut low, mut high] = self.rotations.map(pair);
        if self.is_truncated {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if high <= low {
            high += 0.001;
        }
        for (index, frequency) in frequencies.iter_mut().enumerate() {
            let kept = 1.0 - ((index as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let stretched = *frequency / self.factor as f32;
            *frequency = stretched * (1.0 - kept) + *frequency * kept;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waves_stay_and_long_ones_are_stretched() {
        let all: Vec<f32> = (0..8).map(|pair| 1.0 / libm::powf(10_000.0, pair as f32 / 8.0)).collect();
        let mut found = all.clone();
        let stretch = Stretch { factor: 4.0, tokens: 4096.0, rotations: [32.0, 1.0], is_truncated: true };
        stretch.apply(10_000.0, &mut found);
        assert_eq!(found[..2], all[..2]);
        assert!((found[7] - all[7] / 4.0).abs() < 1e-9);
        assert!(found.is_sorted_by(|a, b| a > b));
        assert!((magnitude(40.0, 1.0) - 1.368_888).abs() < 1e-6 && magnitude(0.5, 1.0) == 1.0);
    }
}
