//! Fetches the sample bytes in a rank's share of a planned step, by range.

mod dataset_ranges;
mod ranges;
mod read_samples;
mod remote;
mod tables;

pub(crate) use self::dataset_ranges::{DatasetRanges, WantedFields, distinct_shards};
pub use self::read_samples::{SampleReader, read_classes, read_samples};
pub(crate) use ranges::{Demand, FieldRange, ReadPlan};
pub use read_samples::{DpShare, Share};
pub(crate) use read_samples::{StepReader, StepReaderSettings};
