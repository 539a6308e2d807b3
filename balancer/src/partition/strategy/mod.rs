//! Partition strategies, one per file.
//!
//! Every strategy answers every problem: no group is empty when there are enough items, and no cap is
//! exceeded. A strategy that builds its answer in a single pass may meet a cap that it cannot keep; then
//! [`within_caps`] finds groups within the caps first.

mod differencing;
mod exact;
mod lpt;
mod multi_lpt;
mod random;
mod round_robin;
mod search;
mod within_caps;

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::partition::bound::LowerBound;
use crate::partition::groups::Partition;
use crate::partition::problem::Problem;
use std::fmt;
use std::str::FromStr;

/// Algorithm that partitions items into groups.
///
/// Written and read as `round_robin`, `random`, `lpt`, `kk`, `multi_lpt`, `search` and `exact`.
///
/// # Examples
/// ```
/// use dflop_balancer::Strategy;
/// assert_eq!("multi_lpt".parse::<Strategy>()?, Strategy::MultiLpt);
/// assert_eq!(Strategy::Search.to_string(), "search");
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// Item `i` goes to group `i mod groups`, like in a data-blind trainer.
    RoundRobin,
    /// Every item goes to a random group.
    Random,
    /// Longest processing time first, on each item's largest module.
    Lpt,
    /// Karmarkar and Karp's largest differencing, on each item's largest module.
    KarmarkarKarp,
    /// Longest processing time first, on all modules at once.
    MultiLpt,
    /// Local search at the slowest group, from the answer of [`Strategy::MultiLpt`].
    Search,
    /// An integer program that starts from the answer of [`Strategy::Search`] and proves the best one; for
    /// small instances only, see [`Error::TooLarge`].
    Exact,
}

impl Strategy {
    /// All strategies, from data-blind to exact.
    pub const ALL: [Self; 7] = [
        Self::RoundRobin,
        Self::Random,
        Self::Lpt,
        Self::KarmarkarKarp,
        Self::MultiLpt,
        Self::Search,
        Self::Exact,
    ];

    /// Strategies for instances of any size: all but [`Strategy::Exact`].
    pub const OF_ANY_SIZE: [Self; 6] =
        [Self::RoundRobin, Self::Random, Self::Lpt, Self::KarmarkarKarp, Self::MultiLpt, Self::Search];

    /// Returns the name that [`FromStr`] reads.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::Lpt => "lpt",
            Self::KarmarkarKarp => "kk",
            Self::MultiLpt => "multi_lpt",
            Self::Search => "search",
            Self::Exact => "exact",
        }
    }
}

impl Strategy {
    /// Returns the default work units: a quick search of a few milliseconds, or for [`Strategy::Exact`] the
    /// proof of most instances that it supports.
    #[must_use]
    pub fn work_default(self) -> u64 {
        if self == Self::Exact { 4_000_000 } else { 20_000 }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|strategy| strategy.name() == name).ok_or_else(|| Error::Config {
            setting: "strategy",
            reason: format!("`{name}` is not in {}", names()),
        })
    }
}

/// Partitions by a strategy; also returns the best known bound.
///
/// # Errors
/// [`Error::CapUnmet`], and [`Error::TooLarge`] from the exact strategy.
pub(crate) fn solve(
    problem: &Problem<'_>,
    strategy: Strategy,
    budget: &mut Budget,
) -> Result<(Partition, LowerBound)> {
    let start = match strategy {
        Strategy::RoundRobin => round_robin::assign(problem),
        Strategy::Random => random::assign(problem),
        Strategy::Lpt => lpt::assign(problem),
        Strategy::KarmarkarKarp => differencing::assign(problem),
        Strategy::MultiLpt | Strategy::Search | Strategy::Exact => multi_lpt::assign(problem),
    };
    let mut partition = match start {
        Some(partition) => partition,
        // A single pass failed at a cap; a search for the caps alone may still succeed.
        None => within_caps::assign(problem)?,
    };
    match strategy {
        Strategy::Search => search::improve(problem, &mut partition, budget),
        Strategy::Exact => return exact::prove(problem, partition, budget),
        _ => (),
    }
    Ok((partition, problem.bound))
}

/// Partitions by a strategy.
pub(crate) fn assign(problem: &Problem<'_>, strategy: Strategy, budget: &mut Budget) -> Result<Partition> {
    solve(problem, strategy, budget).map(|(partition, _)| partition)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse::<Strategy>().unwrap(), strategy);
        }
        let error = "best".parse::<Strategy>().unwrap_err().to_string();
        assert_eq!(
            error,
            "invalid `strategy`: `best` is not in round_robin, random, lpt, kk, multi_lpt, search, exact"
        );
    }
}
