//! Normalizes bytes to vision encoder input values, rounded bit-identically to NumPy.

use super::Pixel;

/// Mean of CLIP's training pixels: red, green, blue, on a scale from 0 to 1.
pub const CLIP_MEAN: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Standard deviation of CLIP's training pixels.
pub const CLIP_DEVIATION: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];
/// `ImageNet` pixel mean, on the same scale.
pub const IMAGENET_MEAN: [f64; 3] = [0.485, 0.456, 0.406];
/// `ImageNet` pixel standard deviation.
pub const IMAGENET_DEVIATION: [f64; 3] = [0.229, 0.224, 0.225];

/// Byte normalization: `(byte * scale - mean) / deviation`, channel by channel.
///
/// The product is computed in double precision and rounded to single; the rest is single precision, as in the
/// NumPy processors in Hugging Face transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    /// Factor for each byte, usually 1 / 255.
    pub scale: f64,
    /// Red, green and blue mean, subtracted after scaling.
    pub mean: [f64; 3],
    /// Red, green and blue standard deviation, the divisor.
    pub deviation: [f64; 3],
}

/// Value for every byte in every channel.
pub(crate) type Tables<T> = [[T; 256]; 3];

impl Normalization {
    const BYTE: f64 = 1.0 / 255.0;
    /// CLIP pixel statistics.
    pub const CLIP: Self = Self { scale: Self::BYTE, mean: CLIP_MEAN, deviation: CLIP_DEVIATION };
    /// `ImageNet` statistics.
    pub const IMAGENET: Self = Self { scale: Self::BYTE, mean: IMAGENET_MEAN, deviation: IMAGENET_DEVIATION };
    /// Maps bytes to the range -1 to 1.
    pub const SIGNED: Self = Self { scale: Self::BYTE, mean: [0.5; 3], deviation: [0.5; 3] };

    pub(crate) fn tables<T: Pixel>(&self) -> Tables<T> {
        std::array::from_fn(|channel| {
            let mean = self.mean[channel] as f32;
            let deviation = self.deviation[channel] as f32;
            let normalized = |byte| ((f64::from(byte) * self.scale) as f32 - mean) / deviation;
            std::array::from_fn(|byte| T::of(byte as u8, normalized(byte as u8)))
        })
    }

    /// Returns the mean as a color, rounded down as the processors do.
    pub(crate) fn mean_color(&self) -> [u8; 3] {
        self.mean.map(|mean| (mean * 255.0) as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_bytes_fill_the_range() {
        let tables = Normalization::SIGNED.tables::<f32>();
        assert_eq!((tables[0][0], tables[2][255]), (-1.0, 1.0));
    }

    #[test]
    fn the_mean_color_is_rounded_down() {
        assert_eq!(Normalization::CLIP.mean_color(), [122, 116, 104]);
        assert_eq!(Normalization::SIGNED.mean_color(), [127; 3]);
    }
}
