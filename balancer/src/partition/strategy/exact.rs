//! Proves the best partition: branch and bound on an integer program.
//!
//! `x[i][j]` is 1 if item `i` is in group `j`; every item is in exactly one group, every group has an item,
//! and no group's module exceeds the lower bound by more than `y`, which is minimized. The local search
//! result is the first incumbent, and the incumbent's excess over the bound limits `y`. Groups are numbered
//! by longest item, so that no partition appears twice under different numbers.
//!
//! All numbers in the program are integer nanoseconds, and tolerances are far below a nanosecond; the result
//! is summed again in integers. Effort is counted in nodes, each with some elementary steps for every program
//! cell, so equal budgets end at the same node on every machine.

use super::{Partitioner, Solution, multi_lpt, search, within};
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::partition::bound::{BoundKind, LowerBound};
use crate::partition::problem::{Partition, Problem};
use microlp::{
    ComparisonOp, LinearExpr, OptimizationDirection, SolveOptions, SolveOutcome, TerminationReason, Variable,
};
use std::cmp::Reverse;

/// Integer program that proves the best partition.
#[derive(Debug)]
pub(super) struct Exact;

impl Partitioner for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn summary(&self) -> &'static str {
        "small instances, with proof"
    }

    fn is_of_any_size(&self) -> bool {
        false
    }

    /// Enough to prove most instances with a supported size.
    fn work_default(&self) -> u64 {
        4_000_000
    }

    fn solve(&self, problem: &Problem<'_>, budget: &mut Budget) -> Result<Solution> {
        prove(problem, within(problem, multi_lpt::assign(problem))?, budget)
    }
}

/// Maximum product of program rows and columns: beyond, a single node takes so long that no budget is kept.
const CELLS_MAX: usize = 8_192;
/// Work units for the search that finds the first incumbent.
const SEARCH_WORK: u64 = 20_000;
/// Elementary steps per node and program cell.
const STEPS_PER_CELL: u64 = 8;
/// Nodes between two checks of the budget.
const NODES_PER_LOOK: u64 = 64;
/// Largest sum, 13 days, that is exact in the program with a thousandth to spare.
const SUM_MAX: u64 = 1 << 50;
/// Solver tolerance for variables and constraints (the smallest that `microlp` accepts).
const TOLERANCE: f64 = 1e-10;

/// Integer program with variables.
struct Program {
    problem: microlp::Problem,
    excess: Variable,
    /// Items longest first, each with a variable per group that it may be in.
    places: Vec<(u32, Vec<Variable>)>,
    cells: usize,
}

/// Improves a partition until it is proven optimal, or the budget is spent.
///
/// Returns the partition and the bound: the makespan if the proof was completed, otherwise the problem's
/// bound. If the times sum to more than 13 days, nothing is proven.
///
/// # Errors
/// [`Error::TooLarge`] if the program would have more than [`CELLS_MAX`] cells.
///
/// # Source
/// The assignment program for parallel machines, as in Martello, Soumis and Toth, "Exact and approximation
/// algorithms for makespan minimization on unrelated parallel machines", Discrete Applied Mathematics 75,
/// 1997, with a row for every module; the crate `microlp` does branch and bound.
fn prove(problem: &Problem<'_>, mut partition: Partition, budget: &mut Budget) -> Result<Solution> {
    let cells = cells(problem);
    if cells > CELLS_MAX {
        let (items, groups) = (problem.items, problem.groups);
        return Err(Error::TooLarge { items, groups, cells, cells_max: CELLS_MAX });
    }
    let mut search_budget = Budget::work(SEARCH_WORK);
    search::improve(problem, &mut partition, &mut search_budget);
    budget.spend(search_budget.steps());
    let is_summable = (0..problem.items as u32)
        .try_fold(0_u64, |sum, item| {
            problem.row(item).iter().try_fold(sum, |sum, value| sum.checked_add(*value))
        })
        .is_some_and(|sum| sum <= SUM_MAX);
    if partition.makespan() == problem.bound.ns || !is_summable {
        return Ok(Solution::new(problem, partition));
    }
    let program = Program::new(problem, partition.makespan() - problem.bound.ns, cells);
    let mut bound = problem.bound;
    if let Some(proven) = program.solve(problem, &partition, budget) {
        if proven.makespan() < partition.makespan() {
            partition = proven;
        }
        bound = LowerBound { ns: partition.makespan(), kind: BoundKind::Exact };
    }
    Ok(Solution { partition, bound })
}

/// Counts the program's rows times columns.
fn cells(problem: &Problem<'_>) -> usize {
    let rows = problem.items.saturating_add(problem.groups.saturating_mul(problem.width() + 1));
    rows.saturating_mul(problem.items.saturating_mul(problem.groups).saturating_add(1))
}

impl Program {
    /// Builds the program; `excess_max` is the incumbent's excess over the bound.
    fn new(problem: &Problem<'_>, excess_max: u64, cells: usize) -> Self {
        let mut program = microlp::Problem::new(OptimizationDirection::Minimize);
        // The solver branches on integers of 32 bits; a larger excess is found as a real number.
        let excess = match i32::try_from(excess_max) {
            Ok(max) => program.add_integer_var(1.0, (0, max)),
            Err(_) => program.add_var(1.0, (0.0, excess_max as f64)),
        };
        let mut items: Vec<u32> = (0..problem.items as u32).collect();
        items.sort_by_key(|&item| (Reverse(problem.value(problem.row(item))), item));
        let places: Vec<(u32, Vec<Variable>)> = items
            .into_iter()
            .enumerate()
            .map(|(rank, item)| {
                // Only longer items head the groups before an item's own group, so rank `r` means group `r`
                // or lower.
                let groups = 0..problem.groups.min(rank + 1);
                (item, groups.map(|_| program.add_binary_var(0.0)).collect())
            })
            .collect();
        let mut program = Self { problem: program, excess, places, cells };
        program.constrain(problem);
        program
    }

    /// Adds the rows: each item in one group, no group empty, no module or cap above the limit.
    fn constrain(&mut self, problem: &Problem<'_>) {
        for (_, variables) in &self.places {
            let once: Vec<(Variable, f64)> = variables.iter().map(|&variable| (variable, 1.0)).collect();
            self.problem.add_constraint(once, ComparisonOp::Eq, 1.0);
        }
        for group in 0..problem.groups {
            let members = self.places.iter().filter_map(|(item, at)| Some((*item, *at.get(group)?)));
            let members: Vec<(u32, Variable)> = members.collect();
            let some: Vec<(Variable, f64)> = members.iter().map(|(_, variable)| (*variable, 1.0)).collect();
            self.problem.add_constraint(some, ComparisonOp::Ge, 1.0);
            for (column, limit) in problem.limits_within(problem.bound.ns).into_iter().enumerate() {
                let mut row = LinearExpr::empty();
                for &(item, variable) in &members {
                    row.add(variable, problem.row(item)[column] as f64);
                }
                if column < problem.modules {
                    row.add(self.excess, -1.0);
                }
                self.problem.add_constraint(row, ComparisonOp::Le, limit as f64);
            }
        }
    }

    /// Solves the program completely; returns `None` if the budget or the solver does not allow it.
    fn solve(&self, problem: &Problem<'_>, start: &Partition, budget: &mut Budget) -> Option<Partition> {
        let mut options = SolveOptions::default();
        options.node_limit = Some(NODES_PER_LOOK);
        options.int_tol = TOLERANCE;
        options.tolerances.feasibility = TOLERANCE;
        // A node is pruned only if it cannot be better at all: the result is a proof.
        options.tolerances.prune_epsilon = 0.0;
        options.warm_start = Some(self.hint(problem, start));
        let mut outcome = self.problem.solve_with(options).ok()?;
        let (mut nodes, steps_per_node) = (0, STEPS_PER_CELL * self.cells as u64);
        while outcome.termination_reason() != TerminationReason::ProvenOptimal {
            budget.spend((outcome.stats().nodes_solved - nodes).max(1) * steps_per_node);
            nodes = outcome.stats().nodes_solved;
            if budget.is_spent() {
                return None;
            }
            outcome = outcome.resume().ok()?;
        }
        budget.spend((outcome.stats().nodes_solved - nodes).max(1) * steps_per_node);
        self.read(problem, &outcome)
    }

    /// Translates the start into variable values: groups are numbered by longest item.
    fn hint(&self, problem: &Problem<'_>, start: &Partition) -> Vec<(Variable, f64)> {
        let group_of = |item: u32| start.groups.iter().position(|items| items.contains(&item));
        let mut numbers: Vec<Option<usize>> = Vec::new();
        let mut hint = vec![(self.excess, (start.makespan() - problem.bound.ns) as f64)];
        for (item, variables) in &self.places {
            let group = group_of(*item);
            // Numbered as in the program: a new group starts at its first, and longest, item.
            let number = numbers.iter().position(|known| *known == group).unwrap_or_else(|| {
                numbers.push(group);
                numbers.len() - 1
            });
            hint.extend(
                variables
                    .iter()
                    .enumerate()
                    .map(|(at, &variable)| (variable, if at == number { 1.0 } else { 0.0 })),
            );
        }
        hint
    }

    /// Reads the partition from a solution; `None` if the sums differ from the solver's.
    fn read(&self, problem: &Problem<'_>, outcome: &SolveOutcome) -> Option<Partition> {
        let solution = outcome.solution()?;
        let mut partition = Partition::empty(problem);
        for (item, variables) in &self.places {
            let group = variables.iter().position(|&variable| solution.var_value(variable) > 0.5)?;
            partition.add(problem, group, *item);
        }
        let excess = partition.makespan() as f64 - problem.bound.ns as f64;
        // The solver computes in floating point; sums in integers must confirm its objective.
        let is_exact = (excess.max(0.0) - solution.objective()).abs() < 0.5;
        let is_full = partition.groups.iter().all(|items| !items.is_empty());
        (is_exact && is_full && partition.is_within(problem)).then_some(partition)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn proven(instance: &Instance, caps: &Caps, work: u64) -> Result<(u64, LowerBound)> {
        let problem = Problem::new(instance, caps).unwrap();
        let start = multi_lpt::assign(&problem).unwrap();
        let Solution { partition, bound } = prove(&problem, start, &mut Budget::work(work))?;
        Ok((partition.makespan(), bound))
    }

    #[test]
    fn a_makespan_above_all_bounds_is_proven() {
        // 144 in two groups is 72 at best, but no three make that.
        let instance = Instance::new(2, 1, vec![31, 27, 26, 23, 20, 17]).unwrap();
        let (makespan, bound) = proven(&instance, &Caps::default(), 1_000_000).unwrap();
        assert_eq!((makespan, bound), (73, LowerBound { ns: 73, kind: BoundKind::Exact }));
    }

    #[test]
    fn a_cap_is_part_of_the_proof() {
        let instance = Instance::new(2, 1, vec![4, 3, 2, 1]).unwrap().tokens(vec![5, 1, 1, 5]).unwrap();
        let caps = Caps { tokens_max: Some(6), bytes_max: None };
        assert_eq!(proven(&instance, &Caps::default(), 1_000_000).unwrap().0, 5);
        // 4 and 1 may not share a group.
        let (makespan, bound) = proven(&instance, &caps, 1_000_000).unwrap();
        assert_eq!((makespan, bound), (6, LowerBound { ns: 6, kind: BoundKind::Exact }));
    }

    #[test]
    fn a_spent_budget_leaves_the_bound_as_it_was() {
        let times_ns = (0..40).map(|i| 1_000_003 + i * i * 7919 % 99_991).collect();
        let instance = Instance::new(5, 2, times_ns).unwrap();
        let (makespan, bound) = proven(&instance, &Caps::default(), 0).unwrap();
        assert!(bound.kind != BoundKind::Exact && bound.ns < makespan);
    }

    #[test]
    fn an_instance_too_large_is_named() {
        let instance = Instance::new(64, 2, vec![1; 1024]).unwrap();
        let error = proven(&instance, &Caps::default(), 1).unwrap_err();
        assert!(matches!(error, Error::TooLarge { items: 512, groups: 64, .. }), "{error}");
    }
}
