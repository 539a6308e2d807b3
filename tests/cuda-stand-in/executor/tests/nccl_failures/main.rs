//! NCCL, rank and library failures end a job on all ranks, in time, with a cause.
//!
//! Requested faults hit any rank in the process, so this program contains no other suite.

mod driver;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Comm, Failure, Settings, StepContext};
use dflop_cuda::{Cuda, Error as CudaError, Nccl, NcclComm, SearchPath};
use dflop_cuda_stand_in::NcclFault;
use dflop_cuda_tests::OnNccl;
use dflop_cuda_tests::cuda::{search_path, stand_in};
use dflop_device::{DeviceComm, Dtype, Error, Lane, MessageLane, Result, RowShape, Runtime};

use dflop_testing::TestBackend;
use dflop_testing::support::{Transport, patient, run};

/// NCCL status for a system failure.
const SYSTEM_ERROR: i32 = 2;

/// Serializes tests that request faults within a process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // faults of earlier tests are over
    stand_in().nccl().reset();
    turn
}

fn at(step: u64) -> StepContext {
    StepContext::step(step, "test")
}

/// Returns short limits, so that hangs are found soon.
fn brief() -> Settings {
    patient().wait(Duration::from_millis(1500)).slow(Duration::from_secs(4))
}

fn failure<T>(result: Result<T>) -> Failure {
    match result {
        Err(Error::Comm(error)) => error.failure().expect("the job is over").clone(),
        Err(error) => panic!("expected the failure of the job, found {error}"),
        Ok(_) => panic!("the job has failed"),
    }
}

/// Sums repeatedly until the job fails.
fn sum_until_it_fails(device: &Cuda, comm: &dyn DeviceComm<Cuda>) -> Failure {
    let done = (0..100).try_for_each(|step| {
        let mut values = device.upload(&[1.0; 64])?;
        comm.all_reduce(at(step), &mut values)?;
        device.download(&values).map(drop)
    });
    failure(done)
}

/// Runs a job with failing sums, and returns the failure on each rank.
fn failures(size: usize, settings: Settings, fault: NcclFault, rank: i32, n: u64) -> Vec<Failure> {
    let _turn = turn();
    // the lanes and groups of earlier tests are gone
    let found = run(Transport::Threads, size, settings, |comm| {
        let device = OnNccl::open(1);
        let host: Arc<dyn Comm> = Arc::new(comm);
        let comm = OnNccl::tensors(&device, Arc::clone(&host)).unwrap();
        host.barrier(at(0)).unwrap();
        if host.rank() == 0 {
            stand_in().nccl().request_fault(fault, rank, n);
        }
        host.barrier(at(0)).unwrap();
        let found = sum_until_it_fails(&device, &*comm);
        // the device's work has ended, whatever it waited for
        drop(device.download(&device.upload(&[1.0]).unwrap()));
        (found, host)
    });
    found.into_iter().map(|(found, _)| found).collect()
}

#[test]
fn an_error_of_nccl_ends_the_job_with_its_text() {
    for failure in failures(2, patient(), NcclFault::Error(SYSTEM_ERROR), 1, 3) {
        assert_eq!(failure.cause, Cause::Transport, "{failure}");
        assert!(failure.message.contains("NCCL failed in all ranks"), "{failure}");
    }
}

#[test]
fn a_rank_that_hangs_is_found_within_the_limits() {
    let begin = Instant::now();
    for failure in failures(3, brief(), NcclFault::Hang, 2, 2) {
        assert_eq!(failure.cause, Cause::TimedOut, "{failure}");
        assert!(failure.message.contains("all-reduce over all ranks"), "{failure}");
    }
    assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
}

#[test]
fn a_rank_whose_connections_are_lost_ends_the_job() {
    for failure in failures(2, brief(), NcclFault::Lost, 1, 2) {
        assert!(matches!(failure.cause, Cause::Transport | Cause::TimedOut), "{failure}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let _turn = turn();
    let found = run(Transport::Tcp, 3, brief(), |comm| {
        let device = OnNccl::open(1);
        let host: Arc<dyn Comm> = Arc::new(comm);
        let comm = OnNccl::tensors(&device, Arc::clone(&host)).unwrap();
        if host.rank() == 2 {
            // as a process that dies: its job ends without a word of its own
            std::thread::sleep(Duration::from_millis(300));
            drop(host.abort(at(1), "out of memory"));
            return None;
        }
        Some(sum_until_it_fails(&device, &*comm))
    });
    for failure in found.into_iter().flatten() {
        assert_eq!((failure.cause, failure.culprit), (Cause::Caller, Some(2)), "{failure}");
    }
}

#[test]
fn a_communicator_that_cannot_be_made_is_an_error() {
    let _turn = turn();
    // builds the stand-in where it is new
    drop(OnNccl::open(1));
    let begin = Instant::now();
    let found = run(Transport::Threads, 2, brief(), |comm| {
        let device = OnNccl::open(1);
        let host: Arc<dyn Comm> = Arc::new(comm);
        if host.rank() == 0 {
            stand_in().nccl().request_fault(NcclFault::Init(SYSTEM_ERROR), 0, 1);
        }
        host.barrier(at(0)).unwrap();
        let joined = OnNccl::tensors(&device, Arc::clone(&host));
        let text = joined.err().map(|error| error.to_string());
        if let Some(text) = &text {
            drop(host.abort(at(0), text));
        }
        (text, host)
    });
    let text = found[0].0.as_deref().expect("rank 0 fails");
    assert!(text.contains("ncclCommInitRankConfig failed for all ranks"), "{text}");
    let text = found[1].0.as_deref().expect("rank 1 does not wait for ever");
    assert!(text.contains("rank 0 ended the job"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let _turn = turn();
    let found = run(Transport::Threads, 2, brief(), |comm| {
        let device = OnNccl::open(1);
        let host: Arc<dyn Comm> = Arc::new(comm);
        if host.rank() == 0 {
            return Some((failure(OnNccl::tensors(&device, Arc::clone(&host))), host));
        }
        // versions and ids are exchanged, and then this rank is busy with something else
        let search = search_path();
        let version = Nccl::open(&search).unwrap().version().0;
        host.gather(at(0), &[u64::from(version)]).unwrap();
        host.gather(at(0), &[0; 16]).unwrap();
        host.note(StepContext::step(0, "read a slow disk"));
        while host.failure().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    });
    let (found, _host) = found.into_iter().flatten().next().expect("rank 0 does not wait for ever");
    assert_eq!((found.cause, found.culprit), (Cause::TimedOut, Some(1)), "{found}");
    assert!(found.message.contains("connect all ranks"), "{found}");
    assert!(found.message.contains("rank 1 is busy since step 0, `read a slow disk`"), "{found}");
}

#[test]
fn a_message_without_a_lane_is_refused() {
    let _turn = turn();
    run(Transport::Threads, 2, patient(), |comm| {
        let device = OnNccl::open(1);
        let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
        let lanes = BTreeSet::from([MessageLane { from: 0, to: 1, flow: 0 }]);
        comm.open_lanes(at(0), &lanes).unwrap();
        let now = device.mark(Lane::Compute).unwrap();
        let shape = RowShape { dtype: Dtype::F32, rows: 1, cols: 1 };
        let refused = comm.recv(1 - comm.host().rank(), 1, at(0), shape, &now).err().unwrap().to_string();
        assert!(refused.contains("no lane from rank") && refused.contains("for flow 1 is open"), "{refused}");
        let itself = BTreeSet::from([MessageLane { from: 1, to: 1, flow: 0 }]);
        assert!(comm.open_lanes(at(0), &itself).is_err(), "a lane has two ends");
        comm.host().barrier(at(9)).unwrap();
    });
}

#[test]
fn a_transfer_that_nobody_awaits_keeps_its_memory_until_it_is_done() {
    let _turn = turn();
    run(Transport::Threads, 2, patient(), |comm| {
        let device = OnNccl::open(1);
        let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
        for step in 0..20 {
            let values = device.upload(&[1.0; 4096]).unwrap();
            let now = device.mark(Lane::Compute).unwrap();
            drop(comm.start_all_reduce(at(step), values, &now).unwrap());
            // takes the memory that the sum had
            let other = device.upload(&[2.0; 4096]).unwrap();
            assert_eq!(device.download(&other).unwrap(), [2.0; 4096]);
        }
        comm.host().barrier(at(99)).unwrap();
    });
    let failed = stand_in().last_failure();
    assert!(!failed.contains("freed"), "{failed}");
}

#[test]
fn a_library_that_is_not_there_is_named_with_all_places() {
    let search = SearchPath::only(vec!["/nowhere/at/all".into()]);
    // the process may have opened the stand-in before
    match Nccl::open(&search) {
        Err(CudaError::LibraryNotFound { library, tried, hint }) => {
            assert_eq!(
                (library, tried.as_slice()),
                ("NCCL", ["/nowhere/at/all/libnccl.so.2".to_owned()].as_slice())
            );
            assert!(hint.contains("nvidia-nccl"), "{hint}");
        }
        Ok(nccl) => assert!(nccl.file().ends_with("libnccl.so.2"), "{nccl:?}"),
        Err(other) => panic!("{other}"),
    }
}

/// Streams that share a device queue could wait for each other.
#[test]
fn lanes_are_shared_where_there_are_fewer_queues_than_streams() {
    let _turn = turn();
    for (queues, pairs) in [(32, [false; 3]), (9, [false, true, true]), (5, [true; 3])] {
        run(Transport::Threads, 2, patient(), |comm| {
            let device = OnNccl::open(1);
            let comm = NcclComm::join_with(&device, Arc::new(comm), &search_path(), queues).unwrap();
            let lane = |from: usize, flow| MessageLane { from, to: 1 - from, flow };
            let all = [lane(0, 0), lane(1, 1), lane(1, 0)];
            assert!(all.iter().all(|&lane| comm.shared_lane(lane).is_none()), "nothing is open");
            comm.open_lanes(at(0), &BTreeSet::from([all[0]])).unwrap();
            comm.open_lanes(at(0), &BTreeSet::from(all)).unwrap();
            let numbers = all.map(|lane| comm.shared_lane(lane));
            assert_eq!(numbers.map(|number| number.is_some()), pairs, "{queues} queues");
            assert_eq!(numbers[1], numbers[2], "{queues} queues");
            comm.host().barrier(at(9)).unwrap();
        });
    }
}

#[test]
fn a_device_without_queues_for_a_lane_is_refused() {
    let _turn = turn();
    run(Transport::Threads, 2, patient(), |comm| {
        let device = OnNccl::open(1);
        let comm = NcclComm::join_with(&device, Arc::new(comm), &search_path(), 3).unwrap();
        let lanes = BTreeSet::from([MessageLane { from: 0, to: 1, flow: 0 }]);
        let refused = comm.open_lanes(at(0), &lanes).unwrap_err().to_string();
        assert!(
            refused.contains(
                "`CUDA_DEVICE_MAX_CONNECTIONS`: this rank needs 4 streams (1 lanes, 2 of NCCL, 1 of compute)"
            ),
            "{refused}"
        );
        comm.host().barrier(at(9)).unwrap();
    });
}

#[test]
fn a_device_checks_the_library_alone() {
    let _turn = turn();
    let search = search_path();
    let (nccl, calls) = dflop_cuda::check_nccl_alone(&OnNccl::open(1), &search).unwrap();
    assert!(nccl.version().0 >= 21_800, "{nccl:?}");
    assert_eq!(calls, ["all-reduce", "reduce-scatter", "all-gather", "send and receive", "split"]);
}

#[test]
fn one_rank_needs_no_communicator() {
    let _turn = turn();
    run(Transport::Threads, 1, patient(), |comm| {
        let device = OnNccl::open(1);
        let search = search_path();
        let comm = NcclComm::join(&device, Arc::new(comm), &search).unwrap();
        let mut values = device.upload(&[3.0; 5]).unwrap();
        comm.all_reduce(at(0), &mut values).unwrap();
        comm.reduce_scatter(at(0), &mut values, &[5]).unwrap();
        comm.all_gather(at(0), &mut values, &[5]).unwrap();
        assert_eq!(device.download(&values).unwrap(), [3.0; 5]);
    });
}
