//! Counts samples by a number's size, in bins with equal ratio.

use serde::Serialize;

/// Number of bins.
const BINS: usize = 48;

/// Counts of samples; bin `i` holds numbers from `edges[i]` up to, not including, `edges[i + 1]`.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Histogram {
    pub(super) edges: Vec<u64>,
    pub(super) counts: Vec<u64>,
    /// Number of samples with number 0, which are in no bin.
    pub(super) zeros: u64,
}

/// Counts numbers in bins.
///
/// - `values`: in rising order
pub(super) fn histogram(values: impl Iterator<Item = u64> + Clone) -> Histogram {
    let positive = values.clone().filter(|value| *value > 0);
    let (Some(smallest), Some(largest)) = (positive.clone().next(), positive.clone().last()) else {
        return Histogram { zeros: values.count() as u64, ..Histogram::default() };
    };
    let ratio = (largest as f64 + 1.0) / smallest as f64;
    let edge = |bin: usize| match bin {
        0 => smallest,
        BINS => largest.saturating_add(1),
        _ => ((smallest as f64 * ratio.powf(bin as f64 / BINS as f64)).ceil() as u64).min(largest),
    };
    let mut edges: Vec<u64> = (0..=BINS).map(edge).collect();
    // Where all numbers are small, whole numbers are closer than the bins.
    edges.dedup();
    let mut counts = vec![0; edges.len() - 1];
    let mut bin = 0;
    for value in positive {
        while bin + 1 < counts.len() && value >= edges[bin + 1] {
            bin += 1;
        }
        counts[bin] += 1;
    }
    let zeros = values.take_while(|value| *value == 0).count() as u64;
    Histogram { edges, counts, zeros }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_counted_once() {
        let values = [0, 0, 1, 1, 2, 3, 900, 1_000_000, u64::MAX];
        let counted = histogram(values.into_iter());
        assert_eq!(counted.zeros, 2);
        assert_eq!(counted.counts.iter().sum::<u64>(), 7);
        assert!(counted.edges.is_sorted() && counted.edges[0] == 1);
        let small = histogram([5, 5, 6].into_iter());
        assert_eq!((small.edges, small.counts), (vec![5, 6, 7], vec![2, 1]));
        assert_eq!(histogram(std::iter::empty()), Histogram::default());
        assert_eq!(histogram([0].into_iter()).zeros, 1);
    }
}
