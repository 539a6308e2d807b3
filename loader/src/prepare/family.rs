//! Model families: how a family writes media into its text, and which tensors it takes.
//!
//! The processor of every family replaces the placeholder of a medium by as many copies as the encoder gives tokens.
//! [`Family::of`] reads all of this off the cost model's description of a model, so that what is planned and what is
//! prepared follow the same rule.

use dflop_costmodel::ModelSpec;
use dflop_costmodel::tokens::VisionRule;

use super::chat_template::MessagePart;

/// How one kind of medium is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placeholder {
    /// The token that stands for one token of the medium, and once for the medium before it is expanded.
    pub token: &'static str,
    /// Tokens before and after the copies.
    pub markers: Option<[&'static str; 2]>,
    /// Whether the chat template writes the markers; else the expansion adds them.
    pub has_markers_in_text: bool,
}

impl Placeholder {
    /// How a chat template writes the medium.
    #[must_use]
    pub fn in_text(&self) -> String {
        match self.markers {
            Some([open, close]) if self.has_markers_in_text => [open, self.token, close].concat(),
            _ => self.token.to_owned(),
        }
    }
}

/// Images of LLaVA-OneVision.
const LLAVA_IMAGE: Placeholder = Placeholder { token: "<image>", markers: None, has_markers_in_text: false };
/// Images of InternVL, as its converted checkpoints write them.
const INTERN_IMAGE: Placeholder =
    Placeholder { token: "<IMG_CONTEXT>", markers: Some(["<img>", "</img>"]), has_markers_in_text: false };
/// Images of Qwen2-VL and Qwen2.5-VL.
const QWEN_IMAGE: Placeholder = Placeholder {
    token: "<|image_pad|>",
    markers: Some(["<|vision_start|>", "<|vision_end|>"]),
    has_markers_in_text: true,
};
/// Videos of LLaVA-OneVision.
const LLAVA_VIDEO: Placeholder = Placeholder { token: "<video>", markers: None, has_markers_in_text: false };
/// Videos of Qwen2-VL and Qwen2.5-VL.
const QWEN_VIDEO: Placeholder = Placeholder { token: "<|video_pad|>", ..QWEN_IMAGE };
/// Positions of a second of video in the released checkpoints of Qwen2.5-VL.
const QWEN_TOKENS_PER_SECOND: u32 = 2;
/// Clips of Qwen2-Audio.
const QWEN_AUDIO: Placeholder = Placeholder {
    token: "<|AUDIO|>",
    markers: Some(["<|audio_bos|>", "<|audio_eos|>"]),
    has_markers_in_text: true,
};

/// How the pixels of several images become one tensor, and what goes with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `pixel_values [images, most tiles, 3, side, side]`, filled up with zeros, with `image_sizes` and
    /// `batch_num_images`: LLaVA-OneVision.
    PaddedTiles,
    /// `pixel_values [tiles, 3, side, side]`: InternVL.
    Tiles,
    /// `pixel_values [patches, values]` with `image_grid_thw`: Qwen2-VL.
    Patches {
        /// Patches along a side of what becomes one token.
        merge: u32,
        /// Positions of a second of video, with `second_per_grid_ts` beside the grids: Qwen2.5-VL. `None` where layers
        /// of frames are counted: Qwen2-VL.
        tokens_per_second: Option<u32>,
    },
}

/// How a video stands in the text. Its pixels are in tensors of their own, `pixel_values_videos`, or among those of
/// images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VideoText {
    /// As one medium with a placeholder of its own.
    Whole(Placeholder),
    /// As a line for each frame, `Frame1: ` and the placeholder of an image, in place of one word: InternVL.
    Frames {
        /// What the chat template writes for the whole video.
        word: &'static str,
    },
}

impl VideoText {
    /// How a chat template writes the video.
    #[must_use]
    pub fn in_text(&self) -> String {
        match self {
            Self::Whole(placeholder) => placeholder.in_text(),
            Self::Frames { word } => (*word).to_owned(),
        }
    }
}

/// What preparing needs to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    image: Option<(Placeholder, PixelLayout)>,
    video: Option<VideoText>,
    audio: Option<Placeholder>,
}

impl Family {
    /// Returns the family of a model; a model without encoders is a text model.
    #[must_use]
    pub fn of(model: &ModelSpec) -> Self {
        let image = model.vision.map(|vision| match vision.rule {
            VisionRule::AnyRes(_) => (LLAVA_IMAGE, PixelLayout::PaddedTiles),
            VisionRule::DynamicTiles(_) => (INTERN_IMAGE, PixelLayout::Tiles),
            VisionRule::Fixed(_) => (LLAVA_IMAGE, PixelLayout::Tiles),
            VisionRule::Native(rule) => {
                // Times of frames came with windows of attention, in Qwen2.5-VL.
                let tokens_per_second = rule.window_patches.map(|_| QWEN_TOKENS_PER_SECOND);
                let merge = u32::from(rule.merge.get());
                (QWEN_IMAGE, PixelLayout::Patches { merge, tokens_per_second })
            }
        });
        let video = model.vision.map(|vision| match vision.rule {
            VisionRule::AnyRes(_) | VisionRule::Fixed(_) => VideoText::Whole(LLAVA_VIDEO),
            VisionRule::DynamicTiles(_) => VideoText::Frames { word: "<video>" },
            VisionRule::Native(_) => VideoText::Whole(QWEN_VIDEO),
        });
        Self { image, video, audio: model.audio.map(|_| QWEN_AUDIO) }
    }

    /// A model of text alone.
    #[must_use]
    pub const fn text() -> Self {
        Self { image: None, video: None, audio: None }
    }

    /// How images are written; `None` for a model that cannot see.
    #[must_use]
    pub fn image(&self) -> Option<&Placeholder> {
        self.image.as_ref().map(|(placeholder, _)| placeholder)
    }

    /// How videos are written; `None` for a model that cannot see.
    #[must_use]
    pub fn video(&self) -> Option<&VideoText> {
        self.video.as_ref()
    }

    /// How clips are written; `None` for a model that cannot hear.
    #[must_use]
    pub fn audio(&self) -> Option<&Placeholder> {
        self.audio.as_ref()
    }

    /// How pixels are laid out; `None` for a model that cannot see.
    #[must_use]
    pub fn pixel_layout(&self) -> Option<PixelLayout> {
        self.image.as_ref().map(|(_, layout)| *layout)
    }

    /// Whether the model takes any medium beside text, so that a processor feeds it and not a tokenizer alone.
    #[must_use]
    pub fn has_media(&self) -> bool {
        self.image.is_some() || self.audio.is_some()
    }

    /// Returns the template that is used where the model's files hold none.
    ///
    /// `has_header_ids` says that turns are written in the manner of Llama 3, which the vocabulary tells.
    #[must_use]
    pub fn built_in_template(&self, has_header_ids: bool) -> &'static str {
        if has_header_ids {
            return include_str!("templates/llama3.jinja");
        }
        match (self.pixel_layout(), &self.audio) {
            (Some(PixelLayout::PaddedTiles), None) => include_str!("templates/llava_onevision.jinja"),
            (Some(PixelLayout::Tiles), None) if self.image() == Some(&LLAVA_IMAGE) => {
                include_str!("templates/llava_onevision.jinja")
            }
            (Some(PixelLayout::Tiles), None) => include_str!("templates/internvl.jinja"),
            (Some(PixelLayout::Patches { .. }), None) => include_str!("templates/qwen2_vl.jinja"),
            (None, Some(_)) => include_str!("templates/qwen2_audio.jinja"),
            (None, None) | (Some(_), Some(_)) => include_str!("templates/chatml.jinja"),
        }
    }

    /// Writes the parts of a turn as one string: media as their placeholders, `separator` behind each.
    #[must_use]
    pub fn inline(&self, parts: &[MessagePart], separator: &str) -> String {
        let placeholder =
            |of: Option<&Placeholder>| of.map(|of| of.in_text() + separator).unwrap_or_default();
        let part = |part: &MessagePart| match part {
            MessagePart::Text(text) => text.clone(),
            MessagePart::Image => placeholder(self.image()),
            MessagePart::Audio => placeholder(self.audio()),
            MessagePart::Video => self.video().map(|of| of.in_text() + separator).unwrap_or_default(),
        };
        parts.iter().map(part).collect()
    }
}
