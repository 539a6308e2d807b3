//! Bucket with trained parameter values, which replicas may still be gathering, and gradients.

use std::ops::Range;

use super::bucket_values::{BucketValues, GatherTimes};
use crate::error::Result;
use dflop_device::{Bucket, Device, Tensor, Transfer};

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
