//! Host tasks as lane work.

use dflop_comm::Buffer;

use super::slot::Place;
use super::{Deferred, contents};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::runtime::{HostTask, Tensor};

/// Host task and the memory that it exchanges.
pub(super) struct HostWork<D: Device> {
    input: Option<Tensor<Deferred<D>>>,
    updated: Option<Place<D>>,
    output: Option<Place<D>>,
    task: Box<dyn HostTask>,
    has_started: bool,
}

impl<D: Device> HostWork<D> {
    /// Creates a task that consumes a tensor and fills a second tensor.
    pub(super) fn new(
        input: Option<Tensor<Deferred<D>>>,
        output: Option<Place<D>>,
        task: Box<dyn HostTask>,
    ) -> Self {
        Self { input, updated: None, output, task, has_started: false }
    }

    /// Creates a task that changes a tensor.
    pub(super) fn update(place: Place<D>, task: Box<dyn HostTask>) -> Self {
        Self { input: None, updated: Some(place), output: None, task, has_started: false }
    }

    /// Returns whether the task waits for other ranks.
    pub(super) fn is_in_progress(&self) -> bool {
        self.has_started && !self.task.is_ready()
    }

    pub(super) const fn has_started(&self) -> bool {
        self.has_started
    }

    pub(super) fn start(&mut self, inner: &D) -> Result<()> {
        self.has_started = true;
        let buffer = match (&self.input, &self.updated) {
            (Some(input), _) => {
                Some(Place::of(input).with(inner, |inner, tensor| contents(inner, tensor, false))?)
            }
            (None, Some(place)) => {
                let adds = self.task.adds();
                Some(place.with(inner, |inner, tensor| contents(inner, tensor, adds))?)
            }
            (None, None) => None,
        };
        self.task.start(buffer)
    }

    pub(super) fn finish(self, inner: &D) -> Result<()> {
        let Self { input, updated, output, task, .. } = self;
        let result = task.finish()?;
        if let (Some(place), Some(buffer)) = (updated.or(output), result) {
            place.with_mut(inner, |inner, tensor| store(inner, &buffer, tensor))?;
        }
        drop(input);
        Ok(())
    }
}

/// Writes host elements to an inner device tensor.
fn store<D: Device>(inner: &D, buffer: &Buffer, tensor: &mut Tensor<D>) -> Result<()> {
    match buffer {
        Buffer::F32(values) => inner.write(values, tensor),
        Buffer::Bf16(values) => {
            inner.write(&values.iter().map(|value| value.to_f32()).collect::<Vec<_>>(), tensor)
        }
        Buffer::F64(values) => inner.write_scalars(values, tensor),
        other => {
            let reason = format!("expected numbers, received {:?}", other.dtype());
            Err(Error::InvalidSetting { setting: "tensor", reason })
        }
    }
}
