//! Creates sample shapes: text, one image, several images.

use dflop_costmodel::{ImageSize, SampleShape};

use crate::random::Random;

/// Creates a text-only sample.
#[must_use]
pub fn text() -> SampleShape {
    SampleShape { text_tokens: 700, target_tokens: 300, ..SampleShape::default() }
}

/// Creates a sample with text and `images` images with different sizes.
#[must_use]
pub fn with_images(images: usize) -> SampleShape {
    let mut random = Random::new(11);
    SampleShape { images: (0..images).map(|_| image_size(&mut random)).collect(), ..text() }
}

/// Draws samples as in instruction data: a fifth text only, most with one image, some with up to eight.
#[must_use]
pub fn mixture(samples: usize) -> Vec<SampleShape> {
    let mut random = Random::new(12);
    let sample = |_| {
        let text_tokens = random.log_normal(250.0, 0.9) as u32;
        let images = match random.below(10) {
            0 | 1 => 0,
            2..=8 => 1,
            _ => 2 + random.below(7),
        };
        let images = (0..images).map(|_| image_size(&mut random)).collect();
        SampleShape { text_tokens, target_tokens: text_tokens / 2, images, ..SampleShape::default() }
    };
    (0..samples).map(sample).collect()
}

/// Draws an image size; half of the images are below 640 x 480.
pub(crate) fn image_size(random: &mut Random) -> ImageSize {
    let mut side = |median| random.log_normal(median, 0.45).clamp(64.0, 2_048.0) as u32;
    ImageSize { width: side(640.0), height: side(480.0) }
}
