//! Reads single samples of an indexed dataset, outside of any step: to look at them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::ranges::ShardRanges;
use crate::error::Result;
use crate::index::Index;
use crate::shard::{RawField, RawSample};

/// Most bytes of decompressed shards that are kept.
const UNPACKED_BYTES_MAX: u64 = 256 << 20;

/// Reads samples by their numbers in the index, in the given order, undecoded.
///
/// - `field_bytes_max`: longer fields are listed without their payload
///
/// Local shards are read on the calling thread, which waits for a cold disk.
///
/// # Errors
/// [`Error::Storage`](crate::Error::Storage) if a shard cannot be read, or has changed since it was indexed.
pub async fn read_samples(
    index: &Arc<Index>,
    numbers: &[u64],
    field_bytes_max: u64,
) -> Result<Vec<RawSample>> {
    let mut ranges = ShardRanges::new(index.clone(), UNPACKED_BYTES_MAX, Arc::new(AtomicU64::new(0)));
    let wanted = numbers.iter().flat_map(|&number| {
        let row = index.sample(number);
        let is_remote = index.shards()[row.shard].remote().is_some();
        let fields = row.fields().filter(move |field| is_remote && field.bytes <= field_bytes_max);
        fields.map(move |field| (row.shard, field.offset, field.bytes))
    });
    ranges.fetch(wanted.collect()).await?;
    let mut samples = Vec::with_capacity(numbers.len());
    for &number in numbers {
        let row = index.sample(number);
        let mut fields = Vec::new();
        for field in row.fields() {
            let is_read = field.bytes <= field_bytes_max;
            let payload = is_read.then(|| ranges.read(row.shard, field.offset, field.bytes)).transpose()?;
            let (extension, offset, bytes) = (field.extension.into(), field.offset, field.bytes);
            fields.push(RawField { extension, offset, bytes, payload, size: None });
        }
        let (key, shard) = (row.key().to_owned(), index.shards()[row.shard].url.clone());
        samples.push(RawSample { key, shard, offset: row.offset(), epoch: 0, fields });
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::IndexOptions;
    use crate::shard::expand_shards;
    use crate::write::ShardWriter;

    #[tokio::test]
    async fn samples_are_read_in_the_given_order_and_long_fields_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let shards = directory.path().join("shards");
        let mut writer = ShardWriter::builder(&shards).build().unwrap();
        for (key, text) in [("a", "a red kite"), ("b", "a much longer text"), ("c", "blue")] {
            writer.write(key, &[("txt", text.as_bytes())]).unwrap();
        }
        writer.finish().unwrap();
        let shards = expand_shards(&[shards.to_str().unwrap()]).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        let samples = read_samples(&index, &[2, 0, 1], 10).await.unwrap();
        let read = samples.iter().map(|sample| (sample.key.as_str(), sample.fields[0].payload.as_deref()));
        let expected: [(&str, Option<&[u8]>); 3] =
            [("c", Some(b"blue")), ("a", Some(b"a red kite")), ("b", None)];
        assert_eq!(read.collect::<Vec<_>>(), expected);
        assert_eq!(samples[2].fields[0].bytes, 18);
    }
}
