//! Makespans and bounds agree with the textbook integer program, which is independent of this crate's
//! algorithms.

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance, lower_bound};
use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem, Variable};
use proptest::prelude::*;

/// Solves `min C` with a binary variable for every item and group, without breaking symmetry.
fn optimum(instance: &Instance) -> u64 {
    let mut program = Problem::new(OptimizationDirection::Minimize);
    let makespan = program.add_var(1.0, (0.0, f64::INFINITY));
    let rows: Vec<Vec<Variable>> = (0..instance.items())
        .map(|_| (0..instance.groups()).map(|_| program.add_binary_var(0.0)).collect())
        .collect();
    for row in &rows {
        let once: Vec<(Variable, f64)> = row.iter().map(|&variable| (variable, 1.0)).collect();
        program.add_constraint(once, ComparisonOp::Eq, 1.0);
    }
    for group in 0..instance.groups() {
        let some: Vec<(Variable, f64)> = rows.iter().map(|row| (row[group], 1.0)).collect();
        program.add_constraint(some, ComparisonOp::Ge, 1.0);
        for module in 0..instance.modules() {
            let mut load = LinearExpr::empty();
            for (item, row) in rows.iter().enumerate() {
                load.add(row[group], instance.times_ns(item as u32)[module] as f64);
            }
            load.add(makespan, -1.0);
            program.add_constraint(load, ComparisonOp::Le, 0.0);
        }
    }
    let outcome = program.solve().expect("one item a group is feasible");
    outcome.solution().expect("no limit was set").objective().round() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn search_and_exact_meet_the_integer_program(
        modules in 1..4_usize,
        groups in 1..4_usize,
        times_ns in prop::collection::vec(prop_oneof![Just(0), 1..30_u64, 1..100_000_u64], 9..28),
    ) {
        let times_ns = times_ns[..times_ns.len() / modules * modules].to_vec();
        let items = times_ns.len() / modules;
        // More items take the plain program seconds.
        let times_ns = times_ns[..items.min(9) * modules].to_vec();
        let instance = Instance::new(groups, modules, times_ns).unwrap();
        let optimum = optimum(&instance);
        prop_assert!(lower_bound(&instance).ns <= optimum);
        for (strategy, work) in [(Strategy::SEARCH, 20_000), (Strategy::EXACT, 4_000_000)] {
            let found = balance(&instance, strategy, &Caps::default(), &mut Budget::work(work)).unwrap();
            prop_assert_eq!(found.makespan_ns, optimum, "{}", strategy);
            prop_assert!(found.is_optimal() || strategy == Strategy::SEARCH);
        }
    }
}
