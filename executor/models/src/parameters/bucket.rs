//! Bucket of trained parameters: their values, which replicas may still be gathering, and their gradients.

use std::ops::Range;

use super::bucket_values::{BucketValues, GatherTimes};
use crate::error::Result;
use dflop_device::{Bucket, Device, Tensor, Transfer};

/// Values and gradients of trained parameters that follow each other in memory.
///
/// Replicas may each update a part of the values and gather the others' while operations go on
/// ([`gather_values`](Self::gather_values)). Values are never seen before they are whole:
/// [`values`](Self::values) and [`values_mut`](Self::values_mut) wait for them. Code that can return an error
/// calls [`wait_values`](Self::wait_values) first.
pub struct ParameterBucket<D: Device> {
    /// Indices of the parameters in the stage, in the order of both buckets.
    pub parameters: Vec<usize>,
    /// Gradients, in `f32`.
    pub gradients: Bucket<D>,
    /// Elements whose gradients are complete on this rank: all, unless a pipeline has divided them over
    /// replicas. The others are unspecified until gradients are set to zero.
    pub summed: Range<usize>,
    values: BucketValues<D>,
}

impl<D: Device> ParameterBucket<D> {
    /// Makes a bucket of values, in the type of the device's weights, and gradients.
    ///
    /// # Panics
    /// If they differ in length.
    #[must_use]
    pub fn new(parameters: Vec<usize>, values: Bucket<D>, gradients: Bucket<D>) -> Self {
        assert_eq!(values.len(), gradients.len(), "every value has a gradient");
        let (summed, values) = (0..gradients.len(), BucketValues::new(values));
        Self { parameters, gradients, summed, values }
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns whether the bucket has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the values in bytes.
    #[must_use]
    pub const fn value_bytes(&self) -> u64 {
        self.values.bytes()
    }

    /// Values, after those that replicas gather have come.
    ///
    /// # Panics
    /// If they could not be gathered: another rank has ended the job.
    #[must_use]
    pub fn values(&self) -> &Bucket<D> {
        self.values.get()
    }

    /// Mutable values, after those that replicas gather have come.
    ///
    /// # Panics
    /// As [`values`](Self::values).
    pub fn values_mut(&mut self) -> &mut Bucket<D> {
        self.values.get_mut()
    }

    /// Values and mutable gradients.
    pub(super) fn both(&mut self) -> (&Bucket<D>, &mut Bucket<D>) {
        (self.values.get(), &mut self.gradients)
    }

    /// Parameters with mutable values and gradients.
    pub(super) fn all_mut(&mut self) -> (&[usize], &mut Bucket<D>, &mut Bucket<D>) {
        (&self.parameters, self.values.get_mut(), &mut self.gradients)
    }

    /// Gives the values to a communication that returns them whole. Later passes overlap with it until they
    /// need the values.
    ///
    /// # Errors
    /// Those of `start`, and those of a gather that was in progress; the values are lost then.
    pub fn gather_values(
        &mut self,
        device: &D,
        start: impl FnOnce(Tensor<D>) -> dflop_device::Result<Transfer<D>>,
    ) -> Result<()> {
        self.values.gather(device, start)
    }

    /// Takes the times of the last gather, if it was waited for since they were taken.
    pub fn take_gather_times(&mut self) -> Option<GatherTimes<D>> {
        self.values.take_times()
    }

    /// Orders the compute lane behind a gather of the values.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if the job has ended; the values are lost then.
    pub fn wait_values(&self) -> Result<()> {
        self.values.wait().map(drop)
    }

    /// Returns whether a gather of the values is not waited for yet.
    #[must_use]
    pub fn is_gathering(&self) -> bool {
        self.values.is_gathering()
    }
}
