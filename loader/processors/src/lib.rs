//! Turns samples into model inputs: token ids with media in place, labels, pixels and mel spectrograms.
//!
//! A [`Preparer`] does to a sample what the Hugging Face processor of the model's family does, and
//! [`ModelInputs`](dflop_samples::inputs::ModelInputs) hold a microbatch of such samples, ready for
//! `model(**inputs)`. A balanced loader runs it in its decode pool, directly after decoding.
//!
//! Pure: once a preparer is built, it reads no files and no clock.

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
