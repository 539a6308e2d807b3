//! Shares memory that Rust owns with Python, through the buffer protocol and `DLPack`, without a copy.

#![expect(unsafe_code, reason = "both protocols hand memory over by pointers")]

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use super::dlpack::{self, DlTensor};
use super::imports::numpy;
use super::storage::{Owner, Storage};

/// Array in C order that Rust owns, shared with Python and other libraries without a copy.
///
/// An array has the buffer protocol (``numpy.asarray``, ``memoryview``, ``bytes``) and DLPack
/// (``torch.from_dlpack``, ``jax.dlpack.from_dlpack``). The memory lives as long as any view. Undecoded shard
/// fields are read-only.
///
/// Examples:
///     >>> loader = dflop.Loader("shards/", read=dflop.Read(fields="cls", decode="raw"))
///     >>> array = next(iter(loader))["cls"][0]
///     >>> array
///     Array(shape=[1], dtype="uint8")
///     >>> array.shape, array.nbytes, array.is_readonly, bytes(array)
///     ((1,), 1, True, b'6')
///     >>> values = array.numpy()
///     >>> values.ctypes.data == array.data_ptr
///     True
#[pyclass(frozen, module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct Array {
    storage: Arc<Storage>,
    shape: Box<[isize]>,
    strides: Box<[isize]>,
}

impl Array {
    /// # Panics
    /// If the values do not fill the shape, which is a bug in the caller.
    pub(crate) fn new(owner: Owner, shape: &[usize]) -> Self {
        let storage = Storage::new(owner);
        let values: usize = shape.iter().product();
        assert_eq!(values * storage.value_type.bytes, storage.bytes, "values do not fill {shape:?}");
        let mut strides = vec![0; shape.len()];
        let mut stride = storage.value_type.bytes as isize;
        for (axis, &length) in shape.iter().enumerate().rev() {
            strides[axis] = stride;
            stride *= length as isize;
        }
        let shape = shape.iter().map(|&length| length as isize).collect();
        Self { storage: Arc::new(storage), shape, strides: strides.into() }
    }

    /// Wraps the bytes of an undecoded field.
    pub(crate) fn stored(stored: Bytes) -> Self {
        let length = stored.len();
        Self::new(Owner::Stored(stored), &[length])
    }

    fn tensor(&self, storage: Arc<Storage>) -> DlTensor {
        DlTensor { storage, shape: self.shape.iter().map(|&length| length as i64).collect() }
    }
}

#[pymethods]
impl Array {
    /// Axis lengths.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.iter())
    }

    /// Value type, by NumPy name.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.storage.value_type.name
    }

    /// Total size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.storage.bytes
    }

    /// Address of the first value.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.storage.start as usize
    }

    /// Whether the memory is read-only.
    #[getter]
    fn is_readonly(&self) -> bool {
        self.storage.is_readonly
    }

    /// Returns a NumPy array over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        numpy(slf.py())?.call_method1("asarray", (slf,))
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |&length| length as usize)
    }

    fn __repr__(&self) -> String {
        format!("Array(shape={:?}, dtype={:?})", self.shape, self.storage.value_type.name)
    }

    /// Pickles undecoded fields as bytes, other values as a NumPy array.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let py = slf.py();
        // Bytes are read-only too, so that the other process gets the same kind of object.
        if slf.get().storage.is_readonly {
            let bytes = PyBytes::new(py, slf.get().storage.as_bytes());
            return Ok((py.get_type::<PyBytes>().into_any(), PyTuple::new(py, [bytes])?));
        }
        let copy = numpy(py)?.getattr("array")?;
        Ok((copy, PyTuple::new(py, [Self::numpy(slf)?])?))
    }

    /// Returns `(1, 0)`: the CPU.
    #[expect(clippy::unused_self, reason = "the protocol calls a method")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    /// Returns a `DLPack` capsule over the same memory, or over a copy on request.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err(
                "expected no stream: the memory is the CPU's, which has none",
            ));
        }
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err("expected device (1, 0): the memory is the CPU's"));
        }
        let is_copied = copy == Some(true);
        let storage = if is_copied {
            let mut copied = Storage::new(Owner::U8(self.storage.as_bytes().to_vec()));
            copied.value_type = self.storage.value_type;
            Arc::new(copied)
        } else {
            self.storage.clone()
        };
        // DLPack before 1.0 has no flag for read-only memory.
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        if storage.is_readonly && !is_versioned {
            let reason = "the values are read-only, which only DLPack 1.0 and later can say; copy them, \
                          or take `numpy.asarray`";
            return Err(PyBufferError::new_err(reason));
        }
        dlpack::capsule(py, self.tensor(storage), is_versioned, is_copied)
    }

    /// # Safety
    /// Fills a view; Python calls this for the buffer protocol.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("expected a view to fill, found a null pointer"));
        }
        let (array, storage) = (slf.get(), &slf.get().storage);
        if storage.is_readonly && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err(
                "the values are read-only: they are an undecoded field of a shard",
            ));
        }
        let has = |wanted: c_int| flags & wanted == wanted;
        let place = |lengths: &[isize]| lengths.as_ptr().cast_mut();
        // SAFETY: Python passes a view to fill. Everything that it points to lives as long as this object,
        // which the view holds a reference to, and never moves; Python does not write to shape and strides.
        unsafe {
            (*view).buf = storage.start;
            (*view).len = storage.bytes as isize;
            (*view).readonly = storage.is_readonly.into();
            (*view).itemsize = storage.value_type.bytes as isize;
            let format = storage.value_type.format.as_ptr().cast_mut();
            (*view).format = if has(ffi::PyBUF_FORMAT) { format } else { null_mut() };
            (*view).ndim = if has(ffi::PyBUF_ND) { array.shape.len() as c_int } else { 1 };
            (*view).shape = if has(ffi::PyBUF_ND) { place(&array.shape) } else { null_mut() };
            (*view).strides = if has(ffi::PyBUF_STRIDES) { place(&array.strides) } else { null_mut() };
            (*view).suboffsets = null_mut();
            (*view).internal = null_mut();
            (*view).obj = slf.into_ptr();
        }
        Ok(())
    }
}

/// Returns an array with a NumPy type that [`Array`] does not have.
///
/// - `shape`, `order`: as in `numpy.ndarray`
pub(crate) fn numpy_from_stored<'py>(
    py: Python<'py>,
    stored: Bytes,
    dtype: &str,
    shape: &[u64],
    is_fortran_order: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let arguments = PyDict::new(py);
    arguments.set_item("shape", PyTuple::new(py, shape)?)?;
    arguments.set_item("dtype", dtype)?;
    arguments.set_item("buffer", Array::stored(stored))?;
    arguments.set_item("order", if is_fortran_order { "F" } else { "C" })?;
    numpy(py)?.getattr("ndarray")?.call((), Some(&arguments))
}
