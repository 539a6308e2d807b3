//! Product plans: descriptors and an algorithm, which stays the same for all products with the same shape.

#![expect(unsafe_code, reason = "the library is called through C functions")]

use cudarc::cublaslt::sys::{
    self, cublasLtEpilogue_t as Epilogue, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Wanted,
};

use super::descriptors::{Layout, Preference, ProductDescriptor};
use super::{Addresses, Fused, Product, RawHandle, check};
use crate::driver::{Context, MemoryPool, Stream, during};
use crate::error::{Error, Result};
use crate::libraries::cublas_lt;

/// Scratch memory for algorithms in bytes, as NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Library handle.
pub(super) struct Handle {
    handle: RawHandle,
    context: Context,
}

// SAFETY: the library allows calls with one handle from several threads.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: created once, not used again.
            let _ = unsafe { (cublas_lt().cublasLtDestroy)(self.handle) };
        }
    }
}

impl Handle {
    pub(super) fn new(context: &Context) -> Result<Self> {
        context.make_current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable.
        check("cublasLtCreate", unsafe { (cublas_lt().cublasLtCreate)(&raw mut handle) })?;
        Ok(Self { handle, context: context.clone() })
    }
}

/// Scratch memory for a stream.
pub(super) struct Workspace {
    address: u64,
    pool: MemoryPool,
}

impl Workspace {
    pub(super) fn new(pool: &MemoryPool) -> Result<Self> {
        Ok(Self { address: pool.allocate(WORKSPACE_BYTES)?, pool: pool.clone() })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: the pool returned this address; products use it in the order of the pool's stream.
        unsafe { self.pool.free(self.address, WORKSPACE_BYTES) };
    }
}

/// Product descriptors and the algorithm that computes the product.
pub(super) struct Plan {
    product: ProductDescriptor,
    a: Layout,
    b: Layout,
    d: Layout,
    algorithm: cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

impl Plan {
    /// Uses the algorithm that the library ranks first.
    pub(super) fn new(handle: &Handle, product: &Product) -> Result<Self> {
        let Product { rows, columns, inner, a, b, d, fused, .. } = *product;
        let descriptor = ProductDescriptor::new()?;
        // `CUBLAS_OP_N` is 0, `CUBLAS_OP_T` is 1
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(a.is_transposed))?;
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(b.is_transposed))?;
        let epilogue = match fused {
            Fused::None => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
            Fused::Bias => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            Fused::Gelu { has_bias: true, .. } => Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Fused::Gelu { has_bias: false, .. } => Epilogue::CUBLASLT_EPILOGUE_GELU_AUX,
        };
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        if let Fused::Gelu { stride, .. } = fused {
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, stride as i64)?;
        }
        let stored = |is_transposed: bool, rows, columns| {
            if is_transposed { (columns, rows) } else { (rows, columns) }
        };
        let (a_rows, a_columns) = stored(a.is_transposed, rows, inner);
        let (b_rows, b_columns) = stored(b.is_transposed, inner, columns);
        let mut plan = Self {
            product: descriptor,
            a: Layout::new(&a, a_rows, a_columns)?,
            b: Layout::new(&b, b_rows, b_columns)?,
            d: Layout::new(&d, rows, columns)?,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace_bytes: 0,
        };
        plan.choose(handle, product)?;
        Ok(plan)
    }

    /// Requests an algorithm from the library.
    fn choose(&mut self, handle: &Handle, product: &Product) -> Result<()> {
        let preference = Preference::new()?;
        preference.set(Wanted::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        preference.set(Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, product.a.alignment)?;
        preference.set(Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, product.b.alignment)?;
        preference.set(Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, product.d.alignment)?;
        preference.set(Wanted::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, product.d.alignment)?;
        handle.context.make_current()?;
        // SAFETY: the result is plain numbers, for which zeros are values.
        let mut result: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all handles are alive, and the pointers are to local variables.
        let status = unsafe {
            (cublas_lt().cublasLtMatmulAlgoGetHeuristic)(
                handle.handle,
                self.product.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                preference.0,
                1,
                &raw mut result,
                &raw mut count,
            )
        };
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        if count == 0 {
            let call = "cublasLtMatmulAlgoGetHeuristic";
            return Err(Error::Blas { call, status: format!("no algorithm for {product:?}") });
        }
        check("cublasLtMatmulAlgoGetHeuristic", result.state)?;
        self.algorithm = result.algo;
        self.workspace_bytes = result.workspaceSize;
        Ok(())
    }

    pub(super) const fn needs_workspace(&self) -> bool {
        self.workspace_bytes > 0
    }

    /// Queues the product.
    ///
    /// # Safety
    /// See [`super::Blas::multiply`].
    pub(super) unsafe fn run(
        &self,
        handle: &Handle,
        stream: &Stream,
        product: &Product,
        addresses: &Addresses,
        workspace: Option<&Workspace>,
    ) -> Result<()> {
        if matches!(product.fused, Fused::Bias | Fused::Gelu { has_bias: true, .. }) {
            self.product.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, addresses.bias)?;
        }
        if matches!(product.fused, Fused::Gelu { .. }) {
            self.product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, addresses.sums)?;
        }
        handle.context.make_current()?;
        let (one, keep) = (1.0_f32, if product.is_added { 1.0_f32 } else { 0.0 });
        let Addresses { a, b, d, .. } = *addresses;
        // SAFETY: the caller's contract; factors are on the host, the descriptors' default.
        let multiply = || unsafe {
            (cublas_lt().cublasLtMatmul)(
                handle.handle,
                self.product.0,
                (&raw const one).cast(),
                a as *const _,
                self.a.0,
                b as *const _,
                self.b.0,
                (&raw const keep).cast(),
                d as *const _,
                self.d.0,
                d as *mut _,
                self.d.0,
                &raw const self.algorithm,
                workspace.map_or(std::ptr::null_mut(), |workspace| workspace.address as *mut _),
                workspace.map_or(0, |_| WORKSPACE_BYTES),
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", during("cublasLtMatmul", multiply))
    }
}
