//! The recorded media of a model.

use dflop_executor::device::Cpu;
use dflop_executor::model::context::Context;
use dflop_executor::model::encoder::{EncoderConfig, Medium, Shown};

use super::fixture::Fixture;

/// Ids of placeholders of images, audio and videos.
pub(crate) const PLACEHOLDERS: [i64; 2] = [46, 47];

/// The encoder of a recorded model.
pub(crate) fn encoder_of(fixture: &Fixture) -> EncoderConfig {
    let vision = EncoderConfig::vision(&fixture.config).unwrap();
    vision.or_else(|| EncoderConfig::audio(&fixture.config).unwrap()).unwrap()
}

/// The recorded media.
pub(crate) fn encoder_context(fixture: &Fixture, config: &EncoderConfig, device: &Cpu) -> Context<Cpu> {
    let unsigned = |name: &str| -> Vec<u32> {
        fixture.integers(name).into_iter().map(|value| u32::try_from(value).unwrap()).collect()
    };
    let context = match fixture.name {
        "llava_onevision" => {
            let images = unsigned("image_sizes");
            let shown = |&[height, width, tiles]: &[u32; 3]| match height {
                0 => Shown::Video { frames: tiles },
                _ => Shown::Image { height, width, tiles },
            };
            let shown: Vec<Shown> = images.as_chunks::<3>().0.iter().map(shown).collect();
            let pixels = fixture.floats("pixel_values");
            config.context(device, &Medium::Tiles { pixels: &pixels, shown: &shown })
        }
        "internvl" | "clip" | "siglip" => {
            let shown = [Shown::Image { height: 1, width: 1, tiles: 3 }];
            let pixels = fixture.floats("pixel_values");
            config.context(device, &Medium::Tiles { pixels: &pixels, shown: &shown })
        }
        "qwen2_audio" => {
            let (features, frames) = (fixture.floats("input_features"), unsigned("frames"));
            config.context(device, &Medium::Windows { features: &features, frames: &frames })
        }
        _ => {
            let (values, grids) = (fixture.floats("patches"), unsigned("grids"));
            let grids = grids.as_chunks::<3>().0;
            config.context(device, &Medium::Patches { values: &values, grids })
        }
    };
    context.unwrap()
}
