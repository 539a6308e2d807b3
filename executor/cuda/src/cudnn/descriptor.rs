//! Backend descriptors: typed attributes, destroyed with their owner.

#![expect(unsafe_code, reason = "calls functions of a library that is opened at run time")]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Kind,
    cudnnBackendDescriptor_t as Raw, cudnnBackendDescriptorType_t as DescriptorType, cudnnBackendHeurMode_t,
    cudnnDataType_t, cudnnPointwiseMode_t, cudnnReduceTensorOp_t,
};

use super::library::{Library, Result};

/// Attribute element type.
///
/// # Safety
/// `KIND` must name the type, and the library must read and write it with this size.
pub(super) unsafe trait Value: Copy {
    const KIND: Kind;
}

// SAFETY: types and sizes are the same as in `cudnn_graph.h`.
unsafe impl Value for i64 {
    const KIND: Kind = Kind::CUDNN_TYPE_INT64;
}
// SAFETY: as above.
unsafe impl Value for i32 {
    const KIND: Kind = Kind::CUDNN_TYPE_INT32;
}
// SAFETY: as above; a C++ `bool` has one byte.
unsafe impl Value for bool {
    const KIND: Kind = Kind::CUDNN_TYPE_BOOLEAN;
}
// SAFETY: as above.
unsafe impl Value for u8 {
    const KIND: Kind = Kind::CUDNN_TYPE_CHAR;
}
// SAFETY: as above; device and host addresses have 64 bits.
unsafe impl Value for *mut c_void {
    const KIND: Kind = Kind::CUDNN_TYPE_VOID_PTR;
}
// SAFETY: as above.
unsafe impl Value for cudnnDataType_t {
    const KIND: Kind = Kind::CUDNN_TYPE_DATA_TYPE;
}
// SAFETY: as above.
unsafe impl Value for cudnnPointwiseMode_t {
    const KIND: Kind = Kind::CUDNN_TYPE_POINTWISE_MODE;
}
// SAFETY: as above.
unsafe impl Value for cudnnReduceTensorOp_t {
    const KIND: Kind = Kind::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
// SAFETY: as above.
unsafe impl Value for cudnnBackendHeurMode_t {
    const KIND: Kind = Kind::CUDNN_TYPE_HEUR_MODE;
}

/// Engine setting kind, `cudnnBackendKnobType_t`; an integer, because a later cuDNN has more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Knob(pub(super) u32);

// SAFETY: as above; enumerations have 32 bits.
unsafe impl Value for Knob {
    const KIND: Kind = Kind::CUDNN_TYPE_KNOB_TYPE;
}

/// Descriptor, and the descriptors that it refers to.
pub(super) struct Descriptor {
    raw: Raw,
    library: Arc<Library>,
    parts: Vec<Arc<Self>>,
}

// SAFETY: a descriptor is plain library memory, bound to no thread.
unsafe impl Send for Descriptor {}
// SAFETY: `&Descriptor` only reads: attributes are set and finalized through `&mut`.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    /// Creates a descriptor without attributes.
    pub(super) fn new(library: &Arc<Library>, kind: DescriptorType) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for the descriptor.
        let status = unsafe { (library.functions().create_descriptor)(kind, &raw mut raw) };
        library.check("cudnnBackendCreateDescriptor", status)?;
        Ok(Self { raw, library: Arc::clone(library), parts: Vec::new() })
    }

    /// Sets an attribute to values.
    pub(super) fn set<T: Value>(&mut self, attribute: Attribute, values: &[T]) -> Result<()> {
        self.set_raw(attribute, T::KIND, values.len(), values.as_ptr().cast())
    }

    /// Sets an attribute to descriptors, which live as long as this descriptor.
    pub(super) fn link(&mut self, attribute: Attribute, parts: &[&Arc<Self>]) -> Result<()> {
        let raw: Vec<Raw> = parts.iter().map(|part| part.raw).collect();
        self.set_raw(attribute, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.len(), raw.as_ptr().cast())?;
        self.parts.extend(parts.iter().map(|&part| Arc::clone(part)));
        Ok(())
    }

    fn set_raw(&mut self, attribute: Attribute, kind: Kind, len: usize, values: *const c_void) -> Result<()> {
        let set = self.library.functions().set_attribute;
        // SAFETY: `values` holds `len` elements of the kind.
        let status = unsafe { set(self.raw, attribute, kind, len as i64, values) };
        self.library.check("cudnnBackendSetAttribute", status)
    }

    /// Checks the attributes and makes the descriptor usable.
    pub(super) fn finalize(mut self) -> Result<Arc<Self>> {
        self.finalize_in_place()?;
        Ok(Arc::new(self))
    }

    fn finalize_in_place(&mut self) -> Result<()> {
        // SAFETY: the descriptor was created by this library and is not destroyed.
        let status = unsafe { (self.library.functions().finalize)(self.raw) };
        self.library.check("cudnnBackendFinalize", status)
    }

    /// Returns a single-value attribute.
    pub(super) fn value<T: Value + Default>(&self, attribute: Attribute) -> Result<T> {
        let mut value = T::default();
        self.get(attribute, T::KIND, 1, (&raw mut value).cast())?;
        Ok(value)
    }

    /// Returns a text attribute.
    pub(super) fn text(&self, attribute: Attribute) -> Result<String> {
        let len = self.get(attribute, u8::KIND, 0, ptr::null_mut())?;
        let mut text = vec![0_u8; len];
        let written = self.get(attribute, u8::KIND, len, text.as_mut_ptr().cast())?;
        text.truncate(written);
        while text.last() == Some(&0) {
            text.pop();
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Returns a descriptor list attribute with a kind.
    pub(super) fn list(&self, attribute: Attribute, kind: DescriptorType) -> Result<Vec<Arc<Self>>> {
        let len = self.get(attribute, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, ptr::null_mut())?;
        let made: Result<Vec<Self>> = (0..len).map(|_| Self::new(&self.library, kind)).collect();
        let mut made = made?;
        let mut raw: Vec<Raw> = made.iter().map(|descriptor| descriptor.raw).collect();
        let written =
            self.get(attribute, Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR, len, raw.as_mut_ptr().cast())?;
        made.truncate(written);
        Ok(made.into_iter().map(Arc::new).collect())
    }

    /// Writes at most `len` attribute elements and returns the total number of elements.
    fn get(&self, attribute: Attribute, kind: Kind, len: usize, values: *mut c_void) -> Result<usize> {
        let mut count = 0_i64;
        let get = self.library.functions().get_attribute;
        // SAFETY: `values` has room for `len` elements of the kind, `count` for their number.
        let status = unsafe { get(self.raw, attribute, kind, len as i64, &raw mut count, values) };
        self.library.check("cudnnBackendGetAttribute", status)?;
        let count = count as usize;
        Ok(if len == 0 { count } else { count.min(len) })
    }

    /// Returns the library that created the descriptor.
    pub(super) const fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Returns the raw descriptor, valid while this descriptor lives.
    pub(super) const fn raw(&self) -> Raw {
        self.raw
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was created by this library and is destroyed once.
        unsafe { (self.library.functions().destroy_descriptor)(self.raw) };
    }
}
