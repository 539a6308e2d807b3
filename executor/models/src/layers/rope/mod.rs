//! Rotation angles for text, multimodal sections, and image rows and columns.
//!
//! Frequencies for long contexts: long waves are stretched, short waves stay, medium waves are interpolated.
//!
//! # Source
//! Su et al.: "`RoFormer`", 2021, arXiv:2104.09864; sections: Wang et al.: "Qwen2-VL", 2024,
//! arXiv:2409.12191, section 2.1; scaling by wavelength: "The Llama 3 Herd of Models", 2024,
//! arXiv:2407.21783, as implemented in transformers; [`yarn`] has its own.
//!
//! # Source
//! Peng et al.: "`YaRN`", 2023, arXiv:2309.00071; with the fields and defaults in transformers 5.24.0.

use crate::error::Result;
use dflop_costmodel::config::ConfigFields;
use dflop_device::ops::rope::RopeTable;
use dflop_device::{Device, Tensor};

/// Frequency and position axis for every column pair in a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    table: RopeTable,
    /// Cosine and sine factor.
    magnitude: f64,
}

impl Rope {
    /// Reads the rotation of a language model; `default_theta` applies if the configuration has none.
    ///
    /// # Errors
    /// [`Error::CostModel`](crate::Error::CostModel) that names the invalid field.
    pub fn read(text: &ConfigFields<'_>, head_dim: usize, default_theta: f64) -> Result<Self> {
        // older configurations have `rope_theta` next to `rope_scaling`
        let (scaling, theta) = if text.has("rope_parameters") {
            let parameters = text.child_or_empty("rope_parameters")?;
            let theta = parameters.number("rope_theta", default_theta)?;
            (parameters, theta)
        } else {
            (text.child_or_empty("rope_scaling")?, text.number("rope_theta", default_theta)?)
        };
        Self::of(&scaling, head_dim, theta)
    }

    /// Reads a rotation from a configuration section; `rope_theta` is already read.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn of(scaling: &ConfigFields<'_>, head_dim: usize, theta: f64) -> Result<Self> {
        // older configurations name it `type`
        let key = if scaling.has("rope_type") { "rope_type" } else { "type" };
        let (mut frequencies, mut magnitude) = (frequencies(theta, head_dim), 1.0);
        match scaling.text(key)? {
            None | Some("default" | "mrope") => {}
            Some("linear") => {
                let factor = scaling.number("factor", 1.0)? as f32;
                for frequency in &mut frequencies {
                    *frequency /= factor;
                }
            }
            Some("llama3") => scale_by_wavelength(scaling, &mut frequencies)?,
            Some("yarn") => magnitude = stretch(scaling, theta, &mut frequencies)?,
            Some(other) => {
                return Err(scaling.invalid(key, format!("= \"{other}\" is not supported")).into());
            }
        }
        let axes = match scaling.whole_numbers("mrope_section")? {
            None => vec![0; frequencies.len()],
            Some(sections) => {
                if sections.len() != 3
                    || sections.iter().map(|&pairs| pairs as usize).sum::<usize>() != frequencies.len()
                {
                    let problem = format!("must be three numbers that add up to {}", frequencies.len());
                    return Err(scaling.invalid("mrope_section", problem).into());
                }
                let axes =
                    (0..).zip(&sections).flat_map(|(axis, &pairs)| std::iter::repeat_n(axis, pairs as usize));
                axes.collect()
            }
        };
        Ok(Self { table: RopeTable::new(frequencies, axes), magnitude })
    }

    /// Interleaves the section axes, one pair after another, as long as an axis has pairs left: layer, row,
    /// column, layer, … Remaining pairs rotate by layer.
    ///
    /// # Source
    /// Qwen Team: "Qwen3-VL Technical Report", 2025, arXiv:2511.21631, section 2.1;
    /// `Qwen3VLTextRotaryEmbedding` in transformers 5.24.0.
    #[must_use]
    pub fn interleaved(self) -> Self {
        let mut left = [0_usize; 3];
        self.table.axes.iter().for_each(|&axis| left[usize::from(axis)] += 1);
        let axis = |pair: usize| if pair < 3 * left[pair % 3] { (pair % 3) as u8 } else { 0 };
        let axes = (0..self.table.axes.len()).map(axis).collect();
        Self { table: RopeTable::new(self.table.frequencies, axes), ..self }
    }

    /// Rotates the first pairs by the first axis, and so on.
    #[must_use]
    pub(crate) fn with_sections(self, sections: [u32; 3]) -> Self {
        let axes = (0..).zip(sections).flat_map(|(axis, pairs)| std::iter::repeat_n(axis, pairs as usize));
        Self { table: RopeTable::new(self.table.frequencies, axes.collect()), ..self }
    }

    /// Returns an image rotation: the first half of the pairs rotates by row, the second by column.
    #[must_use]
    pub fn for_images(theta: f64, head_dim: usize) -> Self {
        let half = frequencies(theta, head_dim / 2);
        let axes = [vec![0; half.len()], vec![1; half.len()]].concat();
        Self { table: RopeTable::new([half.clone(), half].concat(), axes), magnitude: 1.0 }
    }

    /// Returns the additional score factor for a stretched context, as in DeepSeek-V3.
    ///
    /// # Errors
    /// [`Error::CostModel`](crate::Error::CostModel) that names the invalid field.
    pub(crate) fn score_scale(text: &ConfigFields<'_>) -> Result<f64> {
        let key = if text.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
        let scaling = text.child_or_empty(key)?;
        let kind = scaling.text("rope_type")?.or(scaling.text("type")?).unwrap_or("default");
        let scale_all = scaling.number("mscale_all_dim", 0.0)?;
        if kind == "default" || scale_all == 0.0 {
            return Ok(1.0);
        }
        let magnitude = magnitude(scaling.number("factor", 1.0)?, scale_all);
        Ok(magnitude * magnitude)
    }

    /// Returns the number of rotated columns in a head.
    #[must_use]
    pub fn width(&self) -> usize {
        2 * self.table.frequencies.len()
    }

    /// Returns the number of position axes.
    #[must_use]
    pub fn axes(&self) -> usize {
        self.table.axes.iter().max().map_or(1, |&axis| usize::from(axis) + 1)
    }

    /// Computes cosines and sines, `[tokens, head_dim / 2]`, for positions `[axes, tokens]`.
    pub fn angles<D: Device>(
        &self,
        device: &D,
        positions: &[u32],
        tokens: usize,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let (mut cos, mut sin) =
            device.rope_angles(&self.table, &device.upload_indices(positions)?, tokens)?;
        if (self.magnitude - 1.0).abs() > f64::EPSILON {
            device.scale(self.magnitude as f32, &mut cos)?;
            device.scale(self.magnitude as f32, &mut sin)?;
        }
        Ok((cos, sin))
    }
}

/// Computes `1 / theta^(2 i / dim)`.
fn frequencies(theta: f64, dim: usize) -> Vec<f32> {
    let frequency = |pair: usize| 1.0 / libm::powf(theta as f32, (2 * pair) as f32 / dim as f32);
    (0..dim / 2).map(frequency).collect()
}

/// Divides the frequencies of long waves by a factor, keeps short-wave frequencies, and interpolates in
/// between.
fn scale_by_wavelength(scaling: &ConfigFields<'_>, frequencies: &mut [f32]) -> Result<()> {
    let factor = scaling.number("factor", 8.0)? as f32;
    let low = scaling.number("low_freq_factor", 1.0)? as f32;
    let high = scaling.number("high_freq_factor", 4.0)? as f32;
    let old = scaling.number("original_max_position_embeddings", 8192.0)? as f32;
    for frequency in frequencies {
        let wavelength = 2.0 * std::f32::consts::PI / *frequency;
        if wavelength > old / low {
            *frequency /= factor;
        } else if wavelength >= old / high {
            let smooth = (old / wavelength - low) / (high - low);
            *frequency = (1.0 - smooth) * *frequency / factor + smooth * *frequency;
        }
    }
    Ok(())
}

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
fn stretch(scaling: &ConfigFields<'_>, theta: f64, frequencies: &mut [f32]) -> Result<f64> {
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
    use dflop_device::{Cpu, Runtime};
    use serde_json::json;

    fn read(document: &serde_json::Value) -> Result<Rope> {
        Rope::read(&ConfigFields::new("config.json", document)?, 8, 10_000.0)
    }

    #[test]
    fn sections_take_their_axis() {
        let rope =
            read(&json!({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}})).unwrap();
        assert_eq!((rope.axes(), &rope.table.axes[..]), (3, &[0, 1, 2, 2][..]));
        let old =
            json!({"rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}});
        assert_eq!(read(&old).unwrap(), rope);
        let device = Cpu::new(1).unwrap();
        let (cos, _) = rope.angles(&device, &[1, 2, 0], 1).unwrap();
        let cos = device.download(&cos).unwrap();
        let truth = [1.0_f32.cos(), (2.0 * rope.table.frequencies[1]).cos(), 1.0, 1.0];
        assert!(cos.iter().zip(truth).all(|(a, b)| (a - b).abs() < 1e-7));
    }

    #[test]
    fn sections_may_take_turns() {
        let rope = read(&json!({"rope_parameters": {"mrope_section": [2, 1, 1]}})).unwrap().interleaved();
        assert_eq!(&rope.table.axes[..], &[0, 1, 2, 0]);
        assert_eq!(rope.axes(), 3);
    }

    #[test]
    fn unsupported_rotations_are_refused_by_name() {
        for (document, part) in [
            (
                json!({"rope_parameters": {"rope_type": "longrope"}}),
                "rope_parameters.rope_type` = \"longrope\"",
            ),
            (
                json!({"rope_parameters": {"rope_type": "yarn"}}),
                "original_max_position_embeddings` is missing",
            ),
            (json!({"rope_scaling": {"type": "dynamic"}}), "rope_scaling.type` = \"dynamic\""),
            (json!({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}), "add up to 4"),
        ] {
            assert!(read(&document).unwrap_err().to_string().contains(part));
        }
    }

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
