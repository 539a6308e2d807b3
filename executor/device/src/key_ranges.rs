//! Key ranges for packed queries: windows, chunks, images whose tokens see each other.

use std::sync::Arc;

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
