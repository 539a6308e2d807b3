//! Prepares the inputs of one rank from the balanced loader: reads samples, counts tokens, builds contexts.
//!
//! An [`InputReader`] reads for one rank. An LLM rank reads the texts in the microbatches of its DP rank and
//! no media; an encoder rank reads the samples whose media its replica encodes ([`ReplicaShare`]). Before a
//! step, ranks sum token counts (`token_counts.rs`). Then all ranks know the tokens in every sample,
//! including media and targets, and the step loss is scaled by the actual target tokens. All ranks skip a
//! sample that any rank could not decode, or whose text and media disagree, and report it. Before the first
//! step they compare settings ([`check_agreement`]). A training run prepares the inputs for the next step
//! while a step runs (`inputs_ahead.rs`).

mod agreement;
mod contexts;
mod input_reader;
mod inputs_ahead;
mod module_reader;
mod predicted_times;
mod step_media;
mod token_counts;

pub use agreement::{Settings, check_agreement};
pub use input_reader::{InputReader, StepInputs};
pub(crate) use inputs_ahead::{Ending, InputsAhead, Taken};
pub use module_reader::ReplicaShare;
pub use predicted_times::PredictedTimes;
pub(crate) use predicted_times::costed;
pub use token_counts::SkippedSample;

use futures::channel::oneshot;

/// Ends a wait for samples.
struct Stop {
    stopped: oneshot::Receiver<()>,
    /// Sender for a stop that never comes.
    _kept: Option<oneshot::Sender<()>>,
}

impl Stop {
    /// Returns a stop that comes when the sender is dropped.
    fn new(stopped: oneshot::Receiver<()>) -> Self {
        Self { stopped, _kept: None }
    }

    /// Returns a stop that never comes.
    fn never() -> Self {
        let (sender, stopped) = oneshot::channel();
        Self { stopped, _kept: Some(sender) }
    }

    /// Waits for the stop.
    async fn stopped(&mut self) {
        // The sender is dropped, never used.
        let _ = (&mut self.stopped).await;
    }
}
