//! Compared devices, and properties of the CUDA device.

use dflop_cuda::{AttentionChoice, AttentionEngines, Cuda, Libraries, SearchPath};
use dflop_device::prelude::*;
use dflop_device::{Cpu, Dtype, Tensor};
use serde_json::json;

use crate::Result;
use crate::arguments::Arguments;
use crate::random::Random;
use crate::report::{self, Outcome};

/// Maximum number of random numbers that are drawn for a tensor.
const DRAWN_MAX: usize = 1 << 20;

/// Opens the CUDA device.
pub(crate) fn cuda(storage: Dtype) -> Result<Cuda> {
    Ok(Cuda::builder(0).storage(storage).build()?)
}

/// Opens the CUDA device with the faster attention engine.
///
/// # Errors
/// cuDNN errors, where it is not found or cannot be used.
pub(crate) fn cuda_with_cudnn() -> dflop_cuda::Result<Cuda> {
    Cuda::builder(0).attention(AttentionEngines::Fastest).build()
}

/// Prints which engine computes attention for each shape, and why.
pub(crate) fn report_attention(part: &str, device: &Cuda) {
    for choice in device.attention_choices() {
        let AttentionChoice { key, is_cudnn, own_ns, cudnn_ns, refusal } = choice;
        let engine = match is_cudnn {
            Some(true) => "cuDNN",
            Some(false) => "own",
            None => "own until cuDNN's plan is built and measured",
        };
        eprintln!(
            "{key:?}: {engine}, own {own_ns:?} ns, cuDNN {cudnn_ns:?} ns {}",
            refusal.as_deref().unwrap_or("")
        );
        report::result(
            part,
            json!({"shape": format!("{key:?}"), "engine": engine, "own_ns": own_ns, "cudnn_ns": cudnn_ns,
                "refusal": refusal}),
        );
    }
}

/// Opens the CPU device that results are compared with.
pub(crate) fn cpu(storage: Dtype) -> Result<Cpu> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get().min(16));
    Ok(Cpu::new(threads)?.store(storage)?)
}

/// Draws a million random numbers and repeats them on the device.
///
/// Zeros or equal numbers would speed up a device; a repetition does not.
pub(crate) fn numbers(
    device: &Cuda,
    random: &mut Random,
    dtype: Dtype,
    elements: usize,
) -> Result<Tensor<Cuda>> {
    let some = random.numbers(elements.clamp(1, DRAWN_MAX));
    let mut values = Vec::with_capacity(elements);
    while values.len() < elements {
        values.extend_from_slice(&some[..some.len().min(elements - values.len())]);
    }
    Ok(device.upload_as(dtype, &values)?)
}

/// Prints device properties and library locations.
pub(crate) fn run(_: &Arguments) -> Result<Outcome> {
    let properties = cuda(Dtype::Bf16)?.properties();
    let libraries = Libraries::open(&SearchPath::from_environment())?;
    let (major, minor) = properties.capability;
    let driver = properties.driver_version;
    report::result(
        "device",
        json!({
            "name": properties.name, "capability": [major, minor], "processors": properties.processors,
            "bytes": properties.total_bytes, "driver": [driver.0, driver.1],
            "libraries": [libraries.driver, libraries.compiler, libraries.blas],
        }),
    );
    let gib = properties.total_bytes as f64 / f64::from(1 << 30);
    let figure =
        format!("{}, {major}.{minor}, {gib:.0} GiB, CUDA {}.{}", properties.name, driver.0, driver.1);
    Ok(report::summary("device", Outcome::Passed, &figure, "a device of capability 8.0"))
}
