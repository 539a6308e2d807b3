//! Orders the samples in a run: epochs, mixtures, steps, and the state to resume from.
//!
//! Everything is arithmetic on (fingerprint, seed, epoch, position), so any rank computes any step without
//! the earlier steps, and a position is the complete loader state.

mod blocks;
mod epoch;
mod mixture;
mod rows;
mod run;
mod run_state;
mod shuffle_buffer;
mod steps;

pub use self::epoch::{EpochOrder, Order, Shuffle};
pub use self::mixture::{MixRules, Mixture, Origin, Stop};
pub(crate) use self::rows::{DocumentLength, Documents, Piece, Row, RowCursor, fit_rows, split_rows};
pub use self::rows::{RowLayout, RowRule, TokenSpan};
pub(crate) use self::run::{Run, RunBuilder, SampleSource};
pub use self::run_state::LoaderState;
pub(crate) use self::run_state::RowSettings;
pub use self::shuffle_buffer::ShuffleBuffer;
pub(crate) use self::shuffle_buffer::Shuffler;
pub use self::steps::{StepSample, Steps, Tail};
pub use epoch::ShuffleQuality;
