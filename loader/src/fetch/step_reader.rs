//! Reads one rank's share of a planned step by range, microbatch by microbatch.

use std::fmt::Debug;
use std::sync::Arc;

use super::ranges::ShardRanges;
use super::read_plan::{Demand, PlannedRead, ReadPlan};
use crate::error::Result;
use crate::flow::{LoaderStage, Metrics, SkipLog};
use crate::plan::{StepPlan, StepPlanner};
use crate::shard::{FieldSelection, RawSample};

/// Samples in a microbatch, with plan positions.
type ReadMicrobatch = Vec<(u32, RawSample)>;

/// [`StepReader`] settings.
#[derive(Debug)]
pub(crate) struct StepReaderSettings {
    pub(crate) planner: StepPlanner,
    pub(crate) share: Arc<dyn Share>,
    /// Fields to read.
    pub(crate) fields: FieldSelection,
    pub(crate) demand: Arc<dyn Demand>,
    /// Maximum size of kept decompressed shards over all datasets, in bytes.
    pub(crate) unpacked_bytes_max: u64,
}

/// Reads only the wanted fields from this rank's samples in a step.
#[derive(Debug)]
pub(crate) struct StepReader {
    settings: StepReaderSettings,
    /// Shard ranges, by dataset.
    ranges: Vec<ShardRanges>,
    /// Shard number of each dataset's first shard in the metrics.
    shard_starts: Vec<usize>,
    skips: Arc<SkipLog>,
    metrics: Arc<Metrics>,
}

impl StepReader {
    pub(crate) fn new(settings: StepReaderSettings, skips: Arc<SkipLog>, metrics: Arc<Metrics>) -> Self {
        let datasets = settings.planner.datasets();
        let unpacked_bytes_max = settings.unpacked_bytes_max / datasets.len() as u64;
        let ranges = datasets
            .iter()
            .map(|set| ShardRanges::new(set.index().clone(), unpacked_bytes_max, metrics.retries()));
        let shard_starts = datasets.iter().scan(0, |start, set| {
            let first = *start;
            *start += set.index().shards().len();
            Some(first)
        });
        let (ranges, shard_starts) = (ranges.collect(), shard_starts.collect());
        Self { settings, ranges, shard_starts, skips, metrics }
    }

    /// Returns the step samples to read, by microbatch, as plan positions.
    ///
    /// # Errors
    /// See [`Share::places`].
    pub(crate) fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        self.settings.share.places(plan)
    }

    /// Plans the reads for the samples in a microbatch.
    pub(crate) fn plan(&self, plan: &StepPlan, places: &[u32]) -> ReadPlan {
        let StepReaderSettings { planner, fields, demand, .. } = &self.settings;
        ReadPlan::new(planner, plan, places, fields, &**demand)
    }

    /// Fetches everything that microbatches need from remote shards, in parallel. The bytes are kept until
    /// [`Self::read`] has read them.
    pub(crate) async fn fetch(&mut self, microbatches: &mut [ReadPlan]) -> Result<()> {
        let mut wanted = vec![Vec::new(); self.ranges.len()];
        for reads in microbatches {
            wanted.iter_mut().zip(&mut reads.remote).for_each(|(all, own)| all.append(own));
        }
        let fetches = self.ranges.iter_mut().zip(wanted).filter(|(_, wanted)| !wanted.is_empty());
        futures::future::try_join_all(fetches.map(|(ranges, wanted)| ranges.fetch(wanted))).await?;
        Ok(())
    }

    /// Reads microbatches, after [`Self::fetch`]; blocks on a cold disk.
    pub(crate) fn read(&mut self, microbatches: Vec<ReadPlan>) -> Result<Vec<ReadMicrobatch>> {
        let mut read = Vec::with_capacity(microbatches.len());
        for reads in microbatches {
            for (dataset, refused) in reads.refused {
                self.metrics.stage(LoaderStage::Read).fail(1);
                self.skips.push(refused);
                if let Some(source) = self.metrics.source(dataset) {
                    source.skip(1);
                }
            }
            let samples = reads.samples.into_iter().map(|planned| self.read_sample(planned));
            read.push(samples.collect::<Result<_>>()?);
        }
        self.ranges.iter_mut().for_each(ShardRanges::forget_fetched);
        Ok(read)
    }

    fn read_sample(&mut self, planned: PlannedRead) -> Result<(u32, RawSample)> {
        let PlannedRead { place, dataset, shard, mut sample, ranges } = planned;
        self.metrics.reads_shard(self.shard_starts[dataset] + shard);
        let mut read_bytes = 0;
        let fields = sample.fields.iter_mut().zip(ranges);
        for (field, range) in fields.filter(|(field, _)| field.size.is_none()) {
            let payload = self.ranges[dataset].read_field(shard, range, &sample.key, &field.extension)?;
            field.payload = Some(payload);
            read_bytes += field.bytes;
        }
        self.metrics.stage(LoaderStage::Read).count(1, read_bytes);
        Ok((place, sample))
    }
}

/// Returns the step samples that a loader delivers, microbatch by microbatch.
///
/// [`DpShare`] is the share of a DP rank. Custom shares are for stages that do not process a rank's
/// microbatches, such as encoder replicas among which the media of all ranks are balanced again.
pub trait Share: Debug + Send + Sync {
    /// Returns positions in [`StepPlan::samples`], by microbatch; a pure function of the plan.
    ///
    /// # Errors
    /// If the plan cannot be shared like this; ends the stream.
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>>;
}

/// Microbatches assigned to a DP rank by the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DpShare(
    /// DP rank.
    pub usize,
);

impl Share for DpShare {
    fn places(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        Ok(plan.ranks[self.0].clone())
    }
}
