//! Reads one rank's share of a planned step by range.

use std::sync::Arc;

use super::ranges::ShardRanges;
use super::read_plan::{Demand, PlannedRead, ReadPlan};
use super::share::Share;
use crate::error::Result;
use crate::flow::{LoaderStage, Metrics, SkipLog};
use crate::plan::{StepPlan, StepPlanner};
use crate::shard::{FieldSelection, RawSample};

/// Samples of one microbatch, each with its place in the plan.
pub(crate) type ReadMicrobatch = Vec<(u32, RawSample)>;

/// Settings of a [`StepReader`].
#[derive(Debug)]
pub(crate) struct StepReaderSettings {
    pub(crate) planner: StepPlanner,
    pub(crate) share: Arc<dyn Share>,
    /// The fields that are read.
    pub(crate) fields: FieldSelection,
    pub(crate) demand: Arc<dyn Demand>,
    /// Bytes of unpacked compressed shards that are kept, over all datasets.
    pub(crate) unpacked_bytes_max: u64,
}

/// Reads this rank's samples of a step, and of them only the wanted fields.
#[derive(Debug)]
pub(crate) struct StepReader {
    settings: StepReaderSettings,
    /// By dataset.
    ranges: Vec<ShardRanges>,
    /// Number of each dataset's first shard in the metrics.
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

    /// Plans the reads of a step.
    ///
    /// # Errors
    /// See [`Share::places`].
    pub(crate) fn plan(&self, plan: &StepPlan) -> Result<ReadPlan> {
        let StepReaderSettings { planner, share, fields, demand, .. } = &self.settings;
        Ok(ReadPlan::new(planner, plan, &share.places(plan)?, fields, &**demand))
    }

    /// Fetches everything that a step needs of remote shards, at the same time.
    pub(crate) async fn fetch(&mut self, reads: &mut ReadPlan) -> Result<()> {
        let wanted = std::mem::take(&mut reads.remote);
        let fetches = self.ranges.iter_mut().zip(wanted).filter(|(_, wanted)| !wanted.is_empty());
        futures::future::try_join_all(fetches.map(|(ranges, wanted)| ranges.fetch(wanted))).await?;
        Ok(())
    }

    /// Reads a step, after [`Self::fetch`]; blocks on a cold disk.
    pub(crate) fn read(&mut self, reads: ReadPlan) -> Result<Vec<ReadMicrobatch>> {
        for refused in reads.refused {
            self.metrics.stage(LoaderStage::Read).fail(1);
            self.skips.push(refused);
        }
        let mut microbatches = Vec::with_capacity(reads.microbatches.len());
        for planned in reads.microbatches {
            let samples = planned.into_iter().map(|planned| self.read_sample(planned));
            microbatches.push(samples.collect::<Result<_>>()?);
        }
        self.ranges.iter_mut().for_each(ShardRanges::forget_fetched);
        Ok(microbatches)
    }

    fn read_sample(&mut self, planned: PlannedRead) -> Result<(u32, RawSample)> {
        let PlannedRead { place, dataset, shard, mut sample } = planned;
        self.metrics.reads_shard(self.shard_starts[dataset] + shard);
        let mut read_bytes = 0;
        for field in sample.fields.iter_mut().filter(|field| field.size.is_none()) {
            field.payload = Some(self.ranges[dataset].read(shard, field.offset, field.bytes)?);
            read_bytes += field.bytes;
        }
        self.metrics.stage(LoaderStage::Read).count(1, read_bytes);
        Ok((place, sample))
    }
}
