//! Media: the decoder delivers exactly the shape in the header.

use dflop_loader::error::EXCERPT_CHARACTERS;
use dflop_loader::media::{
    DecodeLimits, Media, MediaShape, decode_audio, decode_json, decode_npy, decode_rgb, probe_shape,
};
use dflop_loader::sample::document::SampleMedia;
use dflop_loader::sample::{Field, Sample, measure_within};
use dflop_loader::shard::{RawField, RawSample};

/// Small limits: a fuzzer finds inputs that exceed them sooner.
pub(super) fn limits() -> DecodeLimits {
    let mut limits = DecodeLimits::default();
    limits.image.alloc_bytes_max = 32 << 20;
    limits
}

/// Compares the image size in the header with the pixels.
pub(super) fn image(bytes: &[u8]) {
    let probed = probe_shape(bytes, bytes.len() as u64, "jpg", &limits());
    let Ok(image) = decode_rgb(bytes, &limits().image) else { return };
    let Ok(MediaShape::Image(size)) = probed else {
        panic!("decoded, but its header was refused: {probed:?}")
    };
    assert_eq!((size.width, size.height), (image.width, image.height));
    assert_eq!(image.pixels.len() as u64, 3 * u64::from(image.width) * u64::from(image.height));
}

/// Compares the clip rate in the header with the samples.
pub(super) fn audio(bytes: &[u8]) {
    let probed = probe_shape(bytes, bytes.len() as u64, "wav", &limits());
    let Ok(audio) = decode_audio(bytes, &limits().audio) else { return };
    assert_eq!(audio.samples.len() % usize::from(audio.channels), 0);
    if let Ok(MediaShape::Audio(length)) = probed {
        assert_eq!(length.sample_rate_hz, audio.sample_rate_hz);
    }
}

/// Decodes an array.
pub(super) fn npy(bytes: &[u8]) {
    let _decoded = decode_npy(&bytes.to_vec().into());
}

/// Decodes a document; it can be read after it is written. Long numbers may differ in the last bit.
pub(super) fn json(bytes: &[u8]) {
    if let Ok(value) = decode_json(bytes, 1 << 20) {
        let written = value.to_string();
        assert!(decode_json(written.as_bytes(), 1 << 24).is_ok(), "{written}");
    }
}

/// Measures a document, as an index does, and reads it, as a processor does: the measurement is bounded, and
/// a conversation that cannot be measured cannot be read.
pub(super) fn document(bytes: &[u8]) {
    let Ok(json) = decode_json(bytes, 1 << 20) else { return };
    let field = RawField {
        extension: "json".into(),
        offset: 512,
        bytes: bytes.len() as u64,
        payload: Some(bytes.to_vec().into()),
        size: None,
    };
    let raw = RawSample { key: "k".into(), shard: "s.tar".into(), offset: 0, epoch: 0, fields: vec![field] };
    let Ok(measured) = measure_within(&raw, &limits()) else { return };
    for unused in &measured.unused {
        assert!(unused.example.chars().count() <= EXCERPT_CHARACTERS, "{unused:?}");
    }
    for shape in &measured.shapes {
        if let MediaShape::Text(length) = shape {
            assert!(length.target_tokens <= length.tokens, "{length:?}");
        }
    }
    let fields = vec![Field { extension: "json".into(), media: Media::Json(json) }];
    let sample = Sample::new("k".to_owned(), fields);
    let is_read = SampleMedia::from_sample(&sample).is_ok_and(|media| matches!(media.turns(), Ok(Some(_))));
    assert!(!is_read || measured.unreadable.is_none(), "{:?}, but it is read", measured.unreadable);
}
