//! Lower bounds of the makespan: what no partition can beat.
//!
//! A bound is a proof, so it is computed in integers and rounded up. An answer at its bound is optimal.

use crate::instance::Instance;

/// A value that no answer can go below, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowerBound {
    /// The bound, nanoseconds.
    pub ns: u64,
    /// The argument behind it.
    pub kind: BoundKind,
}

/// Why a lower bound holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BoundKind {
    /// Some group has at least the mean load of a module.
    MeanLoad,
    /// Some group holds the longest item.
    LargestItem,
    /// Of `k * groups + 1` items, `k + 1` share a group.
    Pigeonhole,
    /// Times are multiples of a unit (image tiles, say), and some group has the mean number, rounded up.
    Lattice,
    /// A stage waits for the first microbatch, works through its mean load, and the last gradient
    /// travels back.
    FillAndDrain,
    /// One item passes all stages, forward and backward.
    LongestPath,
    /// However the mean load of a rank is cut into microbatches, some path through the stages is long.
    Fluid,
}

impl BoundKind {
    /// Returns the name that is printed, such as `mean_load`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MeanLoad => "mean_load",
            Self::LargestItem => "largest_item",
            Self::Pigeonhole => "pigeonhole",
            Self::Lattice => "lattice",
            Self::FillAndDrain => "fill_and_drain",
            Self::LongestPath => "longest_path",
            Self::Fluid => "fluid",
        }
    }
}

impl std::fmt::Display for BoundKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the best of the bounds by mean load, largest item, pigeonhole and lattice.
///
/// Pigeonhole: of the `k * m + 1` longest items some `k + 1` share one of the `m` groups, so the sum of
/// the `k + 1` shortest of those is a bound. It is taken in every module and on the modules' mean, which
/// no largest module is below.
///
/// Lattice: give every item a whole number of units. Some group has at least the mean number of them,
/// rounded up, and each unit takes at least the smallest ratio of an item's time to its units. That holds
/// for any numbers; those from a module's shortest time, and simple fractions of it, are tried.
///
/// # Source
/// Dell'Amico and Martello, "Optimal scheduling of tasks on identical parallel processors", ORSA J.
/// Computing 7, 1995, for mean load, largest item and the pigeonhole argument with `k = 1`.
#[must_use]
pub fn lower_bound(instance: &Instance) -> LowerBound {
    lower_bound_for(instance, instance.groups())
}

/// The bound for another number of groups than the instance's: ranks, say.
pub(crate) fn lower_bound_for(instance: &Instance, groups: usize) -> LowerBound {
    let mut best = LowerBound { ns: 0, kind: BoundKind::MeanLoad };
    let mut offer = |ns: u64, kind: BoundKind| {
        if ns > best.ns {
            best = LowerBound { ns, kind };
        }
    };
    for module in 0..instance.modules() {
        let mut times: Vec<u64> = instance.module_ns(module).collect();
        offer(times.iter().sum::<u64>().div_ceil(groups as u64), BoundKind::MeanLoad);
        offer(times.iter().copied().max().unwrap_or(0), BoundKind::LargestItem);
        offer(pigeonhole(&mut times, groups), BoundKind::Pigeonhole);
        offer(lattice(&times, groups), BoundKind::Lattice);
    }
    if instance.modules() > 1 {
        let modules = instance.modules();
        let mut sums: Vec<u64> =
            instance.rows_ns().chunks_exact(modules).map(|row| row.iter().sum()).collect();
        offer(pigeonhole(&mut sums, groups).div_ceil(modules as u64), BoundKind::Pigeonhole);
    }
    best
}

/// The best lattice bound of those whose unit is the shortest time or a half, a third, a quarter of it.
fn lattice(times: &[u64], groups: usize) -> u64 {
    let Some(shortest) = times.iter().copied().filter(|time| *time > 0).min() else { return 0 };
    let units = (1..=4).map(|parts| shortest / parts).filter(|unit| *unit > 0);
    units.map(|unit| lattice_of(times, groups, unit)).max().unwrap_or(0)
}

/// The lattice bound of one unit, or 0 where the times are too far from its multiples to gain anything.
fn lattice_of(times: &[u64], groups: usize, unit: u64) -> u64 {
    // Multiples were rounded to nanoseconds: a time just below one counts as that one.
    let slack = unit / 1024 + 1;
    let (mut total, mut lost) = (0, 0);
    let mut worst = (unit, 1);
    for &time in times {
        let count = (time + slack) / unit;
        total += count;
        lost += time.saturating_sub(count * unit);
        if lost >= unit.saturating_mul(groups as u64) {
            return 0;
        }
        let is_worse = u128::from(time) * u128::from(worst.1) < u128::from(worst.0) * u128::from(count);
        if is_worse {
            worst = (time, count);
        }
    }
    let of_slowest = u128::from(total.div_ceil(groups as u64));
    (of_slowest * u128::from(worst.0)).div_ceil(u128::from(worst.1)) as u64
}

/// The largest sum of the `k + 1` shortest of the `k * groups + 1` longest times, over all `k >= 1`.
fn pigeonhole(times: &mut [u64], groups: usize) -> u64 {
    if times.len() <= groups {
        return 0;
    }
    times.sort_unstable_by(|left, right| right.cmp(left));
    // Sums of a sliding window are differences of running sums.
    let sums: Vec<u128> = std::iter::once(0)
        .chain(times.iter().scan(0, |sum: &mut u128, &time| {
            *sum += u128::from(time);
            Some(*sum)
        }))
        .collect();
    let shares = 1..=(times.len() - 1) / groups;
    let largest = shares.map(|k| sums[k * groups + 1] - sums[k * groups - k]).max().unwrap_or(0);
    u64::try_from(largest).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(groups: usize, modules: usize, times_ns: &[u64]) -> LowerBound {
        lower_bound(&Instance::new(groups, modules, times_ns.to_vec()).unwrap())
    }

    #[test]
    fn mean_load_is_rounded_up() {
        assert_eq!(bound(2, 1, &[3, 1, 1]), LowerBound { ns: 3, kind: BoundKind::MeanLoad });
        assert_eq!(bound(3, 1, &[1, 1, 1, 1, 1, 1, 1]).ns, 3);
    }

    #[test]
    fn largest_item_counts_in_any_module() {
        assert_eq!(bound(2, 2, &[1, 9, 1, 1, 1, 1]), LowerBound { ns: 9, kind: BoundKind::LargestItem });
    }

    #[test]
    fn equal_items_are_bound_by_pigeonhole() {
        // 9 items of 10 in 4 groups: three share a group, though the mean is 22.5.
        assert_eq!(bound(4, 1, &[10; 9]), LowerBound { ns: 30, kind: BoundKind::Pigeonhole });
    }

    #[test]
    fn pigeonhole_holds_on_the_mean_of_modules() {
        // Two items share a group; in each module alone a pair of 17 exists, but every pair sums to 36.
        let times_ns = [10, 8, 8, 10, 9, 9];
        assert_eq!(bound(2, 2, &times_ns), LowerBound { ns: 18, kind: BoundKind::Pigeonhole });
    }

    #[test]
    fn multiples_of_a_tile_are_bound_by_their_number() {
        // Seven tiles in two groups: one has four.
        assert_eq!(bound(2, 1, &[10, 10, 10, 20, 20]), LowerBound { ns: 40, kind: BoundKind::Lattice });
        // The same with tiles of 1000.4, rounded, and of 999.6: four take 4 * 999.5 at least.
        assert_eq!(bound(2, 1, &[1000, 1000, 1000, 2001, 2001]).ns, 4000);
        assert_eq!(bound(2, 1, &[1000, 1000, 1000, 1999, 1999]).ns, 3998);
    }

    #[test]
    fn all_zero_times_have_bound_zero() {
        assert_eq!(bound(2, 1, &[0, 0]).ns, 0);
    }

    #[test]
    fn fewer_items_than_groups_are_bound_by_the_largest() {
        let instance = Instance::groups_may_be_empty(4, 1, vec![5, 3]).unwrap();
        assert_eq!(lower_bound(&instance), LowerBound { ns: 5, kind: BoundKind::LargestItem });
    }
}
