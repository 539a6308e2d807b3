//! Ranged reads of one rank's share of a planned step.

use std::sync::Arc;

use dflop_costmodel::SampleCost;

use super::builder::BalancedLoaderBuilder;
use crate::error::Result;
use crate::field_selection::FieldSelection;
use crate::index::{Index, SampleRow};
use crate::plan::StepPlan;
use crate::sample::{RawField, RawSample};
use crate::skip::{SkipLog, Skipped};
use crate::store::ranges::ShardRanges;

/// What was read for one microbatch: each sample with its cost.
pub(super) type ReadMicrobatch = Vec<(RawSample, SampleCost)>;

/// Reads this rank's samples of a step, and of them only the wanted fields.
#[derive(Debug)]
pub(super) struct StepReader {
    index: Arc<Index>,
    ranges: ShardRanges,
    dp_rank: usize,
    fields: FieldSelection,
    skips: Arc<SkipLog>,
}

impl StepReader {
    pub(super) fn new(settings: &BalancedLoaderBuilder, skips: Arc<SkipLog>) -> Self {
        let index = settings.planner.index().clone();
        Self {
            ranges: ShardRanges::new(index.clone(), settings.unpacked_bytes_max),
            index,
            dp_rank: settings.dp_rank,
            fields: settings.fields.clone(),
            skips,
        }
    }

    /// Reads this rank's microbatches; blocks on a cold disk.
    pub(super) fn read(&mut self, plan: &StepPlan) -> Result<Vec<ReadMicrobatch>> {
        let index = self.index.clone();
        let mut microbatches = Vec::new();
        for places in &plan.ranks[self.dp_rank] {
            let mut samples = Vec::with_capacity(places.len());
            for &place in places {
                let drawn = plan.samples[place as usize];
                let row = index.sample(drawn.sample);
                match plan.refused.iter().find(|(refused, _)| *refused == place as usize) {
                    Some((_, reason)) => self.skip(&row, reason),
                    None => samples.push((self.read_sample(&row, drawn.epoch)?, plan.costs[place as usize])),
                }
            }
            microbatches.push(samples);
        }
        Ok(microbatches)
    }

    fn read_sample(&mut self, row: &SampleRow<'_>, epoch: u64) -> Result<RawSample> {
        let mut fields = Vec::new();
        for field in row.fields().filter(|field| self.fields.wants(field.extension)) {
            let payload = self.ranges.read(row.shard, field.offset, field.bytes)?;
            let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
            fields.push(RawField { extension, offset, bytes, payload: Some(payload) });
        }
        let shard = self.index.shards()[row.shard].url.clone();
        Ok(RawSample { key: row.key().to_owned(), shard, offset: row.offset(), epoch, fields })
    }

    fn skip(&self, row: &SampleRow<'_>, reason: &str) {
        self.skips.push(Skipped {
            shard: self.index.shards()[row.shard].url.to_string(),
            offset: row.offset(),
            key: Some(row.key().to_owned()),
            field: None,
            reason: reason.to_owned(),
        });
    }

    /// What this rank's share of a step takes in memory, decoded, from the shapes in the index.
    pub(super) fn resident_bytes(&self, plan: &StepPlan) -> u64 {
        let places = plan.ranks[self.dp_rank].iter().flatten();
        let rows = places.map(|&place| self.index.sample(plan.samples[place as usize].sample));
        let fields = rows.flat_map(|row| row.fields());
        fields
            .filter(|field| self.fields.wants(field.extension))
            .map(|field| field.shape.decoded_bytes(field.bytes))
            .sum()
    }
}
