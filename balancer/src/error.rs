//! The one error type of this crate.

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a problem could not be read, or has no answer.
///
/// Nothing here is worth a retry: the same input fails the same way on every rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// The text is not an instance file.
    #[error("could not read the instance")]
    Json { source: serde_json::Error },
    /// A column has another length than the number of items asks for.
    #[error("`{field}` holds {found} values, expected {expected}")]
    Length { field: &'static str, found: usize, expected: usize },
    /// One item has another number of modules than the instance.
    #[error("item {item} has times for {found} modules, expected {expected}")]
    ItemLength { item: usize, found: usize, expected: usize },
    /// A time, a token count or a size is a fraction, or too large.
    #[error("`{field}` of item {item} is no whole number of 63 bits: {value}")]
    NotWhole { field: &'static str, item: usize, value: String },
    /// A time, a token count or a size is below zero.
    #[error("`{field}` of item {item} is negative: {value}")]
    Negative { field: &'static str, item: usize, value: i64 },
    /// A column's sum, up to this item, is too large to compute with.
    #[error("the sum of `{field}` overflows at item {item}")]
    Overflow { field: &'static str, item: usize },
    /// There are fewer items than groups, and no group may be empty.
    #[error("{items} items cannot fill {groups} groups")]
    TooFewItems { items: usize, groups: usize },
    /// A setting makes no sense.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// One item alone is above a cap: no partition exists.
    #[error("item {item} alone has {value} {unit}, above the cap of {max} a group")]
    CapItem { item: usize, unit: &'static str, value: u64, max: u64 },
    /// All items together are above the cap of all groups together: no partition exists.
    #[error("the items have {total} {unit}, above the cap of {max} in each of {groups} groups")]
    CapTotal { unit: &'static str, total: u64, max: u64, groups: usize },
    /// No partition within the caps was found; one may exist, but the caps are close to the mean.
    #[error("found no partition of {items} items into {groups} groups within the caps; raise them")]
    CapUnmet { items: usize, groups: usize },
    /// The exact strategy was asked for an instance that it could not finish.
    #[error(
        "{items} items in {groups} groups are too many for the exact strategy: its program would have {cells} cells, at most {cells_max} are taken"
    )]
    TooLarge { items: usize, groups: usize, cells: usize, cells_max: usize },
    /// No plan fits into the devices' memory, or onto the devices at all; says the smallest change that would do.
    #[error("no plan fits: {reason}")]
    NothingFits { reason: String },
    /// The action lists wait for one another, or one asks for what never comes.
    #[error("rank {rank} waits for ever at `{action}`")]
    Deadlock { rank: usize, action: String },
}
