//! Ranks that are processes.

use super::{
    library::{Operation, REMOTE_ERROR, SUCCESS, UniqueId, group, unique_id},
    world::{FLOAT32, Rank, SUM, at, becomes, threaded},
};
use crate::support::cuda;
use std::{
    env,
    process::{Child, Command, Stdio},
};

const LENGTH: usize = 200_000;

/// What both processes do.
fn sum_and_exchange(rank: &Rank) {
    let peer = 1 - rank.rank as i32;
    let own = (rank.rank + 1) as f32;
    let (x, y) = (rank.upload(&vec![own; LENGTH]), rank.buffer::<f32>(LENGTH));
    let result = group(|| {
        rank.issue(Operation::Send(at(&x), LENGTH, FLOAT32, peer));
        rank.issue(Operation::Recv(at(&y), LENGTH, FLOAT32, peer));
    });
    assert_eq!(result, SUCCESS);
    assert_eq!(rank.download(&y), vec![3.0 - own; LENGTH]);
    rank.issue(Operation::AllReduce(at(&x), at(&x), LENGTH, FLOAT32, SUM));
    assert_eq!(rank.download(&x), vec![3.0; LENGTH]);
}

/// Runs in a separate process, with the variables that the tests below set.
#[test]
#[ignore = "a part of other tests"]
fn child() {
    let Some(_cuda) = cuda() else { return };
    let id = UniqueId::from_hex(&env::var("NCCL_TEST_ID").unwrap());
    let rank = Rank::new(2, 1, id);
    sum_and_exchange(&rank);
    if env::var_os("NCCL_TEST_LEAVES").is_some() {
        // With an operation under way, and without an end of the communicator.
        let x = rank.buffer::<f32>(1);
        rank.issue(Operation::Recv(at(&x), 1, FLOAT32, 0));
        std::process::exit(0);
    }
    assert_eq!(rank.comm.destroy(), SUCCESS);
}

fn start_child(id: UniqueId, variables: &[(&str, &str)]) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "nccl::processes::child", "--ignored"])
        .env("NCCL_TEST_ID", id.to_hex())
        .env("CUDA_STAND_IN_STREAM_THREADS", "1")
        .env("CUDA_STAND_IN_DEVICES", "2")
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn expect_success(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn two_processes_communicate() {
    let Some(_cuda) = threaded(1) else { return };
    let id = unique_id();
    let child = start_child(id, &[]);
    let rank = Rank::new(2, 0, id);
    sum_and_exchange(&rank);
    assert_eq!(rank.comm.destroy(), SUCCESS);
    expect_success(child);
}

#[test]
fn a_process_that_ends_is_an_error_of_the_other_and_does_not_hang() {
    let Some(_cuda) = threaded(1) else { return };
    let id = unique_id();
    let child = start_child(id, &[("NCCL_TEST_LEAVES", "1")]);
    let rank = Rank::new(2, 0, id);
    sum_and_exchange(&rank);
    assert!(becomes(|| rank.comm.async_error() == REMOTE_ERROR));
    expect_success(child);
    assert_eq!(rank.comm.abort(), SUCCESS);
}

#[test]
fn a_process_takes_faults_from_its_environment() {
    let Some(_cuda) = threaded(1) else { return };
    let id = unique_id();
    // The send and the receive are the first and the second operation.
    let mut child = start_child(id, &[("CUDA_STAND_IN_NCCL_FAULTS", "hang:0:9,lost:1:3")]);
    let rank = Rank::new(2, 0, id);
    let (x, y) = (rank.upload(&vec![1_f32; LENGTH]), rank.buffer::<f32>(LENGTH));
    let result = group(|| {
        rank.issue(Operation::Send(at(&x), LENGTH, FLOAT32, 1));
        rank.issue(Operation::Recv(at(&y), LENGTH, FLOAT32, 1));
    });
    assert_eq!(result, SUCCESS);
    rank.stream.synchronize().unwrap();
    assert!(becomes(|| rank.comm.async_error() == REMOTE_ERROR));
    assert_eq!(rank.comm.abort(), SUCCESS);
    child.kill().unwrap();
    child.wait().unwrap();
}
