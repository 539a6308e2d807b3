//! An external strategy partitions, cuts pipelines and is checked like built-in strategies.

use dflop_balancer::{
    Budget, Caps, Error, Instance, Partitioner, PipelineConfig, Problem, Result, Solution, Strategy, balance,
    balance_pipeline,
};

/// First fit over the items in descending order by largest module, into as many groups as there are.
#[derive(Debug)]
struct FirstFit;

impl Partitioner for FirstFit {
    fn name(&self) -> &'static str {
        "first_fit"
    }

    fn solve(&self, problem: &Problem<'_>, budget: &mut Budget) -> Result<Solution> {
        let size = |item: u32| problem.times_ns(item).iter().copied().max().unwrap_or(0);
        let mut items: Vec<u32> = (0..problem.items() as u32).collect();
        items.sort_by_key(|item| std::cmp::Reverse(size(*item)));
        let mut loads = vec![0; problem.groups()];
        let mut shares = vec![vec![0; 2]; problem.groups()];
        let mut group_of = vec![0; problem.items()];
        for item in items {
            budget.spend(1);
            let limit = problem.bound_ns();
            let has_room = |group: &usize| {
                problem.shares(item).zip(&shares[*group]).all(|((own, max), used)| used + own <= max)
            };
            let fits = |group: &usize| has_room(group) && loads[*group] + size(item) <= limit;
            let groups = 0..problem.groups();
            let least = || groups.clone().filter(has_room).min_by_key(|group| loads[*group]);
            let group = groups.clone().find(fits).or_else(least).unwrap_or(0);
            loads[group] += size(item);
            for ((own, _), used) in problem.shares(item).zip(&mut shares[group]) {
                *used += own;
            }
            group_of[item as usize] = group as u32;
        }
        Solution::from_groups(problem, &group_of)
    }
}

/// Results that are each wrong in a single way.
#[derive(Debug)]
struct Wrong(&'static [u32]);

impl Partitioner for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Solution::from_groups(problem, self.0)
    }
}

const FIRST_FIT: Strategy = Strategy::new(&FirstFit);

fn instance() -> Instance {
    Instance::new(2, 1, vec![6, 5, 4, 3, 2, 2]).unwrap().tokens(vec![1, 1, 1, 1, 9, 9]).unwrap()
}

#[test]
fn it_partitions_within_caps() {
    let found = balance(&instance(), FIRST_FIT, &Caps::default(), &mut Budget::work(100)).unwrap();
    assert_eq!(found.groups, [vec![0, 1], vec![2, 3, 4, 5]]);
    assert_eq!((found.makespan_ns, found.work_spent), (11, 1));
    assert!(found.is_optimal());
    let caps = Caps { tokens_max: Some(12), bytes_max: None };
    let found = balance(&instance(), FIRST_FIT, &caps, &mut Budget::work(100)).unwrap();
    let tokens = |items: &Vec<u32>| items.iter().map(|item| [1, 1, 1, 1, 9, 9][*item as usize]).sum::<u64>();
    assert!(found.groups.iter().all(|items| tokens(items) <= 12), "{found:?}");
    assert_eq!(found.makespan_ns, 13);
}

#[test]
fn it_cuts_pipelines() {
    let instance = Instance::new(4, 2, vec![9, 1, 9, 1, 1, 9, 1, 9, 4, 4, 5, 5]).unwrap();
    let config = PipelineConfig::new(2, vec![1, 2]);
    let mut budget = Budget::work(1_000);
    let found = balance_pipeline(&instance, &config, FIRST_FIT, &Caps::default(), &mut budget).unwrap();
    let mut items = found.ranks.concat().concat();
    items.sort_unstable();
    assert_eq!(items, [0, 1, 2, 3, 4, 5]);
    assert_eq!(found.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    let ns = config.makespan_ns(&instance, &found.ranks).unwrap();
    assert_eq!(ns, found.makespan_ns);
}

#[test]
fn wrong_answers_are_refused() {
    static WRONG: [Wrong; 4] =
        [Wrong(&[0, 1]), Wrong(&[0, 1, 0, 2, 0, 1]), Wrong(&[0; 6]), Wrong(&[0, 0, 0, 1, 1, 1])];
    let caps = Caps { tokens_max: Some(12), bytes_max: None };
    let [short, outside, empty, over] = WRONG
        .each_ref()
        .map(|wrong| balance(&instance(), Strategy::new(wrong), &caps, &mut Budget::work(1)).unwrap_err());
    assert_eq!(short.to_string(), "invalid `strategy`: expected a group for each of 6 items, got 2");
    assert_eq!(outside.to_string(), "invalid `strategy`: item 3 is in group 2 of 2");
    assert_eq!(empty.to_string(), "invalid `strategy`: a group has no item, although there are enough");
    assert!(matches!(over, Error::CapUnmet { items: 6, groups: 2 }), "{over}");
}

#[test]
fn strategies_are_equal_by_name() {
    assert_eq!(FIRST_FIT, Strategy::new(&FirstFit));
    assert_ne!(FIRST_FIT, Strategy::SEARCH);
    assert_eq!((FIRST_FIT.to_string(), FIRST_FIT.is_blind()), ("first_fit".to_owned(), false));
    assert!("first_fit".parse::<Strategy>().is_err(), "names are those of the crate");
}
