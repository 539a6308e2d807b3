//! Tests against pixels from Pillow.

use super::super::{RgbImage, decode_rgb};
use super::*;
use crate::media::fixtures::avif::{
    AV1_10_BITS, AV1_12_BITS, AV1_420, AV1_422_LIMITED, AV1_GRAY_LIMITED, AV1_IDENTITY, GRAY_LIMITED, Place,
    RGB_10_BITS, RGB_12_BITS, RGB_420, RGB_422_LIMITED, RGB_IDENTITY, SIZE, avif, avif_at, avis, iso_box,
    meta,
};
use crate::media::fixtures::bytes_of_hex;
use crate::media::{DecodeError, DecodeLimits, ImageLimits, MediaShape, probe_shape};

/// Body of the color property.
fn nclx(primaries: u8, matrix: u8, is_full_range: bool) -> Vec<u8> {
    let range = if is_full_range { 0x80 } else { 0 };
    [&b"nclx"[..], &[0, primaries, 0, 13, 0, matrix, range]].concat()
}

fn decoded(file: &[u8]) -> RgbImage {
    decode_rgb(file, &ImageLimits::default()).unwrap()
}

fn refused(file: &[u8]) -> String {
    let error = decode_rgb(file, &ImageLimits::default()).unwrap_err();
    let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
    format!("{error}{source}")
}

#[test]
fn pixels_equal_those_of_pillow() {
    let table = [
        ("4:2:0", AV1_420, RGB_420, nclx(1, 6, true)),
        ("4:2:2", AV1_422_LIMITED, RGB_422_LIMITED, nclx(1, 6, false)),
        ("10 bits", AV1_10_BITS, RGB_10_BITS, nclx(1, 1, true)),
        ("12 bits", AV1_12_BITS, RGB_12_BITS, nclx(9, 9, true)),
        ("identity", AV1_IDENTITY, RGB_IDENTITY, nclx(1, 0, true)),
    ];
    for (name, av1, pixels, colors) in table {
        let (av1, pixels) = (bytes_of_hex(av1), bytes_of_hex(pixels));
        let image = decoded(&avif(&av1, SIZE, &[(b"colr", &colors)]));
        assert_eq!((image.width, image.height, image.is_truncated), (7, 5, false), "{name}");
        assert_eq!(image.pixels, pixels, "{name}");
        assert_eq!(decoded(&avif(&av1, SIZE, &[])).pixels, pixels, "{name}: colors of the AV1 data");
    }
    let gray = decoded(&avif(&bytes_of_hex(AV1_GRAY_LIMITED), SIZE, &[]));
    assert_eq!(gray.pixels, GRAY_LIMITED.map(|value| [value; 3]).concat().repeat(5));
}

#[test]
fn colors_of_the_file_come_before_those_of_the_data() {
    let av1 = bytes_of_hex(AV1_GRAY_LIMITED);
    let full = decoded(&avif(&av1, SIZE, &[(b"colr", b"prof any profile"), (b"colr", &nclx(1, 6, true))]));
    assert_eq!(full.pixels[..3], [16; 3], "black of limited range");
    let other = refused(&avif(&bytes_of_hex(AV1_420), SIZE, &[(b"colr", &nclx(1, 14, true))]));
    assert_eq!(other, "unsupported avif: matrix coefficients 14");
    assert!(refused(&avif(&bytes_of_hex(AV1_420), SIZE, &[(b"colr", &nclx(1, 0, true))])).contains("matrix"));
}

#[test]
fn data_may_lie_anywhere_in_the_file() {
    let av1 = bytes_of_hex(AV1_420);
    for place in [Place::Last, Place::First, Place::Inside] {
        let file = avif_at(&av1, SIZE, &[(b"av1C", &[0x81, 0, 0x0C, 0])], place);
        assert_eq!(decoded(&file).pixels, bytes_of_hex(RGB_420), "{place:?}");
    }
    let mut renamed = avif(&av1, SIZE, &[]);
    renamed[8..12].copy_from_slice(b"mif1");
    renamed[16..20].copy_from_slice(b"avif");
    assert_eq!(decoded(&renamed).pixels, bytes_of_hex(RGB_420));
}

#[test]
fn rotation_and_mirroring_are_applied_once_as_orientation() {
    let av1 = bytes_of_hex(AV1_420);
    let pixels = bytes_of_hex(RGB_420);
    let at = |x: usize, y: usize| &pixels[3 * (7 * y + x)..][..3];
    // The top left pixel after counterclockwise quarter turns, then after top and bottom (0) or left and
    // right (1) are exchanged.
    let table = [
        (None, None, (0, 0)),
        (None, Some(0), (0, 4)),
        (None, Some(1), (6, 0)),
        (Some(1), None, (6, 0)),
        (Some(1), Some(0), (0, 0)),
        (Some(1), Some(1), (6, 4)),
        (Some(2), None, (6, 4)),
        (Some(3), None, (0, 4)),
        (Some(3), Some(0), (6, 4)),
    ];
    for (turns, mirror, (x, y)) in table {
        let (turns_body, mirror_body) = ([turns.unwrap_or(0)], [mirror.unwrap_or(0)]);
        let mut properties: Vec<(&[u8; 4], &[u8])> = Vec::new();
        properties.extend(turns.map(|_| (b"irot", &turns_body[..])));
        properties.extend(mirror.map(|_| (b"imir", &mirror_body[..])));
        let file = avif(&av1, SIZE, &properties);
        let image = decoded(&file);
        let is_swapped = turns.is_some_and(|turns| turns % 2 == 1);
        assert_eq!((image.width, image.height), if is_swapped { (5, 7) } else { (7, 5) });
        assert_eq!(&image.pixels[..3], at(x, y), "{turns:?} {mirror:?}");
        let shape = probe_shape(&file, file.len() as u64, "avif", &DecodeLimits::default()).unwrap();
        let MediaShape::Image(size) = shape else { panic!("{shape:?}") };
        assert_eq!((size.width, size.height), (image.width, image.height));
        let stored = ImageLimits { is_orientation_applied: false, ..ImageLimits::default() };
        assert_eq!(decode_rgb(&file, &stored).unwrap().pixels, pixels);
    }
    let listed_last = decoded(&avif(&av1, SIZE, &[(b"imir", &[0]), (b"irot", &[1])]));
    assert_eq!(&listed_last.pixels[..3], at(0, 0));
}

#[test]
fn a_sequence_is_its_first_frame() {
    let file = avis(&bytes_of_hex(AV1_420), (7, 5));
    let image = decoded(&file);
    assert_eq!((image.width, image.height), (5, 7), "the track is turned");
    assert_eq!(image.pixels[..3], bytes_of_hex(RGB_420)[18..21]);
}

#[test]
fn what_is_not_decoded_is_named() {
    let av1 = bytes_of_hex(AV1_420);
    let grid = [iso_box(*b"ftyp", &[b"avif\0\0\0\0"]), meta(*b"grid", &av1, 0, SIZE, &[], Place::Last)];
    assert_eq!(refused(&grid.concat()), "unsupported avif: a grid of images");
    let unknown = refused(&avif(&av1, SIZE, &[(b"none", &[])]));
    assert_eq!(unknown, "unsupported avif: the property `none`");
    let layer = refused(&avif(&av1, SIZE, &[(b"lsel", &[0, 0])]));
    assert_eq!(layer, "unsupported avif: a layer that is not the highest");
    let mut multiplied = avif(&av1, SIZE, &[]);
    let reference = multiplied.windows(4).position(|kind| kind == b"auxl").unwrap();
    multiplied[reference..reference + 6].copy_from_slice(b"prem\0\x01");
    assert_eq!(refused(&multiplied), "unsupported avif: colors that are multiplied by alpha");
    assert_eq!(decoded(&avif(&av1, SIZE, &[(b"clap", &[0; 32])])).width, 7, "crops are ignored");
}

#[test]
fn sizes_are_checked_before_and_after_decoding() {
    let file = avif(&bytes_of_hex(AV1_420), SIZE, &[]);
    let limits = ImageLimits { pixels_max: 34, ..ImageLimits::default() };
    let refusal = decode_rgb(&file, &limits);
    assert!(matches!(refusal, Err(DecodeError::TooLarge { limit: "pixels_max", actual: 35, .. })));
    let limits = ImageLimits { alloc_bytes_max: 300, ..ImageLimits::default() };
    let refusal = decode_rgb(&file, &limits);
    assert!(matches!(refusal, Err(DecodeError::TooLarge { limit: "alloc_bytes_max", .. })));
    let larger = refused(&avif(&bytes_of_hex(AV1_420), (8, 5), &[]));
    assert!(larger.contains("the frame is of 7 x 5 pixels, the header has 8 x 5"), "{larger}");
    let smaller = avif(&bytes_of_hex(AV1_420), (1, 1), &[]);
    assert!(refused(&smaller).contains("the frame is of 7 x 5 pixels, the header has 1 x 1"));
    let limits = ImageLimits { pixels_max: 34, ..ImageLimits::default() };
    assert!(matches!(decode_rgb(&smaller, &limits), Err(DecodeError::Codec { format: "avif", .. })));
}

#[test]
fn every_cut_is_truncated_or_asks_for_more() {
    for place in [Place::Last, Place::First, Place::Inside] {
        let file = avif_at(&bytes_of_hex(AV1_420), SIZE, &[(b"irot", &[1])], place);
        for length in 12..file.len() {
            let error = decode_rgb(&file[..length], &ImageLimits::default()).unwrap_err();
            assert!(matches!(error, DecodeError::Truncated { .. }), "{place:?} cut to {length}: {error}");
            match probe_shape(&file[..length], file.len() as u64, "avif", &DecodeLimits::default()) {
                Ok(MediaShape::Image(size)) => assert_eq!((size.width, size.height), (5, 7)),
                refused => assert!(matches!(refused, Err(DecodeError::PrefixTooShort { .. })), "{refused:?}"),
            }
        }
    }
}

#[test]
fn a_sequence_header_tells_depth_and_colors() {
    let colors = ColorCoding { primaries: 1, matrix: 6, is_full_range: true };
    let units = read_units(&bytes_of_hex(AV1_420)).unwrap();
    assert_eq!(units.sequence, Sequence { depth: 8, is_gray: false, colors });
    let units = read_units(&bytes_of_hex(AV1_GRAY_LIMITED)).unwrap();
    assert!(units.sequence.is_gray && !units.sequence.colors.is_full_range);
}

#[test]
fn only_units_that_pixels_depend_on_are_kept() {
    let data = bytes_of_hex(AV1_420);
    let whole = read_units(&data).unwrap().bytes;
    // A delimiter, metadata, padding, an unknown unit.
    let other = [&[0x2A, 3, 4, 0x80, 0][..], &[0x7A, 1, 0], &[0x4A, 0], &data].concat();
    assert_eq!(read_units(&other).unwrap().bytes, whole);
}

#[test]
fn every_cut_is_an_error() {
    let data = bytes_of_hex(AV1_420);
    for length in 0..data.len() {
        assert!(read_units(&data[..length]).is_err(), "cut to {length}");
    }
}

#[test]
fn a_last_unit_without_a_length_takes_the_rest() {
    let data = bytes_of_hex(AV1_420);
    let mut position = 0;
    let (mut last, mut start) = (&data[..0], 0);
    while position < data.len() {
        start = position;
        (_, last) = next_unit(&data, &mut position).unwrap();
    }
    let open = [&data[..start], &[data[start] & !HAS_LENGTH], last].concat();
    assert!(open.len() < data.len());
    assert_eq!(read_units(&open).unwrap().bytes, read_units(&data).unwrap().bytes);
}

#[test]
fn too_many_frames_are_refused() {
    let data = bytes_of_hex(AV1_420);
    let frames = [0x32, 1, 0].repeat(FRAMES_MAX);
    let refused = read_units(&[&data[..], &frames].concat()).err().unwrap();
    assert!(refused.to_string().contains("more than 32 frames"), "{refused}");
}
