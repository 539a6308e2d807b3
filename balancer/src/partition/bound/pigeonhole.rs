//! Lower bound by counting: of `k * groups + 1` items, `k + 1` share a group.
//!
//! So the sum over the `k + 1` shortest of the `k * groups + 1` longest items is a bound, for every `k`. It
//! holds in every module and on every convex combination of modules: a group's largest module is never below
//! the combination of the group's modules.

use crate::instance::Instance;

/// Weight parts in a combination: two modules are weighted 1 : 3, 2 : 2 and 3 : 1.
const PARTS: u64 = 4;
/// Maximum number of modules for which all pairs are combined; with more, only neighbors are paired.
const MODULES_MAX: usize = 8;

/// Returns the largest pigeonhole bound above `known`, or 0 if none exceeds it.
///
/// It tries every module, every pair of modules in quarters, and the mean over all modules.
///
/// # Source
/// Dell'Amico and Martello, "Optimal scheduling of tasks on identical parallel processors", ORSA J.
/// Computing 7, 1995, for `k = 1` on one module.
pub(super) fn pigeonhole(instance: &Instance, groups: usize, known: u64) -> u64 {
    if instance.items() <= groups {
        return 0;
    }
    let rows = || instance.rows_ns().chunks_exact(instance.modules());
    // No combination of an item's modules exceeds the largest module.
    let mut values: Vec<u64> = rows().map(|row| row.iter().copied().fold(0, u64::max)).collect();
    if !may_exceed(&values, groups, known as f64) {
        return 0;
    }
    let mut best = 0;
    for weights in combinations(instance.modules()) {
        let parts: u64 = weights.iter().map(|(_, weight)| weight).sum();
        values.clear();
        // A sum too large for 64 bits saturates: a smaller value keeps the bound valid.
        values.extend(rows().map(|row| {
            weights.iter().fold(0, |sum: u64, (module, weight)| {
                sum.saturating_add(row[*module].saturating_mul(*weight))
            })
        }));
        let goal = best.max(known);
        if may_exceed(&values, groups, goal as f64 * parts as f64) {
            best = best.max(values_bound(&mut values, groups).div_ceil(u128::from(parts)) as u64);
        }
    }
    if best > known { best } else { 0 }
}

/// Lists combinations of modules with weights.
fn combinations(modules: usize) -> Vec<Vec<(usize, u64)>> {
    let mut all: Vec<Vec<(usize, u64)>> = (0..modules).map(|module| vec![(module, 1)]).collect();
    for first in 0..modules {
        for second in first + 1..modules {
            if modules <= MODULES_MAX || second == first + 1 {
                all.extend((1..PARTS).map(|part| vec![(first, part), (second, PARTS - part)]));
            }
        }
    }
    if modules > 2 {
        all.push((0..modules).map(|module| (module, 1)).collect());
    }
    all
}

/// Whether some `k` may give more than `goal`: the `k + 1` items that share a group are no longer than the
/// longest, with rank `k * (groups - 1)`. Counts instead of sorting; rounding errs towards "may".
fn may_exceed(values: &[u64], groups: usize, goal: f64) -> bool {
    let shares_max = (values.len() - 1) / groups;
    // counts[k]: items of which k + 1, but not k, exceed the goal.
    let mut counts = vec![0_usize; shares_max + 1];
    let goal = goal * (1.0 - 1e-9);
    for &value in values {
        let share = (goal / value as f64) as usize;
        if let Some(count) = counts.get_mut(share) {
            *count += 1;
        }
    }
    let mut long = counts[0];
    (1..=shares_max).any(|k| {
        long += counts[k];
        long > k * (groups - 1)
    })
}

/// Computes the bound itself; sorts the values.
fn values_bound(values: &mut [u64], groups: usize) -> u128 {
    values.sort_unstable_by(|left, right| right.cmp(left));
    // Sliding-window sums are differences between running sums.
    let mut sums = Vec::with_capacity(values.len() + 1);
    sums.push(0_u128);
    for (rank, value) in values.iter().enumerate() {
        sums.push(sums[rank] + u128::from(*value));
    }
    let shares = 1..=(values.len() - 1) / groups;
    shares.map(|k| sums[k * groups + 1] - sums[k * groups - k]).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bound(groups: usize, modules: usize, times_ns: &[u64]) -> u64 {
        pigeonhole(&Instance::new(groups, modules, times_ns.to_vec()).unwrap(), groups, 0)
    }

    #[test]
    fn three_of_nine_items_share_one_of_four_groups() {
        assert_eq!(bound(4, 1, &[10; 9]), 30);
    }

    #[test]
    fn it_holds_on_combinations_of_modules() {
        // Two items share a group; each single module has a pair with 17, but every pair sums to 36.
        assert_eq!(bound(2, 2, &[10, 8, 8, 10, 9, 9]), 18);
        // Three quarters of the first module and a quarter of the second make every item 9.
        assert_eq!(bound(2, 2, &[10, 6, 8, 12, 9, 9]), 18);
        assert_eq!(bound(1, 3, &[9, 0, 0, 0, 9, 0]), 9);
    }

    #[test]
    fn times_that_fill_64_bits_do_not_overflow() {
        let huge = u64::MAX / 8;
        assert_eq!(bound(1, 2, &[huge, huge, huge, huge]), 2 * huge);
    }

    proptest! {
        #[test]
        fn counting_never_passes_over_a_bound(
            values in prop::collection::vec(prop_oneof![0..20_u64, 1..1_000_000_000_u64], 2..100),
            groups in 1..20_usize,
        ) {
            prop_assume!(values.len() > groups);
            let bound = values_bound(&mut values.clone(), groups);
            if bound > 0 {
                prop_assert!(may_exceed(&values, groups, (bound - 1) as f64));
            }
        }
    }
}
