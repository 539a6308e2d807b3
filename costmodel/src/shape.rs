//! Describes a sample's shape: everything that the cost depends on, without decoding.
//!
//! Shapes are read from headers (pixels, frames, sample rates) and from token counts, so a whole global
//! batch can be planned from a few kilobytes. Token rules ([`crate::tokens`]) turn shapes into work.

use serde::{Deserialize, Serialize};

/// Image size in pixels, after the rotation from the EXIF orientation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "width and height need no words")]
pub struct ImageSize {
    pub width: u32,
    pub height: u32,
}

/// Audio clip length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioLength {
    /// Sample frames: samples per channel.
    pub frames: u64,
    /// Sample frames per second, before any resampling.
    pub sample_rate_hz: u32,
}

/// Video frames given to the model, after frame sampling.
///
/// A token rule with a smaller maximum samples further, down to that maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VideoShape {
    /// Number of images.
    pub frames: u32,
    /// Width of every frame in pixels.
    pub width: u32,
    /// Height of every frame in pixels.
    pub height: u32,
}

/// Text and media sizes in a sample.
///
/// # Examples
/// ```
/// use dflop_costmodel::{ImageSize, SampleShape};
///
/// let mut shape = SampleShape { text_tokens: 120, target_tokens: 40, ..SampleShape::default() };
/// shape.images.push(ImageSize { width: 640, height: 480 });
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct SampleShape {
    /// Text tokens, without media placeholders.
    pub text_tokens: u32,
    /// Text tokens in the loss.
    pub target_tokens: u32,
    /// Images, in order of occurrence.
    pub images: Vec<ImageSize>,
    /// Audio clips, in order of occurrence.
    pub audio: Vec<AudioLength>,
    /// Videos, in order of occurrence.
    pub videos: Vec<VideoShape>,
}

impl SampleShape {
    /// Empties the shape without freeing memory, so that a shape can be reused for each sample.
    pub fn clear(&mut self) {
        self.text_tokens = 0;
        self.target_tokens = 0;
        self.images.clear();
        self.audio.clear();
        self.videos.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_shape_is_the_default() {
        let mut shape = SampleShape {
            text_tokens: 3,
            target_tokens: 2,
            images: vec![ImageSize { width: 1, height: 1 }],
            audio: vec![AudioLength { frames: 1, sample_rate_hz: 16_000 }],
            videos: vec![VideoShape { frames: 1, width: 1, height: 1 }],
        };
        shape.clear();
        assert_eq!(shape, SampleShape::default());
        assert!(shape.images.capacity() > 0);
    }
}
