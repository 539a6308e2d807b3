//! Partition strategies, one per file, and the strategy registry.
//!
//! Every strategy solves every problem: no group is empty if there are enough items, and no cap is exceeded.
//! A single-pass strategy may meet a cap that it cannot keep; then [`assign_within_caps`] finds groups within
//! the caps first. The caps without times form a partition problem: the modules are the capped columns. The
//! local search for a small makespan solves it, and ends once all caps are met.
//!
//! A new strategy is a file with a [`Partitioner`], and a line in [`Strategy::ALL`] for the name used on the
//! command line and in Python.

mod differencing;
mod exact;
mod lpt;
mod multi_lpt;
mod random;
mod round_robin;
mod search;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use super::problem::Partition;
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::partition::bound::LowerBound;
use crate::partition::problem::Problem;

/// Algorithm that partitions items into groups.
///
/// # Examples
/// ```
/// use dflop_balancer::{Budget, Caps, Instance, Partitioner, Problem, Result, Solution, Strategy, balance};
///
/// /// Runs of neighbors, as many items in each group.
/// #[derive(Debug)]
/// struct Runs;
///
/// impl Partitioner for Runs {
///     fn name(&self) -> &'static str {
///         "runs"
///     }
///
///     fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
///         let group = |item: usize| (item * problem.groups() / problem.items()) as u32;
///         Solution::from_groups(problem, &(0..problem.items()).map(group).collect::<Vec<u32>>())
///     }
/// }
///
/// let instance = Instance::new(2, 1, vec![4, 3, 2, 1])?;
/// let found = balance(&instance, Strategy::new(&Runs), &Caps::default(), &mut Budget::work(0))?;
/// assert_eq!(found.groups, [[0, 1], [2, 3]]);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub trait Partitioner: fmt::Debug + Sync {
    /// Returns the name; strategies with equal names are equal.
    fn name(&self) -> &'static str;

    /// Returns alternative accepted names.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns a short summary for help, or nothing.
    fn summary(&self) -> &'static str {
        ""
    }

    /// Whether items are assigned regardless of times, as in a data-blind trainer: pipelines keep the group
    /// order.
    fn is_blind(&self) -> bool {
        false
    }

    /// Whether pipelines are searched for the smallest makespan, starting from this partition.
    fn searches_pipelines(&self) -> bool {
        false
    }

    /// Whether instances of any size are supported, not only small instances.
    fn is_of_any_size(&self) -> bool {
        true
    }

    /// Returns the default work units, for a quick search lasting a few milliseconds.
    fn work_default(&self) -> u64 {
        20_000
    }

    /// Partitions a problem; pure and deterministic, except for the budget's deadline.
    ///
    /// # Errors
    /// [`Error::CapUnmet`] if no partition within the caps is found, [`Error::TooLarge`] from strategies that
    /// do not support any size.
    fn solve(&self, problem: &Problem<'_>, budget: &mut Budget) -> Result<Solution>;
}

/// [`Partitioner`] by reference, or by name for this crate's strategies.
///
/// Written and read as `round_robin`, `random`, `lpt`, `kk`, `multi_lpt`, `search` and `exact`, and by the
/// aliases `data-blind`, `data_blind` and `balanced`.
///
/// # Examples
/// ```
/// use dflop_balancer::Strategy;
/// assert_eq!("multi_lpt".parse::<Strategy>()?, Strategy::MULTI_LPT);
/// assert_eq!("data-blind".parse::<Strategy>()?, Strategy::ROUND_ROBIN);
/// assert_eq!(Strategy::SEARCH.to_string(), "search");
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Strategy(&'static dyn Partitioner);

impl Strategy {
    /// Item `i` goes to group `i mod groups`, like in a data-blind trainer.
    pub const ROUND_ROBIN: Self = Self(&round_robin::RoundRobin);
    /// Every item goes to a random group.
    pub const RANDOM: Self = Self(&random::Random);
    /// Longest processing time first, on each item's largest module.
    pub const LPT: Self = Self(&lpt::Lpt);
    /// Karmarkar and Karp's largest differencing, on each item's largest module.
    pub const KARMARKAR_KARP: Self = Self(&differencing::Differencing);
    /// Longest processing time first, on all modules at once.
    pub const MULTI_LPT: Self = Self(&multi_lpt::MultiLpt);
    /// Local search at the slowest group, starting from the [`Strategy::MULTI_LPT`] result.
    pub const SEARCH: Self = Self(&search::IteratedSearch);
    /// Integer program that starts from the [`Strategy::SEARCH`] result and proves the best partition; for
    /// small instances only, see [`Error::TooLarge`].
    pub const EXACT: Self = Self(&exact::Exact);

    /// Named strategies, from data-blind to exact.
    pub const ALL: &[Self] = &[
        Self::ROUND_ROBIN,
        Self::RANDOM,
        Self::LPT,
        Self::KARMARKAR_KARP,
        Self::MULTI_LPT,
        Self::SEARCH,
        Self::EXACT,
    ];

    /// Wraps any partitioner.
    #[must_use]
    pub const fn new(partitioner: &'static dyn Partitioner) -> Self {
        Self(partitioner)
    }

    /// Lists the strategies in [`Strategy::ALL`] for instances of any size.
    pub fn for_any_size() -> impl Iterator<Item = Self> + Clone {
        Self::ALL.iter().copied().filter(|strategy| strategy.0.is_of_any_size())
    }

    /// Returns the name that [`FromStr`] reads.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// Whether items are assigned regardless of times.
    #[must_use]
    pub fn is_blind(self) -> bool {
        self.0.is_blind()
    }

    /// Whether pipelines are searched for the smallest makespan.
    pub(crate) fn searches_pipelines(self) -> bool {
        self.0.searches_pipelines()
    }

    /// Returns the default work units: for a quick search lasting a few milliseconds, or for
    /// [`Strategy::EXACT`] the proof for most supported instances.
    #[must_use]
    pub fn work_default(self) -> u64 {
        self.0.work_default()
    }

    /// Describes strategies for help: names with aliases and a summary.
    pub fn describe(strategies: impl IntoIterator<Item = Self>) -> String {
        let of = |Self(strategy): Self| {
            let aliases: Vec<String> = strategy.aliases().iter().map(|alias| format!("`{alias}`")).collect();
            let also = (!aliases.is_empty()).then(|| format!("also {}", aliases.join(", ")));
            let summary = Some(strategy.summary().to_owned()).filter(|summary| !summary.is_empty());
            let notes: Vec<String> = also.into_iter().chain(summary).collect();
            let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
            format!("`{}`{notes}", strategy.name())
        };
        strategies.into_iter().map(of).collect::<Vec<String>>().join(", ")
    }
}

impl PartialEq for Strategy {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Strategy {}

impl Hash for Strategy {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Strategy").field(&self.name()).finish()
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
        let is_named = |Self(strategy): &Self| strategy.name() == name || strategy.aliases().contains(&name);
        Self::ALL.iter().copied().find(is_named).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|strategy| strategy.name()).collect();
            let reason = format!("`{name}` is not in {}", names.join(", "));
            Error::Config { setting: "strategy", reason }
        })
    }
}

/// Partitions by a strategy.
///
/// # Errors
/// The errors of [`Partitioner::solve`].
pub(crate) fn solve(problem: &Problem<'_>, strategy: Strategy, budget: &mut Budget) -> Result<Solution> {
    strategy.0.solve(problem, budget)
}

/// Partitions by a strategy.
pub(crate) fn assign(problem: &Problem<'_>, strategy: Strategy, budget: &mut Budget) -> Result<Partition> {
    solve(problem, strategy, budget).map(|solution| solution.partition)
}

/// Returns the single-pass result, or groups within the caps if the pass failed at a cap: a search for the
/// caps may still succeed.
fn within(problem: &Problem<'_>, found: Option<Partition>) -> Result<Partition> {
    found.map_or_else(|| assign_within_caps(problem), Ok)
}

/// Partition that a strategy found, with the best known bound.
#[derive(Debug, Clone)]
pub struct Solution {
    pub(crate) partition: Partition,
    pub(crate) bound: LowerBound,
}

impl Solution {
    /// Creates a solution with the problem's bound.
    pub(crate) fn new(problem: &Problem<'_>, partition: Partition) -> Self {
        Self { partition, bound: problem.bound }
    }

    /// Creates a solution from every item's group.
    ///
    /// # Errors
    /// [`Error::Config`] if there is not exactly one valid group per item, or a group stays empty although
    /// there are enough items; [`Error::CapUnmet`] if a group exceeds a cap.
    pub fn from_groups(problem: &Problem<'_>, group_of: &[u32]) -> Result<Self> {
        let invalid = |reason: String| Err(Error::Config { setting: "strategy", reason });
        if group_of.len() != problem.items {
            return invalid(format!(
                "expected a group for each of {} items, got {}",
                problem.items,
                group_of.len()
            ));
        }
        let mut groups = vec![Vec::new(); problem.groups];
        for (item, group) in group_of.iter().enumerate() {
            let Some(items) = groups.get_mut(*group as usize) else {
                return invalid(format!("item {item} is in group {group} of {}", problem.groups));
            };
            items.push(item as u32);
        }
        if problem.items >= problem.groups && groups.iter().any(Vec::is_empty) {
            return invalid("a group has no item, although there are enough".to_owned());
        }
        let partition = Partition::from_groups(problem, groups);
        if !partition.is_within(problem) {
            return Err(Error::CapUnmet { items: problem.items, groups: problem.groups });
        }
        Ok(Self::new(problem, partition))
    }
}

/// Work-unit limit before it fails, about 10 ms.
const WORK_MAX: u64 = 200_000;

/// Finds groups within all caps.
///
/// # Errors
/// [`Error::CapUnmet`] if no groups were found, although a solution may exist.
fn assign_within_caps(problem: &Problem<'_>) -> Result<Partition> {
    let unmet = || Error::CapUnmet { items: problem.items, groups: problem.groups };
    let of_caps = problem.caps_only();
    let mut partition = multi_lpt::assign(&of_caps).ok_or_else(unmet)?;
    search::improve(&of_caps, &mut partition, &mut Budget::work(WORK_MAX));
    let partition = Partition::from_groups(problem, partition.groups);
    if partition.is_within(problem) { Ok(partition) } else { Err(unmet()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn every_name_is_read_back() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse::<Strategy>().unwrap(), *strategy);
            for alias in strategy.0.aliases() {
                assert_eq!(alias.parse::<Strategy>().unwrap(), *strategy);
            }
        }
        let mut names: Vec<&str> = Strategy::ALL.iter().map(|strategy| strategy.name()).collect();
        names.extend(Strategy::ALL.iter().flat_map(|strategy| strategy.0.aliases()));
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        let error = "best".parse::<Strategy>().unwrap_err().to_string();
        assert_eq!(
            error,
            "invalid `strategy`: `best` is not in round_robin, random, lpt, kk, multi_lpt, search, exact"
        );
    }

    #[test]
    fn help_names_strategies_with_aliases() {
        let described = Strategy::describe([Strategy::ROUND_ROBIN, Strategy::LPT, Strategy::EXACT]);
        let expected =
            "`round_robin` (also `data-blind`, `data_blind`), `lpt`, `exact` (small instances, with proof)";
        assert_eq!(described, expected);
    }

    #[test]
    fn a_cap_that_only_one_partition_meets_is_met() {
        let tokens = vec![8, 7, 6, 5, 4];
        let instance = Instance::new(2, 1, vec![1; 5]).unwrap().tokens(tokens).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(15), bytes_max: None }).unwrap();
        assert_eq!(assign_within_caps(&problem).unwrap().into_groups(), [vec![2, 3, 4], vec![0, 1]]);
    }

    #[test]
    fn two_caps_are_met_at_once() {
        let instance = Instance::new(2, 1, vec![1; 4]).unwrap();
        let instance = instance.tokens(vec![9, 9, 1, 1]).unwrap().bytes(vec![1, 90, 90, 1]).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(10), bytes_max: Some(91) }).unwrap();
        assert_eq!(assign_within_caps(&problem).unwrap().into_groups(), [[1, 3], [0, 2]]);
    }

    #[test]
    fn a_cap_that_nothing_meets_is_an_error() {
        let instance = Instance::new(2, 1, vec![1; 3]).unwrap().tokens(vec![5, 5, 5]).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(8), bytes_max: None }).unwrap();
        assert!(matches!(assign_within_caps(&problem), Err(Error::CapUnmet { items: 3, groups: 2 })));
    }
}
