//! Decodes JPEG to RGB through libjpeg-turbo, as strictly as the pure Rust decoder.
//!
//! libjpeg fills in missing data and only warns. If libjpeg warns about anything but bytes before the end
//! marker, or if colors are converted differently (CMYK), [`super::jpeg`] decodes the image, so that both
//! builds accept and reject the same files.

use std::cell::RefCell;

use turbojpeg::{Decompressor, Error, Image, PixelFormat, ScalingFactor};

use super::{Reduction, RgbImage};
use crate::media::DecodeError;
use crate::media::probe::JpegHeader;
use crate::media::shape::Strictness;

const FORMAT: &str = "jpeg";
/// Maximum number of bytes that some writers insert between the scan and the end marker.
const SURPLUS_BYTES_MAX: u64 = 4;
/// Number of components in CMYK and YCCK.
const CMYK_COMPONENTS: usize = 4;

thread_local! {
    /// Decoder per thread, which reuses tables and buffers.
    static DECODER: RefCell<Option<Decompressor>> = const { RefCell::new(None) };
}

/// Decodes the stored image into `image`, possibly reduced; `None` if the pure Rust decoder has to decide.
pub(super) fn decode_into(
    bytes: &[u8],
    header: &JpegHeader,
    reduction: Reduction,
    strictness: Strictness,
    image: &mut RgbImage,
) -> Option<Result<(), DecodeError>> {
    if strictness == Strictness::Lenient || header.components().len() == CMYK_COMPONENTS {
        return None;
    }
    DECODER.with_borrow_mut(|decoder| {
        let decoded = run(decoder, bytes, header, reduction, image);
        match decoded {
            Ok(()) => Some(Ok(())),
            Err(Error::TurboJpegError(message)) => verdict(&message, bytes.len(), strictness),
            Err(other) => Some(Err(DecodeError::codec(FORMAT, other))),
        }
    })
}

fn run(
    decoder: &mut Option<Decompressor>,
    bytes: &[u8],
    header: &JpegHeader,
    reduction: Reduction,
    image: &mut RgbImage,
) -> Result<(), Error> {
    let decoder = match decoder {
        Some(decoder) => decoder,
        None => decoder.insert(Decompressor::new()?),
    };
    decoder.set_scaling_factor(ScalingFactor::new(1, 1 << reduction.log2()))?;
    (image.width, image.height) = (reduction.apply(header.width), reduction.apply(header.height));
    let (width, height) = (image.width as usize, image.height as usize);
    image.pixels.resize(3 * width * height, 0);
    image.is_truncated = false;
    let pixels = image.pixels.as_mut_slice();
    decoder.decompress(bytes, Image { pixels, width, pitch: 3 * width, height, format: PixelFormat::RGB })
}

/// Interprets the first warning or the error; libjpeg-turbo reports only the first.
fn verdict(message: &str, bytes: usize, strictness: Strictness) -> Option<Result<(), DecodeError>> {
    let is_strict = strictness == Strictness::Strict;
    if let Some(surplus) = surplus_bytes(message) {
        let is_harmless = !is_strict || surplus <= SURPLUS_BYTES_MAX;
        let damage = || DecodeError::malformed(FORMAT, bytes, "unused data before the end marker");
        return Some(if is_harmless { Ok(()) } else { Err(damage()) });
    }
    if !is_strict {
        return None;
    }
    if message.to_ascii_lowercase().contains("premature end") {
        return Some(Err(DecodeError::truncated(FORMAT, bytes)));
    }
    let is_damage = ["bad Huffman code", "found marker"].iter().any(|words| message.contains(words));
    is_damage.then(|| Err(DecodeError::codec(FORMAT, message.to_owned())))
}

/// Returns the number of bytes skipped before the end marker; this warning comes last, so if it is first, it
/// is the only warning.
fn surplus_bytes(message: &str) -> Option<u64> {
    let (before, _) = message.split_once(" extraneous bytes before marker 0xd9")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::fixtures::{encode, gradient};
    use crate::media::image::{decode_rgb, decode_stored_into, jpeg, stored_header};
    use crate::media::shape::ImageLimits;

    #[test]
    fn warnings_are_damage_unless_they_say_nothing_about_pixels() {
        let refused = |message| verdict(message, 9, Strictness::Strict).unwrap().unwrap_err();
        let truncated = ["Premature end of JPEG file", "Corrupt JPEG data: premature end of data segment"];
        for message in truncated {
            assert!(matches!(refused(message), DecodeError::Truncated { .. }), "{message}");
        }
        let surplus = refused("Corrupt JPEG data: 30 extraneous bytes before marker 0xd9");
        assert!(matches!(surplus, DecodeError::Malformed { .. }));
        let few = "Corrupt JPEG data: 2 extraneous bytes before marker 0xd9";
        assert!(verdict(few, 9, Strictness::Strict).unwrap().is_ok());
        let many = "Corrupt JPEG data: 30 extraneous bytes before marker 0xd9";
        assert!(verdict(many, 9, Strictness::Standard).unwrap().is_ok());
        assert!(verdict("Corrupt JPEG data: bad Huffman code", 9, Strictness::Standard).is_none());
        assert!(matches!(refused("Corrupt JPEG data: bad Huffman code"), DecodeError::Codec { .. }));
        for message in [
            "Corrupt JPEG data: 2 extraneous bytes before marker 0xdb",
            "Warning: unknown JFIF revision number 9.01",
        ] {
            assert!(verdict(message, 9, Strictness::Strict).is_none(), "{message}");
        }
    }

    /// Returns the mean and the maximum difference between two images, out of 255.
    fn difference(left: &RgbImage, right: &RgbImage) -> (f64, u8) {
        assert_eq!((left.width, left.height), (right.width, right.height));
        let differences = left.pixels.iter().zip(&right.pixels).map(|(left, right)| left.abs_diff(*right));
        let sum: u64 = differences.clone().map(u64::from).sum();
        (sum as f64 / left.pixels.len() as f64, differences.max().unwrap_or(0))
    }

    #[test]
    fn real_images_are_accepted_and_refused_alike_and_look_alike() {
        /// Maximum size of compared files; larger files take long and test nothing new.
        const FILE_BYTES_MAX: usize = 200 << 10;
        for (path, bytes) in crate::media::tests::shared_files("jpg") {
            if !bytes.starts_with(&[0xFF, 0xD8]) || bytes.len() > FILE_BYTES_MAX {
                continue;
            }
            let limits = ImageLimits { is_orientation_applied: false, ..ImageLimits::default() };
            match (decode_rgb(&bytes, &limits), jpeg::decode_by_zune(&bytes)) {
                (Ok(turbo), Ok(zune)) => {
                    let (mean, largest) = difference(&turbo, &zune);
                    assert!(mean < 1.0 && largest < 80, "{}: {mean} {largest}", path.display());
                }
                (turbo, zune) => assert_eq!(turbo.is_ok(), zune.is_ok(), "{}", path.display()),
            }
        }
    }

    #[test]
    fn a_reduced_image_looks_like_the_whole_one() {
        let whole = gradient(301, 203);
        let file = encode(whole.clone(), image::ImageFormat::Jpeg);
        let header = stored_header(&file, &ImageLimits::default()).unwrap();
        for (wanted, width, height) in [(203, 301, 203), (101, 151, 102), (50, 76, 51), (1, 38, 26)] {
            let reduction = Reduction::at_least(203.0, wanted);
            let mut small = RgbImage::default();
            decode_stored_into(&file, &header, reduction, &ImageLimits::default(), &mut small).unwrap();
            assert_eq!((small.width, small.height), (width, height));
            for (number, pixel) in small.pixels.chunks(3).enumerate() {
                let (x, y) = (number as u32 % width, number as u32 / width);
                let expected = whole.get_pixel((x * 301 + 150) / width, (y * 203 + 101) / height).0;
                let is_near = pixel.iter().zip(expected).all(|(value, near)| value.abs_diff(near) < 12);
                assert!(is_near, "{pixel:?} for {expected:?} at {x} {y} of {width} x {height}");
            }
        }
    }
}
