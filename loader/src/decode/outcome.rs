//! Outcome of one sample: its decoded fields, or why it is bad.

use dflop_samples::inputs::PreparedSample;
use dflop_samples::sample::Field;

use crate::flow::LoaderStage;

/// Decoded fields of a sample, and its model inputs if it was prepared.
pub(crate) type Decoded = (Vec<Field>, Option<PreparedSample>);

/// Failure to decode a field or to prepare a sample.
#[derive(Debug)]
pub(crate) struct FieldError {
    pub(crate) field: Option<String>,
    pub(crate) reason: String,
    pub(crate) is_dropped: bool,
    /// Stage of the loader that failed.
    pub(crate) stage: LoaderStage,
}
