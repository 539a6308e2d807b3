//! Streams, events and page-locked memory in the stand-in.

use crate::{
    launch,
    support::{ILLEGAL_ADDRESS, code, cuda, grid, kernel, raw},
};
use cudarc::driver::sys::CUevent_flags;
use std::{sync::Arc, thread};

const DOUBLE: &str = r#"
#include "device.cuh"
extern "C" __global__ void twice(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 2.f * x[i];
}
"#;

/// Copies on a stream and computes on a second stream, with or without an event between them.
fn twice(waits: bool) -> Option<Vec<f32>> {
    let cuda = cuda()?;
    let (copies, computes) = (cuda.context.new_stream().unwrap(), cuda.context.new_stream().unwrap());
    let twice = kernel(&cuda, DOUBLE, "twice");
    let mut x = raw::alloc::<f32>(&copies, 64).unwrap();
    let mut y = raw::alloc::<f32>(&computes, 64).unwrap();
    copies.synchronize().unwrap();
    copies.memcpy_htod(&[3_f32; 64], &mut x).unwrap();
    if waits {
        computes.wait(&copies.record_event(None).unwrap()).unwrap();
    }
    launch!(computes, twice, grid(1, 64), &x, &mut y).unwrap();
    let y_host = computes.clone_dtoh(&y).unwrap();
    copies.synchronize().unwrap();
    Some(y_host)
}

#[test]
fn a_stream_that_waits_for_an_event_sees_what_was_copied() {
    let Some(y) = twice(true) else { return };
    assert_eq!(y, [6.0; 64]);
}

#[test]
fn a_stream_that_does_not_wait_sees_nan() {
    let Some(y) = twice(false) else { return };
    assert!(y.iter().all(|y| y.is_nan()), "{y:?}");
}

#[test]
fn page_locked_memory_is_read_when_the_copy_runs() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let mut host = raw::page_locked(&cuda.context, 16);
    let mut x = stream.alloc_zeros::<f32>(16).unwrap();
    host.as_mut_slice().unwrap().fill(1.0);
    let address = host.as_mut_ptr().unwrap();
    stream.memcpy_htod(&host, &mut x).unwrap();
    raw::overwrite(address, 2.0);
    let copied = stream.clone_dtoh(&x).unwrap();
    assert_eq!(copied[..2], [2.0, 1.0], "the copy was late");
}

#[test]
fn other_host_memory_is_read_by_the_call() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let mut x = stream.alloc_zeros::<f32>(16).unwrap();
    let mut host = vec![1_f32; 16];
    stream.memcpy_htod(&host, &mut x).unwrap();
    host.fill(2.0);
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [1.0; 16]);
}

#[test]
fn events_are_reached_when_something_waits() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
    let start = stream.record_event(flags).unwrap();
    let _x = stream.alloc_zeros::<f32>(1 << 20).unwrap();
    let end = stream.record_event(flags).unwrap();
    assert!(!end.is_complete());
    start.synchronize().unwrap();
    assert!(start.is_complete() && !end.is_complete(), "the stream runs no further than asked");
    let milliseconds = start.elapsed_ms(&end).unwrap();
    assert!(end.is_complete() && milliseconds > 0.0, "{milliseconds}");
    assert!(cuda.counts().event_synchronizations >= 2);
}

#[test]
fn polling_ends() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let x = stream.clone_htod(&[1_f32; 16]).unwrap();
    let event = stream.record_event(None).unwrap();
    let polls = (0..10).take_while(|_| !event.is_complete()).count();
    assert!((1..10).contains(&polls), "{polls}");
    drop(x);
}

#[test]
fn a_buffer_that_another_stream_releases_too_early_is_an_illegal_address() {
    let Some(cuda) = cuda() else { return };
    let (first, second) = (cuda.context.new_stream().unwrap(), cuda.context.new_stream().unwrap());
    let address = raw::alloc::<f32>(&first, 64).unwrap().leak();
    raw::release(address, &second);
    assert_eq!(code(second.synchronize()), 0);
    assert_eq!(code(first.synchronize()), ILLEGAL_ADDRESS);
}

/// Flag for streams that the default stream does not wait for.
const NON_BLOCKING: u32 = 1;

#[test]
fn the_default_stream_waits_for_blocking_streams_only() {
    let Some(cuda) = cuda() else { return };
    let default = cuda.context.default_stream();
    assert_eq!(raw::read_beside_a_stream(0, &default), [1; 4]);
    assert_eq!(raw::read_beside_a_stream(NON_BLOCKING, &default), [255; 4], "new memory");
}

#[test]
fn host_threads_use_streams_at_once() {
    let Some(cuda) = cuda() else { return };
    let twice = kernel(&cuda, DOUBLE, "twice");
    thread::scope(|scope| {
        for i in 0..4_u16 {
            let (context, twice) = (Arc::clone(&cuda.context), twice.clone());
            scope.spawn(move || {
                let stream = context.new_stream().unwrap();
                for round in 0..20 {
                    let value = f32::from(i * 100 + round);
                    let x = stream.clone_htod(&[value; 128]).unwrap();
                    let mut y = stream.alloc_zeros::<f32>(128).unwrap();
                    launch!(stream, twice, grid(4, 32), &x, &mut y).unwrap();
                    assert_eq!(stream.clone_dtoh(&y).unwrap(), [2.0 * value; 128]);
                }
            });
        }
    });
    assert_eq!(code(cuda.context.synchronize()), 0);
    let counts = cuda.counts();
    assert_eq!((counts.launches, counts.copies_up, counts.copies_down), (80, 80, 80));
}
