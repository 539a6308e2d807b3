//! Operation order: groups, streams, and what waits for what.

use super::{
    library::{Operation, SUCCESS, group, init_all, issue},
    world::{FLOAT32, Gate, Rank, SUM, at, becomes, run_ranks, stream_handle, threaded},
};
use crate::support::raw;
use cudarc::driver::{CudaContext, CudaStream};
use dflop_cuda_stand_in::NcclOperation;
use std::{thread, time::Duration};

fn is_done(stream: &CudaStream) -> bool {
    stream.record_event(None).unwrap().is_complete()
}

/// Returns whether a stream becomes idle in due time, if it can.
fn ends(stream: &CudaStream) -> bool {
    let event = stream.record_event(None).unwrap();
    becomes(|| event.is_complete())
}

/// Receives before it sends, on two streams.
fn receive_ahead(rank: &Rank, comms: [super::library::Handle; 2]) -> [std::sync::Arc<CudaStream>; 2] {
    let peer = 1 - rank.rank as i32;
    let x = rank.upload(&[rank.rank as f32]);
    let y = rank.buffer::<f32>(1);
    rank.stream.synchronize().unwrap();
    let streams = [rank.context.new_stream().unwrap(), rank.context.new_stream().unwrap()];
    // The communicator for a direction: this rank's sends use the communicator with the rank's number.
    let (sends, receives) = (comms[rank.rank], comms[1 - rank.rank]);
    let recv = Operation::Recv(at(&y), 1, FLOAT32, peer);
    assert_eq!(issue(recv, receives, stream_handle(&streams[0])), SUCCESS);
    assert_eq!(issue(Operation::Send(at(&x), 1, FLOAT32, peer), sends, stream_handle(&streams[1])), SUCCESS);
    let _ = (x.leak(), y.leak());
    streams
}

#[test]
fn receives_ahead_of_sends_hang_on_one_communicator_until_an_abort() {
    let Some(_cuda) = threaded(2) else { return };
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let streams = receive_ahead(rank, [rank.comm; 2]);
        thread::sleep(Duration::from_millis(100));
        assert!(!is_done(&streams[0]) && !is_done(&streams[1]), "the send waits for the receive before it");
        assert_eq!(rank.comm.async_error(), SUCCESS);
        both.wait();
        assert_eq!(rank.comm.abort(), SUCCESS);
        for stream in &streams {
            stream.synchronize().unwrap();
        }
    });
}

#[test]
fn receives_ahead_of_sends_work_on_two_communicators() {
    let Some(_cuda) = threaded(2) else { return };
    run_ranks(2, |rank| {
        let other = rank.comm.split(0, rank.rank as i32).unwrap();
        let streams = receive_ahead(rank, [rank.comm, other]);
        assert!(ends(&streams[0]) && ends(&streams[1]));
        assert_eq!(other.destroy(), SUCCESS);
    });
}

#[test]
fn streams_of_one_hardware_queue_hold_each_other_up() {
    let Some(cuda) = threaded(2) else { return };
    cuda.set_queues(1);
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let other = rank.comm.split(0, rank.rank as i32).unwrap();
        let peer = 1 - rank.rank as i32;
        let (sends, receives) = if rank.rank == 0 { (rank.comm, other) } else { (other, rank.comm) };
        let (x, y) = (rank.upload(&[1_f32]), rank.buffer::<f32>(1));
        rank.stream.synchronize().unwrap();
        let streams = [rank.context.new_stream().unwrap(), rank.context.new_stream().unwrap()];
        let recv = Operation::Recv(at(&y), 1, FLOAT32, peer);
        assert_eq!(issue(recv, receives, stream_handle(&streams[0])), SUCCESS);
        // The wait for the receive is before the send in the queue, although it is on a different stream.
        let received = streams[0].record_event(None).unwrap();
        let send = Operation::Send(at(&x), 1, FLOAT32, peer);
        assert_eq!(issue(send, sends, stream_handle(&streams[1])), SUCCESS);
        thread::sleep(Duration::from_millis(100));
        assert!(!received.is_complete());
        both.wait();
        assert_eq!((other.abort(), rank.comm.abort()), (SUCCESS, SUCCESS));
        streams[1].synchronize().unwrap();
    });
}

#[test]
fn operations_of_a_communicator_follow_each_other_across_streams() {
    let Some(cuda) = threaded(2) else { return };
    run_ranks(2, |rank| {
        let streams: Vec<_> = (0..3).map(|_| rank.context.new_stream().unwrap()).collect();
        let x = rank.upload(&[1_f32]);
        rank.stream.synchronize().unwrap();
        for step in 0..30 {
            // Ranks use their streams in different orders.
            let stream = &streams[(step * (rank.rank + 1)) % 3];
            rank.issue_on(stream, Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM));
        }
        for stream in &streams {
            stream.synchronize().unwrap();
        }
        assert_eq!(rank.download(&x), [(1_u64 << 30) as f32]);
    });
    assert_eq!(cuda.nccl().counts().all_reduces, 60);
}

#[test]
fn operations_of_a_group_wait_for_each_other_nowhere() {
    let Some(cuda) = threaded(2) else { return };
    run_ranks(2, |rank| {
        let peer = 1 - rank.rank as i32;
        let (x, y, z) = (rank.upload(&[1_f32; 100]), rank.buffer::<f32>(100), rank.upload(&[2_f32; 100]));
        let other = rank.context.new_stream().unwrap();
        rank.stream.synchronize().unwrap();
        let result = group(|| {
            assert_eq!(
                group(|| {
                    rank.issue(Operation::Recv(at(&y), 50, FLOAT32, peer));
                    rank.issue(Operation::Recv(at(&y) + 200, 50, FLOAT32, peer));
                }),
                SUCCESS
            );
            assert!(ends(&rank.stream), "nothing begins before the end of all");
            rank.issue_on(&other, Operation::AllReduce(at(&z), at(&z), 100, FLOAT32, SUM));
            rank.issue(Operation::Send(at(&x), 50, FLOAT32, peer));
            rank.issue(Operation::Send(at(&x), 50, FLOAT32, peer));
        });
        assert_eq!(result, SUCCESS);
        assert_eq!(rank.download(&y), [1.0; 100]);
        assert_eq!(rank.download(&z), [4.0; 100], "both streams wait for the group");
    });
    assert!(cuda.nccl().counts().in_flight_highest >= 5);
    let launches = cuda.nccl().launches();
    let first: Vec<_> = launches.iter().filter(|launch| launch.rank == 0).map(|it| it.operation).collect();
    let (recv, send) = (NcclOperation::Recv, NcclOperation::Send);
    assert_eq!(first, [recv, recv, NcclOperation::AllReduce, send, send]);
    assert!(launches.iter().all(|launch| launch.communicator == launches[0].communicator));
    assert_eq!((launches[0].peer, launches[0].count, launches[0].data_type), (1 - launches[0].rank, 50, 7));
}

#[test]
fn one_host_thread_drives_several_ranks_in_groups() {
    let Some(_cuda) = threaded(2) else { return };
    let contexts = [0, 1].map(|device| {
        let context = CudaContext::new(device).unwrap();
        raw::without_event_tracking(&context);
        context
    });
    let comms = init_all(2, |rank| contexts[rank].bind_to_thread().unwrap());
    let streams = contexts.each_ref().map(|context| context.new_stream().unwrap());
    let buffers = streams.each_ref().map(|stream| stream.clone_htod(&[1_f32, 2.0]).unwrap());
    let result = group(|| {
        for ((comm, stream), buffer) in comms.iter().zip(&streams).zip(&buffers) {
            let sum = Operation::AllReduce(at(buffer), at(buffer), 2, FLOAT32, SUM);
            assert_eq!(issue(sum, *comm, stream_handle(stream)), SUCCESS);
        }
    });
    assert_eq!(result, SUCCESS);
    for (stream, buffer) in streams.iter().zip(&buffers) {
        assert_eq!(stream.clone_dtoh(buffer).unwrap(), [2.0, 4.0]);
    }
    assert!(comms.iter().all(|comm| comm.destroy() == SUCCESS));
}

#[test]
fn a_send_waits_for_its_receive_and_the_work_before_it() {
    let Some(_cuda) = threaded(2) else { return };
    let both = Gate::new(2);
    run_ranks(2, |rank| {
        let x = rank.buffer::<f32>(1 << 20);
        if rank.rank == 0 {
            rank.stream.memset_zeros(&mut x.clone()).unwrap();
            let mut x = x;
            rank.stream.memcpy_htod(&vec![3_f32; 1 << 20], &mut x).unwrap();
            rank.issue(Operation::Send(at(&x), 1 << 20, FLOAT32, 1));
            thread::sleep(Duration::from_millis(50));
            assert!(!is_done(&rank.stream), "nobody takes it");
            both.wait();
            rank.stream.synchronize().unwrap();
        } else {
            both.wait();
            rank.issue(Operation::Recv(at(&x), 1 << 20, FLOAT32, 0));
            assert_eq!(rank.download(&x), vec![3.0; 1 << 20]);
        }
    });
}

#[test]
fn a_delay_is_on_the_stream() {
    let Some(cuda) = threaded(1) else { return };
    cuda.nccl().set_delay(Duration::from_millis(50));
    run_ranks(1, |rank| {
        let x = rank.upload(&[1_f32]);
        rank.issue(Operation::AllReduce(at(&x), at(&x), 1, FLOAT32, SUM));
        assert!(!is_done(&rank.stream));
        assert!(ends(&rank.stream));
    });
}
