//! Counts the work of a sample in the units of a planner.

use super::spec::ModelSpec;
use crate::error::Result;
use crate::shape::SampleShape;

/// Units of a sample in the encoder and in the LLM, saturating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SampleUnits {
    /// Tiles, windows of audio, or patches of media in native resolution.
    pub encoder_units: u32,
    /// Tokens in the LLM.
    pub tokens: u32,
    /// Query-key pairs of media in native resolution in a mean encoder layer; 0 for units of one size.
    pub pairs: u64,
}

impl SampleUnits {
    /// Counts the units of a sample by the token rules of a model; of several encoders, those of all.
    ///
    /// # Errors
    /// [`crate::Error`] for a medium that a rule does not take.
    pub fn new(spec: &ModelSpec, shape: &SampleShape) -> Result<Self> {
        let mut units = Self { encoder_units: 0, tokens: shape.text_tokens, pairs: 0 };
        for (module, encoder, rule) in spec.encoders() {
            let work = rule.work(shape)?;
            let is_native = spec.is_native(module);
            let own = if is_native { work.encoder_tokens } else { work.items };
            units.encoder_units = units.encoder_units.saturating_add(saturate(own));
            units.tokens = units.tokens.saturating_add(saturate(work.tokens));
            if is_native {
                units.pairs = units.pairs.saturating_add(encoder.mean_layer_pairs(&work));
            }
        }
        Ok(units)
    }
}

fn saturate(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageSize, VideoShape};

    fn shape() -> SampleShape {
        SampleShape {
            text_tokens: 100,
            images: vec![ImageSize { width: 640, height: 480 }, ImageSize { width: 448, height: 448 }],
            videos: vec![VideoShape { frames: 3, width: 1920, height: 1080 }],
            ..SampleShape::default()
        }
    }

    /// Images of 46 x 34 and 32 x 32 patches, and two pairs of frames of 72 x 40; four patches make a token.
    #[test]
    fn patches_and_pairs_of_all_media_add_up() {
        let patches = [1564_u64, 1024, 2880, 2880];
        let pairs: u64 = patches.iter().map(|patches| patches * patches).sum();
        let spec = ModelSpec::preset("qwen2-vl-7b").unwrap();
        let units = SampleUnits::new(&spec, &shape()).unwrap();
        assert_eq!(units, SampleUnits { encoder_units: 8348, tokens: 100 + 8348 / 4 + 3 * 2, pairs });
        // 28 of 32 layers attend within windows of 8 x 8 patches; the ones at the edge are smaller.
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        let windows = 92_560 + 65_536 + 2 * 2880 * 64;
        let units = SampleUnits::new(&spec, &shape()).unwrap();
        assert_eq!((units.encoder_units, units.pairs), (8348, (4 * pairs + 28 * windows + 16) / 32));
    }

    #[test]
    fn tiles_have_no_pairs() {
        let spec = ModelSpec::preset("internvl3-8b").unwrap();
        let image = SampleShape { videos: Vec::new(), ..shape() };
        let units = SampleUnits::new(&spec, &image).unwrap();
        assert!(units.encoder_units > 2 && units.tokens >= 100 + units.encoder_units * 256, "{units:?}");
        assert_eq!(units.pairs, 0);
        let thin = SampleShape { images: vec![ImageSize { width: 0, height: 9 }], ..shape() };
        assert!(SampleUnits::new(&spec, &thin).is_err());
        let text = SampleShape { text_tokens: 7, ..SampleShape::default() };
        let expected = SampleUnits { encoder_units: 0, tokens: 7, pairs: 0 };
        assert_eq!(SampleUnits::new(&spec, &text), Ok(expected));
    }
}
