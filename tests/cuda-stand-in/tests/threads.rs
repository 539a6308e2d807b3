//! Streams with threads: calls mean the same as with lazy streams, except for when operations run.

use crate::{
    launch,
    support::{Cuda, ILLEGAL_ADDRESS, code, cuda, grid, kernel, raw},
};
use cudarc::driver::CudaStream;
use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

const DOUBLE: &str = r#"
#include "device.cuh"
extern "C" __global__ void twice(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 2.f * x[i];
}
"#;

fn threaded() -> Option<Cuda> {
    let cuda = cuda()?;
    cuda.set_stream_threads(true);
    Some(cuda)
}

#[test]
fn operations_run_without_a_wait_of_the_host() {
    let Some(cuda) = threaded() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let (sender, receiver) = mpsc::channel();
    raw::host_function(&stream, move || sender.send(()).unwrap());
    assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(()));
    stream.synchronize().unwrap();
}

#[test]
fn a_wait_for_an_event_holds_up_its_stream_only() {
    let Some(cuda) = threaded() else { return };
    let twice = kernel(&cuda, DOUBLE, "twice");
    let streams: Vec<_> = (0..3).map(|_| cuda.context.new_stream().unwrap()).collect();
    let (release, released) = mpsc::channel::<()>();
    raw::host_function(&streams[0], move || released.recv().unwrap());
    let opened = streams[0].record_event(None).unwrap();
    streams[1].wait(&opened).unwrap();
    let x = streams[1].clone_htod(&[1_f32; 32]).unwrap();
    let mut y = raw::alloc::<f32>(&streams[1], 32).unwrap();
    launch!(streams[1], twice, grid(1, 32), &x, &mut y).unwrap();
    let end = streams[1].record_event(None).unwrap();
    // The third stream computes meanwhile.
    let z = streams[2].clone_htod(&[2_f32; 32]).unwrap();
    let mut w = raw::alloc::<f32>(&streams[2], 32).unwrap();
    launch!(streams[2], twice, grid(1, 32), &z, &mut w).unwrap();
    assert_eq!(streams[2].clone_dtoh(&w).unwrap(), [4.0; 32]);
    assert!(!opened.is_complete() && !end.is_complete());
    release.send(()).unwrap();
    assert_eq!(streams[1].clone_dtoh(&y).unwrap(), [2.0; 32]);
    assert!(end.is_complete());
}

#[test]
fn kernels_of_many_streams_run_one_at_a_time() {
    let Some(cuda) = threaded() else { return };
    let twice = kernel(&cuda, DOUBLE, "twice");
    let streams: Vec<_> = (0..8).map(|_| cuda.context.new_stream().unwrap()).collect();
    let mut buffers: Vec<_> = streams
        .iter()
        .map(|stream| [stream.clone_htod(&[1_f32; 256]).unwrap(), stream.clone_htod(&[0_f32; 256]).unwrap()])
        .collect();
    for _ in 0..10 {
        for (stream, [x, y]) in streams.iter().zip(&mut buffers) {
            launch!(stream, twice, grid(4, 64), &*x, &mut *y).unwrap();
            std::mem::swap(x, y);
        }
    }
    for (stream, [x, _]) in streams.iter().zip(&buffers) {
        assert_eq!(stream.clone_dtoh(x).unwrap(), [1024.0; 256]);
    }
    assert_eq!(cuda.counts().launches, 80);
}

#[test]
fn faults_are_errors_of_the_device() {
    let Some(cuda) = threaded() else { return };
    let twice = kernel(&cuda, DOUBLE, "twice");
    let stream = cuda.context.new_stream().unwrap();
    let x = stream.clone_htod(&[1_f32; 32]).unwrap();
    let mut y = raw::alloc::<f32>(&stream, 32).unwrap();
    launch!(stream, twice, grid(4, 32), &x, &mut y).unwrap();
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS);
    assert!(cuda.last_failure().starts_with("twice: illegal address"), "{}", cuda.last_failure());
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS);
}

#[test]
fn a_stream_that_is_destroyed_runs_what_it_has() {
    let Some(cuda) = threaded() else { return };
    let (sender, receiver) = mpsc::channel();
    let x = raw::alloc::<f32>(&cuda.context.default_stream(), 16).unwrap();
    cuda.context.synchronize().unwrap();
    let stream = cuda.context.new_stream().unwrap();
    raw::host_function(&stream, || thread::sleep(Duration::from_millis(50)));
    raw::host_function(&stream, move || sender.send(()).unwrap());
    drop(stream);
    assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(()));
    cuda.context.synchronize().unwrap();
    drop(x);
}

#[test]
fn many_streams_are_cheap() {
    let Some(cuda) = threaded() else { return };
    let streams: Vec<_> = (0..500).map(|_| cuda.context.new_stream().unwrap()).collect();
    assert!(raw::stream_threads() < 20, "a stream without work has no thread");
    let events: Vec<_> = streams[..50].iter().map(|stream| stream.record_event(None).unwrap()).collect();
    for event in &events {
        event.synchronize().unwrap();
    }
    drop(streams);
    let end = Instant::now() + Duration::from_secs(20);
    while raw::stream_threads() > 20 {
        assert!(Instant::now() < end, "threads of destroyed streams end");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn buffers_are_allocated_and_released_in_the_order_of_streams() {
    let Some(cuda) = threaded() else { return };
    let stream = cuda.context.new_stream().unwrap();
    for round in 0..200_u16 {
        let x = stream.clone_htod(&[f32::from(round); 1000]).unwrap();
        let y = stream.clone_dtod(&x).unwrap();
        drop(x);
        assert_eq!(stream.clone_dtoh(&y).unwrap(), [f32::from(round); 1000]);
    }
    stream.synchronize().unwrap();
    assert_eq!(cuda.counts().buffers_in_use, 0);
}

#[test]
fn events_measure_time() {
    let Some(cuda) = threaded() else { return };
    let flags = Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT);
    let stream = cuda.context.new_stream().unwrap();
    let start = stream.record_event(flags).unwrap();
    raw::host_function(&stream, || thread::sleep(Duration::from_millis(20)));
    let end = stream.record_event(flags).unwrap();
    end.synchronize().unwrap();
    let milliseconds = start.elapsed_ms(&end).unwrap();
    assert!((20.0..2000.0).contains(&milliseconds), "{milliseconds}");
}

#[test]
fn lazy_streams_are_lazy_again_afterwards() {
    let Some(cuda) = threaded() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let x = stream.clone_htod(&[1_f32; 16]).unwrap();
    cuda.set_stream_threads(false);
    let event = stream.record_event(None).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert!(!event.is_complete(), "nothing has waited for it");
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [1.0; 16]);
}

/// Blocks a stream, calls `synchronize` on a thread, and waits until that holds the context.
fn hold_context(cuda: &Cuda, stream: &CudaStream) -> (mpsc::Sender<()>, thread::JoinHandle<bool>) {
    let (release, released) = mpsc::channel::<()>();
    raw::host_function(stream, move || released.recv().unwrap_or(()));
    let context = cuda.context.clone();
    let holder = thread::spawn(move || context.synchronize().is_ok());
    while !cuda.calls().contains_key("cuCtxSynchronize") {
        thread::sleep(Duration::from_millis(1));
    }
    // the call is counted just before it takes the lock
    thread::sleep(Duration::from_millis(100));
    (release, holder)
}

#[test]
fn a_call_that_waits_for_a_context_holds_up_the_others() {
    let Some(cuda) = threaded() else { return };
    let [blocked, other] = [(), ()].map(|()| cuda.context.new_stream().unwrap());
    let (release, holder) = hold_context(&cuda, &blocked);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(other.record_event(None).is_ok()));
    assert!(receiver.recv_timeout(Duration::from_millis(300)).is_err(), "an event is not recorded meanwhile");
    release.send(()).unwrap();
    assert!(holder.join().unwrap() && receiver.recv_timeout(Duration::from_secs(20)).unwrap());
}

#[test]
fn a_hang_is_reported_with_who_waits_for_whom() {
    let Some(cuda) = threaded() else { return };
    cuda.set_hang_time(Duration::from_millis(500));
    let [blocked, other] = [(), ()].map(|()| cuda.context.new_stream().unwrap());
    let (release, holder) = hold_context(&cuda, &blocked);
    let waiter = thread::Builder::new().name("waiter".to_owned());
    let waiter = waiter.spawn(move || other.record_event(None).is_ok()).unwrap();
    assert!(!holder.join().unwrap(), "the device has failed");
    let failure = cuda.last_failure();
    for part in ["is in cuCtxSynchronize", "runs host function", "thread waiter waits in cuEventCreate"] {
        assert!(failure.contains(part), "{failure}");
    }
    assert!(!waiter.join().unwrap());
    drop(release);
    cuda.reset();
}

#[test]
fn kernels_that_are_loaded_eagerly_load_with_their_module() {
    let Some(cuda) = threaded() else { return };
    cuda.set_eager_loading(true);
    let twice = kernel(&cuda, DOUBLE, "twice");
    assert!(cuda.calls()["cuModuleLoadData"] == 1 && cuda.calls()["cuModuleGetFunction"] == 1);
    drop(twice);
    cuda.reset();
}
