//! The search comes close to the bound on generated families, within work units for about 20 ms.

use super::families::{Family, PLANTED_NS};
use dflop_balancer::{Assignment, BoundKind, Budget, Caps, Strategy, balance};

const WORK: u64 = 200_000;
const SEEDS: std::ops::Range<u64> = 10..12;

fn solve(family: Family, (items, groups): (usize, usize), seed: u64, work: u64) -> Assignment {
    let instance = family.instance(items, groups, seed);
    balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(work)).unwrap()
}

fn assert_gap(family: Family, size: (usize, usize), work: u64, gap_max: f64) {
    for seed in SEEDS {
        let found = solve(family, size, seed, work);
        assert!(
            found.gap() <= gap_max,
            "{family:?} {size:?} {seed}: {} by {}",
            found.gap(),
            found.bound.kind
        );
    }
}

#[test]
fn realistic_batches_are_within_a_ten_thousandth_of_their_bound() {
    for family in Family::REALISTIC {
        assert_gap(family, (512, 64), WORK, 1e-4);
        assert_gap(family, (2_048, 128), WORK, 1e-4);
    }
}

#[test]
fn large_batches_start_within_a_fiftieth_and_are_improved_within_little_work() {
    for family in Family::REALISTIC {
        assert_gap(family, (8_192, 1_024), 0, 2e-2);
        assert_gap(family, (8_192, 1_024), 60_000, 2e-3);
    }
}

#[test]
fn planted_partitions_are_nearly_found() {
    for size in [(128, 16), (512, 64)] {
        assert_gap(Family::Planted, size, WORK, 1.5e-3);
        assert_eq!(solve(Family::Planted, size, 10, 0).bound.ns, PLANTED_NS);
    }
}

#[test]
fn opposed_modules_are_balanced_together() {
    assert_gap(Family::Opposed, (512, 64), WORK, 2e-4);
}

#[test]
fn batches_of_giants_and_of_equal_items_are_optimal_without_a_search() {
    for family in [Family::Giant, Family::Pareto, Family::EqualOdd] {
        for seed in SEEDS {
            let found = solve(family, (512, 64), seed, 0);
            assert!(found.is_optimal() && found.gap() == 0.0, "{family:?} {seed}");
        }
    }
    assert_eq!(solve(Family::EqualOdd, (512, 64), 0, 0).bound.kind, BoundKind::Pigeonhole);
}

#[test]
fn small_members_of_every_family_are_proven_optimal() {
    for family in Family::ALL {
        let instance = family.instance(9, 3, 4);
        let solve = |strategy: Strategy| {
            let budget = &mut Budget::work(strategy.work_default());
            balance(&instance, strategy, &Caps::default(), budget).unwrap()
        };
        let (found, proven) = (solve(Strategy::SEARCH), solve(Strategy::EXACT));
        assert!(proven.is_optimal(), "{family:?}");
        assert_eq!(found.makespan_ns, proven.makespan_ns, "{family:?}");
    }
}

#[test]
fn whole_tiles_are_certified_though_they_were_rounded() {
    for seed in SEEDS {
        let found = solve(Family::LargeEncoder, (512, 64), seed, WORK);
        assert_eq!(found.bound.kind, BoundKind::Lattice);
        assert!(found.gap() < 1e-6, "{}", found.gap());
    }
}
