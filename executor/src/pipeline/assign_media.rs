//! Assigns media to encoder replicas.

use std::cmp::Reverse;

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};

use crate::error::Result;

/// Assigns the media in every round to replicas and minimizes the maximum replica load, first within each
/// round, then over all rounds so far.
///
/// Pure, and the same on every rank: costs are integers, and the search is bounded in work units for all
/// rounds together. With fewer media than replicas, some replicas get none. The heaviest group in a round
/// goes to the replica with the least load in earlier rounds.
///
/// - `rounds`: media costs in every round, in nanoseconds
/// - returns the replica for every medium, by round
///
/// # Errors
/// [`crate::Error::Balancer`] if the total cost of a round does not fit into 63 bits, or there is no replica.
pub fn assign_media(rounds: &[Vec<u64>], replicas: usize) -> Result<Vec<Vec<usize>>> {
    assign_pool(rounds, replicas, 1)
}

/// Assigns media in one of `pools` pools, each of which has separate replicas.
pub(super) fn assign_pool(rounds: &[Vec<u64>], replicas: usize, pools: usize) -> Result<Vec<Vec<usize>>> {
    // One budget for all rounds and pools, so that the effort per step does not grow with their number.
    let work = Strategy::SEARCH.work_default() / (rounds.len() * pools).max(1) as u64;
    let mut before_ns = vec![0_u64; replicas];
    rounds.iter().map(|costs_ns| assign_round(costs_ns, work, &mut before_ns)).collect()
}

/// - `work`: number of work units that the search may spend
/// - `before_ns`: load of every replica in earlier rounds, in nanoseconds; the load of this round is added
fn assign_round(costs_ns: &[u64], work: u64, before_ns: &mut [u64]) -> Result<Vec<usize>> {
    let replicas = before_ns.len();
    if costs_ns.is_empty() || replicas == 1 {
        return Ok(vec![0; costs_ns.len()]);
    }
    let instance = Instance::with_empty_groups(replicas, 1, costs_ns.to_vec())?;
    let groups = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(work))?.groups;
    let load_ns = |group: &[u32]| group.iter().map(|&medium| costs_ns[medium as usize]).sum::<u64>();
    let mut heaviest: Vec<usize> = (0..groups.len()).collect();
    // Both sorts are stable, so equal loads keep their order and all ranks agree.
    heaviest.sort_by_key(|&group| Reverse(load_ns(&groups[group])));
    let mut idlest: Vec<usize> = (0..replicas).collect();
    idlest.sort_by_key(|&replica| before_ns[replica]);
    let mut replica_of = vec![0; costs_ns.len()];
    for (group, replica) in heaviest.into_iter().zip(idlest) {
        before_ns[replica] = before_ns[replica].saturating_add(load_ns(&groups[group]));
        groups[group].iter().for_each(|&medium| replica_of[medium as usize] = replica);
    }
    Ok(replica_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(costs: &[u64], replica_of: &[usize], replicas: usize) -> Vec<u64> {
        let load = |replica| {
            costs.iter().zip(replica_of).filter(|(_, of)| **of == replica).map(|(cost, _)| cost).sum()
        };
        (0..replicas).map(load).collect()
    }

    #[test]
    fn every_medium_has_a_replica_and_loads_of_a_round_are_even() {
        let rounds = [vec![80, 40, 40, 30, 30, 20], vec![], vec![0; 5], vec![5, 5]];
        let replica_of = assign_media(&rounds, 3).unwrap();
        assert_eq!(replica_of, assign_media(&rounds, 3).unwrap());
        assert!(rounds.iter().map(Vec::len).eq(replica_of.iter().map(Vec::len)));
        assert!(replica_of.iter().flatten().all(|&replica| replica < 3));
        assert_eq!(loads(&rounds[0], &replica_of[0], 3), [80, 80, 80]);
        assert_eq!(loads(&rounds[3], &replica_of[3], 3).into_iter().max(), Some(5));
        assert_eq!(assign_media(&[vec![7, 7]], 1).unwrap(), [[0, 0]]);
    }

    #[test]
    fn replicas_take_turns_where_rounds_have_few_media() {
        let rounds: Vec<Vec<u64>> = (0..9).map(|_| vec![10]).collect();
        let replica_of = assign_media(&rounds, 3).unwrap().concat();
        assert_eq!(loads(&[10; 9], &replica_of, 3), [30, 30, 30]);
    }
}
