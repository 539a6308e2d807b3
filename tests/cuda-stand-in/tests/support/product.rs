//! Products through cuBLASLt.
#![expect(unsafe_code, reason = "calls of CUDA")]

use cudarc::{
    cublaslt::{
        result,
        sys::{
            cublasComputeType_t, cublasLtMatmulDescAttributes_t as Attribute,
            cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t,
            cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t, cudaDataType,
        },
    },
    driver::{CudaSlice, CudaStream, DevicePtr},
};
use std::ffi::c_void;

pub(crate) const F32: cudaDataType = cudaDataType::CUDA_R_32F;
pub(crate) const BF16: cudaDataType = cudaDataType::CUDA_R_16BF;

pub(crate) mod epilogue {
    pub(crate) const DEFAULT: u32 = 1;
    pub(crate) const RELU: u32 = 2;
    pub(crate) const BIAS: u32 = 4;
    pub(crate) const RELU_BIAS: u32 = 6;
    pub(crate) const GELU: u32 = 32;
    pub(crate) const GELU_BIAS: u32 = 36;
    pub(crate) const GELU_AUX: u32 = 160;
    pub(crate) const GELU_AUX_BIAS: u32 = 164;
    pub(crate) const DGELU: u32 = 192;
    pub(crate) const DGELU_BGRAD: u32 = 208;
    pub(crate) const BGRADA: u32 = 256;
    pub(crate) const BGRADB: u32 = 512;
}

/// A stored matrix; `index` takes the indices that the product sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    pub(crate) is_by_rows: bool,
    pub(crate) is_transposed: bool,
}

impl Matrix {
    fn new(rows: usize, columns: usize, is_transposed: bool) -> Self {
        let (rows, columns) = if is_transposed { (columns, rows) } else { (rows, columns) };
        Self { rows, columns, leading: rows, is_by_rows: false, is_transposed }
    }

    pub(crate) fn index(&self, i: usize, j: usize) -> usize {
        let (i, j) = if self.is_transposed { (j, i) } else { (i, j) };
        if self.is_by_rows { i * self.leading + j } else { j * self.leading + i }
    }

    pub(crate) fn elements(&self) -> usize {
        self.leading * if self.is_by_rows { self.rows } else { self.columns }
    }

    /// # Safety
    /// The layout must be destroyed.
    unsafe fn layout(&self, kind: cudaDataType) -> cublasLtMatrixLayout_t {
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        let layout = result::create_matrix_layout(kind, rows, columns, self.leading as i64).unwrap();
        let order = i32::from(self.is_by_rows);
        let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_ORDER;
        // SAFETY: the attribute has the size of an i32.
        unsafe {
            result::set_matrix_layout_attribute(layout, attribute, (&raw const order).cast(), 4).unwrap();
        }
        layout
    }
}

/// `D = epilogue(alpha * A * B + beta * C)`; C has the layout of D.
#[derive(Debug, Clone)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) d: Matrix,
    pub(crate) input: cudaDataType,
    pub(crate) output: cudaDataType,
    pub(crate) epilogue: u32,
    pub(crate) aux_leading: usize,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

impl Product {
    pub(crate) fn new(m: usize, n: usize, k: usize, is_a_transposed: bool, is_b_transposed: bool) -> Self {
        Self {
            m,
            n,
            k,
            a: Matrix::new(m, k, is_a_transposed),
            b: Matrix::new(k, n, is_b_transposed),
            d: Matrix::new(m, n, false),
            input: F32,
            output: F32,
            epilogue: epilogue::DEFAULT,
            aux_leading: m.next_multiple_of(8),
            alpha: 1.0,
            beta: 0.0,
        }
    }

    pub(crate) fn types(self, input: cudaDataType, output: cudaDataType) -> Self {
        Self { input, output, ..self }
    }

    pub(crate) fn epilogue(self, epilogue: u32) -> Self {
        Self { epilogue, ..self }
    }

    /// Enqueues the product with the pointers of A, B, C, D, the bias and the auxiliary matrix.
    pub(crate) fn run(
        &self,
        stream: &CudaStream,
        pointers: [u64; 6],
        workspace: &CudaSlice<u8>,
    ) -> Result<(), cublasStatus_t> {
        let handle = result::create_handle().unwrap();
        let description = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, F32).unwrap();
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the value lives through the call and has this size.
            unsafe { result::set_matmul_desc_attribute(description, attribute, value, bytes) }.unwrap();
        };
        let transposes = [i32::from(self.a.is_transposed), i32::from(self.b.is_transposed)];
        let aux_leading = self.aux_leading as i64;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, (&raw const transposes[0]).cast(), 4);
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, (&raw const transposes[1]).cast(), 4);
        set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const self.epilogue).cast(), 4);
        set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const pointers[4]).cast(), 8);
        set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (&raw const pointers[5]).cast(), 8);
        set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (&raw const aux_leading).cast(), 8);
        let preference = result::create_matmul_pref().unwrap();
        let bytes = workspace.num_bytes();
        // SAFETY: all objects live until they are destroyed below, and the pointers belong to the test.
        unsafe {
            result::set_matmul_pref_attribute(
                preference,
                PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                8,
            )
            .unwrap();
            let a = self.a.layout(self.input);
            let b = self.b.layout(self.input);
            let d = self.d.layout(self.output);
            let status = result::get_matmul_algo_heuristic(handle, description, a, b, d, d, preference)
                .and_then(|heuristic| {
                    result::matmul(
                        handle,
                        description,
                        (&raw const self.alpha).cast(),
                        (&raw const self.beta).cast(),
                        pointers[0] as *const c_void,
                        a,
                        pointers[1] as *const c_void,
                        b,
                        pointers[2] as *const c_void,
                        d,
                        pointers[3] as *mut c_void,
                        d,
                        &raw const heuristic.algo,
                        workspace.device_ptr(workspace.stream()).0 as *mut c_void,
                        bytes,
                        stream.cu_stream().cast(),
                    )
                });
            for layout in [a, b, d] {
                result::destroy_matrix_layout(layout).unwrap();
            }
            result::destroy_matmul_pref(preference).unwrap();
            result::destroy_matmul_desc(description).unwrap();
            result::destroy_handle(handle).unwrap();
            status.map_err(|error| error.0)
        }
    }
}
