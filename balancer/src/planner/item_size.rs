//! Sizes samples by the work of both modules.

use dflop_costmodel::model::VisionSpec;
use dflop_costmodel::tokens::{EncoderWork, VisionRule};
use dflop_costmodel::{ModelSpec, SampleShape};

/// Size of a sample in both modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ItemSize {
    /// Units of the encoder: tiles, windows of audio, or patches of media in native resolution; 0 for text
    /// alone.
    pub tiles: u32,
    /// Tokens in the LLM, at least 1.
    pub tokens: u32,
    /// Query-key pairs of the media in a mean encoder layer, for media in native resolution: each attends
    /// within itself, so that the sample has at most `tiles²`. 0 where all units have one size, because their
    /// attention is part of the time per unit.
    pub pairs: u64,
}

impl ItemSize {
    /// Returns the size of a sample whose tiles or windows have one size.
    #[must_use]
    pub const fn of_tiles(tiles: u32, tokens: u32) -> Self {
        Self { tiles, tokens, pairs: 0 }
    }

    /// Returns the size of a sample whose media come in native resolution, for a model that sees them so.
    ///
    /// - `squares`: sum over its media of their squared patches
    /// - `window_squares`: sum over attention windows of their squared patches; `None` takes all windows as
    ///   full, which is a little too much, as windows at the edges are smaller
    #[must_use]
    pub fn of_patches(
        spec: &ModelSpec,
        patches: u32,
        tokens: u32,
        squares: u64,
        window_squares: Option<u64>,
    ) -> Self {
        let mut size = Self::of_tiles(patches, tokens);
        let Some(VisionSpec { encoder, rule: VisionRule::Native(rule) }) = &spec.vision else { return size };
        let full_windows = rule.window_patches.map_or(squares, |side| {
            u64::from(side.get()).pow(2).saturating_mul(u64::from(patches)).min(squares)
        });
        let window_pairs = window_squares.unwrap_or(full_windows);
        let work = EncoderWork { attention_pairs: squares, window_pairs, ..EncoderWork::default() };
        size.pairs = encoder.mean_layer_pairs(&work);
        size
    }

    /// Computes the size of a sample by the token rules of a model with at most one encoder; saturating.
    ///
    /// A model with several encoders has the units of all of them.
    ///
    /// # Errors
    /// [`dflop_costmodel::Error`] for a medium that a rule does not take.
    pub fn of_sample(spec: &ModelSpec, shape: &SampleShape) -> Result<Self, dflop_costmodel::Error> {
        let mut size = Self::of_tiles(0, shape.text_tokens);
        for (module, encoder, rule) in spec.encoders() {
            let work = rule.work(shape)?;
            let is_native = spec.is_native(module);
            let units = if is_native { work.encoder_tokens } else { work.items };
            size.tiles = size.tiles.saturating_add(saturate(units));
            size.tokens = size.tokens.saturating_add(saturate(work.tokens));
            if is_native {
                size.pairs = size.pairs.saturating_add(encoder.mean_layer_pairs(&work));
            }
        }
        Ok(size)
    }
}

fn saturate(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::{ImageSize, VideoShape};

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
        let size = ItemSize::of_sample(&spec, &shape()).unwrap();
        assert_eq!(size, ItemSize { tiles: 8348, tokens: 100 + 8348 / 4 + 3 * 2, pairs });
        // 28 of 32 layers attend within windows of 8 x 8 patches; the ones at the edge are smaller.
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        let windows = 92_560 + 65_536 + 2 * 2880 * 64;
        let size = ItemSize::of_sample(&spec, &shape()).unwrap();
        assert_eq!((size.tiles, size.pairs), (8348, (4 * pairs + 28 * windows + 16) / 32));
    }

    #[test]
    fn patches_of_a_table_are_those_of_a_sample() {
        let pairs = 1564 * 1564 + 1024 * 1024 + 2 * 2880 * 2880;
        let windows = 92_560 + 65_536 + 2 * 2880 * 64;
        for name in ["qwen2-vl-7b", "qwen2.5-vl-7b"] {
            let spec = ModelSpec::preset(name).unwrap();
            let size = ItemSize::of_sample(&spec, &shape()).unwrap();
            let windows = Some(if name == "qwen2-vl-7b" { pairs } else { windows });
            assert_eq!(ItemSize::of_patches(&spec, 8348, size.tokens, pairs, windows), size);
            assert!(ItemSize::of_patches(&spec, 8348, size.tokens, pairs, None).pairs >= size.pairs);
        }
    }

    #[test]
    fn tiles_have_no_pairs() {
        let spec = ModelSpec::preset("internvl3-8b").unwrap();
        let image = SampleShape { videos: Vec::new(), ..shape() };
        let size = ItemSize::of_sample(&spec, &image).unwrap();
        assert!(size.tiles > 2 && size.tokens >= 100 + size.tiles * 256, "{size:?}");
        assert_eq!(size.pairs, 0);
        let thin = SampleShape { images: vec![ImageSize { width: 0, height: 9 }], ..shape() };
        assert!(ItemSize::of_sample(&spec, &thin).is_err());
        let text = SampleShape { text_tokens: 7, ..SampleShape::default() };
        assert_eq!(ItemSize::of_sample(&spec, &text), Ok(ItemSize::of_tiles(0, 7)));
    }
}
