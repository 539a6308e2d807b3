//! Sorts and filters dataset samples.
//!
//! Counts samples by a number's size, in bins with equal ratio.

use super::query::{Filter, Query};
use super::table::{Column, SampleTable};
use dflop_loader::Dataset;
use serde::Serialize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Sample orders, sorted once per column, and the last filtered order.
#[derive(Debug, Default)]
pub(super) struct Selections {
    orders: [OnceLock<Places>; Column::ALL.len()],
    last: Mutex<Option<(Filter, Column, Places)>>,
}

/// Sample places, in rising column order, equal values by place.
pub(super) type Places = Arc<Vec<u32>>;

impl Selections {
    /// Returns the places of the samples that meet a filter, in rising column order.
    pub(super) fn select(
        &self,
        dataset: &Dataset,
        table: &SampleTable,
        filter: &Filter,
        column: Column,
    ) -> Places {
        let order = self.orders[column as usize].get_or_init(|| Arc::new(sorted(table, column)));
        if *filter == Filter::default() {
            return order.clone();
        }
        let known = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, _, places)) = known.filter(|(of, by, _)| (of, *by) == (filter, column)) {
            return places;
        }
        let mut places: Vec<u32> =
            order.iter().copied().filter(|place| meets_numbers(table, filter, *place)).collect();
        if !(filter.key.is_empty() && filter.field.is_empty()) {
            places.retain(|place| meets_names(dataset, filter, *place));
        }
        let places = Arc::new(places);
        let known = (filter.clone(), column, places.clone());
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        places
    }
}

/// Returns a page of places.
pub(super) fn page(places: &[u32], query: &Query) -> Vec<u32> {
    let (offset, limit) = (query.offset as usize, query.limit as usize);
    if query.is_descending {
        places.iter().rev().skip(offset).take(limit).copied().collect()
    } else {
        places.iter().skip(offset).take(limit).copied().collect()
    }
}

fn sorted(table: &SampleTable, column: Column) -> Vec<u32> {
    let mut places: Vec<u32> = (0..table.len()).collect();
    if column != Column::Place {
        places.sort_by_key(|place| table.value(column, *place));
    }
    places
}

/// Returns whether the table values for a sample meet the filter.
fn meets_numbers(table: &SampleTable, filter: &Filter, place: u32) -> bool {
    if filter.is_refused && !table.is_refused(place) {
        return false;
    }
    Column::ALL.into_iter().zip(filter.ranges).all(|(column, range)| {
        range.is_none_or(|(smallest, largest)| (smallest..=largest).contains(&table.value(column, place)))
    })
}

/// Returns whether a sample's key and fields meet a filter.
fn meets_names(dataset: &Dataset, filter: &Filter, place: u32) -> bool {
    let row = dataset.index().sample(dataset.sample_number(place.into()));
    let has_field = filter.field.is_empty() || row.fields().any(|field| field.extension == filter.field);
    has_field && contains(row.key(), &filter.key)
}

/// Returns whether a text contains a lower-case part, without regard to ASCII case.
fn contains(text: &str, part: &str) -> bool {
    let (text, part) = (text.as_bytes(), part.as_bytes());
    part.is_empty() || text.windows(part.len()).any(|window| window.eq_ignore_ascii_case(part))
}

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
    use super::super::table::tests::with_costs;
    use super::*;

    #[test]
    fn equal_samples_stay_in_the_order_of_the_dataset() {
        let table = with_costs(&[30, 10, 30, 0]);
        assert_eq!(sorted(&table, Column::CostNs), [3, 1, 0, 2]);
        assert_eq!(sorted(&table, Column::Place), [0, 1, 2, 3]);
        let mut query = Query::parse("sort=cost_ns&offset=1&limit=2").unwrap();
        assert_eq!(page(&[3, 1, 0, 2], &query), [1, 0]);
        query.is_descending = true;
        assert_eq!(page(&[3, 1, 0, 2], &query), [0, 1]);
        query.offset = u64::MAX;
        assert_eq!(page(&[3, 1, 0, 2], &query), [0; 0]);
    }

    #[test]
    fn ranges_include_their_ends() {
        let table = with_costs(&[30, 10, 20, 0]);
        let filter = |query: &str| Query::parse(query).unwrap().filter;
        let of = |query: &str| -> Vec<u32> {
            (0..4).filter(|place| meets_numbers(&table, &filter(query), *place)).collect()
        };
        assert_eq!(of("cost_ns_min=10&cost_ns_max=20"), [1, 2]);
        assert_eq!(of("cost_ns_max=20&tokens_min=2"), [2]);
        assert_eq!(of("refused=1"), [3]);
    }

    #[test]
    fn keys_are_compared_without_regard_to_case() {
        assert!(contains("Directory/KITE-01", "kite"));
        assert!(contains("", "") && !contains("kit", "kite"));
    }

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
