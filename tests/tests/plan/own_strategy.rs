//! An external strategy plans the loader steps.

use dflop_balancer::{Budget, Partitioner, Problem, Result, Solution, Strategy};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

/// Runs of neighbors in the global order, regardless of cost.
#[derive(Debug)]
struct Runs;

impl Partitioner for Runs {
    fn name(&self) -> &'static str {
        "runs"
    }

    fn is_blind(&self) -> bool {
        true
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        let group = |item: usize| (item * problem.groups() / problem.items()) as u32;
        Solution::from_groups(problem, &(0..problem.items()).map(group).collect::<Vec<u32>>())
    }
}

#[test]
fn ranks_and_microbatches_are_those_of_the_strategy() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let builder = loaders::builder(data.index(), 24, 2).microbatches(3).strategy(Strategy::new(&Runs));
    let planner = builder.build().unwrap();
    for step in 0..2 {
        let plan = planner.plan(step).unwrap();
        for (rank, microbatches) in plan.ranks.iter().enumerate() {
            for (microbatch, places) in microbatches.iter().enumerate() {
                let run = (microbatch * 2 + rank) as u32 * 4;
                assert_eq!(*places, (run..run + 4).collect::<Vec<u32>>());
            }
        }
    }
}
