//! Resamples an image part.

use dflop_costmodel::ImageSize;
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use super::RgbImage;
use super::crop::{Crop, CropBox};
use crate::media::error::DecodeError;

impl RgbImage {
    /// Returns the image in another size, bilinear and antialiased.
    ///
    /// # Errors
    /// [`DecodeError::Codec`] if the resizer rejects the sizes.
    pub fn resized(&self, size: ImageSize) -> Result<RgbImage, DecodeError> {
        let whole =
            CropBox { left: 0.0, top: 0.0, width: f64::from(self.width), height: f64::from(self.height) };
        resize_owned(self, whole, size)
    }
}

/// Cuts a rectangle out of an image and resizes the rectangle.
pub(crate) fn resize_crop(image: &RgbImage, crop: Crop, size: ImageSize) -> Result<RgbImage, DecodeError> {
    resize_owned(image, CropBox::from(crop), size)
}

fn resize_owned(image: &RgbImage, part: CropBox, size: ImageSize) -> Result<RgbImage, DecodeError> {
    let mut pixels = vec![0; 3 * size.width as usize * size.height as usize];
    resize_part(&mut Resizer::new(), image, part, size, &mut pixels)?;
    Ok(RgbImage { width: size.width, height: size.height, pixels, is_truncated: image.is_truncated })
}

/// Resamples the image part `part` to `size`, bilinear and antialiased.
///
/// - `out`: `[size.height, size.width, 3]`, overwritten
pub(super) fn resize_part(
    resizer: &mut Resizer,
    image: &RgbImage,
    part: CropBox,
    size: ImageSize,
    out: &mut [u8],
) -> Result<(), DecodeError> {
    let refusal = |error: &dyn std::fmt::Display| DecodeError::codec("image", error.to_string());
    let source = TypedImageRef::<U8x3>::from_buffer(image.width, image.height, &image.pixels)
        .map_err(|error| refusal(&error))?;
    let mut target =
        TypedImage::<U8x3>::from_buffer(size.width, size.height, out).map_err(|error| refusal(&error))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear)).crop(
        part.left,
        part.top,
        part.width,
        part.height,
    );
    resizer.resize_typed(&source, &mut target, &options).map_err(|error| refusal(&error))
}
