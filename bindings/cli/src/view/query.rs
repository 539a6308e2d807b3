//! Reads the query in a request: filter, order and page.
//!
//! Sorts and filters dataset samples.
//!
//! Counts samples by a number's size, in bins with equal ratio.

use super::table::{Column, SampleTable};
use dflop_loader::Dataset;
use serde::Serialize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum number of samples in an answer.
pub(super) const LIMIT_MAX: u64 = 200;
/// Maximum length of a filter text, in bytes.
const TEXT_BYTES_MAX: usize = 1_000;

/// Condition that samples meet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Filter {
    /// Key part, compared without regard to ASCII case; empty for all.
    pub(super) key: String,
    /// Extension of a field that the sample has; empty for all.
    pub(super) field: String,
    /// Whether only samples that the model does not support are requested.
    pub(super) is_refused: bool,
    /// Lower-case part of a text field; empty for all.
    pub(super) text: String,
    /// Smallest and largest number by column, both included.
    pub(super) ranges: [Option<(u64, u64)>; Column::ALL.len()],
}

impl Filter {
    /// Returns the filter without the range for a column.
    pub(super) fn without(&self, column: Column) -> Self {
        let mut other = self.clone();
        other.ranges[column as usize] = None;
        other
    }
}

/// Page of samples that meet a filter, in an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) filter: Filter,
    /// Column that samples are sorted by, or that a histogram counts.
    pub(super) column: Column,
    pub(super) is_descending: bool,
    pub(super) offset: u64,
    pub(super) limit: u64,
    /// Group of reasons of skipped samples; empty for all.
    pub(super) reason: String,
}

impl Query {
    /// Parses a URL query, such as `sort=cost_ns&descending=1&tokens_min=100&limit=50`.
    ///
    /// # Errors
    /// A name that is unknown, or a value that is not a number, as text.
    pub(super) fn parse(query: &str) -> Result<Self, String> {
        let mut parsed = Self {
            filter: Filter::default(),
            column: Column::Place,
            is_descending: false,
            offset: 0,
            limit: 50,
            reason: String::new(),
        };
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sort" => parsed.column = column(&value)?,
                "descending" => parsed.is_descending = flag(&name, &value)?,
                "offset" => parsed.offset = number(&name, &value)?,
                "limit" => parsed.limit = number(&name, &value)?.clamp(1, LIMIT_MAX),
                "key" => parsed.filter.key = text(&name, &value)?.to_ascii_lowercase(),
                "field" => parsed.filter.field = text(&name, &value)?,
                "text" => parsed.filter.text = text(&name, &value)?.to_lowercase(),
                "reason" => parsed.reason = text(&name, &value)?,
                "refused" => parsed.filter.is_refused = flag(&name, &value)?,
                _ => parsed.filter.bound(&name, &value)?,
            }
        }
        Ok(parsed)
    }
}

impl Filter {
    /// Sets `COLUMN_min` or `COLUMN_max`.
    fn bound(&mut self, name: &str, value: &str) -> Result<(), String> {
        let unknown = || format!("unknown parameter `{name}`");
        let (of, bound) = name.rsplit_once('_').ok_or_else(unknown)?;
        let of = column(of).map_err(|_| unknown())?;
        let range = self.ranges[of as usize].get_or_insert((0, u64::MAX));
        match bound {
            "min" => range.0 = number(name, value)?,
            "max" => range.1 = number(name, value)?,
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

fn column(name: &str) -> Result<Column, String> {
    let known = Column::ALL.map(Column::name).join(", ");
    let found = Column::ALL.into_iter().find(|column| column.name() == name);
    found.ok_or_else(|| format!("expected a column of {known}, found `{name}`"))
}

fn number(name: &str, value: &str) -> Result<u64, String> {
    value.parse().map_err(|_| format!("`{name}`: expected a whole number, found `{value}`"))
}

fn flag(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(format!("`{name}`: expected 0 or 1, found `{value}`")),
    }
}

fn text(name: &str, value: &str) -> Result<String, String> {
    if value.len() > TEXT_BYTES_MAX {
        return Err(format!("`{name}`: expected at most {TEXT_BYTES_MAX} bytes, found {}", value.len()));
    }
    Ok(value.to_owned())
}

/// Sample orders, sorted once per column, and the last filtered order.
#[derive(Debug, Default)]
pub(super) struct Selections {
    orders: [OnceLock<Places>; Column::ALL.len()],
    last: Mutex<Option<(Filter, Column, Places)>>,
}

/// Sample places, in rising column order, equal values by place.
pub(super) type Places = Arc<Vec<u32>>;

impl Selections {
    /// Returns the places of the samples that meet a filter apart from the text, in rising column order.
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
    use super::*;
    use crate::view::table::tests::with_costs;

    #[test]
    fn a_query_has_a_filter_an_order_and_a_page() {
        let query = "sort=tokens&descending=1&offset=100&limit=1000&key=%3CScript%3E+a&field=jpg&refused=1\
                     &cost_ns_min=5&tokens_max=7";
        let query = Query::parse(query).unwrap();
        assert_eq!((query.column, query.is_descending), (Column::Tokens, true));
        assert_eq!((query.offset, query.limit), (100, LIMIT_MAX));
        assert_eq!((&*query.filter.key, &*query.filter.field), ("<script> a", "jpg"));
        assert!(query.filter.is_refused);
        assert_eq!(query.filter.ranges[Column::CostNs as usize], Some((5, u64::MAX)));
        assert_eq!(query.filter.ranges[Column::Tokens as usize], Some((0, 7)));
        assert_eq!(query.filter.without(Column::CostNs).ranges[Column::CostNs as usize], None);
        assert_eq!(Query::parse("").unwrap().filter, Filter::default());
    }

    #[test]
    fn what_is_unknown_is_refused_by_name() {
        let refused = [
            ("sort=size", "found `size`"),
            ("offset=-1", "`offset`: expected a whole number"),
            ("refused=yes", "expected 0 or 1"),
            ("cost_ns_mid=1", "unknown parameter `cost_ns_mid`"),
            ("color=red", "unknown parameter `color`"),
            ("tokens_min=1e3", "found `1e3`"),
        ];
        for (query, message) in refused {
            let refusal = Query::parse(query).unwrap_err();
            assert!(refusal.contains(message), "{query}: {refusal}");
        }
        assert!(Query::parse(&format!("key={}", "a".repeat(1_001))).is_err());
    }

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
