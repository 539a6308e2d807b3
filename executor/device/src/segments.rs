//! Microbatch segments and key ranges, created once and used by every layer.

use std::sync::Arc;

use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Number of queries per tile, if the segment length is a multiple of it.
const TILE_ROWS: usize = 64;
/// Maximum number of rows above a multiple that join existing tiles.
const JOINED_ROWS: usize = 16;

/// Maximum number of rows in a tile.
pub(crate) const TILE_ROWS_MAX: usize = TILE_ROWS + JOINED_ROWS;

/// Maximum number of rows in a block, for devices that process row blocks in parallel.
const BLOCK_ROWS: usize = 64;

/// Consecutive rows in the same segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Row range of the segment: first row and end (exclusive).
    pub segment: (usize, usize),
    /// First row in the tile.
    pub start: usize,
    /// End of the tile (exclusive).
    pub end: usize,
}

/// Segment shape by which a device can reuse an attention plan: powers of two above both numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanKey {
    /// Number of segments.
    pub segments: u32,
    /// Number of rows in the longest segment.
    pub longest: u32,
}

/// Segments of microbatch rows: samples, images, windows. Tokens attend within a segment, and within key
/// ranges if there are any, which then replace the attention mask.
pub struct Segments<D: Runtime> {
    host: HostSegments,
    starts: Tensor<D>,
    blocks: Tensor<D>,
    block_count: usize,
    ranges: Option<Tensor<D>>,
}

/// Segments in host memory.
#[derive(Debug, Clone, Default)]
pub struct HostSegments {
    starts: Arc<[u32]>,
    tiles: Arc<[Tile]>,
    longest: u32,
    ranges: Option<KeyRanges>,
}

impl HostSegments {
    /// Divides segments into tiles.
    ///
    /// - `starts`: first row in every segment, then the number of rows; empty segments are allowed
    ///
    /// # Panics
    /// If `starts` does not ascend from 0.
    #[must_use]
    pub fn new(starts: &[u32]) -> Self {
        let is_ascending = starts.first().is_none_or(|&first| first == 0) && starts.is_sorted();
        assert!(is_ascending, "segments start at 0");
        let pairs = starts.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
        let tiles = pairs.clone().flat_map(|(start, end)| Tile::in_segment(start, end)).collect();
        let longest = pairs.map(|(start, end)| end - start).max().unwrap_or(0) as u32;
        Self { starts: starts.into(), tiles, longest, ranges: None }
    }

    /// Limits every query to a key range in the same segment.
    ///
    /// # Panics
    /// If there is not exactly a range for every row, or a range leaves the segment.
    #[must_use]
    pub fn ranged(mut self, ranges: KeyRanges) -> Self {
        assert_eq!(ranges.keys().len(), self.rows(), "every row has a range");
        for pair in self.starts.windows(2).filter(|pair| pair[0] < pair[1]) {
            // bounds ascend, so checking a segment's first and last row is sufficient
            let (first, last) = (ranges.keys()[pair[0] as usize], ranges.keys()[pair[1] as usize - 1]);
            assert!(first[0] >= pair[0] && last[1] <= pair[1], "ranges lie in their segment");
        }
        self.ranges = Some(ranges);
        self
    }

    /// Returns the key ranges, if any.
    #[must_use]
    pub const fn ranges(&self) -> Option<&KeyRanges> {
        self.ranges.as_ref()
    }

    /// Returns the first row in every segment, then the number of rows.
    #[must_use]
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// Returns the tiles in all segments, in order.
    #[must_use]
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Returns the number of rows in the longest segment.
    #[must_use]
    pub const fn longest(&self) -> u32 {
        self.longest
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.starts.last().map_or(0, |&rows| rows as usize)
    }

    /// Returns the number of segments, including empty segments.
    #[must_use]
    pub fn count(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Splits segments into blocks with 64 rows (the last block in a segment may be shorter), in two orders,
    /// `[2, blocks, 3]`: for query owners, most visible keys first, and for key owners, most queries first,
    /// under a causal mask.
    ///
    /// A block is the first row in the segment, the segment end, and the first row in the block.
    fn blocks(&self) -> Vec<u32> {
        let of_segment = |pair: &[u32]| {
            let (start, end) = (pair[0], pair[1]);
            (start..end).step_by(BLOCK_ROWS).map(move |first| [start, end, first])
        };
        let mut by_keys: Vec<[u32; 3]> = self.starts.windows(2).flat_map(of_segment).collect();
        let mut by_queries = by_keys.clone();
        by_keys.sort_by_key(|&[start, _, first]| std::cmp::Reverse(first - start));
        by_queries.sort_by_key(|&[_, end, first]| std::cmp::Reverse(end - first));
        [by_keys, by_queries].concat().into_flattened()
    }

    /// Returns the key for an attention plan that serves these segments.
    #[must_use]
    pub fn plan_key(&self) -> PlanKey {
        PlanKey {
            segments: (self.count() as u32).next_power_of_two(),
            longest: self.longest.next_power_of_two(),
        }
    }
}

impl<D: Runtime> Segments<D> {
    /// Copies segments to a device.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    ///
    /// # Panics
    /// As [`HostSegments::new`].
    pub fn new(device: &D, starts: &[u32]) -> Result<Self> {
        Self::of(device, HostSegments::new(starts))
    }

    /// Copies segments to a device, with key ranges.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn of(device: &D, host: HostSegments) -> Result<Self> {
        let blocks = host.blocks();
        let block_count = blocks.len() / 6;
        let (starts, blocks) = (device.upload_indices(host.starts())?, device.upload_indices(&blocks)?);
        let ranges = host.ranges().map(|ranges| device.upload_indices(&ranges.table())).transpose()?;
        Ok(Self { host, starts, blocks, block_count, ranges })
    }

    /// Returns the segments in host memory.
    #[must_use]
    pub const fn host(&self) -> &HostSegments {
        &self.host
    }

    /// Returns the first row in every segment, then the number of rows, on the device.
    #[must_use]
    pub const fn starts(&self) -> &Tensor<D> {
        &self.starts
    }

    /// Returns blocks with at most 64 rows, `[2, blocks, 3]`: first row in the segment, segment end, first
    /// row in the block. Under a causal mask, the first order starts with the blocks that see the most keys,
    /// the second with the blocks that the most queries see.
    #[must_use]
    pub const fn blocks(&self) -> &Tensor<D> {
        &self.blocks
    }

    /// Returns key ranges for all queries, then query ranges for all keys, `[2, rows, 2]`, if any.
    #[must_use]
    pub const fn ranges(&self) -> Option<&Tensor<D>> {
        self.ranges.as_ref()
    }

    /// Returns the number of blocks in each order.
    #[must_use]
    pub const fn block_count(&self) -> usize {
        self.block_count
    }
}

impl Tile {
    /// Splits a segment into tiles that differ by at most one row. A few rows above a multiple of `TILE_ROWS`
    /// join existing tiles, because a tile with a few rows costs nearly as much as a full tile.
    fn in_segment(start: usize, end: usize) -> impl Iterator<Item = Self> + Clone {
        let rows = end - start;
        let tiles = rows.saturating_sub(JOINED_ROWS).div_ceil(TILE_ROWS).max(usize::from(rows > 0));
        let at = move |tile: usize| start + tile * rows / tiles.max(1);
        (0..tiles).map(move |tile| Self { segment: (start, end), start: at(tile), end: at(tile + 1) })
    }

    /// Returns the number of rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.end - self.start
    }
}

/// Keys that each packed query attends to: a contiguous range per query, which contains the query.
///
/// Both bounds ascend with the query. A causal window with a few tokens is `[query + 1 - window, query + 1)`,
/// cut at the segment start; a query inside a bidirectional image ends with the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRanges {
    keys: Arc<[[u32; 2]]>,
    queries: Arc<[[u32; 2]]>,
}

impl KeyRanges {
    /// Accepts the first key and the end of the key range, for every query.
    ///
    /// # Panics
    /// If a range does not contain the query, a bound descends, or a range ends after the last row.
    #[must_use]
    pub fn new(keys: &[[u32; 2]]) -> Self {
        let contains_query = (0..).zip(keys).all(|(query, &[start, end])| start <= query && query < end);
        assert!(contains_query, "every query attends to itself");
        let is_ascending = [0, 1].into_iter().all(|bound| keys.is_sorted_by_key(|range| range[bound]));
        assert!(is_ascending, "bounds of keys ascend");
        assert!(keys.last().is_none_or(|last| last[1] as usize == keys.len()), "keys end with the rows");
        let queries_of =
            |key: u32| [1, 0].map(|bound| keys.partition_point(|range| range[bound] <= key) as u32);
        Self { keys: keys.into(), queries: (0..keys.len() as u32).map(queries_of).collect() }
    }

    /// Returns the first key and the end of the key range, for every query.
    #[must_use]
    pub fn keys(&self) -> &[[u32; 2]] {
        &self.keys
    }

    /// Returns the first query that attends to a key and the end of the query range, for every key.
    #[must_use]
    pub fn queries(&self) -> &[[u32; 2]] {
        &self.queries
    }

    /// Returns the number of query-key pairs.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        self.keys.iter().map(|&[start, end]| u64::from(end - start)).sum()
    }

    /// Returns query ranges, then key ranges, in the device layout: `[2, rows, 2]`.
    #[must_use]
    pub fn table(&self) -> Vec<u32> {
        self.keys.iter().chain(&*self.queries).flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_row_once_in_both_orders() {
        let blocks = HostSegments::new(&[0, 0, 65, 66, 200]).blocks();
        let blocks: Vec<&[u32]> = blocks.chunks(3).collect();
        let (by_keys, by_queries) = blocks.split_at(blocks.len() / 2);
        assert_eq!(
            by_keys,
            [[66, 200, 194], [0, 65, 64], [66, 200, 130], [0, 65, 0], [65, 66, 65], [66, 200, 66]]
        );
        assert_eq!(
            by_queries,
            [[66, 200, 66], [66, 200, 130], [0, 65, 0], [66, 200, 194], [0, 65, 64], [65, 66, 65]]
        );
    }

    #[test]
    fn tiles_cover_every_row_once_and_are_even() {
        let segments = HostSegments::new(&[0, 0, 65, 66, 194, 500]);
        let mut next = 0;
        for tile in segments.tiles() {
            assert_eq!(tile.start, next);
            assert!((1..=TILE_ROWS + JOINED_ROWS).contains(&tile.rows()), "{tile:?}");
            assert!(tile.segment.0 <= tile.start && tile.end <= tile.segment.1);
            next = tile.end;
        }
        assert_eq!(next, segments.rows());
        let rows: Vec<usize> = segments.tiles().iter().map(Tile::rows).collect();
        assert_eq!(rows[..4], [65, 1, 64, 64]);
        assert_eq!((segments.longest(), segments.count()), (306, 5));
        assert_eq!(segments.plan_key(), PlanKey { segments: 8, longest: 512 });
    }

    #[test]
    fn queries_of_a_key_are_those_whose_range_has_it() {
        // a window with 3 tokens, an image from 4 to 8, a second sample from 9 on
        let keys = [[0, 1], [0, 2], [0, 3], [1, 4], [2, 8], [3, 8], [4, 8], [5, 8], [6, 9], [9, 10]];
        let ranges = KeyRanges::new(&keys);
        for (key, &[first, end]) in (0..).zip(ranges.queries()) {
            let truth: Vec<u32> = (0..10)
                .filter(|&query| (keys[query as usize][0]..keys[query as usize][1]).contains(&key))
                .collect();
            assert_eq!((first..end).collect::<Vec<u32>>(), truth, "{key}");
        }
        assert_eq!(ranges.pairs(), 31);
        assert_eq!(ranges.table().len(), 40);
    }

    #[test]
    #[should_panic(expected = "every query attends to itself")]
    fn a_query_outside_of_its_range_is_refused() {
        let _ = KeyRanges::new(&[[0, 1], [0, 1]]);
    }
}
