//! Tells the modality of a field from its extension.

/// Decoder that handles a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FieldKind {
    /// [`crate::media::decode_rgb`]: JPEG, PNG, WebP, GIF, BMP, TIFF.
    Image,
    /// [`crate::media::decode_audio`]: WAV, FLAC, MP3, Ogg Vorbis.
    Audio,
    /// FFmpeg: MP4, MOV, Matroska, WebM, AVI.
    #[cfg(feature = "video")]
    Video,
    /// [`crate::media::decode_text`]: UTF-8.
    Text,
    /// [`crate::media::decode_json`].
    Json,
    /// [`crate::media::decode_npy`]: one NumPy array.
    Npy,
    /// No decoder: the bytes are delivered unchanged.
    Opaque,
}

/// Extensions of [`FieldKind::Image`].
pub const IMAGE_EXTENSIONS: [&str; 10] =
    ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"];

/// Returns the kind of the field with this WebDataset extension: everything after the first dot of the file
/// name.
///
/// Only the part after the last dot counts, ignoring case: `seg.png` and `0.PNG` are images, `txt.gz` is
/// opaque.
///
/// # Examples
/// ```
/// use dflop_samples::media::{FieldKind, kind_of_extension};
/// assert_eq!(kind_of_extension("left.jpg"), FieldKind::Image);
/// assert_eq!(kind_of_extension("txt.gz"), FieldKind::Opaque);
/// ```
#[must_use]
pub fn kind_of_extension(extension: &str) -> FieldKind {
    match last_part(extension).as_str() {
        image if IMAGE_EXTENSIONS.contains(&image) => FieldKind::Image,
        "wav" | "wave" | "flac" | "mp3" | "ogg" | "oga" => FieldKind::Audio,
        #[cfg(feature = "video")]
        "mp4" | "mkv" | "webm" | "avi" | "mov" => FieldKind::Video,
        "txt" | "text" | "caption" => FieldKind::Text,
        "json" => FieldKind::Json,
        "npy" => FieldKind::Npy,
        _ => FieldKind::Opaque,
    }
}

/// Returns whether a field with this extension holds a video, also without the feature `video`.
#[must_use]
pub fn is_video_extension(extension: &str) -> bool {
    matches!(last_part(extension).as_str(), "mp4" | "mkv" | "webm" | "avi" | "mov")
}

/// Returns the last dot-part of an extension, in lower case.
pub(crate) fn last_part(extension: &str) -> String {
    extension.rsplit('.').next().unwrap_or(extension).to_ascii_lowercase()
}
