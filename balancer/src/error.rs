//! Error type for this crate.

/// Result type for this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reasons why a problem is invalid or has no solution.
///
/// No error is worth a retry: equal input fails in the same way on every rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// The text is not an instance file.
    #[error("could not read the instance")]
    Json { source: serde_json::Error },
    /// A column's length does not match the number of items.
    #[error("`{field}` holds {found} values, expected {expected}")]
    Length { field: &'static str, found: usize, expected: usize },
    /// An item's number of modules differs from the instance.
    #[error("item {item} has times for {found} modules, expected {expected}")]
    ItemLength { item: usize, found: usize, expected: usize },
    /// A time, a token count or a size is a fraction, or too large.
    #[error("`{field}` of item {item} must be an integer below 2^63, got {value}")]
    NotWhole { field: &'static str, item: usize, value: String },
    /// A time, a token count or a size is negative.
    #[error("`{field}` of item {item} must not be negative, got {value}")]
    Negative { field: &'static str, item: usize, value: i64 },
    /// A column's sum, up to this item, is too large to compute with.
    #[error("the sum of `{field}` overflows at item {item}: it must be below 2^63")]
    Overflow { field: &'static str, item: usize },
    /// There are fewer items than groups, and no group may be empty.
    #[error("{items} items cannot fill {groups} groups: expected at least one item per group")]
    TooFewItems { items: usize, groups: usize },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A single item is above a cap: no partition exists.
    #[error("item {item} alone has {value} {unit}, above the cap of {max} per group")]
    CapItem { item: usize, unit: &'static str, value: u64, max: u64 },
    /// The total over all items is above the caps of all groups together: no partition exists.
    #[error("the items have {total} {unit} in total, above the cap of {max} in each of {groups} groups")]
    CapTotal { unit: &'static str, total: u64, max: u64, groups: usize },
    /// No partition within the caps was found; there may be a solution, but the caps are close to the mean.
    #[error("found no partition of {items} items into {groups} groups within the caps; raise them")]
    CapUnmet { items: usize, groups: usize },
    /// The instance is too large for the exact strategy.
    #[error(
        "{items} items in {groups} groups are too large for the exact strategy: the program would have {cells} cells, \
         at most {cells_max} are supported; use the strategy `search`"
    )]
    TooLarge { items: usize, groups: usize, cells: usize, cells_max: usize },
    /// No plan fits the devices or the device memory; the reason names the smallest change that would fit.
    #[error("no plan fits: {reason}")]
    NothingFits { reason: String },
    /// A rank waits for an input that never arrives, or the action list contains an impossible action.
    #[error("deadlock: rank {rank} never completes `{action}`")]
    Deadlock { rank: usize, action: String },
}
