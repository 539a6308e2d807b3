//! Names the media modalities that encoders accept.

/// Media modality.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modality {
    /// An image.
    Image,
    /// An audio clip.
    Audio,
    /// A video.
    Video,
}

impl Modality {
    /// All modalities, in discriminant order.
    pub const ALL: [Self; 3] = [Self::Image, Self::Audio, Self::Video];

    /// Returns the name that datasets and chat templates use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Video => "video",
        }
    }

    /// Returns the plural used in messages.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Image => "images",
            Self::Audio => "clips",
            Self::Video => "videos",
        }
    }
}
