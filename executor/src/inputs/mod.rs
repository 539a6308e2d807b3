//! From the balanced loader to the work of a rank: who reads which samples, what was counted of them, and their contexts.
//!
//! A [`InputReader`] is one rank's end of the loader. A rank of the LLM reads the texts of its DP rank's microbatches and no medium;
//! a rank of an encoder reads the samples whose media its replica encodes ([`ReplicaShare`]). Before a step, ranks add up
//! what each counted (`figures.rs`), so all of them know the tokens of every sample, media and targets included,
//! and the loss of the step is scaled by what is really learned. A sample that some rank could not decode, or of which
//! text and media do not agree, is dropped by all of them, and named.

mod input_reader;
mod media_context;
mod predicted_times;
mod replica_share;
mod step_media;
mod text_context;
mod token_counts;

pub use input_reader::{InputReader, StepInputs};
pub use predicted_times::PredictedTimes;
pub use replica_share::ReplicaShare;
pub use token_counts::SkippedSample;
