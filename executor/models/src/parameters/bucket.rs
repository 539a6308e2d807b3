//! Bucket with trained parameter values, which replicas may still be gathering, and gradients.
//!
//! Bucket values, which a communication may temporarily own.

use crate::error::{Error, Result};
use dflop_device::{Bucket, Device, Lane, Span, Tensor, Transfer};
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Values and gradients of trained parameters that are adjacent in memory.
///
/// Replicas may each update a part of the values and gather the remaining parts while operations continue
/// ([`gather_values`](Self::gather_values)). Values are never seen before they are complete:
/// [`values`](Self::values) and [`values_mut`](Self::values_mut) wait for them. Code that can return an error
/// calls [`wait_values`](Self::wait_values) first.
pub struct ParameterBucket<D: Device> {
    /// Parameter indices in the stage, in the order of both buckets.
    pub parameters: Vec<usize>,
    /// Gradients, in `f32`.
    pub gradients: Bucket<D>,
    /// Elements whose gradients are complete on this rank: all, unless a pipeline has divided them over
    /// replicas. All other gradients are unspecified until gradients are set to zero.
    pub summed: Range<usize>,
    values: BucketValues<D>,
}

impl<D: Device> ParameterBucket<D> {
    /// Creates a bucket from values, in the weight type of the device, and gradients.
    ///
    /// # Panics
    /// If the lengths differ.
    #[must_use]
    pub fn new(parameters: Vec<usize>, values: Bucket<D>, gradients: Bucket<D>) -> Self {
        assert_eq!(values.len(), gradients.len(), "every value has a gradient");
        let (summed, values) = (0..gradients.len(), BucketValues::new(values));
        Self { parameters, gradients, summed, values }
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns whether the bucket has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of the values in bytes.
    #[must_use]
    pub const fn value_bytes(&self) -> u64 {
        self.values.bytes()
    }

    /// Returns the values, after waiting for values that replicas gather.
    ///
    /// # Panics
    /// If the gather failed: another rank has ended the job.
    #[must_use]
    pub fn values(&self) -> &Bucket<D> {
        self.values.get()
    }

    /// Returns mutable values, after waiting for values that replicas gather.
    ///
    /// # Panics
    /// As [`values`](Self::values).
    pub fn values_mut(&mut self) -> &mut Bucket<D> {
        self.values.get_mut()
    }

    /// Returns values and mutable gradients.
    pub(super) fn both(&mut self) -> (&Bucket<D>, &mut Bucket<D>) {
        (self.values.get(), &mut self.gradients)
    }

    /// Returns the parameters with mutable values and gradients.
    pub(super) fn all_mut(&mut self) -> (&[usize], &mut Bucket<D>, &mut Bucket<D>) {
        (&self.parameters, self.values.get_mut(), &mut self.gradients)
    }

    /// Moves the values to a communication that returns them complete. Later passes overlap with the
    /// communication until they need the values.
    ///
    /// # Errors
    /// Errors from `start`, and from a gather that was in progress; the values are lost then.
    pub fn gather_values(
        &mut self,
        device: &D,
        start: impl FnOnce(Tensor<D>) -> dflop_device::Result<Transfer<D>>,
    ) -> Result<()> {
        self.values.gather(device, start)
    }

    /// Takes the times of the last gather, if it was waited for since the last call.
    pub fn take_gather_times(&mut self) -> Option<GatherTimes<D>> {
        self.values.take_times()
    }

    /// Orders the compute lane after a gather of the values.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if the job has ended; the values are lost then.
    pub fn wait_values(&self) -> Result<()> {
        self.values.wait().map(drop)
    }

    /// Returns whether a gather is not waited for yet.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        self.values.is_gathering()
    }
}

/// Times for a gather that was waited for.
pub struct GatherTimes<D: Device> {
    /// Start and end of the gather.
    pub span: Span<D>,
    /// Compute lane events before and after the wait for the gather.
    pub wait: [D::Event; 2],
}

/// Bucket values; not accessible while a communication owns them.
pub(super) struct BucketValues<D: Device> {
    /// Values, unless they are being gathered or lost.
    whole: OnceLock<Bucket<D>>,
    gathering: Mutex<Option<Gathering<D>>>,
    /// Times for the last gather, until they are taken.
    times: Mutex<Option<GatherTimes<D>>>,
    len: usize,
    bytes: u64,
}

/// Values that a communication owns.
struct Gathering<D: Device> {
    device: D,
    transfer: Transfer<D>,
    /// Tensor lengths.
    lens: Vec<usize>,
}

impl<D: Device> BucketValues<D> {
    pub(super) fn new(values: Bucket<D>) -> Self {
        let (len, bytes) = (values.len(), values.parts().iter().map(Tensor::bytes).sum());
        let (gathering, times) = (Mutex::new(None), Mutex::new(None));
        Self { whole: OnceLock::from(values), gathering, times, len, bytes }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_gathering(&self) -> bool {
        self.whole.get().is_none()
    }

    /// Moves the values to a communication that returns them.
    pub(super) fn gather(
        &mut self,
        device: &D,
        start: impl FnOnce(Tensor<D>) -> dflop_device::Result<Transfer<D>>,
    ) -> Result<()> {
        self.wait()?;
        let Some(mut values) = self.whole.take() else { return Ok(()) };
        let (whole, lens) = values.open();
        let transfer = start(whole)?;
        *self.gathering.get_mut().unwrap_or_else(PoisonError::into_inner) =
            Some(Gathering { device: device.clone(), transfer, lens });
        Ok(())
    }

    /// Orders the compute lane after the communication, if there is one, and returns the values.
    pub(super) fn wait(&self) -> Result<&Bucket<D>> {
        if let Some(values) = self.whole.get() {
            return Ok(values);
        }
        // held during the wait: a second reader also gets the values
        let mut gathering = self.gathering.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = || {
            let reason = "the weights of a bucket were lost in a gather that failed".to_owned();
            Error::Device(dflop_device::Error::Failed { reason })
        };
        if let Some(Gathering { device, transfer, lens }) = gathering.take() {
            let (span, before) = (transfer.span(), device.mark(Lane::Compute)?);
            let gathered = transfer.wait(Lane::Compute)?.ok_or_else(lost)?;
            let times = GatherTimes { span, wait: [before, device.mark(Lane::Compute)?] };
            *self.times.lock().unwrap_or_else(PoisonError::into_inner) = Some(times);
            return Ok(self.whole.get_or_init(|| Bucket::new(gathered, &lens)));
        }
        self.whole.get().ok_or_else(lost)
    }

    /// Takes the times of the last gather, if it was waited for since the last call.
    pub(super) fn take_times(&mut self) -> Option<GatherTimes<D>> {
        self.times.get_mut().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn get(&self) -> &Bucket<D> {
        self.wait().unwrap_or_else(|error| panic!("weights that replicas gather: {error}"))
    }

    pub(super) fn get_mut(&mut self) -> &mut Bucket<D> {
        self.get();
        self.whole.get_mut().expect("the values have come")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::{Cpu, Runtime};

    fn values(device: &Cpu) -> BucketValues<Cpu> {
        BucketValues::new(Bucket::new(device.upload(&[1.0, 2.0, 3.0]).unwrap(), &[1, 2]))
    }

    #[test]
    fn a_reader_gets_the_values_that_the_communication_returns() {
        let device = Cpu::new(1).unwrap();
        let mut values = values(&device);
        let gathered = device.upload(&[4.0, 5.0, 6.0]).unwrap();
        values.gather(&device, |_| Ok(Transfer::new(move |_| Ok(Some(gathered))))).unwrap();
        assert!(values.is_gathering());
        assert_eq!((values.len(), values.bytes()), (3, 12), "sizes are known without the values");
        assert_eq!(device.download(&values.get().parts()[1]).unwrap(), [5.0, 6.0]);
        assert!(!values.is_gathering());
        assert!(values.take_times().is_some() && values.take_times().is_none(), "times are taken once");
        device.write(&[7.0], &mut values.get_mut().parts_mut()[0]).unwrap();
        assert_eq!(device.download(&values.wait().unwrap().parts()[0]).unwrap(), [7.0]);
    }

    #[test]
    fn values_that_were_lost_are_never_seen() {
        let device = Cpu::new(1).unwrap();
        let mut values = values(&device);
        let failed = |reason: &str| dflop_device::Error::Failed { reason: reason.to_owned() };
        values.gather(&device, |_| Ok(Transfer::new(move |_| Err(failed("the job has ended"))))).unwrap();
        let text = |result: Result<&Bucket<Cpu>>| result.err().map(|error| error.to_string()).unwrap();
        assert!(text(values.wait()).contains("the job has ended"));
        assert!(text(values.wait()).contains("lost in a gather"));
        assert!(values.gather(&device, |_| unreachable!("there is nothing to gather")).is_err());
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| values.get().len()));
        assert!(read.is_err());
    }
}
