//! NVRTC and cuBLASLt functions, resolved from the files that [`Libraries::open`] has opened.
//!
//! The bindings search by short name, and may find a different file: a CUDA toolkit in the loader path
//! instead of the wheels in a Python environment. Types and numbers come from the bindings.
//!
//! [`Libraries::open`]: crate::Libraries::open

#![expect(unsafe_code, reason = "functions of C libraries")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasStatus_t, cudaDataType_t,
    cudaStream_t,
};
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use libloading::os::unix::Library;

/// Defines a function table, and the function that resolves it.
macro_rules! function_table {
    ($(#[$note:meta])* $table:ident { $($function:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        $(#[$note])*
        #[expect(non_snake_case, reason = "functions keep their names of C")]
        pub(crate) struct $table {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $table {
            /// Names of all functions.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($function)),*];

            /// Resolves all functions; `None` if one is missing.
            ///
            /// # Safety
            /// The library declares the functions with these types, and stays open.
            pub(crate) unsafe fn find(library: &Library) -> Option<Self> {
                // SAFETY: the caller's contract.
                Some(unsafe { Self { $($function: *library.get(stringify!($function).as_bytes()).ok()?,)* } })
            }
        }
    };
}

function_table! {
    /// NVRTC, the kernel compiler.
    Nvrtc {
        nvrtcVersion(*mut c_int, *mut c_int) -> nvrtcResult;
        nvrtcCreateProgram(
            *mut nvrtcProgram,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> nvrtcResult;
        nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> nvrtcResult;
        nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> nvrtcResult;
        nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> nvrtcResult;
        nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        nvrtcGetErrorString(nvrtcResult) -> *const c_char;
        nvrtcDestroyProgram(*mut nvrtcProgram) -> nvrtcResult;
    }
}

function_table! {
    /// cuBLASLt, the matrix product library.
    CublasLt {
        cublasLtCreate(*mut cublasLtHandle_t) -> cublasStatus_t;
        cublasLtDestroy(cublasLtHandle_t) -> cublasStatus_t;
        cublasLtMatmulDescCreate(
            *mut cublasLtMatmulDesc_t,
            cublasComputeType_t,
            cudaDataType_t,
        ) -> cublasStatus_t;
        cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t) -> cublasStatus_t;
        cublasLtMatmulDescSetAttribute(
            cublasLtMatmulDesc_t,
            cublasLtMatmulDescAttributes_t,
            *const c_void,
            usize,
        ) -> cublasStatus_t;
        cublasLtMatrixLayoutCreate(
            *mut cublasLtMatrixLayout_t,
            cudaDataType_t,
            u64,
            u64,
            i64,
        ) -> cublasStatus_t;
        cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t) -> cublasStatus_t;
        cublasLtMatmulPreferenceCreate(*mut cublasLtMatmulPreference_t) -> cublasStatus_t;
        cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) -> cublasStatus_t;
        cublasLtMatmulPreferenceSetAttribute(
            cublasLtMatmulPreference_t,
            cublasLtMatmulPreferenceAttributes_t,
            *const c_void,
            usize,
        ) -> cublasStatus_t;
        cublasLtMatmulAlgoGetHeuristic(
            cublasLtHandle_t,
            cublasLtMatmulDesc_t,
            cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t,
            cublasLtMatrixLayout_t,
            cublasLtMatmulPreference_t,
            c_int,
            *mut cublasLtMatmulHeuristicResult_t,
            *mut c_int,
        ) -> cublasStatus_t;
        cublasLtMatmul(
            cublasLtHandle_t,
            cublasLtMatmulDesc_t,
            *const c_void,
            *const c_void,
            cublasLtMatrixLayout_t,
            *const c_void,
            cublasLtMatrixLayout_t,
            *const c_void,
            *const c_void,
            cublasLtMatrixLayout_t,
            *mut c_void,
            cublasLtMatrixLayout_t,
            *const cublasLtMatmulAlgo_t,
            *mut c_void,
            usize,
            cudaStream_t,
        ) -> cublasStatus_t;
    }
}

/// Process-wide tables, which the first successful search sets.
static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
static CUBLAS_LT: OnceLock<CublasLt> = OnceLock::new();

/// Keeps the tables for the complete process; existing tables stay.
pub(crate) fn keep(nvrtc: Nvrtc, cublas_lt: CublasLt) {
    let _ = (NVRTC.set(nvrtc), CUBLAS_LT.set(cublas_lt));
}

/// Returns the compiler functions. The libraries are open.
pub(crate) fn nvrtc() -> &'static Nvrtc {
    NVRTC.get().expect("a device opens the libraries first")
}

/// Returns the matrix product library functions. The libraries are open.
pub(crate) fn cublas_lt() -> &'static CublasLt {
    CUBLAS_LT.get().expect("a device opens the libraries first")
}
