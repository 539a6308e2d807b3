//! Counts a sample's work in planner units.

use super::spec::{AudioSpec, ModelSpec, VisionSpec};
use crate::error::Result;
use crate::tokens::audio::AudioRule;
use crate::tokens::{EncoderWork, VisionRule};
use crate::{Module, SampleShape};

/// Units in a sample's media for one encoder, saturating.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MediaUnits {
    /// Tiles, audio windows, or encoder tokens in native-size media: patches, audio in chunks.
    pub units: u32,
    /// Query-key pairs in native-size media in a mean encoder layer: each medium attends within itself, so
    /// there are at most `units²`. 0 for fixed-size units, whose attention is part of the time per unit.
    pub pairs: u64,
    /// Number of media, into which ranks can divide the units.
    pub media: u32,
}

/// Units in a sample for the encoders and the LLM, saturating.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SampleUnits {
    /// Units in each encoder, in [`ModelSpec::encoders`] order.
    pub encoders: Vec<MediaUnits>,
    /// Tokens in the LLM.
    pub tokens: u32,
}

impl MediaUnits {
    /// Returns the units of media with fixed-size tiles or windows.
    #[must_use]
    pub const fn from_tiles(tiles: u32, media: u32) -> Self {
        Self { units: tiles, pairs: 0, media }
    }

    /// Returns the units in a sample's images and videos for a model that processes them in native
    /// resolution. The number of media is that of equal media with the same squares.
    ///
    /// - `squares`: sum of squared patch counts over the sample's media
    /// - `window_squares`: sum of squared patch counts over attention windows; `None` counts all windows as
    ///   full, which is slightly too much, as windows at the edges are smaller
    #[must_use]
    pub fn from_patches(spec: &ModelSpec, patches: u32, squares: u64, window_squares: Option<u64>) -> Self {
        // As many media of one size have these squares.
        let media =
            u64::from(patches).pow(2).checked_div(squares).unwrap_or(0).max(u64::from(patches.min(1)));
        let units = Self { units: patches, pairs: 0, media: saturate(media) };
        let Some(VisionSpec { encoder, rule, .. }) = spec.vision.filter(|vision| vision.rule.is_native())
        else {
            return units;
        };
        let window_patches = if let VisionRule::Native(rule) = rule { rule.window_patches } else { None };
        let full_windows = window_patches.map_or(squares, |side| {
            u64::from(side.get()).pow(2).saturating_mul(u64::from(patches)).min(squares)
        });
        let window_pairs = window_squares.unwrap_or(full_windows);
        let work = EncoderWork { attention_pairs: squares, window_pairs, ..EncoderWork::default() };
        Self { pairs: encoder.mean_layer_pairs(&work), ..units }
    }

    /// Returns the units in a sample's audio clips for a model that processes them in chunks.
    ///
    /// Counts all attention windows as full, which is slightly too much, as a clip's last window is shorter.
    #[must_use]
    pub fn from_audio_tokens(spec: &ModelSpec, tokens: u32) -> Self {
        let units = Self { units: tokens, pairs: 0, media: tokens.min(1) };
        let Some(AudioSpec { rule: AudioRule::Chunks(rule), .. }) = &spec.audio else { return units };
        Self { pairs: rule.window_tokens().min(u64::from(tokens)) * u64::from(tokens), ..units }
    }
}

impl SampleUnits {
    /// Counts a sample's units by a model's token rules.
    ///
    /// # Errors
    /// [`crate::Error`] for a medium that a rule does not support.
    pub fn new(spec: &ModelSpec, shape: &SampleShape) -> Result<Self> {
        let mut units = Self { encoders: Vec::new(), tokens: shape.text_tokens };
        for (module, encoder, rule) in spec.encoders() {
            let work = rule.work(shape)?;
            let is_native = spec.is_native(module);
            let own = if is_native { work.encoder_tokens } else { work.items };
            let pairs = if is_native { encoder.mean_layer_pairs(&work) } else { 0 };
            let media = match module {
                Module::Audio => shape.audio.len(),
                _ => shape.images.len() + shape.videos.len(),
            };
            units.encoders.push(MediaUnits { units: saturate(own), pairs, media: saturate(media as u64) });
            units.tokens = units.tokens.saturating_add(saturate(work.tokens));
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
    use crate::{AudioLength, ImageSize, VideoShape};

    fn shape() -> SampleShape {
        SampleShape {
            text_tokens: 100,
            images: vec![ImageSize { width: 640, height: 480 }, ImageSize { width: 448, height: 448 }],
            videos: vec![VideoShape { frames: 3, width: 1920, height: 1080 }],
            ..SampleShape::default()
        }
    }

    /// Images with 46 x 34 and 32 x 32 patches, and two pairs of 72 x 40 frames; four patches form a token.
    #[test]
    fn patches_and_pairs_of_all_media_add_up() {
        let patches = [1564_u64, 1024, 2880, 2880];
        let pairs: u64 = patches.iter().map(|patches| patches * patches).sum();
        let spec = ModelSpec::preset("qwen2-vl-7b").unwrap();
        let units = SampleUnits::new(&spec, &shape()).unwrap();
        let encoders = vec![MediaUnits { units: 8348, pairs, media: 3 }];
        assert_eq!(units, SampleUnits { encoders, tokens: 100 + 8348 / 4 + 3 * 2 });
        // 28 of 32 layers attend within 8 x 8 patch windows; the windows at the edge are smaller.
        let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
        let windows = 92_560 + 65_536 + 2 * 2880 * 64;
        let units = SampleUnits::new(&spec, &shape()).unwrap();
        let pairs = (4 * pairs + 28 * windows + 16) / 32;
        assert_eq!(units.encoders, [MediaUnits { units: 8348, pairs, media: 3 }]);
    }

    #[test]
    fn tiles_have_no_pairs() {
        let spec = ModelSpec::preset("internvl3-8b").unwrap();
        let image = SampleShape { videos: Vec::new(), ..shape() };
        let units = SampleUnits::new(&spec, &image).unwrap();
        let MediaUnits { units: tiles, pairs, .. } = units.encoders[0];
        assert!(tiles > 2 && units.tokens >= 100 + tiles * 256, "{units:?}");
        assert_eq!(pairs, 0);
        let thin = SampleShape { images: vec![ImageSize { width: 0, height: 9 }], ..shape() };
        assert!(SampleUnits::new(&spec, &thin).is_err());
        let text = SampleShape { text_tokens: 7, ..SampleShape::default() };
        let expected = SampleUnits { encoders: vec![MediaUnits::default()], tokens: 7 };
        assert_eq!(SampleUnits::new(&spec, &text), Ok(expected));
    }

    /// 5 s of audio are 250 encoder tokens: two windows with 100 tokens and one with 50.
    #[test]
    fn audio_in_chunks_has_tokens_and_pairs() {
        let spec = ModelSpec::preset("qwen2.5-omni-7b").unwrap();
        let audio = vec![AudioLength { frames: 80_000, sample_rate_hz: 16_000 }];
        let heard = SampleShape { audio, ..SampleShape::default() };
        let units = SampleUnits::new(&spec, &heard).unwrap();
        assert_eq!(
            units.encoders,
            [MediaUnits::default(), MediaUnits { units: 250, pairs: 22_500, media: 1 }]
        );
        assert_eq!(units.tokens, 125 + 2);
        assert_eq!(
            MediaUnits::from_audio_tokens(&spec, 250),
            MediaUnits { units: 250, pairs: 25_000, media: 1 }
        );
    }

    #[test]
    fn each_encoder_has_units_of_its_own() {
        let spec = ModelSpec::preset("omni-7b").unwrap();
        let heard =
            SampleShape { audio: vec![AudioLength { frames: 640_000, sample_rate_hz: 16_000 }], ..shape() };
        let [of_both, of_seen] = [&heard, &shape()].map(|shape| SampleUnits::new(&spec, shape).unwrap());
        assert_eq!(of_both.encoders.len(), 2);
        assert_eq!(of_both.encoders[0], of_seen.encoders[0]);
        assert_eq!((of_seen.encoders[1], of_both.encoders[1].units), (MediaUnits::default(), 2));
        assert!(of_both.tokens > of_seen.tokens, "{of_both:?}");
    }
}
