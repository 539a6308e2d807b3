//! Operation times, measured with device events.

use dflop_device::{Device, Dtype, Lane};

use crate::Result;

/// Calls that are not timed: they compile kernels, choose algorithms and fill caches.
const WARM_UP_CALLS: usize = 3;

/// Returns the median call seconds, over several calls that the device runs in sequence.
///
/// All calls are queued before the first is waited for, so that the device does not wait for the host between
/// them.
pub(crate) fn median_seconds<D: Device>(
    device: &D,
    rounds: usize,
    mut call: impl FnMut(usize) -> dflop_device::Result<()>,
) -> Result<f64> {
    for round in 0..WARM_UP_CALLS {
        call(round)?;
    }
    wait(device)?;
    let mut events = vec![device.mark(Lane::Compute)?];
    for round in 0..rounds {
        call(round)?;
        events.push(device.mark(Lane::Compute)?);
    }
    wait(device)?;
    let nanoseconds = |pair: &[D::Event]| device.busy_ns(&pair[0], &pair[1]) as f64;
    // stand-in clocks may be too coarse for a small operation
    Ok((median(events.windows(2).map(nanoseconds).collect()) * 1e-9).max(1e-9))
}

/// Waits for all work on the compute lane.
pub(crate) fn wait<D: Device>(device: &D) -> Result<()> {
    device.read(&device.zeros_as(Dtype::F64, 1)?)?;
    Ok(())
}

/// Returns the median, 0 for no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match (values.len(), values.len() / 2) {
        (0, _) => 0.0,
        (len, middle) if len % 2 == 0 => f64::midpoint(values[middle - 1], values[middle]),
        (_, middle) => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::Cpu;

    #[test]
    fn medians_are_in_the_middle() {
        assert!((median(vec![5.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(vec![4.0, 1.0, 2.0, 9.0]) - 3.0).abs() < 1e-12);
        assert!(median(Vec::new()).abs() < 1e-12);
    }

    #[test]
    fn calls_of_warm_up_and_rounds_are_made() {
        let mut calls = 0;
        let mut call = |_| {
            calls += 1;
            Ok(())
        };
        median_seconds(&Cpu::new(1).unwrap(), 4, &mut call).unwrap();
        assert_eq!(calls, WARM_UP_CALLS + 4);
    }
}
