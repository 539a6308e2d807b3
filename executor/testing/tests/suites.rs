//! All suites on the CPU device, and the device-independent suites on the deferred device.

use std::process::ExitCode;

use dflop_device::Cpu;
use dflop_device::deferred::Deferred;
use dflop_testing::{all, on_cpu, run};

fn main() -> ExitCode {
    let mut cpu = all::<Cpu>();
    cpu.extend(on_cpu());
    run(vec![("cpu", cpu), ("deferred", all::<Deferred<Cpu>>())])
}
