//! Process-wide settings.

use crate::{
    launch,
    support::{ILLEGAL_ADDRESS, code, cuda, grid, kernel},
};
use std::{env, process::Command};

/// Runs in a separate process, with the variables that the test below sets.
#[test]
#[ignore = "a part of another test"]
fn child() {
    let Some(cuda) = cuda() else { return };
    assert_eq!(cuda.context.mem_get_info().unwrap(), (1 << 20, 1 << 20));
    assert_eq!(cuda.context.compute_capability().unwrap(), (8, 6));
    assert_eq!(cudarc::driver::CudaContext::device_count().unwrap(), 3);
    assert_eq!(crate::support::raw::driver_version(), 12080);
    let source = r#"
#include "device.cuh"
extern "C" __global__ void last(int* x) { *x = blockIdx.x; }
"#;
    let stream = cuda.context.default_stream();
    let last = kernel(&cuda, source, "last");
    let mut x = stream.alloc_zeros::<i32>(1).unwrap();
    launch!(stream, last, grid(5, 1), &mut x).unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [0], "blocks descend");
    launch!(stream, last, grid(5, 1), &mut x).unwrap();
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS, "the second launch fails");
}

#[test]
fn variables_of_the_environment_are_settings() {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "environment::child", "--ignored"])
        .envs([
            ("CUDA_STAND_IN_BYTES", "1048576"),
            ("CUDA_STAND_IN_COMPUTE_CAPABILITY", "86"),
            ("CUDA_STAND_IN_DEVICES", "3"),
            ("CUDA_STAND_IN_DRIVER_VERSION", "12080"),
            ("CUDA_STAND_IN_ORDER", "1"),
            ("CUDA_STAND_IN_FAIL_LAUNCH", "last:2"),
        ])
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
    assert!(String::from_utf8_lossy(&text).contains("1 passed"));
}
