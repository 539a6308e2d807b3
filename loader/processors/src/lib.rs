//! Converts samples to model inputs: token ids with media in place, labels, pixels and mel spectrograms.
//!
//! A [`Preparer`] processes a sample like the Hugging Face processor for the model's family, and
//! [`ModelInputs`](dflop_samples::inputs::ModelInputs) hold a microbatch of prepared samples, ready for
//! `model(**inputs)`. A balanced loader runs the preparer in the decode pool, directly after decoding.
//!
//! A preparer is pure: once built, it reads no files and no clock.

pub mod audio;
mod chat;
pub mod family;
pub mod image;
mod message;
mod preparer;
mod tensors;

pub use self::chat::{ChatTemplate, Conversation, Encoded, SampleConversation, Tokenizer, read_conversation};
pub use self::family::{
    Family, LayerTime, PixelLayout, Placeholder, ProcessorFamilies, ProcessorFamily, VideoText,
};
pub use self::message::{Dialogue, Message, MessagePart};
pub use self::preparer::{
    Buckets, LongSample, PlainText, PreparedTexts, Preparer, PreparerBuilder, TokenizedTexts,
};
pub use self::tensors::{
    AudioTensors, CountedAudio, CountedImages, CountedVideos, ImageTensors, VideoTensors,
};
