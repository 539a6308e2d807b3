//! Ranged reads of one rank's share of a planned step.

use std::sync::Arc;

use dflop_costmodel::{ImageSize, SampleShape};

use crate::loader::BalancedLoaderBuilder;
use super::share::Share;
use crate::error::{Result, Skipped};
use crate::shard::{FieldSelection, RawField, RawSample};
use crate::index::SampleRow;
use crate::sample::FieldShape;
use crate::flow::{Metrics, SkipLog, Stage};
use crate::plan::{StepPlan, StepPlanner};
use crate::prepare::Preparer;
use crate::order::StepSample;
use super::ranges::ShardRanges;
use crate::decode::Transforms;

/// What was read for one microbatch: each sample, behind its place in the plan.
pub(super) type ReadMicrobatch = Vec<(u32, RawSample)>;

/// Reads this rank's samples of a step, and of them only the wanted fields.
#[derive(Debug)]
pub(crate) struct StepReader {
    planner: Arc<StepPlanner>,
    /// By dataset.
    ranges: Vec<ShardRanges>,
    /// Number of each dataset's first shard in the metrics.
    shard_starts: Vec<usize>,
    share: Arc<dyn Share>,
    fields: FieldSelection,
    skips: Arc<SkipLog>,
    metrics: Arc<Metrics>,
    preparer: Option<Arc<Preparer>>,
    transforms: Transforms,
}

impl StepReader {
    pub(super) fn new(settings: &BalancedLoaderBuilder, skips: Arc<SkipLog>, metrics: Arc<Metrics>) -> Self {
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
        Self {
            ranges: ranges.collect(),
            shard_starts: shard_starts.collect(),
            planner: Arc::new(settings.planner.clone()),
            share: settings.share.clone(),
            fields: settings.fields.clone(),
            skips,
            metrics,
            preparer: settings.preparer.clone(),
            transforms: settings.transforms.clone(),
        }
    }

    /// Places of the samples that are read of a step, by microbatch.
    pub(super) fn share(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        self.share.places(plan)
    }

    /// Brings what the share of a step needs of remote shards, all of it at the same time.
    pub(super) async fn fetch(&mut self, plan: &StepPlan, share: &[Vec<u32>]) -> Result<()> {
        let wanted = self.wanted_of_remote(plan, share);
        let fetches = self.ranges.iter_mut().zip(wanted).filter(|(_, wanted)| !wanted.is_empty());
        futures::future::try_join_all(fetches.map(|(ranges, wanted)| ranges.fetch(wanted))).await?;
        Ok(())
    }

    /// Shard, offset and length of every wanted field that is not on this machine, by dataset.
    fn wanted_of_remote(&self, plan: &StepPlan, share: &[Vec<u32>]) -> Vec<Vec<(usize, u64, u64)>> {
        let mut wanted = vec![Vec::new(); self.ranges.len()];
        for &place in share.iter().flatten() {
            let drawn = plan.samples[place as usize];
            let row = self.planner.row(drawn);
            let is_remote = self.ranges[drawn.dataset].is_remote(row.shard);
            if !is_remote || plan.refused.iter().any(|(at, _)| *at == place as usize) {
                continue;
            }
            let fields = row.fields().filter(|field| {
                self.fields.wants(field.extension) && self.size_alone(field.extension, field.shape).is_none()
            });
            wanted[drawn.dataset].extend(fields.map(|field| (row.shard, field.offset, field.bytes)));
        }
        wanted
    }

    /// Reads the share of a step, after [`Self::fetch`]; blocks on a cold disk.
    pub(super) fn read(&mut self, plan: &StepPlan, share: &[Vec<u32>]) -> Result<Vec<ReadMicrobatch>> {
        let planner = self.planner.clone();
        let mut microbatches = Vec::new();
        for places in share {
            let mut samples = Vec::with_capacity(places.len());
            for &place in places {
                let drawn = plan.samples[place as usize];
                let row = planner.row(drawn);
                match plan.refused.iter().find(|(refused, _)| *refused == place as usize) {
                    Some((_, reason)) => self.skip(&row, drawn, reason),
                    None => samples.push((place, self.read_sample(&row, drawn)?)),
                }
            }
            microbatches.push(samples);
        }
        self.ranges.iter_mut().for_each(ShardRanges::forget_fetched);
        Ok(microbatches)
    }

    fn read_sample(&mut self, row: &SampleRow<'_>, drawn: StepSample) -> Result<RawSample> {
        let mut fields = Vec::new();
        self.metrics.reads_shard(self.shard_starts[drawn.dataset] + row.shard);
        for field in row.fields().filter(|field| self.fields.wants(field.extension)) {
            let size = self.size_alone(field.extension, field.shape);
            let payload = match size {
                Some(_) => None,
                None => Some(self.ranges[drawn.dataset].read(row.shard, field.offset, field.bytes)?),
            };
            let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
            fields.push(RawField { extension, offset, bytes, payload, size });
        }
        let shard = self.url(row, drawn);
        let read = fields.iter().filter(|field: &&RawField| field.size.is_none());
        self.metrics.stage(Stage::Read).count(1, read.map(|field| field.bytes).sum());
        Ok(RawSample { key: row.key().to_owned(), shard, offset: row.offset(), epoch: drawn.epoch, fields })
    }

    /// The size of an image of which neither the preparer nor a transform asks for more.
    fn size_alone(&self, extension: &str, shape: FieldShape) -> Option<ImageSize> {
        let is_enough = self.preparer.as_ref().is_some_and(|own| !own.reads_pixels());
        match shape {
            FieldShape::Image(size) if is_enough && !self.transforms.takes(extension) => Some(size),
            _ => None,
        }
    }

    fn url(&self, row: &SampleRow<'_>, drawn: StepSample) -> Arc<str> {
        self.planner.datasets()[drawn.dataset].index().shards()[row.shard].url.clone()
    }

    fn skip(&self, row: &SampleRow<'_>, drawn: StepSample, reason: &str) {
        self.metrics.stage(Stage::Read).fail(1);
        self.skips.push(Skipped {
            shard: self.url(row, drawn).to_string(),
            offset: row.offset(),
            key: Some(row.key().to_owned()),
            field: None,
            reason: reason.to_owned(),
        });
    }

    /// What the share of a step takes in memory, decoded and prepared, from the shapes in the index.
    pub(super) fn resident_bytes(&self, plan: &StepPlan, share: &[Vec<u32>]) -> u64 {
        let rows = || share.iter().flatten().map(|&place| self.planner.row(plan.samples[place as usize]));
        let mut shape = SampleShape::default();
        let tensor_bytes = |preparer: &Arc<Preparer>| -> u64 {
            let bytes = |row: SampleRow<'_>| {
                row.read_shape(&mut shape);
                preparer.tensor_bytes(&shape)
            };
            rows().map(bytes).sum()
        };
        let prepared = self.preparer.as_ref().map_or(0, tensor_bytes);
        let fields = rows().flat_map(|row| row.fields());
        let decoded: u64 = fields
            .filter(|field| {
                self.fields.wants(field.extension) && self.size_alone(field.extension, field.shape).is_none()
            })
            .map(|field| field.shape.decoded_bytes(field.bytes))
            .sum();
        decoded.saturating_add(prepared)
    }
}
