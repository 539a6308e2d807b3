//! Every operation, on ranks that are threads.

use super::{
    library::{Handle, Operation, SUCCESS, error_string, group, issue, unique_id, version},
    world::{FLOAT32, Rank, SUM, at, run_ranks, stream_handle, threaded},
};
use crate::support::cuda;
use cudarc::driver::DeviceRepr;
use std::fmt::Debug;

const RANKS: usize = 3;

#[test]
fn the_version_is_chosen() {
    let Some(cuda) = cuda() else { return };
    assert_eq!(version(), 22809);
    cuda.nccl().set_version(21800);
    assert_eq!(version(), 21800);
    assert_eq!(error_string(SUCCESS), "no error");
}

#[test]
fn an_all_reduce_sums_over_ranks() {
    let Some(_cuda) = threaded(RANKS) else { return };
    for count in [1, 2, 1000, 300_000] {
        let sums = run_ranks(RANKS, |rank| {
            let values: Vec<f32> = (0..count).map(|i| (i % 100 * (rank.rank + 1)) as f32).collect();
            let (send, receive) = (rank.upload(&values), rank.buffer::<f32>(count));
            rank.issue(Operation::AllReduce(at(&send), at(&receive), count, FLOAT32, SUM));
            rank.issue(Operation::AllReduce(at(&send), at(&send), count, FLOAT32, SUM));
            assert_eq!(rank.download(&send), rank.download(&receive), "in place");
            rank.download(&receive)
        });
        let expected: Vec<f32> = (0..count).map(|i| (i % 100 * 6) as f32).collect();
        assert!(sums.iter().all(|sum| *sum == expected));
    }
}

#[test]
fn ranks_send_in_a_ring() {
    let Some(_cuda) = threaded(RANKS) else { return };
    let received = run_ranks(RANKS, |rank| {
        let send = rank.upload(&vec![rank.rank as f32; 100_000]);
        let receive = rank.buffer::<f32>(100_000);
        let (next, previous) = ((rank.rank + 1) % RANKS, (rank.rank + RANKS - 1) % RANKS);
        let result = group(|| {
            rank.issue(Operation::Send(at(&send), 100_000, FLOAT32, next as i32));
            rank.issue(Operation::Recv(at(&receive), 100_000, FLOAT32, previous as i32));
        });
        assert_eq!(result, SUCCESS);
        rank.download(&receive)
    });
    for (rank, received) in received.iter().enumerate() {
        assert_eq!(*received, vec![((rank + RANKS - 1) % RANKS) as f32; 100_000]);
    }
}

#[test]
fn other_collectives_move_and_sum_parts() {
    let Some(cuda) = threaded(RANKS) else { return };
    run_ranks(RANKS, |rank| {
        let own = rank.rank as f32;
        let (gathered, reduced) = (rank.buffer::<f32>(6), rank.buffer::<f32>(2));
        let (pair, six) = (rank.upload(&[own, own + 10.0]), rank.upload(&[own, 1.0, 2.0, 3.0, 4.0, 5.0]));
        rank.issue(Operation::AllGather(at(&pair), at(&gathered), 2, FLOAT32));
        assert_eq!(rank.download(&gathered), [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        rank.issue(Operation::ReduceScatter(at(&six), at(&reduced), 2, FLOAT32, SUM));
        let sums = [[3.0, 3.0], [6.0, 9.0], [12.0, 15.0]];
        assert_eq!(rank.download(&reduced), sums[rank.rank]);
        rank.issue(Operation::Reduce(at(&pair), at(&reduced), 2, FLOAT32, SUM, 1));
        assert_eq!(rank.download(&reduced), if rank.rank == 1 { [3.0, 33.0] } else { sums[rank.rank] });
        rank.issue(Operation::Broadcast(at(&pair), at(&reduced), 2, FLOAT32, 2));
        assert_eq!(rank.download(&reduced), [2.0, 12.0]);
    });
    let counts = cuda.nccl().counts();
    let ranks = RANKS as u64;
    assert_eq!((counts.all_gathers, counts.reduce_scatters, counts.reduces), (ranks, ranks, ranks));
    assert_eq!((counts.broadcasts, counts.communicators), (ranks, 0));
    assert_eq!(counts.bytes, (8 + 24 + 8) * ranks + 8, "of the send buffers");
}

#[test]
fn collectives_work_in_place() {
    let Some(_cuda) = threaded(RANKS) else { return };
    run_ranks(RANKS, |rank| {
        let own = rank.rank as f32;
        let part = 8 * rank.rank as u64;
        let six = rank.upload(&[own; 6]);
        rank.issue(Operation::AllGather(at(&six) + part, at(&six), 2, FLOAT32));
        assert_eq!(rank.download(&six), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
        rank.issue(Operation::ReduceScatter(at(&six), at(&six) + part, 2, FLOAT32, SUM));
        assert_eq!(rank.download(&six)[2 * rank.rank..][..2], [3.0 * own; 2]);
        rank.issue(Operation::Broadcast(at(&six), at(&six), 6, FLOAT32, 0));
        rank.issue(Operation::Reduce(at(&six), at(&six), 6, FLOAT32, SUM, 0));
        let expected =
            if rank.rank == 0 { [0.0, 0.0, 3.0, 3.0, 6.0, 6.0] } else { [0.0, 0.0, 1.0, 1.0, 2.0, 2.0] };
        assert_eq!(rank.download(&six), expected);
    });
}

/// Sums two values per rank over all ranks; returns the results on all ranks.
fn sums<T>(values: [[T; 2]; RANKS], data_type: i32, reduction: i32) -> Vec<T>
where
    T: DeviceRepr + Default + Copy + PartialEq + Debug + Send + Sync,
{
    let all = run_ranks(RANKS, |rank| {
        let x = rank.upload(&values[rank.rank]);
        rank.issue(Operation::AllReduce(at(&x), at(&x), 2, data_type, reduction));
        rank.download(&x)
    });
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all[0].clone()
}

#[test]
fn sums_have_the_type_of_their_elements() {
    let Some(_cuda) = threaded(RANKS) else { return };
    assert_eq!(sums([[1_i8, -1], [2, -2], [3, -3]], 0, SUM), [6, -6]);
    assert_eq!(sums([[1_u8, 250], [2, 3], [3, 4]], 1, SUM), [6, 1]);
    assert_eq!(sums([[1_i32, -1], [2, -2], [i32::MAX, 0]], 2, SUM), [i32::MIN + 2, -3]);
    assert_eq!(sums([[1_u32, 1], [2, 2], [u32::MAX, 3]], 3, SUM), [2, 6]);
    assert_eq!(sums([[1_i64, -1], [2, -2], [1 << 40, 0]], 4, SUM), [(1 << 40) + 3, -3]);
    assert_eq!(sums([[1_u64, 1], [2, 2], [1 << 63, 3]], 5, SUM), [(1 << 63) + 3, 6]);
    assert_eq!(sums([[1e100, 0.25], [1e100, 0.5], [0.0, 1.0]], 8, SUM), [2e100, 1.75]);
    assert_eq!(sums([[1_f32, 5.0], [3.0, -2.0], [2.0, 0.0]], FLOAT32, 2), [3.0, 5.0], "the greatest");
    assert_eq!(sums([[1_f32, 5.0], [3.0, -2.0], [2.0, 0.0]], FLOAT32, 4), [2.0, 1.0], "the mean");
}

#[test]
fn sums_are_in_the_order_of_ranks_and_bf16_is_rounded_once() {
    let Some(_cuda) = threaded(RANKS) else { return };
    assert_eq!(sums([[1e8_f32, 1e8], [1.0, -1e8], [-1e8, 1.0]], FLOAT32, SUM), [0.0, 1.0]);
    let bf16 = |value: f32| (value.to_bits() >> 16) as u16;
    // 256 + 1 + 1 is a bf16, 256 + 1 is not.
    let values = [[bf16(256.0), bf16(1.0)], [bf16(1.0), bf16(2.0)], [bf16(1.0), bf16(3.0)]];
    assert_eq!(sums(values, 9, SUM), [bf16(258.0), bf16(6.0)]);
}

#[test]
fn one_rank_works_by_itself_on_lazy_streams() {
    let Some(cuda) = cuda() else { return };
    let rank = Rank::new(1, 0, unique_id());
    let (x, y, z) = (rank.upload(&[1_f32, 2.0]), rank.buffer::<f32>(2), rank.buffer::<f32>(2));
    rank.issue(Operation::AllReduce(at(&x), at(&y), 2, FLOAT32, SUM));
    let result = group(|| {
        rank.issue(Operation::Recv(at(&z), 2, FLOAT32, 0));
        rank.issue(Operation::Send(at(&x), 2, FLOAT32, 0));
    });
    assert_eq!(result, SUCCESS);
    assert_eq!((rank.download(&y), rank.download(&z)), (vec![1.0, 2.0], vec![1.0, 2.0]));
    // A later operation on a different stream comes after the earlier operation.
    let other = rank.context.new_stream().unwrap();
    rank.issue(Operation::AllReduce(at(&x), at(&y), 2, FLOAT32, SUM));
    rank.issue_on(&other, Operation::AllReduce(at(&y), at(&z), 2, FLOAT32, SUM));
    assert_eq!(other.clone_dtoh(&z).unwrap(), [1.0, 2.0]);
    assert_eq!((rank.comm.count(), rank.comm.user_rank()), (1, 0));
    rank.issue(Operation::AllReduce(at(&x), at(&y), 2, FLOAT32, SUM));
    assert_eq!(rank.comm.destroy(), SUCCESS);
    assert_eq!(cuda.nccl().counts().communicators, 0);
}

#[test]
fn a_split_makes_communicators_by_color_and_key() {
    const RANKS: usize = 4;
    let Some(cuda) = threaded(RANKS) else { return };
    run_ranks(RANKS, |rank| {
        let own = rank.rank as i32;
        let color = if own == 3 { -1 } else { own % 2 };
        let part = rank.comm.split(color, -own).unwrap();
        if own == 3 {
            return assert_eq!(part, Handle::NULL);
        }
        assert_eq!(part.count(), if color == 0 { 2 } else { 1 });
        assert_eq!(part.user_rank(), i32::from(own == 0), "the greater rank has the lesser key");
        let x = rank.upload(&[(own + 1) as f32]);
        let sum = Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM);
        assert_eq!(issue(sum, part, stream_handle(&rank.stream)), SUCCESS);
        assert_eq!(rank.download(&x), [if color == 0 { 4.0 } else { 2.0 }]);
        // In any order: here before the parent, on one rank.
        assert_eq!(part.destroy(), SUCCESS);
    });
    let launches = cuda.nccl().launches();
    let of =
        |rank| launches.iter().filter(move |launch| launch.rank == rank).map(|launch| launch.communicator);
    let mut even: Vec<u64> = of(0).collect();
    assert_eq!(even.len(), 2, "the first ranks of both parts");
    even.extend(of(1));
    even.sort_unstable();
    even.dedup();
    assert_eq!(even.len(), 2, "two communicators");
}
