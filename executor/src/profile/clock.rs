//! Measures computing time on a device: CPU time of one thread, or wall time of several.
//!
//! With one thread, the CPU time of the computing thread is read: [`Runtime::run`] moves the work to the
//! pool's thread, and the clock is read there, so that other processes hardly affect it. With several threads
//! it is wall time: the threads share an operation, and a stage takes as long as the slowest of them.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_gettime};

use dflop_device::Cpu;
use dflop_device::prelude::*;

/// Clock that measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// CPU time of the single computing thread.
    ThreadCpu,
    /// Wall time.
    Wall,
}

impl Clock {
    /// Returns the clock for a device: CPU time of one thread, wall time of several.
    #[must_use]
    pub fn of(device: &Cpu) -> Self {
        if device.threads() == 1 { Self::ThreadCpu } else { Self::Wall }
    }

    /// Returns the clock's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ThreadCpu => "thread CPU time",
            Self::Wall => "wall time",
        }
    }

    /// Runs a closure on the device's threads and returns its result and duration.
    pub fn time<R: Send>(self, device: &Cpu, body: impl FnOnce() -> R + Send) -> (R, Duration) {
        device.run(|| match self {
            Self::ThreadCpu => {
                let start = thread_cpu();
                let result = body();
                (result, thread_cpu().saturating_sub(start))
            }
            Self::Wall => {
                let start = Instant::now();
                let result = body();
                (result, start.elapsed())
            }
        })
    }
}

/// Returns the CPU time of this thread since its start.
#[must_use]
pub fn thread_cpu() -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(tv_sec.unsigned_abs(), tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_that_of_the_thread_that_computes() {
        let device = Cpu::new(1).unwrap();
        assert_eq!(Clock::of(&device), Clock::ThreadCpu);
        assert_eq!(Clock::of(&Cpu::new(2).unwrap()), Clock::Wall);
        let caller = std::thread::current().id();
        let work =
            || (0..200_000_u64).fold(1_u64, |hash, value| hash.rotate_left(7) ^ value.wrapping_mul(hash));
        let ((thread, hash), taken) =
            Clock::ThreadCpu.time(&device, || (std::thread::current().id(), std::hint::black_box(work())));
        assert!(thread != caller && hash != 0 && taken > Duration::ZERO);
    }

    #[test]
    fn a_thread_that_sleeps_takes_no_cpu_time() {
        let device = Cpu::new(1).unwrap();
        let ((), asleep) = Clock::ThreadCpu.time(&device, || std::thread::sleep(Duration::from_millis(40)));
        assert!(asleep < Duration::from_millis(20), "{asleep:?}");
    }
}
