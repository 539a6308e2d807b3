//! Messages between two ranks.

use super::{Case, Rank, numbers};
use crate::comm::RowShape;
use crate::ops::Device;
use crate::runtime::{Dtype, Lane};

/// Number of messages in the lane whose order is checked.
const ORDERED: usize = 20;
/// Number of messages from each rank that are received ahead.
const AHEAD: usize = 4;
const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F64];

pub(super) fn cases<D: Device>() -> Vec<Case<D>> {
    vec![
        Case { name: "rows_of_every_type_and_size_arrive", sizes: &[2, 3], run: every_type },
        Case { name: "messages_of_a_lane_keep_their_order", sizes: &[2], run: in_order },
        Case { name: "receives_posted_ahead_hold_up_nothing", sizes: &[2, 4], run: ahead },
        Case { name: "flows_between_two_ranks_are_independent", sizes: &[2], run: flows },
        Case { name: "a_message_comes_behind_the_operations_before_it", sizes: &[2], run: behind_operations },
    ]
}

fn every_type<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    let (own, size) = (rank.rank(), rank.size());
    let (next, before) = ((own + 1) % size, (own + size - 1) % size);
    for (index, dtype) in TYPES.into_iter().enumerate() {
        for (rows, cols) in [(1, 1), (3, 5), (300, 17)] {
            let tag = 2 * (index * 1000 + rows) as u64;
            let received = rank.recv(before, tag, 1, RowShape { dtype, rows, cols });
            let sent = rank.send(next, tag, 1, rank.upload(dtype, &numbers(own, rows * cols)), cols);
            assert_eq!(rank.received(received), numbers(before, rows * cols), "{dtype:?} [{rows} x {cols}]");
            let returned = sent.wait(Lane::Compute).expect("the job goes on");
            assert!(returned.is_none(), "what was sent is gone");
        }
    }
    rank.stay();
}

fn in_order<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    let shape = |index: usize| RowShape { dtype: Dtype::F32, rows: index + 1, cols: 3 };
    if rank.rank() == 0 {
        let sends = (0..ORDERED).map(|index| {
            rank.send(1, 2 * index as u64, 1, rank.upload(Dtype::F32, &numbers(index, 3 * (index + 1))), 3)
        });
        let sends: Vec<_> = sends.collect();
        for send in sends {
            send.wait(Lane::Compute).expect("the job goes on");
        }
        // also without a use for the values: device work may start only when it is waited for
        drop(rank.download(&rank.upload(Dtype::F32, &[1.0])));
    } else {
        let receives = (0..ORDERED).map(|index| rank.recv(0, 2 * index as u64, 1, shape(index)));
        let receives: Vec<_> = receives.collect();
        for (index, receive) in receives.into_iter().enumerate() {
            assert_eq!(rank.received(receive), numbers(index, 3 * (index + 1)));
        }
    }
    rank.stay();
}

/// All ranks first post receives from all other ranks, several each, and then send.
fn ahead<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    let (own, cols) = (rank.rank(), 64);
    let others = || (0..rank.size()).filter(|&other| other != own);
    let shape = RowShape { dtype: Dtype::F32, rows: 32, cols };
    let seed = |from: usize, to: usize, index: usize| 100 * from + 10 * to + index;
    let mut receives = Vec::new();
    for from in others() {
        for index in 0..AHEAD {
            receives.push((seed(from, own, index), rank.recv(from, 2 * index as u64, 1, shape)));
        }
    }
    let mut sends = Vec::new();
    for index in 0..AHEAD {
        for to in others() {
            let rows = rank.upload(Dtype::F32, &numbers(seed(own, to, index), 32 * cols));
            sends.push(rank.send(to, 2 * index as u64, 1, rows, cols));
        }
    }
    // not in the order in which they were posted
    receives.reverse();
    for (seed, receive) in receives {
        assert_eq!(rank.received(receive), numbers(seed, 32 * cols));
    }
    for send in sends {
        send.wait(Lane::Compute).expect("the job goes on");
    }
    rank.stay();
}

fn flows<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    let (own, other) = (rank.rank(), 1 - rank.rank());
    let shape = RowShape { dtype: Dtype::F32, rows: 2, cols: 4 };
    // the gradient is received first, although the other rank sends it last
    let gradient = rank.recv(other, 1, 1, shape);
    let activation = rank.recv(other, 0, 1, shape);
    let sends = [0, 1].map(|flow| {
        let rows = rank.upload(Dtype::F32, &numbers(10 * own + flow as usize, 8));
        rank.send(other, flow, 1, rows, 4)
    });
    assert_eq!(rank.received(gradient), numbers(10 * other + 1, 8));
    assert_eq!(rank.received(activation), numbers(10 * other, 8));
    for send in sends {
        send.wait(Lane::Compute).expect("the job goes on");
    }
    rank.stay();
}

fn behind_operations<D: Device>(rank: &Rank<'_, D>) {
    rank.open_all_lanes();
    let (device, len) = (rank.device, 5000);
    if rank.rank() == 0 {
        let mut rows = rank.upload(Dtype::F32, &numbers(1, len));
        let summand = rank.upload(Dtype::F32, &numbers(2, len));
        for _ in 0..10 {
            device.add(&summand, &mut rows).expect("the device works");
        }
        let sent = rank.send(1, 0, 1, rows, 1);
        sent.wait(Lane::Compute).expect("the job goes on");
        drop(rank.download(&summand));
    } else {
        let received = rank.recv(0, 0, 1, RowShape { dtype: Dtype::F32, rows: len, cols: 1 });
        let mut rows = received.wait(Lane::Compute).expect("the job goes on").expect("a receive has rows");
        device.scale(2.0, &mut rows).expect("the device works");
        let expected = numbers(1, len).into_iter().zip(numbers(2, len)).map(|(x, y)| 2.0 * (x + 10.0 * y));
        assert_eq!(rank.download(&rows), expected.collect::<Vec<_>>());
    }
    rank.stay();
}
