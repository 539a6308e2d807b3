//! Reads the query in a request: filter, order and page.

use super::table::Column;

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
        };
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sort" => parsed.column = column(&value)?,
                "descending" => parsed.is_descending = flag(&name, &value)?,
                "offset" => parsed.offset = number(&name, &value)?,
                "limit" => parsed.limit = number(&name, &value)?.clamp(1, LIMIT_MAX),
                "key" => parsed.filter.key = text(&name, &value)?.to_ascii_lowercase(),
                "field" => parsed.filter.field = text(&name, &value)?,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
