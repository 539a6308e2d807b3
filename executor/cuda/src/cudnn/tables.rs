//! Microbatch tables that plans read: segment locations and lengths.

use super::library::{Error, PlanKey, Result};

/// Table alignment in bytes.
const ALIGNMENT_BYTES: usize = 16;

/// Segment tables for a microbatch, to be copied to the device as a single block.
///
/// Forward and backward plans for the same heads and segments read the same tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentTables {
    bytes: Vec<u8>,
}

/// Table locations in the block, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    /// `i64`, first element in every segment in queries, keys and values.
    pub(super) rows: usize,
    /// `i64`, first element in every segment in the output.
    pub(super) outputs: usize,
    /// `i64`, first element in every segment in separate key or value gradients.
    pub(super) keys: usize,
    /// `i64`, first element in every segment in the log-sum-exp.
    pub(super) log_sums: usize,
    /// `i32`, number of rows in every segment.
    pub(super) lengths: usize,
    /// Block size in bytes.
    pub(super) end: usize,
}

impl Places {
    pub(super) const fn of(key: &PlanKey) -> Self {
        let segments = key.segments as usize;
        let offsets = ((segments + 1) * size_of::<i64>()).next_multiple_of(ALIGNMENT_BYTES);
        let lengths = (segments * size_of::<i32>()).next_multiple_of(ALIGNMENT_BYTES);
        Self {
            rows: 0,
            outputs: offsets,
            keys: 2 * offsets,
            log_sums: 3 * offsets,
            lengths: 4 * offsets,
            end: 4 * offsets + lengths,
        }
    }
}

impl SegmentTables {
    /// Creates the tables that plans for a key read; missing segments are empty segments at the end.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    ///
    /// # Errors
    /// [`Error::Shape`] if the key has fewer or shorter segments.
    pub fn new(key: &PlanKey, starts: &[u32]) -> Result<Self> {
        let lengths: Vec<u32> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if lengths.len() > key.segments as usize || longest > key.longest {
            let reason = format!("{key} does not serve {} segments of up to {longest} rows", lengths.len());
            return Err(Error::Shape { setting: "segments", reason });
        }
        let places = Places::of(key);
        let mut bytes = vec![0; places.end];
        let rows = starts.last().map_or(0, |&rows| rows);
        for (place, width) in [
            (places.rows, key.row()),
            (places.outputs, key.heads * key.head_dim),
            (places.keys, key.kv_heads * key.head_dim),
            (places.log_sums, key.heads),
        ] {
            let starts = starts.iter().copied().chain(std::iter::repeat(rows));
            let offsets = starts.take(key.segments as usize + 1).map(|row| i64::from(row) * i64::from(width));
            put(&mut bytes[place..], offsets.map(i64::to_ne_bytes));
        }
        put(&mut bytes[places.lengths..], lengths.iter().map(|&rows| rows.to_ne_bytes()));
        Ok(Self { bytes })
    }

    /// Returns the block, to be copied to a device address that is a multiple of 16.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn put<const BYTES: usize>(table: &mut [u8], numbers: impl Iterator<Item = [u8; BYTES]>) {
    for (place, number) in table.chunks_exact_mut(BYTES).zip(numbers) {
        place.copy_from_slice(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::library::Heads;

    const HEADS: Heads = Heads { heads: 12, kv_heads: 2, head_dim: 128, is_causal: true };

    #[test]
    fn missing_segments_are_empty_ones_at_the_end() {
        let starts = [0, 3, 10];
        let key = PlanKey::forward(HEADS, &starts);
        let tables = SegmentTables::new(&key, &starts).unwrap();
        let places = Places::of(&key);
        let offsets = |place: usize| -> Vec<i64> {
            let bytes = tables.bytes()[place..].chunks_exact(8).take(9);
            bytes.map(|bytes| i64::from_ne_bytes(bytes.try_into().unwrap())).collect()
        };
        let row = 16 * 128;
        assert_eq!(offsets(places.rows)[..4], [0, 3 * row, 10 * row, 10 * row]);
        assert_eq!(offsets(places.rows)[8], 10 * row);
        assert_eq!(offsets(places.outputs)[..3], [0, 3 * 12 * 128, 10 * 12 * 128]);
        assert_eq!(offsets(places.keys)[..3], [0, 3 * 2 * 128, 10 * 2 * 128]);
        assert_eq!(offsets(places.log_sums)[..3], [0, 36, 120]);
        let lengths: Vec<i32> = tables.bytes()[places.lengths..]
            .chunks_exact(4)
            .map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(lengths, [3, 7, 0, 0, 0, 0, 0, 0]);
        assert!(
            [places.outputs, places.keys, places.log_sums, places.lengths]
                .iter()
                .all(|place| place % 16 == 0)
        );
    }

    #[test]
    fn a_key_of_other_segments_is_refused() {
        let key = PlanKey::forward(HEADS, &[0, 64]);
        assert!(SegmentTables::new(&key, &[0, 65]).is_err());
        let starts: Vec<u32> = (0..10).collect();
        assert!(SegmentTables::new(&key, &starts).is_err());
        assert!(SegmentTables::new(&key, &[]).is_ok());
    }

    #[test]
    fn forward_and_backward_read_the_same_tables() {
        let starts = [0, 100, 300];
        let forward = SegmentTables::new(&PlanKey::forward(HEADS, &starts), &starts);
        let backward = SegmentTables::new(&PlanKey::backward(HEADS, &starts, false), &starts);
        assert_eq!(forward.unwrap(), backward.unwrap());
    }
}
