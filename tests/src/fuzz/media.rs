//! Media: what the header promises is what the decoder delivers.

use dflop_loader::media::{
    DecodeLimits, MediaShape, decode_audio, decode_json, decode_npy, decode_rgb, probe_shape,
};

/// Small limits: a fuzzer finds what exceeds them sooner.
pub(super) fn limits() -> DecodeLimits {
    let mut limits = DecodeLimits::default();
    limits.image.alloc_bytes_max = 32 << 20;
    limits
}

/// Compares the size in the header of an image with that of its pixels.
pub(super) fn image(bytes: &[u8]) {
    let probed = probe_shape(bytes, bytes.len() as u64, "jpg", &limits());
    let Ok(image) = decode_rgb(bytes, &limits().image) else { return };
    let Ok(MediaShape::Image(size)) = probed else {
        panic!("decoded, but its header was refused: {probed:?}")
    };
    assert_eq!((size.width, size.height), (image.width, image.height));
    assert_eq!(image.pixels.len() as u64, 3 * u64::from(image.width) * u64::from(image.height));
}

/// Compares the rate in the header of a clip with that of its samples.
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

/// Decodes a document; it can be read after it is written. Long numbers may differ in their last bit.
pub(super) fn json(bytes: &[u8]) {
    if let Ok(value) = decode_json(bytes, 1 << 20) {
        let written = value.to_string();
        assert!(decode_json(written.as_bytes(), 1 << 24).is_ok(), "{written}");
    }
}
