//! Every operation, on ranks that are threads.

use super::{
    library::{Operation, SUCCESS, error_string, group, version},
    world::{FLOAT32, SUM, at, run_ranks, threaded},
};
use crate::support::cuda;

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
