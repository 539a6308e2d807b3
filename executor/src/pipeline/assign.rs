//! Which replica of an encoder encodes which medium of a round.

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};

use crate::error::Result;

/// Deals media out so that the replica with the most to do has little: returns the replica of every medium.
///
/// Pure, and the same on every rank: costs are integers and the search is bounded in work units. With fewer media than
/// replicas some replicas get none.
///
/// # Errors
/// [`crate::Error::Balancer`] if the costs together do not fit 63 bits, or there is no replica.
pub fn assign(costs_ns: &[u64], replicas: usize) -> Result<Vec<usize>> {
    if costs_ns.is_empty() || replicas == 1 {
        return Ok(vec![0; costs_ns.len()]);
    }
    let instance = Instance::groups_may_be_empty(replicas, 1, costs_ns.to_vec())?;
    let mut budget = Budget::work(Strategy::Search.work_default());
    let found = balance(&instance, Strategy::Search, &Caps::default(), &mut budget)?;
    let mut replica_of = vec![0; costs_ns.len()];
    for (replica, media) in found.groups.iter().enumerate() {
        media.iter().for_each(|&medium| replica_of[medium as usize] = replica);
    }
    Ok(replica_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_medium_has_a_replica_and_loads_are_even() {
        assert_eq!(assign(&[], 3).unwrap(), Vec::<usize>::new());
        assert_eq!(assign(&[7, 7], 1).unwrap(), [0, 0]);
        let of_few = assign(&[5, 5], 4).unwrap();
        assert!(of_few[0] != of_few[1] && of_few.iter().all(|&replica| replica < 4));
        let costs = [80, 40, 40, 30, 30, 20];
        let replica_of = assign(&costs, 3).unwrap();
        let load = |replica| -> u64 {
            costs.iter().zip(&replica_of).filter(|(_, of)| **of == replica).map(|(cost, _)| cost).sum()
        };
        assert_eq!((0..3).map(load).max(), Some(80));
        assert_eq!(replica_of, assign(&costs, 3).unwrap());
    }

    #[test]
    fn media_that_cost_nothing_are_dealt_out_too() {
        let replica_of = assign(&[0; 5], 2).unwrap();
        assert!(replica_of.iter().all(|&replica| replica < 2));
    }
}
