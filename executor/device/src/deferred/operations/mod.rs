//! Operations of the test device, by group: each is queued with the ranges that it reads and writes.

mod activation;
mod attention;
mod elementwise;
mod experts;
mod gemm;
mod latent_heads;
mod loss;
mod norm;
mod update;

use super::Deferred;
use super::queue::{Place, Work};
use crate::device::Device;
use crate::error::Result;
use crate::runtime::{Lane, Tensor};

/// Written operands of an operation, taken in the order in which they were queued.
struct Written<'a, 'b, D: Device>(std::slice::IterMut<'a, &'b mut Tensor<D>>);

impl<'a, 'b, D: Device> Written<'a, 'b, D> {
    fn of(writes: &'a mut [&'b mut Tensor<D>]) -> Self {
        Self(writes.iter_mut())
    }

    fn next(&mut self) -> &'a mut Tensor<D> {
        self.0.next().expect("as many operands as were queued")
    }
}

#[expect(clippy::unnecessary_wraps, reason = "operations end with these calls")]
impl<D: Device> Deferred<D> {
    /// Queues an operation of the compute lane.
    pub(super) fn enqueue<const READS: usize, const WRITES: usize>(
        &self,
        reads: [&Tensor<Self>; READS],
        writes: [&Tensor<Self>; WRITES],
        run: impl FnOnce(&D, [&Tensor<D>; READS], [&mut Tensor<D>; WRITES]) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.enqueue_lists(&reads, &writes, move |inner, reads, writes| {
            let mut written = Written::of(writes);
            run(inner, std::array::from_fn(|index| reads[index]), std::array::from_fn(|_| written.next()))
        })
    }

    /// Queues an operation of the compute lane whose operands are optional or many.
    fn enqueue_lists(
        &self,
        reads: &[&Tensor<Self>],
        writes: &[&Tensor<Self>],
        run: impl FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let places = |tensors: &[&Tensor<Self>]| tensors.iter().map(|tensor| Place::of(tensor)).collect();
        let work = Work::Compute { reads: places(reads), writes: places(writes), run: Box::new(run) };
        self.queue.push(Lane::Compute, work);
        Ok(())
    }
}
