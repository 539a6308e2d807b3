//! Parity with Hugging Face transformers: logits, loss and every gradient for tiny models.
//!
//! Inputs are packed samples with uneven lengths and media, recorded by `tests/record/executor_parity.py`.
//! `encoder_context` uploads the media of a recording.

pub(crate) mod fixture;
pub mod language_models;
pub mod media;
pub mod omni;

use crate::claim::Claim;
use crate::device::TestBackend;
use dflop_device::Device;
use dflop_models::MicrobatchContext;
use dflop_models::encoder::{EncoderConfig, EncoderInput, TiledMedium};
use fixture::Fixture;

/// Lists the claims in this suite.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let files = [language_models::claims::<B>(), media::claims::<B>(), omni::claims::<B>()];
    files.into_iter().flatten().collect()
}

/// Placeholder ids for images, audio and videos.
pub(crate) const PLACEHOLDERS: [i64; 2] = [46, 47];

/// Returns the encoder of a recorded model.
pub(crate) fn fixture_encoder(fixture: &Fixture) -> EncoderConfig {
    let vision = EncoderConfig::vision(&fixture.config).unwrap();
    vision.or_else(|| EncoderConfig::audio(&fixture.config).unwrap()).unwrap()
}

/// Recorded media.
pub(crate) fn encoder_context<D: Device>(
    fixture: &Fixture,
    config: &EncoderConfig,
    device: &D,
) -> MicrobatchContext<D> {
    let unsigned = |name: &str| -> Vec<u32> {
        fixture.integers(name).into_iter().map(|value| u32::try_from(value).unwrap()).collect()
    };
    let context = match fixture.name {
        "llava_onevision" => {
            let images = unsigned("image_sizes");
            let shown = |&[height, width, tiles]: &[u32; 3]| match height {
                0 => TiledMedium::Video { frames: tiles },
                _ => TiledMedium::Image { height, width, tiles },
            };
            let shown: Vec<TiledMedium> = images.as_chunks::<3>().0.iter().map(shown).collect();
            let pixels = fixture.floats("pixel_values");
            config.context(device, &EncoderInput::Tiles { pixels: &pixels, shown: &shown })
        }
        "internvl" | "internvl_moe" | "gemma3" | "clip" | "siglip" => {
            let shown = [TiledMedium::Image { height: 1, width: 1, tiles: 3 }];
            let pixels = fixture.floats("pixel_values");
            config.context(device, &EncoderInput::Tiles { pixels: &pixels, shown: &shown })
        }
        "qwen2_audio" => {
            let (features, frames) = (fixture.floats("input_features"), unsigned("frames"));
            config.context(device, &EncoderInput::Windows { features: &features, frames: &frames })
        }
        _ => {
            let (values, grids) = (fixture.floats("patches"), unsigned("grids"));
            let grids = grids.as_chunks::<3>().0;
            config.context(device, &EncoderInput::Patches { values: &values, grids })
        }
    };
    context.unwrap()
}
