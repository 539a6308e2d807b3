//! Fetches the sample bytes in a rank's share of a planned step, by range.

mod field_range;
mod ranges;
mod read_plan;
mod read_samples;
mod remote;
mod step_reader;

pub(crate) use self::field_range::FieldRange;
pub(crate) use self::ranges::ShardRanges;
pub(crate) use self::read_plan::{Demand, ReadPlan};
pub use self::read_samples::{SampleReader, read_samples};
pub use self::step_reader::{DpShare, Share};
pub(crate) use self::step_reader::{StepReader, StepReaderSettings};
