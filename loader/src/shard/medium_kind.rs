//! Tells the modality of a field from its extension.

/// Which decoder claims a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediumKind {
    /// [`super::decode_rgb`]: JPEG, PNG, WebP, GIF, BMP, TIFF.
    Image,
    /// [`super::decode_audio`]: WAV, FLAC, MP3, Ogg Vorbis.
    Audio,
    /// FFmpeg: MP4, MOV, Matroska, WebM, AVI.
    #[cfg(feature = "video")]
    Video,
    /// [`super::decode_text`]: UTF-8.
    Text,
    /// [`super::decode_json`].
    Json,
    /// [`super::decode_npy`]: one NumPy array.
    Npy,
    /// No decoder: the bytes are delivered as they are.
    Opaque,
}

/// Returns the kind of the field with this WebDataset extension: everything after the first dot of the file
/// name.
///
/// Only the last dot-part counts, without regard to case: `seg.png` and `0.PNG` are images, `txt.gz` is
/// opaque.
///
/// # Examples
/// ```
/// use dflop_loader::media::{MediumKind, kind_of_extension};
/// assert_eq!(kind_of_extension("left.jpg"), MediumKind::Image);
/// assert_eq!(kind_of_extension("txt.gz"), MediumKind::Opaque);
/// ```
#[must_use]
pub fn kind_of_extension(extension: &str) -> MediumKind {
    match last_part(extension).as_str() {
        "jpg" | "jpeg" | "jpe" | "jfif" | "png" | "webp" | "gif" | "bmp" | "tif" | "tiff" => {
            MediumKind::Image
        }
        "wav" | "wave" | "flac" | "mp3" | "ogg" | "oga" => MediumKind::Audio,
        #[cfg(feature = "video")]
        "mp4" | "mkv" | "webm" | "avi" | "mov" => MediumKind::Video,
        "txt" | "text" | "caption" => MediumKind::Text,
        "json" => MediumKind::Json,
        "npy" => MediumKind::Npy,
        _ => MediumKind::Opaque,
    }
}

/// Whether a field with this extension holds a video.
#[must_use]
pub fn is_video_extension(extension: &str) -> bool {
    matches!(last_part(extension).as_str(), "mp4" | "mkv" | "webm" | "avi" | "mov")
}

/// Returns the last dot-part of an extension, in lower case.
pub(crate) fn last_part(extension: &str) -> String {
    extension.rsplit('.').next().unwrap_or(extension).to_ascii_lowercase()
}
