//! Image parts, and their resampling.

use dflop_costmodel::ImageSize;
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use image::metadata::Orientation;

use super::RgbImage;
use crate::media::DecodeError;

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

/// Nonempty rectangle inside an image, in whole pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crop {
    pub(crate) left: u32,
    pub(crate) top: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

/// Part of an image, in fractional pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CropBox {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl From<Crop> for CropBox {
    fn from(crop: Crop) -> Self {
        let [left, top, width, height] = [crop.left, crop.top, crop.width, crop.height].map(f64::from);
        Self { left, top, width, height }
    }
}

impl CropBox {
    /// Returns the part that a center crop keeps.
    ///
    /// The part is defined by resizing to whole pixels with the shorter side at `side`, then cropping around
    /// the center, as torchvision does; only this part needs to be resampled.
    pub(super) fn center(size: ImageSize, side: u32) -> Self {
        let scale = f64::from(side) / f64::from(size.width.min(size.height));
        let [(left, width), (top, height)] = [size.width, size.height].map(|length| {
            let length = f64::from(length);
            let resized = (length * scale).round_ties_even().max(f64::from(side));
            let margin = (resized - f64::from(side)) / 2.0;
            let start = margin / resized * length;
            let end = ((margin + f64::from(side)) / resized * length).min(length);
            (start, end - start)
        });
        Self { left, top, width, height }
    }

    /// Returns the same part in the stored image, before the orientation is applied.
    pub(super) fn to_stored(self, stored: ImageSize, orientation: Orientation) -> Self {
        let (width, height) = (f64::from(stored.width), f64::from(stored.height));
        let point = |x: f64, y: f64| match orientation {
            Orientation::NoTransforms => (x, y),
            Orientation::FlipHorizontal => (width - x, y),
            Orientation::Rotate180 => (width - x, height - y),
            Orientation::FlipVertical => (x, height - y),
            Orientation::Rotate90 => (y, height - x),
            Orientation::Rotate270 => (width - y, x),
            Orientation::Rotate90FlipH => (y, x),
            Orientation::Rotate270FlipH => (width - y, height - x),
        };
        let (x0, y0) = point(self.left, self.top);
        let (x1, y1) = point(self.left + self.width, self.top + self.height);
        Self { left: x0.min(x1), top: y0.min(y1), width: (x1 - x0).abs(), height: (y1 - y0).abs() }
    }

    /// Returns the same part in an image that was decoded at a reduced size.
    pub(super) fn in_decoded(self, stored: ImageSize, decoded: ImageSize) -> Self {
        let scale_x = f64::from(decoded.width) / f64::from(stored.width);
        let scale_y = f64::from(decoded.height) / f64::from(stored.height);
        let (left, top) = (self.left * scale_x, self.top * scale_y);
        let width = (self.width * scale_x).min(f64::from(decoded.width) - left);
        let height = (self.height * scale_y).min(f64::from(decoded.height) - top);
        Self { left, top, width, height }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_center_is_cut_from_the_longer_side() {
        let center = CropBox::center(ImageSize { width: 448, height: 224 }, 224);
        assert_eq!(center, CropBox { left: 112.0, top: 0.0, width: 224.0, height: 224.0 });
    }

    #[test]
    fn a_corner_of_the_shown_image_is_found_in_the_stored_one() {
        let stored = ImageSize { width: 40, height: 20 };
        let corner = CropBox { left: 0.0, top: 0.0, width: 2.0, height: 1.0 };
        let table = [
            (Orientation::NoTransforms, [0.0, 0.0, 2.0, 1.0]),
            (Orientation::FlipHorizontal, [38.0, 0.0, 2.0, 1.0]),
            (Orientation::Rotate180, [38.0, 19.0, 2.0, 1.0]),
            (Orientation::FlipVertical, [0.0, 19.0, 2.0, 1.0]),
            (Orientation::Rotate90, [0.0, 18.0, 1.0, 2.0]),
            (Orientation::Rotate270, [39.0, 0.0, 1.0, 2.0]),
            (Orientation::Rotate90FlipH, [0.0, 0.0, 1.0, 2.0]),
            (Orientation::Rotate270FlipH, [39.0, 18.0, 1.0, 2.0]),
        ];
        for (orientation, [left, top, width, height]) in table {
            let found = corner.to_stored(stored, orientation);
            assert_eq!(found, CropBox { left, top, width, height }, "{orientation:?}");
        }
    }

    #[test]
    fn a_reduced_image_has_the_same_part() {
        let whole = CropBox { left: 0.0, top: 3.0, width: 9.0, height: 4.0 };
        let (stored, decoded) = (ImageSize { width: 9, height: 7 }, ImageSize { width: 5, height: 4 });
        let found = whole.in_decoded(stored, decoded);
        assert!((found.width - 5.0).abs() < 1e-9 && (found.top + found.height - 4.0).abs() < 1e-9);
    }
}
