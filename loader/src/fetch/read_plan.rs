//! Plans a microbatch's reads, in a single pass over the index rows.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::ImageSize;
use dflop_samples::media::MediaShape;

use super::field_range::FieldRange;
use crate::error::Skipped;
use crate::index::{Index, SampleRow};
use crate::order::StepSample;
use crate::plan::{StepPlan, StepPlanner};
use crate::shard::{FieldSelection, RawField, RawSample};

/// Reports what later stages need from a sample, so that nothing else is read.
pub(crate) trait Demand: Debug + Send + Sync {
    /// Returns whether an image field's pixels are needed, and not only the image size.
    fn needs_pixels(&self, extension: &str) -> bool;

    /// Returns the total size of the tensors created from a sample, in bytes.
    fn tensor_bytes(&self, row: &SampleRow<'_>) -> u64;
}

/// Planned reads for a microbatch.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    /// Samples to read; payloads are missing.
    pub(crate) samples: Vec<PlannedRead>,
    /// Shard, offset and length for every remote field with headers, by dataset.
    pub(super) remote: Vec<Vec<(usize, u64, u64)>>,
    /// Samples that the cost model rejects, with dataset numbers; these samples are not read.
    pub(super) refused: Vec<(usize, Skipped)>,
    /// Memory size of the samples, decoded and prepared, estimated from the index shapes, in bytes.
    pub(crate) resident_bytes: u64,
}

/// Sample to read.
#[derive(Debug)]
pub(crate) struct PlannedRead {
    /// Sample position in [`StepPlan::samples`].
    pub(super) place: u32,
    pub(super) dataset: usize,
    /// Shard number in the dataset index.
    pub(super) shard: usize,
    pub(super) sample: RawSample,
    /// Field ranges, in field order.
    pub(super) ranges: Vec<FieldRange>,
}

impl ReadPlan {
    /// Plans the reads for the samples at `places` in the plan.
    pub(super) fn new(
        planner: &StepPlanner,
        plan: &StepPlan,
        places: &[u32],
        fields: &FieldSelection,
        demand: &dyn Demand,
    ) -> Self {
        let datasets = planner.datasets();
        let is_remote = |index: &Index, shard: usize| index.shards()[shard].remote().is_some();
        let (mut refused, mut resident_bytes) = (Vec::new(), 0u64);
        let mut remote = vec![Vec::new(); datasets.len()];
        let mut samples = Vec::with_capacity(places.len());
        for &place in places {
            let drawn = plan.samples[place as usize];
            let (row, index) = (planner.row(drawn), datasets[drawn.dataset].index());
            let url = &index.shards()[row.shard].url;
            // Rejected samples are listed in plan order.
            if let Ok(at) = plan.refused.binary_search_by_key(&(place as usize), |(at, _)| *at) {
                refused.push((drawn.dataset, skipped(&row, url, &plan.refused[at].1)));
                continue;
            }
            resident_bytes = resident_bytes.saturating_add(demand.tensor_bytes(&row));
            let mut sample = raw_sample(&row, url.clone(), drawn);
            let mut ranges = Vec::new();
            let wanted = FieldRange::row_fields(&row).filter(|(field, _)| fields.wants(field.extension));
            for (field, range) in wanted {
                let size = size_alone(field.extension, field.shape, demand);
                if size.is_none() {
                    resident_bytes = resident_bytes.saturating_add(field.shape.decoded_bytes(field.bytes));
                    if is_remote(index, row.shard) {
                        remote[drawn.dataset].push(range.in_shard(row.shard));
                    }
                }
                let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
                sample.fields.push(RawField { extension, offset, bytes, payload: None, size });
                ranges.push(range);
            }
            samples.push(PlannedRead { place, dataset: drawn.dataset, shard: row.shard, sample, ranges });
        }
        Self { samples, remote, refused, resident_bytes }
    }

    /// Returns whether any field is in a remote shard.
    pub(crate) fn is_remote(&self) -> bool {
        self.remote.iter().any(|fields| !fields.is_empty())
    }
}

/// Returns the size of an image whose pixels no later stage needs.
fn size_alone(extension: &str, shape: MediaShape, demand: &dyn Demand) -> Option<ImageSize> {
    match shape {
        MediaShape::Image(size) if !demand.needs_pixels(extension) => Some(size),
        _ => None,
    }
}

fn raw_sample(row: &SampleRow<'_>, shard: Arc<str>, drawn: StepSample) -> RawSample {
    let key = row.key().to_owned();
    RawSample { key, shard, offset: row.offset(), epoch: drawn.epoch, fields: Vec::new() }
}

fn skipped(row: &SampleRow<'_>, url: &str, reason: &str) -> Skipped {
    let (shard, key, reason) = (url.to_owned(), Some(row.key().to_owned()), reason.to_owned());
    Skipped { shard, offset: row.offset(), key, field: None, reason }
}
