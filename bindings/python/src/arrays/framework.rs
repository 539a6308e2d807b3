//! Delivers NumPy, PyTorch or JAX arrays, or [`Array`].

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use super::array::Array;
use super::imports::{import, numpy};
use super::storage::Owner;
use crate::error::DflopError;

/// Library whose arrays are delivered, always over the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framework {
    Numpy,
    Torch,
    Jax,
    /// dflop's own [`Array`], for every consumer of `DLPack` or the buffer protocol.
    Dlpack,
    /// `PyTorch` if the process has imported it, else `NumPy`.
    Auto,
}

impl Framework {
    /// # Errors
    /// `ConfigError` for an unknown name.
    pub(crate) fn parse(name: &str) -> PyResult<Self> {
        Ok(match name {
            "numpy" => Self::Numpy,
            "torch" => Self::Torch,
            "jax" => Self::Jax,
            "dlpack" => Self::Dlpack,
            "auto" => Self::Auto,
            _ => {
                let reason = format!("expected numpy, torch, jax, dlpack or auto, found `{name}`");
                return Err(DflopError::config("array_type", reason).into());
            }
        })
    }

    /// Resolves `Auto`, when a loader is created.
    pub(crate) fn resolved(self, py: Python<'_>) -> PyResult<Self> {
        if self != Self::Auto {
            return Ok(self);
        }
        let has_torch = py.import("sys")?.getattr("modules")?.contains("torch")?;
        Ok(if has_torch { Self::Torch } else { Self::Numpy })
    }

    /// Returns an array over the memory of `owner`, without a copy.
    pub(crate) fn array<'py>(
        self,
        py: Python<'py>,
        owner: Owner,
        shape: &[usize],
    ) -> PyResult<Bound<'py, PyAny>> {
        let framework = self.resolved(py)?;
        if framework == Self::Numpy && matches!(owner, Owner::Bf16(_)) {
            let reason = "NumPy has no bfloat16: import torch first, or set `array_type`";
            return Err(DflopError::config("dtype", reason).into());
        }
        let array = Bound::new(py, Array::new(owner, shape))?;
        match framework {
            Self::Torch => import(py, &TORCH, "torch")?.call_method1("from_dlpack", (array,)),
            Self::Jax => import(py, &JAX, "jax.dlpack")?.call_method1("from_dlpack", (array,)),
            Self::Dlpack => Ok(array.into_any()),
            Self::Numpy | Self::Auto => numpy(py)?.call_method1("asarray", (array,)),
        }
    }

    /// Converts a `NumPy` array; other libraries do not support read-only memory, so read-only arrays are
    /// copied for them.
    pub(crate) fn convert_numpy(self, array: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
        let py = array.py();
        match self.resolved(py)? {
            Self::Torch => {
                let copy = numpy(py)?.call_method1("array", (array,))?;
                import(py, &TORCH, "torch")?.call_method1("from_numpy", (copy,))
            }
            Self::Jax => import(py, &JAX_NUMPY, "jax.numpy")?.call_method1("array", (array,)),
            Self::Numpy | Self::Auto | Self::Dlpack => Ok(array),
        }
    }
}

static TORCH: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
static JAX: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
static JAX_NUMPY: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
