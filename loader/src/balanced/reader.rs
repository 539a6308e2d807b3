//! Ranged reads of one rank's share of a planned step.

use std::sync::Arc;

use dflop_costmodel::SampleCost;

use super::builder::BalancedLoaderBuilder;
use crate::error::Result;
use crate::index::{FieldRow, SampleRow};
use crate::plan::{StepPlan, StepPlanner};
use crate::sample::{RawField, RawSample};
use crate::skip::{SkipLog, Skipped};
use crate::steps::StepSample;
use crate::store::ranges::ShardRanges;

/// What was read for one microbatch: each sample with its cost.
pub(super) type ReadMicrobatch = Vec<(RawSample, SampleCost)>;

/// Reads this rank's samples of a step, and of them only the wanted fields.
#[derive(Debug)]
pub(super) struct StepReader {
    planner: Arc<StepPlanner>,
    /// By data set.
    ranges: Vec<ShardRanges>,
    dp_rank: usize,
    fields: Option<Vec<String>>,
    skips: Arc<SkipLog>,
}

impl StepReader {
    pub(super) fn new(settings: &BalancedLoaderBuilder, skips: Arc<SkipLog>) -> Self {
        let data_sets = settings.planner.data_sets();
        let unpacked_bytes_max = settings.unpacked_bytes_max / data_sets.len() as u64;
        let ranges = data_sets.iter().map(|set| ShardRanges::new(set.index().clone(), unpacked_bytes_max));
        Self {
            ranges: ranges.collect(),
            planner: Arc::new(settings.planner.clone()),
            dp_rank: settings.dp_rank,
            fields: settings.fields.clone(),
            skips,
        }
    }

    /// Brings what this rank's share of a step needs of remote shards, all of it at the same time.
    pub(super) async fn fetch(&mut self, plan: &StepPlan) -> Result<()> {
        let wanted = self.wanted_of_remote(plan);
        if wanted.is_empty() { Ok(()) } else { self.ranges.fetch(wanted).await }
    }

    /// Shard, offset and length of every wanted field that is not on this machine.
    fn wanted_of_remote(&self, plan: &StepPlan) -> Vec<(usize, u64, u64)> {
        let mut wanted = Vec::new();
        for &place in plan.ranks[self.dp_rank].iter().flatten() {
            let row = self.index.sample(plan.samples[place as usize].sample);
            if !self.ranges.is_remote(row.shard) || plan.refused.iter().any(|(at, _)| *at == place as usize) {
                continue;
            }
            let fields = row.fields().filter(|field| is_wanted(self.fields.as_deref(), field));
            wanted.extend(fields.map(|field| (row.shard, field.offset, field.bytes)));
        }
        wanted
    }

    /// Reads this rank's microbatches, after [`Self::fetch`]; blocks on a cold disk.
    pub(super) fn read(&mut self, plan: &StepPlan) -> Result<Vec<ReadMicrobatch>> {
        let planner = self.planner.clone();
        let mut microbatches = Vec::new();
        for places in &plan.ranks[self.dp_rank] {
            let mut samples = Vec::with_capacity(places.len());
            for &place in places {
                let drawn = plan.samples[place as usize];
                let row = planner.row(drawn);
                match plan.refused.iter().find(|(refused, _)| *refused == place as usize) {
                    Some((_, reason)) => self.skip(&row, drawn, reason),
                    None => samples.push((self.read_sample(&row, drawn)?, plan.costs[place as usize])),
                }
            }
            microbatches.push(samples);
        }
        Ok(microbatches)
    }

    fn read_sample(&mut self, row: &SampleRow<'_>, drawn: StepSample) -> Result<RawSample> {
        let mut fields = Vec::new();
        for field in row.fields().filter(|field| is_wanted(self.fields.as_deref(), field)) {
            let payload = self.ranges[drawn.data_set].read(row.shard, field.offset, field.bytes)?;
            let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
            fields.push(RawField { extension, offset, bytes, payload: Some(payload) });
        }
        let shard = self.url(row, drawn);
        Ok(RawSample { key: row.key().to_owned(), shard, offset: row.offset(), epoch: drawn.epoch, fields })
    }

    fn url(&self, row: &SampleRow<'_>, drawn: StepSample) -> Arc<str> {
        self.planner.data_sets()[drawn.data_set].index().shards()[row.shard].url.clone()
    }

    fn skip(&self, row: &SampleRow<'_>, drawn: StepSample, reason: &str) {
        self.skips.push(Skipped {
            shard: self.url(row, drawn).to_string(),
            offset: row.offset(),
            key: Some(row.key().to_owned()),
            field: None,
            reason: reason.to_owned(),
        });
    }

    /// What this rank's share of a step takes in memory, decoded, from the shapes in the index.
    pub(super) fn resident_bytes(&self, plan: &StepPlan) -> u64 {
        let places = plan.ranks[self.dp_rank].iter().flatten();
        let rows = places.map(|&place| self.planner.row(plan.samples[place as usize]));
        let fields = rows.flat_map(|row| row.fields());
        fields
            .filter(|field| is_wanted(self.fields.as_deref(), field))
            .map(|field| field.shape.decoded_bytes(field.bytes))
            .sum()
    }
}

fn is_wanted(wanted: Option<&[String]>, field: &FieldRow<'_>) -> bool {
    let last = field.extension.rsplit('.').next().unwrap_or_default();
    wanted.is_none_or(|wanted| wanted.iter().any(|name| name == field.extension || name == last))
}
