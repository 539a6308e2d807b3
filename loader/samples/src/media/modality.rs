//! Names the modalities of media that encoders take.

/// Modality of a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modality {
    /// An image.
    Image,
    /// Audio: one clip.
    Audio,
    /// A video.
    Video,
}

impl Modality {
    /// All modalities, in the order of their discriminants.
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
