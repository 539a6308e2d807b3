//! Measures computing time on a device, and the peak rate of matrix products there.
//!
//! With one thread, the CPU time of the computing thread is read: [`run`](dflop_device::Runtime::run) moves
//! the work to the pool's thread, and the clock is read there, so that other processes hardly affect it. With
//! several threads it is wall time: the threads share an operation, and a stage takes as long as the slowest
//! thread. Other processors measure themselves, between events before and after the work.

use std::time::{Duration, Instant};

use dflop_device::ops::gemm::{GemmShape, MatrixLayout};
use dflop_device::{Device, Dtype, Epilogue, Lane};
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::error::Result;

/// Measuring clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// CPU time on the single computing thread.
    ThreadCpu,
    /// Wall time.
    Wall,
    /// Time between device events.
    Device,
}

impl Clock {
    /// Returns the clock for a device: CPU time for a single thread, wall time for several, or the device
    /// clock.
    #[must_use]
    pub fn of<D: Device>(device: &D) -> Self {
        match device.host_threads() {
            Some(1) => Self::ThreadCpu,
            Some(_) => Self::Wall,
            None => Self::Device,
        }
    }

    /// Returns the clock name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ThreadCpu => "thread CPU time",
            Self::Wall => "wall time",
            Self::Device => "time of the device",
        }
    }

    /// Runs a closure on the device threads and returns result and duration.
    ///
    /// # Errors
    /// [`crate::Error::Device`] from the device clock.
    pub fn time<D: Device, R: Send>(
        self,
        device: &D,
        body: impl FnOnce() -> R + Send,
    ) -> Result<(R, Duration)> {
        if self == Self::Device {
            return on_device(device, body);
        }
        Ok(device.run(|| match self {
            Self::ThreadCpu => {
                let start = thread_cpu();
                let result = body();
                (result, thread_cpu().saturating_sub(start))
            }
            Self::Wall | Self::Device => {
                let start = Instant::now();
                let result = body();
                (result, start.elapsed())
            }
        }))
    }
}

/// Times the work that a closure queues, by device events.
fn on_device<D: Device, R: Send>(device: &D, body: impl FnOnce() -> R + Send) -> Result<(R, Duration)> {
    let start = device.mark(Lane::Compute)?;
    let result = device.run(body);
    let end = device.mark(Lane::Compute)?;
    // waits for the events
    device.read(&device.zeros_as(Dtype::F64, 1)?)?;
    Ok((result, Duration::from_nanos(device.busy_ns(&start, &end))))
}

/// Returns the CPU time of this thread since thread start.
#[must_use]
pub fn thread_cpu() -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(tv_sec.unsigned_abs(), tv_nsec.unsigned_abs() as u32)
}

/// Minimum side of the square matrices to multiply: three matrices with 4 MiB in `f32`.
const SIDE_MIN: usize = 1024;
/// Maximum side, for a processor that smaller products do not keep busy.
const SIDE_MAX: usize = 8192;
/// Minimum duration in seconds of a product that shows the peak.
const PRODUCT_SECONDS: f64 = 1e-3;

/// Measures the FLOP/s of a large square matrix product in the weight type of the device, the best of `runs`
/// runs (at least one).
///
/// The product is [`gemm`](dflop_device::ops::gemm::Gemm::gemm), after a warm-up run that is not timed. The
/// matrix side is doubled from 1,024 until a product takes a millisecond, at most to 8,192.
///
/// # Errors
/// [`crate::Error::Device`].
pub fn gemm_peak_flops<D: Device>(device: &D, runs: usize) -> Result<f64> {
    let mut side = SIDE_MIN;
    loop {
        let seconds = best_product(device, side, runs)?;
        if seconds >= PRODUCT_SECONDS || side >= SIDE_MAX {
            return Ok(2.0 * (side as f64).powi(3) / seconds);
        }
        side *= 2;
    }
}

/// Returns the duration in seconds for the fastest product.
fn best_product<D: Device>(device: &D, side: usize, runs: usize) -> Result<f64> {
    let values = |seed: usize| -> Vec<f32> {
        (0..side * side).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect()
    };
    let (a, b, mut c) = (device.upload(&values(1))?, device.upload(&values(2))?, device.alloc(side * side)?);
    let layout = MatrixLayout::rows(side);
    let shape = GemmShape { rows: side, columns: side, inner: side };
    let mut best = f64::INFINITY;
    for run in 0..=runs.max(1) {
        let product =
            || device.gemm(shape, (&a, layout), (&b, layout), false, (&mut c, layout), Epilogue::None);
        let (done, taken) = Clock::of(device).time(device, product)?;
        done?;
        // The first run warms up caches and threads.
        if run > 0 {
            best = best.min(taken.as_secs_f64());
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use dflop_device::Cpu;

    use super::*;

    #[test]
    fn the_clock_is_that_of_the_thread_that_computes() {
        let device = Cpu::new(1).unwrap();
        assert_eq!(Clock::of(&device), Clock::ThreadCpu);
        assert_eq!(Clock::of(&Cpu::new(2).unwrap()), Clock::Wall);
        let caller = std::thread::current().id();
        let work =
            || (0..200_000_u64).fold(1_u64, |hash, value| hash.rotate_left(7) ^ value.wrapping_mul(hash));
        let ((thread, hash), taken) = Clock::ThreadCpu
            .time(&device, || (std::thread::current().id(), std::hint::black_box(work())))
            .unwrap();
        assert!(thread != caller && hash != 0 && taken > Duration::ZERO);
    }

    #[test]
    fn a_thread_that_sleeps_takes_no_cpu_time() {
        let device = Cpu::new(1).unwrap();
        let ((), asleep) =
            Clock::ThreadCpu.time(&device, || std::thread::sleep(Duration::from_millis(40))).unwrap();
        assert!(asleep < Duration::from_millis(20), "{asleep:?}");
    }
}
