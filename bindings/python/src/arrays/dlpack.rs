//! Creates `DLPack` capsules over memory that Rust owns.
//!
//! # Source
//! `DLPack` 1.0, `dlpack.h`, and "Python Specification for `DLPack`": a consumer renames the capsule and
//! calls the deleter; the destructor of an unconsumed capsule calls the deleter.

#![expect(unsafe_code, reason = "the protocol consists of C structures and function pointers")]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use super::storage::Storage;

/// CPU device type and number.
pub(crate) const CPU: (i32, i32) = (1, 0);

const NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// An array in C order.
pub(crate) struct DlTensor {
    pub(crate) storage: Arc<Storage>,
    pub(crate) shape: Vec<i64>,
}

/// `DLTensor`.
#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: RawTensor,
}

/// Owner of all data that a managed tensor points to.
struct Context {
    _storage: Arc<Storage>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

fn raw(tensor: DlTensor) -> (RawTensor, *mut Context) {
    let DlTensor { storage, shape } = tensor;
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let (data, value_type) = (storage.start, storage.value_type);
    let context = Box::new(Context { _storage: storage, shape, strides });
    let context = Box::into_raw(context);
    // SAFETY: the context was just created and is not shared; moving the vectors does not move their memory.
    let (shape, strides, ndim) = unsafe {
        ((*context).shape.as_mut_ptr(), (*context).strides.as_mut_ptr(), (*context).shape.len() as i32)
    };
    let raw = RawTensor {
        data,
        device_type: CPU.0,
        device_id: CPU.1,
        ndim,
        code: value_type.code,
        bits: (value_type.bytes * 8) as u8,
        lanes: 1,
        shape,
        strides,
        byte_offset: 0,
    };
    (raw, context)
}

/// Creates a capsule.
pub(crate) fn capsule(
    py: Python<'_>,
    tensor: DlTensor,
    is_versioned: bool,
    is_copied: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let is_readonly = tensor.storage.is_readonly;
    let (tensor, context) = raw(tensor);
    let context = context.cast();
    // SAFETY: the structures have the layout of the protocol. The deleters below free what is given away
    // here, and the capsules' destructors call them if no consumer did.
    unsafe {
        let capsule = if is_versioned {
            let flags = u64::from(is_readonly) * READ_ONLY + u64::from(is_copied) * IS_COPIED;
            let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut ManagedVersioned));
            let managed = ManagedVersioned { major: 1, minor: 0, context, deleter, flags, tensor };
            let managed = Box::into_raw(Box::new(managed)).cast();
            ffi::PyCapsule_New(managed, VERSIONED_NAME.as_ptr(), Some(drop_versioned))
        } else {
            let deleter = Some(delete as unsafe extern "C" fn(*mut Managed));
            let managed = Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast();
            ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(drop_unversioned))
        };
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees a managed tensor; the consumer calls this once, on any thread.
unsafe extern "C" fn delete(managed: *mut Managed) {
    if !managed.is_null() {
        // SAFETY: `capsule` created it, and the protocol calls this once.
        let managed = unsafe { Box::from_raw(managed) };
        // SAFETY: `capsule` created its context too.
        drop(unsafe { Box::from_raw(managed.context.cast::<Context>()) });
    }
}

/// Frees a versioned managed tensor, as [`delete`].
unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    if !managed.is_null() {
        // SAFETY: as in `delete`.
        let managed = unsafe { Box::from_raw(managed) };
        // SAFETY: as in `delete`.
        drop(unsafe { Box::from_raw(managed.context.cast::<Context>()) });
    }
}

/// Destroys a capsule; if the capsule still has the first name, no consumer took the tensor.
unsafe extern "C" fn drop_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule, whose pointer is the one that it was created with.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// Destroys a versioned capsule, as [`drop_unversioned`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_unversioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED_NAME.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED_NAME.as_ptr()).cast());
        }
    }
}
