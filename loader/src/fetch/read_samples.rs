//! Reads the samples in a rank's share of a step, samples by number, and the class of each sample from a
//! column: a field, or an entry in the JSON documents.

use super::dataset_ranges::DatasetRanges;
use super::ranges::{Demand, FieldRange, PlannedRead, ReadPlan, ShardRanges};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::flow::{LoaderStage, Metrics, SkipLog};
use crate::index::{FieldRow, Index};
use crate::plan::{StepPlan, StepPlanner};
use crate::shard::{Compression, FieldSelection, RawField, RawSample};
use bytes::Bytes;
use serde_json::Value;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Maximum size of kept decompressed shards, in bytes.
const UNPACKED_BYTES_MAX: u64 = 256 << 20;
/// Maximum size of a field whose values are compared, such as a class, in bytes.
const FIELD_BYTES_MAX: u64 = 1 << 20;

/// Number of samples whose fields are requested together.
const READ_TOGETHER: u64 = 1 << 10;
/// Maximum length of a class, in bytes.
const CLASS_BYTES_MAX: usize = 256;
/// Field with the columns of a packed table.
const DOCUMENT: &str = "json";

/// Reads samples by index number, in the requested order, undecoded.
///
/// - `field_bytes_max`: longer fields are listed without payload
///
/// # Errors
/// See [`SampleReader::samples`].
pub async fn read_samples(
    index: &Arc<Index>,
    numbers: &[u64],
    field_bytes_max: u64,
) -> Result<Vec<RawSample>> {
    SampleReader::new(index.clone()).samples(numbers, field_bytes_max).await
}

/// Reads samples and parts of fields, call by call; shards stay open between calls.
///
/// Compressed shards are decompressed as a whole; the most recent are kept, up to 256 MiB. Local shards are
/// read on the calling thread, which waits for a cold disk.
#[derive(Debug)]
pub struct SampleReader {
    index: Arc<Index>,
    ranges: ShardRanges,
}

impl SampleReader {
    /// Creates a reader for an indexed dataset; opens nothing yet.
    #[must_use]
    pub fn new(index: Arc<Index>) -> Self {
        let ranges = ShardRanges::new(index.clone(), UNPACKED_BYTES_MAX, Arc::new(AtomicU64::new(0)));
        Self { index, ranges }
    }

    /// Reads samples by index number, in the requested order, undecoded.
    ///
    /// - `field_bytes_max`: longer fields are listed without payload
    ///
    /// # Errors
    /// [`Error::Storage`] if a shard cannot be read, or has changed since it was indexed.
    ///
    /// # Panics
    /// If a number is outside the index.
    pub async fn samples(&mut self, numbers: &[u64], field_bytes_max: u64) -> Result<Vec<RawSample>> {
        let wanted = numbers.iter().flat_map(|&number| {
            let row = self.index.sample(number);
            let is_fetched = self.index.is_fetched(row.shard);
            let fields = FieldRange::row_fields(&row);
            let read = fields.filter(move |(field, _)| is_fetched && field.bytes <= field_bytes_max);
            read.map(move |(_, range)| (row.shard, range))
        });
        let wanted = wanted.collect();
        self.ranges.fetch(wanted).await?;
        numbers.iter().map(|&number| self.sample(number, field_bytes_max)).collect()
    }

    /// Reads the bytes `range` of a field; any part of the range outside the field is omitted.
    ///
    /// - `number`: sample number in the index
    /// - `field`: field position in the sample, from 0
    ///
    /// # Errors
    /// [`Error::Config`] if the sample has no such field; [`Error::Storage`] if the shard cannot be read, or
    /// has changed since it was indexed.
    ///
    /// # Panics
    /// If the number is outside the index.
    pub async fn field(&mut self, number: u64, field: usize, range: Range<u64>) -> Result<Bytes> {
        let row = self.index.sample(number);
        let found = FieldRange::row_fields(&row).nth(field);
        let (_, whole) = found.ok_or_else(|| Error::Config {
            setting: "field",
            reason: format!("sample {number} has {} fields, found {field}", row.fields().count()),
        })?;
        let (shard, bytes) = (row.shard, whole.bytes);
        let start = range.start.min(bytes);
        let length = range.end.min(bytes).saturating_sub(start);
        if length == 0 {
            return Ok(Bytes::new());
        }
        let part = FieldRange { offset: whole.offset + start, bytes: length, header_bytes: 0, ..whole };
        // A table row is decoded as a whole.
        let is_table = self.index.indexed_shards()[shard].compression == Compression::Table;
        let wanted = if is_table { whole } else { part };
        if self.index.is_fetched(shard) {
            self.ranges.fetch(vec![(shard, wanted)]).await?;
        }
        let read = self.ranges.read(shard, wanted);
        self.ranges.forget_fetched();
        Ok(if is_table { read?.slice(start as usize..(start + length) as usize) } else { read? })
    }

    /// Reads one field of each sample, by extension; `None` for a sample without the field.
    ///
    /// # Errors
    /// [`Error::Config`] if a field is longer than 1 MiB; [`Error::Storage`] if a shard cannot be read, or
    /// has changed since it was indexed.
    ///
    /// # Panics
    /// If a number is outside the index.
    pub async fn fields(&mut self, numbers: &[u64], extension: &str) -> Result<Vec<Option<Bytes>>> {
        let mut found = Vec::with_capacity(numbers.len());
        for &number in numbers {
            let row = self.index.sample(number);
            let range = FieldRange::row_fields(&row).find(|(field, _)| field.extension == extension);
            let range = range.map(|(_, range)| range);
            if let Some(FieldRange { bytes, .. }) = range.filter(|range| range.bytes > FIELD_BYTES_MAX) {
                let reason = format!(
                    "`{extension}` of sample `{}` has {bytes} bytes, over {FIELD_BYTES_MAX}",
                    row.key()
                );
                return Err(Error::Config { setting: "field", reason });
            }
            found.push((row, range));
        }
        let fetched = found.iter().filter(|(row, _)| self.index.is_fetched(row.shard));
        let wanted = fetched.filter_map(|(row, range)| Some((row.shard, (*range)?))).collect();
        self.ranges.fetch(wanted).await?;
        let read = found.into_iter().map(|(row, range)| {
            range.map(|range| self.ranges.read_field(row.shard, range, row.key(), extension)).transpose()
        });
        let read = read.collect();
        self.ranges.forget_fetched();
        read
    }

    /// Reads a sample; remote fields and table fields are fetched.
    fn sample(&mut self, number: u64, field_bytes_max: u64) -> Result<RawSample> {
        let row = self.index.sample(number);
        let mut fields = Vec::new();
        for (FieldRow { extension, offset, bytes, .. }, range) in FieldRange::row_fields(&row) {
            let is_read = bytes <= field_bytes_max;
            let read = || self.ranges.read_field(row.shard, range, row.key(), extension);
            let payload = is_read.then(read).transpose()?;
            fields.push(RawField { extension: extension.into(), offset, bytes, payload, size: None });
        }
        let (key, shard) = (row.key().to_owned(), self.index.shards()[row.shard].url.clone());
        Ok(RawSample { key, shard, offset: row.offset(), epoch: 0, fields })
    }
}

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
    ranges: DatasetRanges,
    skips: Arc<SkipLog>,
    metrics: Arc<Metrics>,
}

impl StepReader {
    pub(crate) fn new(settings: StepReaderSettings, skips: Arc<SkipLog>, metrics: Arc<Metrics>) -> Self {
        let datasets = settings.planner.datasets();
        let ranges = DatasetRanges::new(datasets, settings.unpacked_bytes_max, &metrics);
        Self { settings, ranges, skips, metrics }
    }

    /// Returns the step samples to read, by microbatch, as plan positions.
    ///
    /// # Errors
    /// See [`Share::plan_indices`].
    pub(crate) fn plan_indices(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        self.settings.share.plan_indices(plan)
    }

    /// Plans the reads for the samples in a microbatch.
    pub(crate) fn plan(&self, plan: &StepPlan, plan_indices: &[u32]) -> ReadPlan {
        let StepReaderSettings { planner, fields, demand, .. } = &self.settings;
        ReadPlan::new(planner, plan, plan_indices, fields, &**demand)
    }

    /// Fetches everything that microbatches need from remote shards and tables, in parallel. The bytes are
    /// kept until [`Self::read`] has read them.
    pub(crate) async fn fetch(&mut self, microbatches: &mut [ReadPlan]) -> Result<()> {
        let mut wanted = vec![Vec::new(); self.settings.planner.datasets().len()];
        for reads in microbatches {
            wanted.iter_mut().zip(&mut reads.fetched).for_each(|(all, own)| all.append(own));
        }
        self.ranges.fetch(wanted).await
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
        self.ranges.forget_fetched();
        Ok(read)
    }

    fn read_sample(&mut self, planned: PlannedRead) -> Result<(u32, RawSample)> {
        let PlannedRead { place, dataset, shard, mut sample, ranges } = planned;
        self.metrics.reads_shard(self.ranges.shard_number(dataset, shard));
        let mut read_bytes = 0;
        let fields = sample.fields.iter_mut().zip(ranges);
        for (field, range) in fields.filter(|(field, _)| field.size.is_none()) {
            let payload = self.ranges.read_field((dataset, shard), range, &sample.key, &field.extension)?;
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
    fn plan_indices(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>>;
}

/// Microbatches assigned to a DP rank by the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DpShare(
    /// DP rank.
    pub usize,
);

impl Share for DpShare {
    fn plan_indices(&self, plan: &StepPlan) -> Result<Vec<Vec<u32>>> {
        Ok(plan.ranks[self.0].clone())
    }
}

/// Reads the class of each dataset sample, in dataset order, for
/// [`Mixture::by_class`](crate::order::Mixture::by_class).
///
/// - `column`: extension of a field whose text is the class, such as `cls`; if no sample has such a field,
///   key of a text, a number or a Boolean in the field `json`, which has the columns of a packed table
///
/// # Errors
/// [`Error::Config`] if a sample has no such field or key, or a value that is no class: longer than 256
/// bytes, not UTF-8, a list or an object; the errors of [`SampleReader::fields`].
pub async fn read_classes(dataset: &Dataset, column: &str) -> Result<Vec<String>> {
    let is_field = dataset.index().extensions().any(|extension| extension == column);
    let extension = if is_field { column } else { DOCUMENT };
    let mut reader = SampleReader::new(dataset.index().clone());
    let (mut classes, mut place) = (Vec::new(), 0);
    while place < dataset.len() {
        let end = dataset.len().min(place + READ_TOGETHER);
        let numbers: Vec<u64> = (place..end).map(|place| dataset.sample_number(place)).collect();
        let contents = reader.fields(&numbers, extension).await?;
        for (&number, content) in numbers.iter().zip(contents) {
            let class = match (content, is_field) {
                (None, _) => Err(format!("has no field `{extension}`")),
                (Some(content), true) => text(&content),
                (Some(content), false) => entry(&content, column),
            };
            classes.push(class.map_err(|fault| Error::Config {
                setting: "by_class",
                reason: format!("sample `{}` {fault}", dataset.index().sample(number).key()),
            })?);
        }
        place = end;
    }
    Ok(classes)
}

/// Returns the text of a field without the white space around it.
fn text(content: &[u8]) -> std::result::Result<String, String> {
    let text = std::str::from_utf8(content).map_err(|_| "has a class that is not UTF-8".to_owned())?;
    short(text.trim())
}

/// Returns the value under a key in a JSON document.
fn entry(content: &[u8], key: &str) -> std::result::Result<String, String> {
    let document: Value = serde_json::from_slice(content)
        .map_err(|error| format!("has a document that is no JSON: {error}"))?;
    match document.get(key) {
        Some(Value::String(text)) => short(text),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
        Some(_) => Err(format!("has no text, number or Boolean under `{key}`")),
        None => Err(format!("has neither a field nor a key `{key}`")),
    }
}

fn short(class: &str) -> std::result::Result<String, String> {
    if class.len() > CLASS_BYTES_MAX {
        return Err(format!("has a class of {} bytes, over {CLASS_BYTES_MAX}", class.len()));
    }
    Ok(class.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::IndexOptions;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    fn index(directory: &std::path::Path) -> Arc<Index> {
        let shards = directory.join("shards");
        let mut writer = ShardWriter::builder(&shards).build().unwrap();
        for (key, text) in [("a", "a red kite"), ("b", "a much longer text"), ("c", "blue")] {
            writer.write(key, &[("txt", text.as_bytes())]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[shards.to_str().unwrap()]).unwrap();
        Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap())
    }

    #[tokio::test]
    async fn samples_are_read_in_the_given_order_and_long_fields_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let samples = read_samples(&index(directory.path()), &[2, 0, 1], 10).await.unwrap();
        let read = samples.iter().map(|sample| (sample.key.as_str(), sample.fields[0].payload.as_deref()));
        let expected: [(&str, Option<&[u8]>); 3] =
            [("c", Some(b"blue")), ("a", Some(b"a red kite")), ("b", None)];
        assert_eq!(read.collect::<Vec<_>>(), expected);
        assert_eq!(samples[2].fields[0].bytes, 18);
    }

    #[tokio::test]
    async fn one_field_of_each_sample_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let mut reader = SampleReader::new(index(directory.path()));
        let texts = reader.fields(&[2, 0], "txt").await.unwrap();
        assert_eq!(texts, [Some(Bytes::from_static(b"blue")), Some(Bytes::from_static(b"a red kite"))]);
        assert_eq!(reader.fields(&[1], "cls").await.unwrap(), [None]);
    }

    #[tokio::test]
    async fn a_part_of_a_field_ends_with_the_field() {
        let directory = tempfile::tempdir().unwrap();
        let mut reader = SampleReader::new(index(directory.path()));
        assert_eq!(reader.field(0, 0, 2..5).await.unwrap(), "red");
        assert_eq!(reader.field(0, 0, 6..u64::MAX).await.unwrap(), "kite");
        assert_eq!(reader.field(1, 0, 99..100).await.unwrap(), "");
        let refused = reader.field(0, 1, 0..1).await.unwrap_err();
        assert_eq!(refused.to_string(), "invalid `field`: sample 0 has 1 fields, found 1");
    }

    #[tokio::test]
    async fn a_column_is_a_field_or_a_key_of_the_document() {
        let directory = tempfile::tempdir().unwrap();
        let shards = directory.path().join("shards");
        let mut writer = ShardWriter::builder(&shards).build().unwrap();
        let documents: [&[u8]; 3] =
            [br#"{"kind": "bird", "n": 1}"#, br#"{"kind": "fish", "n": [2]}"#, br#"{"n": 3}"#];
        for (number, document) in documents.into_iter().enumerate() {
            let class = format!("{}\n", number % 2);
            writer.write(&format!("{number}"), &[("cls", class.as_bytes()), ("json", document)]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[shards.to_str().unwrap()]).unwrap();
        let all = Dataset::from(Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap()));
        assert_eq!(read_classes(&all, "cls").await.unwrap(), ["0", "1", "0"]);
        let two = all.clone().at_places(&[0, 1]);
        assert_eq!(read_classes(&two, "kind").await.unwrap(), ["bird", "fish"]);
        for (set, column, reason) in [
            (&all, "kind", "sample `2` has neither a field nor a key `kind`"),
            (&two, "n", "sample `1` has no text, number or Boolean under `n`"),
        ] {
            let refused = read_classes(set, column).await.unwrap_err().to_string();
            assert!(refused.contains(reason), "{refused}");
        }
    }
}
