//! Decodes images to 8-bit RGB.
//!
//! The format is recognized by content. Size limits are checked against the header before pixels are
//! allocated; the orientation comes from the same header as the shape in [`super::probe`], so both agree.
//!
//! A JPEG may be reduced during decoding: an inverse DCT with fewer frequencies produces a smaller image with
//! less work. Halves, quarters and eighths have fast code; other ratios cost more than they save.

#[cfg(feature = "avif")]
mod avif;
mod gif;
mod jpeg;
mod jpeg_scans;
#[cfg(feature = "turbojpeg")]
mod jpeg_turbo;
mod raster;
mod tiff;
mod to_tensor;

use image::metadata::Orientation;

use super::DecodeError;
use super::probe::{ImageFormat, ImageHeader, TiffKind, image_header, read_tiff_header};
use super::shape::{ImageLimits, check_limit};

pub use self::to_tensor::{IMAGENET_DEVIATION, IMAGENET_MEAN, ImageTensorDecoder, PixelStatistics};
pub(crate) use raster::{Crop, resize_crop};
pub use raster::{Pixel, PixelBuffer, PixelFormat, PixelLayout, PixelType};

/// Decoded image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RgbImage {
    /// Number of columns.
    pub width: u32,
    /// Number of rows.
    pub height: u32,
    /// `[height, width, 3]`: red, green, blue, each 0 to 255.
    pub pixels: Vec<u8>,
    /// Whether the coded data are damaged or end too early, so that some pixels are invented; never in strict
    /// mode.
    pub is_truncated: bool,
}

/// Decodes an image to RGB.
///
/// # Errors
/// See [`DecodeError`]. A file that ends too early is [`DecodeError::Truncated`], except for a JPEG in
/// lenient mode; in strict mode any damage in a JPEG is an error.
///
/// # Examples
/// ```
/// use dflop_samples::media::{ImageLimits, decode_rgb};
/// let bmp = [
///     0x42, 0x4D, 58, 0, 0, 0, 0, 0, 0, 0, 54, 0, 0, 0, 40, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 24, 0,
///     0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30, 20, 10, 0,
/// ];
/// let image = decode_rgb(&bmp, &ImageLimits::default())?;
/// assert_eq!((image.width, image.height, image.pixels), (1, 1, vec![10, 20, 30]));
/// # Ok::<(), dflop_samples::media::DecodeError>(())
/// ```
pub fn decode_rgb(bytes: &[u8], limits: &ImageLimits) -> Result<RgbImage, DecodeError> {
    let mut image = RgbImage::default();
    decode_rgb_into(bytes, limits, &mut image)?;
    Ok(image)
}

/// Decodes an image to RGB into `image`, and reuses the pixel buffer.
///
/// After an error the content of `image` is unspecified.
///
/// # Errors
/// See [`decode_rgb`].
pub fn decode_rgb_into(bytes: &[u8], limits: &ImageLimits, image: &mut RgbImage) -> Result<(), DecodeError> {
    let header = stored_header(bytes, limits)?;
    decode_stored_into(bytes, &header, Reduction::NONE, limits, image)?;
    let orientation = header.orientation;
    if orientation != Orientation::NoTransforms {
        turn(image, orientation);
    }
    Ok(())
}

/// Reads the header and checks the size; returns the orientation to apply, if any.
fn stored_header(bytes: &[u8], limits: &ImageLimits) -> Result<ImageHeader, DecodeError> {
    let header = image_header(bytes)?;
    check_pixels(header.format, header.stored.width, header.stored.height, limits)?;
    let is_turned = limits.is_orientation_applied;
    let orientation = if is_turned { header.orientation } else { Orientation::NoTransforms };
    Ok(ImageHeader { orientation, ..header })
}

/// Decodes the image as stored, possibly reduced by up to `reduction`.
fn decode_stored_into(
    bytes: &[u8],
    header: &ImageHeader,
    reduction: Reduction,
    limits: &ImageLimits,
    image: &mut RgbImage,
) -> Result<(), DecodeError> {
    match header.format {
        ImageFormat::Jpeg => jpeg::decode_into(bytes, reduction, limits, image),
        ImageFormat::Gif => gif::decode_into(bytes, header, limits, image),
        #[cfg(feature = "avif")]
        ImageFormat::Avif => avif::decode_into(bytes, limits, image),
        ImageFormat::Tiff => {
            let tiff = read_tiff_header(bytes)?;
            match tiff.kind {
                TiffKind::Plain => raster::decode_into(bytes, header.format, limits, image),
                _ => tiff::decode_into(bytes, &tiff, limits, image),
            }
        }
        format => raster::decode_into(bytes, format, limits, image),
    }
}

fn check_pixels(
    format: ImageFormat,
    width: u32,
    height: u32,
    limits: &ImageLimits,
) -> Result<(), DecodeError> {
    let pixels = u64::from(width) * u64::from(height);
    check_limit(format.name(), pixels, "pixels", "pixels_max", limits.pixels_max)
}

fn turn(image: &mut RgbImage, orientation: Orientation) {
    let pixels = std::mem::take(&mut image.pixels);
    let Some(buffer) = image::RgbImage::from_raw(image.width, image.height, pixels) else {
        unreachable!("every decoder fills width x height x 3 bytes")
    };
    let mut turned = image::DynamicImage::ImageRgb8(buffer);
    turned.apply_orientation(orientation);
    (image.width, image.height) = (turned.width(), turned.height());
    image.pixels = turned.into_rgb8().into_raw();
}

/// Maximum number of halvings: an 8 x 8 block becomes a single pixel.
#[cfg(any(feature = "turbojpeg", test))]
const HALVINGS_MAX: u32 = 3;

/// Reduction by a power of two on both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reduction(u32);

impl Reduction {
    /// No reduction.
    pub(super) const NONE: Self = Self(0);

    /// Returns the largest reduction that keeps `length` pixels at least `wanted` long.
    #[cfg(any(feature = "turbojpeg", test))]
    fn at_least(length: f64, wanted: u32) -> Self {
        let leaves = |halvings: &u32| length / f64::from(1u32 << halvings) >= f64::from(wanted);
        Self((1..=HALVINGS_MAX).rev().find(leaves).unwrap_or(0))
    }

    /// Returns the number of halvings.
    #[cfg(feature = "turbojpeg")]
    fn log2(self) -> u32 {
        self.0
    }

    /// Returns the reduced length, rounded up.
    #[cfg(feature = "turbojpeg")]
    fn apply(self, length: u32) -> u32 {
        length.div_ceil(1 << self.0)
    }
}

#[cfg(test)]
mod tests {
    use image::{DynamicImage, GrayImage, ImageBuffer, ImageFormat as Encoding, Luma, Rgba, RgbaImage};

    use super::super::shape::Strictness;
    use super::*;
    use crate::media::fixtures::{
        ADOBE_CMYK_JPEG, PROGRESSIVE_JPEG, bytes_of_hex, encode, exif_body, gradient, with_segment,
    };

    fn decoded(bytes: &[u8]) -> RgbImage {
        decode_rgb(bytes, &ImageLimits::default()).unwrap()
    }

    fn decoded_leniently(bytes: &[u8]) -> Result<RgbImage, DecodeError> {
        decode_rgb(bytes, &ImageLimits { strictness: Strictness::Lenient, ..ImageLimits::default() })
    }

    /// Decodes in strict mode, where any damage is an error.
    fn decoded_strictly(bytes: &[u8]) -> Result<RgbImage, DecodeError> {
        decode_rgb(bytes, &ImageLimits { strictness: Strictness::Strict, ..ImageLimits::default() })
    }

    fn refused(bytes: &[u8]) -> DecodeError {
        decode_rgb(bytes, &ImageLimits::default()).unwrap_err()
    }

    fn assert_near(image: &RgbImage, expected: &image::RgbImage, tolerance: u8) {
        assert_eq!((image.width, image.height), expected.dimensions());
        for (position, (actual, expected)) in image.pixels.iter().zip(expected.as_raw()).enumerate() {
            assert!(actual.abs_diff(*expected) <= tolerance, "{actual} for {expected} at {position}");
        }
    }

    #[test]
    fn lossless_formats_are_exact_for_odd_sizes() {
        for (width, height) in [(1, 1), (17, 5), (64, 33)] {
            let image = gradient(width, height);
            for encoding in [Encoding::Png, Encoding::Bmp, Encoding::Tiff, Encoding::WebP] {
                assert_near(&decoded(&encode(image.clone(), encoding)), &image, 0);
            }
        }
    }

    #[test]
    fn sequential_and_progressive_jpeg_are_near_the_original() {
        assert_near(&decoded(&encode(gradient(37, 29), Encoding::Jpeg)), &gradient(37, 29), 8);
        assert_near(&decoded(&bytes_of_hex(PROGRESSIVE_JPEG)), &gradient(40, 24), 16);
    }

    #[test]
    fn gray_is_repeated_alpha_is_dropped_and_16_bits_become_8() {
        let gray = GrayImage::from_fn(9, 7, |x, y| Luma([(x * 20 + y) as u8]));
        let expected = DynamicImage::from(gray.clone()).into_rgb8();
        assert_near(&decoded(&encode(gray.clone(), Encoding::Png)), &expected, 0);
        assert_near(&decoded(&encode(gray, Encoding::Jpeg)), &expected, 8);
        let clear = RgbaImage::from_pixel(3, 3, Rgba([10, 20, 30, 0]));
        assert_eq!(decoded(&encode(clear, Encoding::Png)).pixels[..3], [10, 20, 30]);
        let deep = ImageBuffer::<Luma<u16>, _>::from_pixel(2, 2, Luma([0x80_80]));
        assert_eq!(decoded(&encode(deep, Encoding::Png)).pixels[..3], [128, 128, 128]);
    }

    #[test]
    fn palettes_are_looked_up_in_the_first_frame_of_an_animation() {
        let frame =
            |value| image::Frame::new(RgbaImage::from_pixel(4, 4, Rgba([value, 0, 255 - value, 255])));
        let mut file = Vec::new();
        image::codecs::gif::GifEncoder::new(&mut file).encode_frames([frame(255), frame(0)]).unwrap();
        assert_eq!(decoded(&file).pixels, [255, 0, 0].repeat(16));
    }

    #[test]
    fn adobe_cmyk_is_inverted_and_adobe_rgb_is_not_converted() {
        let cmyk = decoded(&bytes_of_hex(ADOBE_CMYK_JPEG));
        assert_near(&cmyk, &image::RgbImage::from_pixel(8, 8, image::Rgb([47, 165, 208])), 5);
        let red = encode(image::RgbImage::from_pixel(8, 8, image::Rgb([255, 0, 0])), Encoding::Jpeg);
        let with_both = with_segment(&red, 0xEE, b"Adobe\0\x64\0\0\0\0\0");
        assert_near(&decoded(&with_both), &image::RgbImage::from_pixel(8, 8, image::Rgb([255, 0, 0])), 3);
        let stored = decoded(&without_jfif(&with_both));
        assert_near(&stored, &image::RgbImage::from_pixel(8, 8, image::Rgb([76, 85, 255])), 3);
    }

    /// Renames the JFIF segment, so that it is skipped.
    fn without_jfif(jpeg: &[u8]) -> Vec<u8> {
        let mut other = jpeg.to_vec();
        let at = other.windows(4).position(|name| name == b"JFIF").unwrap();
        other[at] = b'X';
        other
    }

    #[test]
    fn colors_follow_jfif_before_component_ids() {
        let mut red = encode(image::RgbImage::from_pixel(8, 8, image::Rgb([255, 0, 0])), Encoding::Jpeg);
        let frame = red.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        let scan = red.windows(2).position(|pair| pair == [0xFF, 0xDA]).unwrap();
        for (component, id) in b"RGB".iter().enumerate() {
            red[frame + 10 + 3 * component] = *id;
            red[scan + 5 + 2 * component] = *id;
        }
        assert_near(&decoded(&red), &image::RgbImage::from_pixel(8, 8, image::Rgb([255, 0, 0])), 3);
        let stored = decoded(&without_jfif(&red));
        assert_near(&stored, &image::RgbImage::from_pixel(8, 8, image::Rgb([76, 85, 255])), 3);
    }

    #[test]
    fn every_cut_of_a_jpeg_is_an_error_or_flagged() {
        for file in [encode(gradient(40, 24), Encoding::Jpeg), bytes_of_hex(PROGRESSIVE_JPEG)] {
            for length in 0..file.len() {
                let error = refused(&file[..length]);
                assert!(!error.to_string().is_empty());
                if let Ok(image) = decoded_leniently(&file[..length]) {
                    assert!(image.is_truncated, "cut to {length} of {} bytes", file.len());
                }
            }
        }
    }

    #[test]
    fn short_scan_with_an_end_marker_is_gray_from_there_on_or_refused_in_strict_mode() {
        let file = encode(gradient(64, 64), Encoding::Jpeg);
        let mut cut = file[..file.len() * 3 / 4].to_vec();
        cut.extend([0xFF, 0xD9]);
        assert!(matches!(decoded_strictly(&cut), Err(DecodeError::Truncated { .. })));
        let (whole, part) = (decoded(&file), decoded(&cut));
        assert!(part.is_truncated);
        let rows = 64 * 3 * 16;
        let apart = part.pixels[..rows].iter().zip(&whole.pixels).map(|(part, whole)| part.abs_diff(*whole));
        assert!(apart.max().unwrap() <= 4, "the rows in front of the cut are there");
        assert_eq!(part.pixels[64 * 3 * 64 - 3..], [128; 3]);
    }

    #[test]
    fn bytes_between_the_scan_and_the_end_marker_are_ignored_or_refused_in_strict_mode() {
        let file = encode(gradient(64, 64), Encoding::Jpeg);
        let RgbImage { width, height, pixels, .. } = decoded(&file);
        let whole = image::RgbImage::from_raw(width, height, pixels).unwrap();
        for surplus in [&[0; 2][..], &[0; 30], &[0; 2000], b"written by a camera \xFF\xE1\0\x06odd\0"] {
            let other = [&file[..file.len() - 2], surplus, &[0xFF, 0xD9]].concat();
            assert_near(&decoded(&other), &whole, 4);
            assert_eq!(decoded_strictly(&other).is_ok(), surplus.len() == 2);
        }
    }

    #[test]
    fn a_whole_scan_needs_no_end_marker_if_bytes_follow() {
        let file = encode(gradient(64, 64), Encoding::Jpeg);
        let without_end = &file[..file.len() - 2];
        assert!(matches!(refused(without_end), DecodeError::Truncated { .. }));
        let image = decoded(&[without_end, &[0; 8]].concat());
        assert!(!image.is_truncated);
        assert_near(&image, &gradient(64, 64), 8);
    }

    #[test]
    fn flat_images_and_bytes_behind_the_end_marker_are_complete() {
        for (width, height) in [(8, 8), (64, 64), (300, 200)] {
            let mut file = encode(GrayImage::from_pixel(width, height, Luma([128])), Encoding::Jpeg);
            assert!(!decoded(&file).is_truncated);
            file.extend(b"trailing bytes \xFF\xD8\xFF\xD9");
            assert!(!decoded(&file).is_truncated);
        }
    }

    #[test]
    fn a_reused_buffer_shows_nothing_of_the_last_image() {
        let mut image =
            decoded(&encode(image::RgbImage::from_pixel(64, 64, image::Rgb([1, 2, 3])), Encoding::Png));
        let file = encode(gradient(64, 64), Encoding::Jpeg);
        let limits = ImageLimits { strictness: Strictness::Lenient, ..ImageLimits::default() };
        decode_rgb_into(&file[..file.len() - 200], &limits, &mut image).unwrap();
        assert!(image.is_truncated);
        assert!(!image.pixels.chunks(3).any(|pixel| pixel == [1, 2, 3]));
    }

    #[test]
    fn exif_orientation_is_applied_as_the_reference_does() {
        let file = encode(gradient(20, 12), Encoding::Jpeg);
        let plain = decoded(&file);
        for value in 1..=8 {
            let turned_file = with_segment(&file, 0xE1, &exif_body(value));
            let buffer = image::RgbImage::from_raw(plain.width, plain.height, plain.pixels.clone()).unwrap();
            let mut expected = DynamicImage::from(buffer);
            expected.apply_orientation(Orientation::from_exif(value).unwrap());
            assert_near(&decoded(&turned_file), &expected.into_rgb8(), 0);
            let limits = ImageLimits { is_orientation_applied: false, ..ImageLimits::default() };
            assert_eq!(decode_rgb(&turned_file, &limits).unwrap(), plain);
        }
    }

    #[test]
    fn size_lies_are_refused_before_allocation() {
        let mut png = encode(gradient(4, 4), Encoding::Png);
        png[16..24].copy_from_slice(&[0x7F, 0xFF, 0xFF, 0xFF, 0x7F, 0xFF, 0xFF, 0xFF]);
        let mut jpeg = encode(gradient(8, 8), Encoding::Jpeg);
        let frame = jpeg.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        jpeg[frame + 5..frame + 9].fill(0xFF);
        let mut bmp = encode(gradient(4, 4), Encoding::Bmp);
        bmp[18..26].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0x7F, 0, 0, 0, 0x80]);
        for file in [png, jpeg, bmp] {
            assert!(matches!(refused(&file), DecodeError::TooLarge { limit: "pixels_max", .. }));
        }
        let limits = ImageLimits { alloc_bytes_max: 2_000, ..ImageLimits::default() };
        for file in [encode(gradient(40, 24), Encoding::Png), bytes_of_hex(PROGRESSIVE_JPEG)] {
            let refused = decode_rgb(&file, &limits);
            assert!(matches!(refused, Err(DecodeError::TooLarge { limit: "alloc_bytes_max", .. })));
        }
    }

    #[test]
    fn png_with_a_wrong_checksum_is_refused_where_pixels_depend_on_it() {
        let file = encode(gradient(9, 9), Encoding::Png);
        for chunk in [b"IHDR", b"IDAT"] {
            let at = file.windows(4).position(|name| name == chunk).unwrap();
            let length = u32::from_be_bytes(file[at - 4..at].try_into().unwrap()) as usize;
            let mut damaged = file.clone();
            damaged[at + 4 + length] ^= 1;
            assert!(matches!(refused(&damaged), DecodeError::Codec { format: "png", .. }));
        }
    }

    #[test]
    fn exotic_jpeg_codings_are_unsupported() {
        let mut file = encode(gradient(8, 8), Encoding::Jpeg);
        let frame = file.windows(2).position(|pair| pair == [0xFF, 0xC0]).unwrap();
        let mut changed = |at: usize, value: u8| {
            let before = std::mem::replace(&mut file[frame + at], value);
            let refused = refused(&file).to_string();
            assert_eq!(image_header(&file).unwrap_err().to_string(), refused, "the probe refuses the same");
            file[frame + at] = before;
            refused
        };
        assert_eq!(changed(4, 12), "unsupported jpeg: 12 bits in coding 0xC0");
        assert_eq!(changed(1, 0xC3), "unsupported jpeg: lossless coding (0xC3)");
        assert_eq!(changed(1, 0xC5), "unsupported jpeg: hierarchical coding (0xC5)");
        assert_eq!(changed(9, 2), "unsupported jpeg: 2 color components");
    }

    #[test]
    fn what_is_left_is_never_shorter_than_wanted() {
        let table = [(223.0, 0), (447.9, 0), (448.0, 1), (895.0, 1), (896.0, 2), (1792.0, 3), (9000.0, 3)];
        for (length, halvings) in table {
            assert_eq!(Reduction::at_least(length, 224), Reduction(halvings), "{length}");
        }
    }
}
