//! Lower bounds on the makespan for any partition.
//!
//! A bound is a proof, so it is computed in integers and rounded up. A result equal to the bound is optimal.

mod lattice;
mod pigeonhole;

use crate::instance::Instance;

/// Value that no result can go below, and the argument for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LowerBound {
    /// Bound in nanoseconds.
    pub ns: u64,
    /// Argument that proves the bound.
    pub kind: BoundKind,
}

/// Argument that proves a lower bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum BoundKind {
    /// Some group has at least a module's mean load.
    MeanLoad,
    /// Some group holds the longest item.
    LargestItem,
    /// Of `k * groups + 1` items, `k + 1` share a group.
    Pigeonhole,
    /// Times are multiples of a unit (image tiles, for example), and some group has the mean number, rounded
    /// up.
    Lattice,
    /// An integer program was solved completely.
    Exact,
    /// A stage waits for the first microbatch, works through the mean load, and the last gradient travels
    /// back.
    FillAndDrain,
    /// An item passes all stages, forward and backward.
    LongestPath,
    /// For every cut of a rank's mean load into microbatches, some path through the stages is long.
    Relaxation,
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
            Self::Exact => "exact",
            Self::FillAndDrain => "fill_and_drain",
            Self::LongestPath => "longest_path",
            Self::Relaxation => "fluid",
        }
    }
}

impl std::fmt::Display for BoundKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the best bound among mean load, largest item, pigeonhole and lattice.
///
/// Mean load and largest item are computed in every module, pigeonhole also on combinations of modules; the
/// lattice bound recovers the unit from times that are whole tiles. Takes a few nanoseconds per item and
/// module.
///
/// # Source
/// Dell'Amico and Martello, "Optimal scheduling of tasks on identical parallel processors", ORSA J.
/// Computing 7, 1995, for mean load, largest item and the pigeonhole argument.
#[must_use]
pub fn lower_bound(instance: &Instance) -> LowerBound {
    lower_bound_for(instance, instance.groups())
}

/// Computes the bound for a number of groups that differs from the instance's: for ranks, for example.
pub(crate) fn lower_bound_for(instance: &Instance, groups: usize) -> LowerBound {
    let mut best = LowerBound { ns: 0, kind: BoundKind::MeanLoad };
    let mut offer = |ns: u64, kind: BoundKind| {
        if ns > best.ns {
            best = LowerBound { ns, kind };
        }
        best
    };
    let modules: Vec<Vec<u64>> =
        (0..instance.modules()).map(|module| instance.module_ns(module).collect()).collect();
    for times in &modules {
        offer(times.iter().sum::<u64>().div_ceil(groups as u64), BoundKind::MeanLoad);
        offer(times.iter().copied().max().unwrap_or(0), BoundKind::LargestItem);
    }
    // The cheap bounds come first: pigeonhole skips all sorting if it cannot beat them.
    let known = offer(0, BoundKind::MeanLoad).ns;
    offer(pigeonhole::pigeonhole(instance, groups, known), BoundKind::Pigeonhole);
    for times in &modules {
        offer(lattice::lattice(times, groups), BoundKind::Lattice);
    }
    best
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
        // Two items share a group; each single module has a pair with 17, but every pair sums to 36.
        let times_ns = [10, 8, 8, 10, 9, 9];
        assert_eq!(bound(2, 2, &times_ns), LowerBound { ns: 18, kind: BoundKind::Pigeonhole });
    }

    #[test]
    fn multiples_of_a_tile_are_bound_by_their_number() {
        let times_ns = [10_000, 10_000, 10_000, 20_000, 20_000];
        assert_eq!(bound(2, 1, &times_ns), LowerBound { ns: 40_000, kind: BoundKind::Lattice });
    }

    #[test]
    fn all_zero_times_have_bound_zero() {
        assert_eq!(bound(2, 1, &[0, 0]).ns, 0);
    }

    #[test]
    fn fewer_items_than_groups_are_bound_by_the_largest() {
        let instance = Instance::with_empty_groups(4, 1, vec![5, 3]).unwrap();
        assert_eq!(lower_bound(&instance), LowerBound { ns: 5, kind: BoundKind::LargestItem });
    }
}
