//! Tests that all decoders agree with the probe and survive arbitrary bytes.

use std::path::{Path, PathBuf};

use ::image::{DynamicImage, ImageFormat as Encoding};
use proptest::prelude::*;

use super::fixtures::{
    ADOBE_CMYK_JPEG, PROGRESSIVE_JPEG, RAMP_FLAC, SINE_MP3, bytes_of_hex, encode, exif_body, gradient, tiff,
    wav, with_segment,
};
use super::probe::audio_shape;
use crate::media::*;

/// Number of files in [`one_of_each`].
const KINDS: usize = if cfg!(feature = "avif") { 20 } else { 16 };

/// Returns a file of every kind, with the extension.
fn one_of_each() -> Vec<(&'static str, Vec<u8>)> {
    let jpeg = encode(gradient(40, 24), Encoding::Jpeg);
    let mut adpcm = wav(0x11, 4, 2, 8_000, &[9; 200]);
    adpcm[32..34].copy_from_slice(&24_u16.to_le_bytes());
    let mut files = vec![
        ("jpg", with_segment(&jpeg, 0xE1, &exif_body(6))),
        ("jpg", jpeg),
        ("jpg", bytes_of_hex(PROGRESSIVE_JPEG)),
        ("jpeg", bytes_of_hex(ADOBE_CMYK_JPEG)),
        ("png", encode(gradient(17, 9), Encoding::Png)),
        ("jpg", encode(gradient(17, 9), Encoding::Png)),
        ("gif", encode(DynamicImage::from(gradient(17, 9)).into_rgba8(), Encoding::Gif)),
        ("bmp", encode(gradient(17, 9), Encoding::Bmp)),
        ("tif", encode(gradient(17, 9), Encoding::Tiff)),
        ("webp", encode(gradient(17, 9), Encoding::WebP)),
        ("wav", wav(1, 16, 2, 8_000, &[3; 4_000])),
        ("flac", bytes_of_hex(RAMP_FLAC)),
        ("mp3", bytes_of_hex(SINE_MP3)),
        (
            "tif",
            tiff(false, &[(256, vec![5]), (258, vec![4]), (262, vec![3]), (320, vec![7; 48])], &[0x21; 3]),
        ),
        ("wav", adpcm),
        ("au", [&b".snd"[..], &[24_u32, 40, 3, 22_050, 1].map(u32::to_be_bytes).concat(), &[9; 40]].concat()),
    ];
    files.extend(avif_files());
    assert_eq!(files.len(), KINDS);
    files
}

#[cfg(not(feature = "avif"))]
fn avif_files() -> Vec<(&'static str, Vec<u8>)> {
    Vec::new()
}

#[cfg(feature = "avif")]
fn avif_files() -> Vec<(&'static str, Vec<u8>)> {
    use super::fixtures::avif::{AV1_10_BITS, AV1_420, AV1_GRAY_LIMITED, Place, SIZE, avif, avif_at, avis};

    vec![
        ("avif", avif(&bytes_of_hex(AV1_420), SIZE, &[(b"irot", &[3]), (b"imir", &[1])])),
        ("avif", avif_at(&bytes_of_hex(AV1_10_BITS), SIZE, &[], Place::First)),
        ("avif", avif_at(&bytes_of_hex(AV1_GRAY_LIMITED), SIZE, &[], Place::Inside)),
        ("avifs", avis(&bytes_of_hex(AV1_420), (7, 5))),
    ]
}

/// Reads a field's shape with the default limits.
fn probed_shape(prefix: &[u8], field_bytes: u64, extension: &str) -> Result<MediaShape, DecodeError> {
    probe_shape(prefix, field_bytes, extension, &DecodeLimits::default())
}

/// Returns whether a shape matches the decoded media.
fn agrees(shape: MediaShape, media: &Media) -> bool {
    match (shape, media) {
        (MediaShape::Image(size), Media::Image(image)) => {
            (size.width, size.height) == (image.width, image.height)
        }
        (MediaShape::Audio(length), Media::Audio(audio)) => {
            length.frames == audio.frames() as u64 && length.sample_rate_hz == audio.sample_rate_hz
        }
        (MediaShape::Opaque, Media::Text(_) | Media::Json(_) | Media::Npy(_)) | (_, Media::Opaque(_)) => true,
        _ => false,
    }
}

#[test]
fn shape_agrees_with_what_is_decoded() {
    for (extension, file) in one_of_each() {
        let shape = probed_shape(&file, file.len() as u64, extension).unwrap();
        let channels = audio_shape(&file, file.len() as u64).map(|(_, channels)| channels);
        let media = decode(extension, file.into(), &DecodeLimits::default()).unwrap();
        assert!(agrees(shape, &media), "{extension}: {shape:?}");
        if let Media::Audio(audio) = media {
            assert_eq!(channels.unwrap(), audio.channels, "{extension}");
        }
    }
}

#[test]
fn prefix_gives_the_same_shape_or_asks_for_more() {
    for (extension, file) in one_of_each() {
        let field_bytes = file.len() as u64;
        let whole = probed_shape(&file, field_bytes, extension).unwrap();
        for length in 0..file.len() {
            match probed_shape(&file[..length], field_bytes, extension) {
                Ok(shape) => assert_eq!(shape, whole, "{extension} cut to {length}"),
                Err(DecodeError::PrefixTooShort { prefix_bytes }) => assert_eq!(prefix_bytes, length as u64),
                Err(error) => panic!("{extension} cut to {length}: {error}"),
            }
        }
    }
}

#[test]
#[cfg(not(feature = "avif"))]
fn avif_is_refused_with_the_name_of_its_feature() {
    for main_brand in [b"avif", b"mif1"] {
        let file = [b"\0\0\0\x18ftyp", &main_brand[..], b"\0\0\0\0miafavif\0\0\0\x08mdat"].concat();
        for extension in ["avif", "jpg"] {
            let probed = probed_shape(&file, file.len() as u64, extension).unwrap_err();
            let refused = decode(extension, file.clone().into(), &DecodeLimits::default()).unwrap_err();
            assert_eq!(refused.to_string(), "unsupported avif: this build lacks the feature `avif`");
            assert_eq!(probed.to_string(), refused.to_string());
        }
    }
}

#[test]
fn extension_claims_by_its_last_part_alone() {
    let limits = DecodeLimits::default();
    assert!(matches!(decode("txt.gz", "x".into(), &limits), Ok(Media::Opaque(_))));
    assert!(matches!(decode("seg.JSON", "1".into(), &limits), Ok(Media::Json(_))));
    assert!(decode("0.jpg", "<html>not an image</html>".into(), &limits).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn mutated_files_never_panic(
        file in 0..KINDS,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut: prop::sample::Index,
        is_cut: bool,
        is_lenient: bool,
    ) {
        let (extension, mut bytes) = one_of_each().swap_remove(file);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let mut limits = DecodeLimits::default();
        limits.image.pixels_max = 1 << 20;
        limits.image.alloc_bytes_max = 1 << 24;
        if is_lenient {
            limits.image.strictness = Strictness::Lenient;
            limits.audio.strictness = Strictness::Lenient;
        }
        let _ = probed_shape(&bytes, bytes.len() as u64, extension);
        let _ = decode(extension, bytes.into(), &limits);
    }

    #[test]
    fn random_bytes_behind_a_magic_number_never_panic(
        magic in 0..KINDS,
        tail in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let (extension, file) = one_of_each().swap_remove(magic);
        let mut bytes = file[..12].to_vec();
        bytes.extend(tail);
        let _ = probed_shape(&bytes, bytes.len() as u64, extension);
        let _ = decode(extension, bytes.into(), &DecodeLimits::default());
    }
}

/// Returns the directory with real and malformed media; they are outside this repository, and tests skip
/// without them.
fn shared_media() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let root = std::env::var_os("DFLOP_SHARED").map_or(beside, PathBuf::from).join("data");
    root.is_dir().then_some(root)
}

fn files_below(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files_below(&path, files) } else { files.push(path) }
    }
}

/// Returns real files with this extension; empty without shared media.
#[cfg(any(feature = "turbojpeg", feature = "video"))]
pub(super) fn shared_files(ending: &str) -> impl Iterator<Item = (PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    if let Some(directory) = shared_media() {
        files_below(&directory, &mut files);
    }
    files.retain(|path| path.extension().is_some_and(|extension| extension == ending));
    files.into_iter().filter_map(|path| std::fs::read(&path).ok().map(|bytes| (path, bytes)))
}

#[test]
fn real_media_agree_with_their_shapes() {
    let Some(root) = shared_media() else { return };
    let mut files = Vec::new();
    for directory in ["images", "audio", "malformed"] {
        files_below(&root.join(directory), &mut files);
    }
    for path in files {
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = Bytes::from(std::fs::read(&path).unwrap());
        if let Ok(media) = decode(&extension, bytes.clone(), &DecodeLimits::default()) {
            let shape = probed_shape(&bytes, bytes.len() as u64, &extension);
            assert!(agrees(shape.unwrap(), &media), "{}", path.display());
        }
    }
}

#[test]
fn damaged_real_media_are_refused() {
    let Some(root) = shared_media() else { return };
    let made = root.join("malformed/made");
    for name in ["trunc_02.jpg", "trunc_10.jpg", "trunc_50.jpg", "trunc_98.jpg", "trunc_50.png"]
        .into_iter()
        .chain([
            "trunc_50.webp",
            "trunc.flac",
            "bitrot.flac",
            "bomb_20000x20000_gray.png",
            "bomb_sof_65535.jpg",
        ])
        .chain(["bad_utf8.txt", "utf16.txt", "deep.json", "wav_rate0.wav", "id3_only.mp3"])
    {
        let bytes = Bytes::from(std::fs::read(made.join(name)).unwrap());
        let extension = name.rsplit('.').next().unwrap();
        assert!(decode(extension, bytes, &DecodeLimits::default()).is_err(), "{name}");
    }
    let rotten = std::fs::read(made.join("bitrot.jpg")).unwrap();
    let strict = ImageLimits { strictness: Strictness::Strict, ..ImageLimits::default() };
    assert!(decode_rgb(&rotten, &strict).is_err());
    assert!(decode_rgb(&rotten, &ImageLimits::default()).unwrap().is_truncated);
}
