//! Sends and receives.

use half::bf16;

use super::{Case, Promises, at, floats, row, stay};
use crate::api::{Comm, P2pOp};
use crate::message::{Buffer, Payload, PayloadShape};

pub(super) const CASES: &[Case] = &[
    Case { name: "messages_of_all_sizes_arrive", sizes: &[2], run: all_sizes, needs: |_| true },
    Case { name: "every_type_keeps_its_bits_and_its_shape", sizes: &[2], run: all_types, needs: |_| true },
    Case { name: "rows_of_bf16_travel_as_two_bytes", sizes: &[2], run: rows_of_bf16, needs: |_| true },
    Case { name: "tags_are_received_in_any_order", sizes: &[2], run: tags, needs: |has| has.has_tags },
    Case { name: "receives_take_messages_in_order", sizes: &[2], run: receives_in_order, needs: |_| true },
    Case { name: "large_messages_cross", sizes: &[2], run: large_messages_cross, needs: has_tags },
    Case { name: "neighbors_exchange_in_a_group", sizes: &[2, 4], run: neighbors_exchange, needs: |_| true },
    Case { name: "sent_bytes_are_counted", sizes: &[3], run: sent_bytes, needs: |_| true },
];

fn has_tags(promises: Promises) -> bool {
    promises.has_tags
}

fn all_sizes(comm: &dyn Comm) {
    // around the limits for headers, inline writes and socket buffers
    let sizes = [0, 1, 3, 1023, 16 << 10, (16 << 10) + 1, 100_003, 2 << 20];
    let other = 1 - comm.rank();
    for (step, elements) in sizes.into_iter().enumerate() {
        let (at, shape) = (at(step as u64), PayloadShape::f32(1, elements));
        if comm.rank() == 0 {
            comm.send(other, 7, at, row(&floats(0, elements))).unwrap();
            let back = comm.recv(other, 8, at, shape).unwrap();
            assert_eq!(back.into_f32().unwrap(), floats(1, elements));
        } else {
            let there = comm.recv(other, 7, at, shape).unwrap();
            assert_eq!(there.into_f32().unwrap(), floats(0, elements));
            comm.send(other, 8, at, row(&floats(1, elements))).unwrap();
        }
    }
}

fn all_types(comm: &dyn Comm) {
    let buffers = [
        Buffer::U8(vec![1, 2, 255, 0, 9, 8]),
        Buffer::Bf16([1.5, -0.0, f32::INFINITY, 3.0, 0.1, 2.0].map(bf16::from_f32).to_vec()),
        Buffer::F32(vec![f32::MIN_POSITIVE, -0.0, 1.0, f32::MAX, 5.5, 0.1]),
        Buffer::F64(vec![f64::EPSILON, -0.0, 1.0, f64::MAX, 5.5, 0.1]),
        Buffer::U64(vec![u64::MAX, 0, 1, 2, 3, 4]),
    ];
    for (tag, buffer) in buffers.into_iter().enumerate() {
        let payload = Payload::new(2, 3, buffer).unwrap();
        if comm.rank() == 0 {
            comm.send(1, tag as u64, at(0), payload).unwrap();
        } else {
            let found = comm.recv(0, tag as u64, at(0), payload.shape()).unwrap();
            assert_eq!(found.buffer().as_bytes(), payload.buffer().as_bytes());
            assert_eq!(found.shape(), payload.shape());
        }
    }
    stay(comm);
}

fn rows_of_bf16(comm: &dyn Comm) {
    let rows = |rank| floats(rank, 300 * 7).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let (own, other) = (comm.rank(), 1 - comm.rank());
    let payload = Payload::new(300, 7, rows(own).into()).unwrap();
    let shape = payload.shape();
    let before = comm.bytes_sent();
    let exchanges =
        vec![P2pOp::Send { to: other, tag: 1, payload }, P2pOp::Recv { from: other, tag: 1, shape }];
    let found = comm.group(at(0), exchanges).unwrap().remove(0);
    assert_eq!(found.into_bf16().unwrap(), rows(other));
    assert_eq!(comm.bytes_sent() - before, 300 * 7 * 2);
    stay(comm);
}

fn tags(comm: &dyn Comm) {
    if comm.rank() == 0 {
        for value in 0..30_u8 {
            comm.send(1, u64::from(value % 3), at(0), row(&[f32::from(value)])).unwrap();
        }
    } else {
        let recv = |tag| comm.recv(0, tag, at(0), PayloadShape::f32(1, 1)).unwrap().into_f32().unwrap()[0];
        for tag in [2, 0, 1] {
            let values: Vec<f32> = (0..10).map(|_| recv(tag)).collect();
            let expected: Vec<f32> = (0..10).map(|index| index as f32 * 3.0 + tag as f32).collect();
            assert_eq!(values, expected);
        }
    }
    stay(comm);
}

fn receives_in_order(comm: &dyn Comm) {
    if comm.rank() == 0 {
        stay(comm);
        let send = |value| comm.start_send(1, 0, at(0), row(&[value as f32])).unwrap();
        let sends: Vec<_> = (0..3).map(send).collect();
        for send in sends {
            send.wait().unwrap();
        }
    } else {
        let receive = || comm.start_recv(0, 0, at(0), PayloadShape::f32(1, 1)).unwrap();
        let receives = [receive(), receive(), receive()];
        assert!(receives.iter().all(|receive| !receive.is_complete()), "nothing was sent yet");
        stay(comm);
        // the last receive first
        for (expected, receive) in receives.into_iter().enumerate().rev() {
            assert_eq!(receive.wait().unwrap().into_f32().unwrap(), [expected as f32]);
        }
    }
    stay(comm);
}

/// Both ranks send before either receives.
fn large_messages_cross(comm: &dyn Comm) {
    let elements = 2 << 20;
    let (rank, other) = (comm.rank(), 1 - comm.rank());
    comm.send(other, 0, at(0), row(&floats(rank, elements))).unwrap();
    let found = comm.recv(other, 0, at(0), PayloadShape::f32(1, elements)).unwrap();
    assert_eq!(found.into_f32().unwrap(), floats(other, elements));
    stay(comm);
}

fn neighbors_exchange(comm: &dyn Comm) {
    let elements = 300_000;
    let (rank, size) = (comm.rank(), comm.size());
    let (before, after) = ((rank + size - 1) % size, (rank + 1) % size);
    let shape = PayloadShape::f32(3, elements / 3);
    // one tag per direction, as both neighbors are the same rank in a two-rank job
    let send = |to, tag| {
        let payload = Payload::f32(3, elements / 3, floats(rank, elements)).unwrap();
        P2pOp::Send { to, tag, payload }
    };
    let recv = |from, tag| P2pOp::Recv { from, tag, shape };
    let mut exchanges =
        vec![send(before, 1), send(after, 2), send(rank, 3), recv(before, 2), recv(after, 1), recv(rank, 3)];
    if rank % 2 == 1 {
        exchanges.rotate_left(3);
    }
    let found = comm.group(at(0), exchanges).unwrap();
    for (from, payload) in [before, after, rank].into_iter().zip(found) {
        assert_eq!(payload.into_f32().unwrap(), floats(from, elements), "from {from}");
    }
    stay(comm);
}

fn sent_bytes(comm: &dyn Comm) {
    let part = comm.split(at(0), Some(0), 0).unwrap().expect("a color was given");
    stay(comm);
    let before = comm.bytes_sent();
    // to itself: nothing leaves the rank
    comm.send(comm.rank(), 0, at(0), row(&[1.0; 100])).unwrap();
    comm.recv(comm.rank(), 0, at(0), PayloadShape::f32(1, 100)).unwrap();
    assert_eq!(comm.bytes_sent(), before);
    let next = (comm.rank() + 1) % comm.size();
    let last = (comm.rank() + comm.size() - 1) % comm.size();
    let send = P2pOp::Send { to: next, tag: 0, payload: row(&[1.0; 100]) };
    let recv = P2pOp::Recv { from: last, tag: 0, shape: PayloadShape::f32(1, 100) };
    part.group(at(1), vec![send, recv]).unwrap();
    assert_eq!((comm.bytes_sent() - before, part.bytes_sent() - before), (400, 400));
    stay(comm);
}
