//! Prepares the inputs of a rank from the balanced loader: reads samples, counts tokens, builds contexts.
//!
//! An [`InputReader`] reads for one rank. A rank of the LLM reads the texts of its DP rank's microbatches and
//! no medium; a rank of an encoder reads the samples whose media its replica encodes ([`ReplicaShare`]).
//! Before a step, ranks sum their token counts (`token_counts.rs`). Then all of them know the tokens of every
//! sample, media and targets included, and the loss of the step is scaled by its actual target tokens. All
//! ranks skip a sample that one of them could not decode, or whose text and media disagree, and report it.
//! Before the first step they compare their settings ([`check_agreement`]). A training run prepares the
//! inputs of the next step while a step runs (`inputs_ahead.rs`).

mod agreement;
mod input_reader;
mod inputs_ahead;
mod media_context;
mod module_reader;
mod predicted_times;
mod replica_share;
mod same_digests;
mod step_media;
mod text_context;
mod token_counts;

pub use agreement::{Settings, check_agreement};
pub use input_reader::{InputReader, StepInputs};
pub(crate) use inputs_ahead::{Ending, InputsAhead, Taken};
pub use predicted_times::PredictedTimes;
pub(crate) use predicted_times::costed;
pub use replica_share::ReplicaShare;
pub use token_counts::SkippedSample;
