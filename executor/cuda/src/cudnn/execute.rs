//! Runs plans on a stream.

#![expect(unsafe_code, reason = "calls functions of a library that is opened at run time")]

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType, cudnnHandle_t,
};
use cudarc::driver::sys as driver;

use super::arguments::{Arguments, ColumnCopy, HostValues};
use super::descriptor::Descriptor;
use super::library::{Error, Library, Result};
use super::plan::Plan;

/// Runs plans on a device.
pub struct Executor {
    library: Arc<Library>,
    handle: Mutex<Handle>,
}

/// Library handle, which belongs to a device and runs on a stream.
struct Handle(cudnnHandle_t);

// SAFETY: a handle may move between threads; its owner's mutex prevents concurrent use.
unsafe impl Send for Handle {}

impl Executor {
    /// Creates an executor for the device whose context is current in this thread.
    ///
    /// # Errors
    /// [`super::Error::Refused`] without a device.
    pub fn new(library: &Arc<Library>) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the handle.
        let status = unsafe { (library.functions().create_handle)(&raw mut handle) };
        library.check("cudnnCreate", status)?;
        Ok(Self { library: Arc::clone(library), handle: Mutex::new(Handle(handle)) })
    }

    /// Queues a plan on a stream.
    ///
    /// # Errors
    /// [`super::Error::Shape`] if the arguments do not match the plan, [`super::Error::Refused`].
    ///
    /// # Safety
    /// - The device context must be current in this thread, and `stream` must be a stream on the device,
    ///   `CUstream`.
    /// - The addresses must point to memory with the shapes that [`Arguments`] names.
    /// - `plan` and the memory must live until the stream has passed this call.
    pub unsafe fn execute(&self, plan: &Plan, stream: *mut c_void, arguments: &Arguments) -> Result<()> {
        let values = HostValues::of(arguments);
        let bindings = arguments.bind(plan.key(), plan.form(), plan.own_workspace_bytes(), &values)?;
        let ids: Vec<i64> = bindings.addresses.iter().map(|&(id, _)| id as i64).collect();
        let addresses: Vec<*mut c_void> =
            bindings.addresses.iter().map(|&(_, address)| pointer(address)).collect();
        let mut pack = Descriptor::new(&self.library, DescriptorType::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[pointer(arguments.workspace)])?;
        let pack = pack.finalize()?;
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let functions = self.library.functions();
        // SAFETY: the handle lives; the caller passes a stream on its device.
        let status = unsafe { (functions.set_stream)(handle.0, stream.cast()) };
        self.library.check("cudnnSetStream", status)?;
        // SAFETY: both descriptors are final; the caller is responsible for the addresses, and the host
        // values, which the call reads before it returns, live in `values`.
        let status = unsafe { (functions.execute)(handle.0, plan.descriptor().raw(), pack.raw()) };
        self.library.check("cudnnBackendExecute", status)?;
        for copy in bindings.copies.iter().filter(|copy| copy.rows > 0) {
            // SAFETY: the caller is responsible for the matrix and the stream; the workspace holds the other
            // end.
            unsafe { copy_columns(copy, stream) }?;
        }
        Ok(())
    }
}

/// Returns an address as a library pointer.
fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Queues a column copy.
///
/// # Safety
/// Both ends must be memory on the device of the stream.
unsafe fn copy_columns(copy: &ColumnCopy, stream: *mut c_void) -> Result<()> {
    let memory = driver::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = driver::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: memory,
        srcHost: ptr::null(),
        srcDevice: copy.from.0,
        srcArray: ptr::null_mut(),
        srcPitch: copy.from.1,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: memory,
        dstHost: ptr::null_mut(),
        dstDevice: copy.to.0,
        dstArray: ptr::null_mut(),
        dstPitch: copy.to.1,
        WidthInBytes: copy.width_bytes,
        Height: copy.rows,
    };
    // SAFETY: same contract as this function.
    let status = unsafe { driver::cuMemcpy2DAsync_v2(&raw const copy, stream.cast()) };
    if status == driver::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let (call, detail) = ("cuMemcpy2DAsync", format!("{status:?}"));
    Err(Error::Refused { call, status: status as u32, detail })
}

impl Drop for Executor {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the handle was created by this library and is destroyed once.
        unsafe { (self.library.functions().destroy_handle)(handle.0) };
    }
}
