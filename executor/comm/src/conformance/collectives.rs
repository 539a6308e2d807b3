//! Collectives that do not sum, and splits.

use std::time::{Duration, SystemTime};

use half::bf16;

use super::{Case, at, floats, row, stay};
use crate::api::Comm;
use crate::message::{PayloadShape, Slice};

pub(super) const CASES: &[Case] = &[
    Case { name: "parts_may_be_of_any_length", sizes: &[4], run: any_parts, needs: |_| true },
    Case { name: "rows_of_bf16_are_gathered", sizes: &[3], run: gathered_bf16, needs: |_| true },
    Case { name: "every_root_broadcasts", sizes: SIZES, run: every_root, needs: |_| true },
    Case {
        name: "no_rank_passes_a_barrier_before_all_have_entered",
        sizes: SIZES,
        run: barrier,
        needs: |_| true,
    },
    Case {
        name: "splits_have_their_own_ranks_and_messages",
        sizes: &[5],
        run: splits,
        needs: |has| has.has_tags,
    },
    Case { name: "numbers_are_gathered_in_rank_order", sizes: SIZES, run: gathered_numbers, needs: |_| true },
    Case { name: "equal_digests_pass", sizes: &[1, 3, 7], run: equal_digests, needs: |_| true },
];

const SIZES: &[usize] = &[1, 2, 3, 4, 5];

fn any_parts(comm: &dyn Comm) {
    let (parts, rank) = ([5, 0, 1000, 1], comm.rank());
    let owners: Vec<usize> =
        parts.iter().enumerate().flat_map(|(rank, &length)| vec![rank; length]).collect();
    let own = |&owner: &usize| if owner == rank { owner as u8 + 1 } else { 0 };
    let mut gathered: Vec<u8> = owners.iter().map(own).collect();
    comm.all_gather(at(0), Slice::U8(&mut gathered), &parts).unwrap();
    assert!(gathered.iter().zip(&owners).all(|(&value, &owner)| usize::from(value) == owner + 1));
    let mut summed = vec![1.0_f32; 1006];
    comm.reduce_scatter(at(0), summed.as_mut_slice().into(), &parts).unwrap();
    let begin: usize = parts[..rank].iter().sum();
    assert_eq!(summed[begin..][..parts[rank]], vec![4.0; parts[rank]]);
}

fn gathered_bf16(comm: &dyn Comm) {
    let parts = [700, 0, 33];
    let all: Vec<bf16> = floats(9, 733).into_iter().map(bf16::from_f32).collect();
    let begin: usize = parts[..comm.rank()].iter().sum();
    let own = begin..begin + parts[comm.rank()];
    let mut values = vec![bf16::ZERO; all.len()];
    values[own.clone()].copy_from_slice(&all[own]);
    comm.all_gather(at(0), values.as_mut_slice().into(), &parts).unwrap();
    assert_eq!(values, all);
}

fn gathered_numbers(comm: &dyn Comm) {
    let numbers = |rank: usize, count: u64| (0..count).map(move |index| 100 * rank as u64 + index);
    for count in [0, 1, 3, 16, 41] {
        let gathered = comm.gather(at(0), &numbers(comm.rank(), count).collect::<Vec<_>>()).unwrap();
        let expected: Vec<u64> = (0..comm.size()).flat_map(|rank| numbers(rank, count)).collect();
        assert_eq!(gathered, expected);
    }
    assert_eq!(comm.failure(), None, "the job goes on");
    let waited = comm.check_wait(comm.rank(), at(0), "pass", Duration::ZERO);
    waited.expect("a wait that has just begun goes on");
}

fn every_root(comm: &dyn Comm) {
    for root in 0..comm.size() {
        for elements in [0, 1, 50_000] {
            let mut values = floats(comm.rank(), elements);
            comm.broadcast(at(0), root, values.as_mut_slice().into()).unwrap();
            assert_eq!(values, floats(root, elements));
        }
    }
}

/// Compares the times at which ranks enter and leave, by the same clock: on one machine, or synchronized.
fn barrier(comm: &dyn Comm) {
    let now_ns = || SystemTime::UNIX_EPOCH.elapsed().expect("the clock is set").as_nanos() as u64;
    for round in 0..10 {
        if comm.rank() == round % comm.size() {
            std::thread::sleep(Duration::from_millis(3));
        }
        let mut times = vec![0; 2 * comm.size()];
        times[2 * comm.rank()] = now_ns();
        comm.barrier(at(round as u64)).unwrap();
        times[2 * comm.rank() + 1] = now_ns();
        comm.all_gather(at(round as u64), times.as_mut_slice().into(), &vec![2; comm.size()]).unwrap();
        let last_entry = times.iter().step_by(2).max();
        let first_exit = times.iter().skip(1).step_by(2).min();
        assert!(last_entry <= first_exit, "round {round}: {times:?}");
    }
}

fn splits(comm: &dyn Comm) {
    let world = comm.rank();
    // even ranks in reverse, odd ranks in order, and a rank that does not take part
    let color = (world != 3).then_some(world as u64 % 2);
    let key = if world.is_multiple_of(2) { 10 - world as u64 } else { 0 };
    let part = comm.split(at(0), color, key).unwrap();
    let Some(part) = part else {
        assert_eq!(world, 3);
        return stay(comm);
    };
    let members: Vec<usize> = (0..part.size()).map(|rank| part.world_rank(rank)).collect();
    assert_eq!(members, if world.is_multiple_of(2) { vec![4, 2, 0] } else { vec![1] });
    assert_eq!(members[part.rank()], world);
    let mut sum = [world as u64];
    part.all_reduce(at(1), sum.as_mut_slice().into()).unwrap();
    assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
    part.check_digest(1, 77).unwrap();
    // the same tag between the same two processes, in two communicators
    if world == 4 {
        comm.send(0, 5, at(2), row(&[1.0])).unwrap();
        part.send(2, 5, at(2), row(&[2.0])).unwrap();
    } else if world == 0 {
        let recv = |comm: &dyn Comm, from| comm.recv(from, 5, at(2), PayloadShape::f32(1, 1)).unwrap();
        assert_eq!(recv(&*part, 0).into_f32().unwrap(), [2.0]);
        assert_eq!(recv(comm, 4).into_f32().unwrap(), [1.0]);
    }
    // a nested split
    let single = part.split(at(3), Some(part.rank() as u64), 0).unwrap().unwrap();
    assert_eq!((single.size(), single.world_rank(0)), (1, world));
    stay(comm);
}

fn equal_digests(comm: &dyn Comm) {
    for step in 0..10 {
        comm.check_digest(step, step * 77).unwrap();
    }
}
