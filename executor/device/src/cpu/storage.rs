//! Operation operands in `f32`: borrowed, or widened from bf16 and rounded back.

use std::ops::Deref;
use std::sync::Arc;

use dflop_comm::Buffer;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::{Cpu, CpuMemory};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::runtime::{Memory, Tensor};

/// Number of elements that a thread converts at a time.
pub(super) const CHUNK: usize = 1 << 13;

/// Operand in `f32`.
pub(crate) enum Operand<'a> {
    Borrowed(&'a [f32]),
    Widened(Tensor<Cpu>),
}

impl Deref for Operand<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match self {
            Self::Borrowed(values) => values,
            Self::Widened(tensor) => tensor.f32(),
        }
    }
}

impl Cpu {
    /// Allocates elements with a type other than `f32`.
    pub(super) fn elements(&self, dtype: Dtype, len: usize) -> Result<Tensor<Self>> {
        let bytes = len.saturating_mul(dtype.bytes());
        let none = |_| Error::out_of_memory(bytes, self.buffers.used_bytes());
        let pool = Arc::clone(&self.buffers);
        macro_rules! vector {
            ($make:ident, $poison:expr, $zero:expr) => {{
                let mut values = Vec::new();
                values.try_reserve_exact(len).map_err(none)?;
                pool.reserve(bytes as u64)?;
                // poisoned in debug builds, so that a read before a write is noticed
                values.resize(len, if cfg!(debug_assertions) { $poison } else { $zero });
                CpuMemory::$make(values, pool)
            }};
        }
        let memory = match dtype {
            Dtype::F32 => return Ok(Tensor::new(self.buffers.take_exact(len)?, len)),
            Dtype::Bf16 => vector!(bf16, bf16::NAN, bf16::ZERO),
            Dtype::F64 => vector!(f64, f64::NAN, 0.0),
            Dtype::U32 => vector!(u32, u32::MAX, 0),
        };
        Ok(Tensor::new(memory, len))
    }

    fn widen(&self, halves: &[bf16]) -> Result<Tensor<Self>> {
        let mut full = Tensor::new(self.buffers.take(halves.len())?, halves.len());
        let values = full.f32_mut();
        self.on_pool(|| {
            let pairs = values.par_chunks_mut(CHUNK).zip(halves.par_chunks(CHUNK));
            pairs.for_each(|(full, halves)| halves.convert_to_f32_slice(full));
        });
        Ok(full)
    }

    pub(super) fn round(&self, full: &[f32], halves: &mut [bf16]) {
        self.on_pool(|| {
            let pairs = halves.par_chunks_mut(CHUNK).zip(full.par_chunks(CHUNK));
            pairs.for_each(|(halves, full)| halves.convert_from_f32_slice(full));
        });
    }

    /// Returns the numbers in a tensor as `f32`.
    pub(crate) fn operand<'a>(&self, x: &'a Tensor<Self>) -> Result<Operand<'a>> {
        Ok(match x.dtype() {
            Dtype::Bf16 => Operand::Widened(self.widen(x.bf16())?),
            _ => Operand::Borrowed(x.f32()),
        })
    }

    /// Runs an operation on numbers that it changes, completely or in part, and stores the result.
    pub(crate) fn update<R>(&self, y: &mut Tensor<Self>, run: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        if y.dtype() != Dtype::Bf16 {
            return Ok(run(y.f32_mut()));
        }
        // widened although it may be overwritten: an operation may change only a part
        let mut full = self.widen(y.bf16())?;
        let result = run(full.f32_mut());
        self.round(full.f32(), y.bf16_mut());
        Ok(result)
    }

    /// Runs an operation on numbers that it changes if they are requested.
    pub(crate) fn update_if<R>(
        &self,
        y: Option<&mut Tensor<Self>>,
        run: impl FnOnce(Option<&mut [f32]>) -> Result<R>,
    ) -> Result<R> {
        match y {
            Some(y) => self.update(y, |y| run(Some(y)))?,
            None => run(None),
        }
    }

    /// Creates a tensor from host elements.
    pub(super) fn adopt(&self, dtype: Dtype, buffer: Buffer) -> Result<Tensor<Self>> {
        let len = buffer.elements();
        match (dtype, buffer) {
            (Dtype::F32, Buffer::F32(values)) => Ok(Tensor::new(self.buffers.adopt(values)?, len)),
            (Dtype::Bf16, Buffer::Bf16(values)) => {
                let mut tensor = self.elements(Dtype::Bf16, len)?;
                tensor.bf16_mut().copy_from_slice(&values);
                Ok(tensor)
            }
            (Dtype::F64, Buffer::F64(values)) => {
                let mut tensor = self.elements(Dtype::F64, len)?;
                tensor.f64_mut().copy_from_slice(&values);
                Ok(tensor)
            }
            (dtype, buffer) => {
                let reason = format!("expected {dtype:?}, received {:?}", buffer.dtype());
                Err(Error::InvalidSetting { setting: "tensor", reason })
            }
        }
    }
}

/// Moves tensor elements out of the device, without a copy if no other tensor shares the allocation.
pub(super) fn give(tensor: Tensor<Cpu>) -> Result<Buffer> {
    match tensor.dtype() {
        Dtype::Bf16 => Ok(Buffer::Bf16(tensor.bf16().to_vec())),
        Dtype::F64 => Ok(Buffer::F64(tensor.f64().to_vec())),
        Dtype::U32 => Err(Error::InvalidSetting { setting: "tensor", reason: "indices stay".into() }),
        Dtype::F32 if tensor.len() == tensor.memory().len() => match tensor.into_memory() {
            Ok(memory) => Ok(Buffer::F32(memory.into_f32())),
            Err(tensor) => Ok(Buffer::F32(tensor.f32().to_vec())),
        },
        Dtype::F32 => Ok(Buffer::F32(tensor.f32().to_vec())),
    }
}
