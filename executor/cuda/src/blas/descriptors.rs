//! Library descriptors, with attributes.

#![expect(unsafe_code, reason = "the library is called through C functions")]

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t,
    cudaDataType_t,
};
use dflop_device::Dtype;

use super::{Operand, check};
use crate::error::{Error, Result};
use crate::libraries::cublas_lt;

/// Product description: transposes and epilogue.
pub(super) struct ProductDescriptor(pub(super) sys::cublasLtMatmulDesc_t);

/// Matrix description.
pub(super) struct Layout(pub(super) sys::cublasLtMatrixLayout_t);

/// Algorithm requirements.
pub(super) struct Preference(pub(super) sys::cublasLtMatmulPreference_t);

// SAFETY: descriptors are plain library memory, and used under their plan's lock.
unsafe impl Send for ProductDescriptor {}
// SAFETY: as above.
unsafe impl Send for Layout {}

impl Drop for ProductDescriptor {
    fn drop(&mut self) {
        // SAFETY: created once, not used again.
        let _ = unsafe { (cublas_lt().cublasLtMatmulDescDestroy)(self.0) };
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created once, not used again.
        let _ = unsafe { (cublas_lt().cublasLtMatrixLayoutDestroy)(self.0) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, not used again.
        let _ = unsafe { (cublas_lt().cublasLtMatmulPreferenceDestroy)(self.0) };
    }
}

impl ProductDescriptor {
    /// Describes a product that is computed and scaled in `f32`.
    pub(super) fn new() -> Result<Self> {
        let mut descriptor = std::ptr::null_mut();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        // SAFETY: the pointer is to a local variable.
        let status = unsafe { (cublas_lt().cublasLtMatmulDescCreate)(&raw mut descriptor, compute, scale) };
        check("cublasLtMatmulDescCreate", status)?;
        Ok(Self(descriptor))
    }

    /// Sets an attribute to a value with the attribute type.
    pub(super) fn set<T: Copy>(&self, attribute: cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the library copies as many bytes as the value has, and checks their number.
        let status = unsafe {
            (cublas_lt().cublasLtMatmulDescSetAttribute)(
                self.0,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        };
        check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Layout {
    /// Describes a matrix as it is in memory, by columns.
    pub(super) fn new(operand: &Operand, rows: usize, columns: usize) -> Result<Self> {
        let dtype = match operand.dtype {
            Dtype::F32 => cudaDataType_t::CUDA_R_32F,
            Dtype::Bf16 => cudaDataType_t::CUDA_R_16BF,
            other => {
                let reason = format!("expected F32 or Bf16, found {other:?}");
                return Err(Error::InvalidSetting { setting: "matrix", reason });
            }
        };
        let stride = operand.stride.max(rows);
        let mut layout = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        let status = unsafe {
            (cublas_lt().cublasLtMatrixLayoutCreate)(
                &raw mut layout,
                dtype,
                rows as u64,
                columns as u64,
                stride as i64,
            )
        };
        check("cublasLtMatrixLayoutCreate", status)?;
        Ok(Self(layout))
    }
}

impl Preference {
    pub(super) fn new() -> Result<Self> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        let status = unsafe { (cublas_lt().cublasLtMatmulPreferenceCreate)(&raw mut preference) };
        check("cublasLtMatmulPreferenceCreate", status)?;
        Ok(Self(preference))
    }

    /// Sets an attribute to a value with the attribute type.
    pub(super) fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<()> {
        // SAFETY: the library copies as many bytes as the value has, and checks their number.
        let status = unsafe {
            let value = (&raw const value).cast();
            (cublas_lt().cublasLtMatmulPreferenceSetAttribute)(self.0, attribute, value, size_of::<T>())
        };
        check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}
