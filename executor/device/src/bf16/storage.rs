//! Buffers of bf16 or `f32`, and the conversion of operands around an operation in `f32`.

use std::ops::Deref;
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::CpuBf16;
use crate::buffer_pool::{BufferPool, CpuFloats};
use crate::device::{Buffer, Device};
use crate::error::{Error, Result};

/// Numbers that a thread converts at a time.
const CHUNK: usize = 1 << 13;

/// Buffer of [`CpuBf16`].
#[derive(Debug)]
pub struct Bf16Floats(pub(super) Storage);

/// Representation of a buffer.
#[derive(Debug)]
pub(super) enum Storage {
    Bf16(Bf16Values),
    F32(CpuFloats),
}

#[derive(Debug)]
pub(super) struct Bf16Values {
    pub(super) values: Vec<bf16>,
    /// Pool whose limit the values count toward.
    pool: Arc<BufferPool>,
}

impl Drop for Bf16Values {
    fn drop(&mut self) {
        self.pool.release(2 * self.values.len() as u64);
    }
}

impl Buffer for Bf16Floats {
    fn len(&self) -> usize {
        match &self.0 {
            Storage::Bf16(halves) => halves.values.len(),
            Storage::F32(full) => Buffer::len(full),
        }
    }
}

/// Operand in `f32`.
pub(super) enum Widened<'a> {
    Borrowed(&'a CpuFloats),
    Owned(CpuFloats),
}

impl Deref for Widened<'_> {
    type Target = CpuFloats;
    fn deref(&self) -> &CpuFloats {
        match self {
            Self::Borrowed(full) => full,
            Self::Owned(full) => full,
        }
    }
}

impl CpuBf16 {
    pub(super) fn halves(&self, len: usize) -> Result<Bf16Values> {
        let mut values = Vec::new();
        let none = |_| Error::out_of_memory(2 * len, self.memory_used_bytes());
        values.try_reserve_exact(len).map_err(none)?;
        let pool = self.cpu.pool_of_buffers();
        pool.reserve(2 * len as u64)?;
        // NaN in debug builds, so that a read before a write is noticed
        values.resize(len, if cfg!(debug_assertions) { bf16::NAN } else { bf16::ZERO });
        Ok(Bf16Values { values, pool: Arc::clone(pool) })
    }

    fn widen(&self, halves: &[bf16]) -> Result<CpuFloats> {
        let mut full = self.cpu.alloc(halves.len())?;
        self.cpu.run(|| {
            let pairs = full.par_chunks_mut(CHUNK).zip(halves.par_chunks(CHUNK));
            pairs.for_each(|(full, halves)| halves.convert_to_f32_slice(full));
        });
        Ok(full)
    }

    fn round(&self, full: &[f32], halves: &mut [bf16]) {
        self.cpu.run(|| {
            let pairs = halves.par_chunks_mut(CHUNK).zip(full.par_chunks(CHUNK));
            pairs.for_each(|(halves, full)| halves.convert_from_f32_slice(full));
        });
    }

    pub(super) fn read<'a>(&self, x: &'a Bf16Floats) -> Result<Widened<'a>> {
        Ok(match &x.0 {
            Storage::F32(full) => Widened::Borrowed(full),
            Storage::Bf16(halves) => Widened::Owned(self.widen(&halves.values)?),
        })
    }

    /// Runs an operation on a buffer that it changes, wholly or in part, and stores the result.
    pub(super) fn update<R>(
        &self,
        y: &mut Bf16Floats,
        run: impl FnOnce(&mut CpuFloats) -> Result<R>,
    ) -> Result<R> {
        match &mut y.0 {
            Storage::F32(full) => run(full),
            Storage::Bf16(halves) => {
                // widened although it may be overwritten: an operation may change only a part of the buffer
                let mut full = self.widen(&halves.values)?;
                let result = run(&mut full)?;
                self.round(&full, &mut halves.values);
                Ok(result)
            }
        }
    }

    pub(super) fn update_if<R>(
        &self,
        y: Option<&mut Bf16Floats>,
        run: impl FnOnce(Option<&mut CpuFloats>) -> Result<R>,
    ) -> Result<R> {
        match y {
            Some(y) => self.update(y, |y| run(Some(y))),
            None => run(None),
        }
    }

    /// Turns a buffer into one of `f32`; its contents are lost.
    pub(super) fn exact<'a>(&self, y: &'a mut Bf16Floats) -> Result<&'a mut CpuFloats> {
        if matches!(y.0, Storage::Bf16(_)) {
            y.0 = Storage::F32(self.cpu.zeros_f32(y.len())?);
        }
        match &mut y.0 {
            Storage::F32(full) => Ok(full),
            Storage::Bf16(_) => unreachable!("it was just made one of `f32`"),
        }
    }

    pub(super) fn store(&self, full: &[f32]) -> Result<Bf16Floats> {
        let mut halves = self.halves(full.len())?;
        self.round(full, &mut halves.values);
        Ok(Bf16Floats(Storage::Bf16(halves)))
    }
}
