//! Launch graph over all ranks: a launch waits for the previous launch in the same lane, for events, and for
//! remote ends.

use std::collections::BTreeMap;

use dflop_balancer::schedule::Pass;

use crate::pipeline::topology::{Flow, StageEdge};

/// Order of work on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// Passes, updates, and tensor-parallel sums.
    Compute,
    /// Waits on the launching host.
    Host,
    /// Messages or collectives in a rank group.
    Of(Group),
    /// Messages to and from a rank.
    Peer(usize),
    /// Messages of several ranks.
    Shared(u64),
}

/// Ranks whose operations match only by order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Group {
    World,
    /// From a world rank to another; with a single flow, or both.
    Messages(usize, usize, Option<Flow>),
    /// Ranks that share a pipeline rank.
    TensorParallel(usize),
    /// Replicas of a stage, with the same TP rank.
    Replicas(u16, usize),
    /// First and last stage of an LLM replica, with the same TP rank.
    Tie(usize, usize),
}

/// Operation, by which operation ends are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Pass(Pass),
    Sum(Pass),
    Message(Flow, StageEdge),
    Bucket(u16, usize),
    Tied,
    Wait,
    Update,
    Norm,
    Gather(u16),
}

/// End of an operation on a rank.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) lane: Lane,
    /// Ranks with the remote ends, if any.
    pub(super) group: Option<Group>,
    pub(super) step: usize,
    pub(super) op: Op,
    /// Earlier launches on the rank that must be done before.
    pub(super) after: Vec<usize>,
}

/// Reason why launches cannot all run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// Ends in a group differ.
    Mismatch(Group),
    /// A launch waits for itself.
    Cycle,
}

/// Checks that the ends in every group match and that all launches can run.
///
/// - `ranks`: launches on every rank, in host order
pub(super) fn check(ranks: &[Vec<Launch>]) -> Result<(), Problem> {
    let operations = operations(ranks)?;
    let count = operations.iter().flatten().max().map_or(0, |last| last + 1);
    let (mut waits, mut followers) = (vec![0_usize; count], vec![Vec::new(); count]);
    for (launches, operations) in ranks.iter().zip(&operations) {
        let mut last: BTreeMap<Lane, usize> = BTreeMap::new();
        for (launch, &operation) in launches.iter().zip(operations) {
            let before = last.insert(launch.lane, operation);
            for before in launch.after.iter().map(|&own| operations[own]).chain(before) {
                waits[operation] += 1;
                followers[before].push(operation);
            }
        }
    }
    let mut ready: Vec<usize> = (0..count).filter(|&operation| waits[operation] == 0).collect();
    let mut done = 0;
    while let Some(operation) = ready.pop() {
        done += 1;
        for &follower in &followers[operation] {
            waits[follower] -= 1;
            if waits[follower] == 0 {
                ready.push(follower);
            }
        }
    }
    if done == count { Ok(()) } else { Err(Problem::Cycle) }
}

/// Numbers the operations: all ends of an operation have the same number.
fn operations(ranks: &[Vec<Launch>]) -> Result<Vec<Vec<usize>>, Problem> {
    // The first rank in a group that launches an operation names it for the remaining ranks.
    let mut named: BTreeMap<Group, Vec<(usize, usize, Op)>> = BTreeMap::new();
    let (mut count, mut numbers, mut ends) = (0, Vec::new(), BTreeMap::new());
    for launches in ranks {
        let (mut of_rank, mut places) = (Vec::new(), BTreeMap::new());
        for launch in launches {
            let Some(group) = launch.group else {
                of_rank.push(count);
                count += 1;
                continue;
            };
            let place: &mut usize = places.entry(group).or_default();
            let known = named.entry(group).or_default();
            if *place == known.len() {
                known.push((count, launch.step, launch.op));
                count += 1;
            }
            let (number, step, op) = known[*place];
            if (step, op) != (launch.step, launch.op) {
                return Err(Problem::Mismatch(group));
            }
            *place += 1;
            of_rank.push(number);
        }
        for (group, place) in places {
            ends.entry(group).or_insert_with(Vec::new).push(place);
        }
        numbers.push(of_rank);
    }
    let is_whole = |group: &Group, counts: &[usize]| {
        let has_both = !matches!(group, Group::Messages(..)) || counts.len() == 2;
        has_both && counts.iter().all(|&count| count == named[group].len())
    };
    match ends.iter().find(|(group, counts)| !is_whole(group, counts)) {
        Some((&group, _)) => Err(Problem::Mismatch(group)),
        None => Ok(numbers),
    }
}
