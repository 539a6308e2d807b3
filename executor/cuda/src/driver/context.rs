//! Primary device context, shared by all code in the process.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};

use super::check;
use crate::error::{Error, Result};

/// Minimum major compute capability required by the kernels.
const CAPABILITY_MIN: u32 = 8;

/// Retained primary device context.
#[derive(Clone)]
pub(crate) struct Context(Arc<Retained>);

struct Retained {
    context: sys::CUcontext,
    device: sys::CUdevice,
    ordinal: u32,
    name: String,
    capability: (u32, u32),
    processors: u32,
    total_bytes: u64,
    /// Driver version, major and minor.
    driver: (u32, u32),
}

// SAFETY: a context may be used by any thread that makes it current, which every call does.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: the context was retained once. A failure at the end of the process is of no use to anyone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Context {
    /// Returns the number of devices, at least one.
    pub(crate) fn count() -> Result<u32> {
        let no_device = |reason: String| Error::NoDevice { ordinal: 0, reason };
        let mut count = 0;
        // SAFETY: the pointer is to a local variable.
        unsafe {
            check("cuInit", sys::cuInit(0)).map_err(|error| no_device(error.to_string()))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))
                .map_err(|error| no_device(error.to_string()))?;
        }
        if count < 1 {
            return Err(no_device("the driver has no devices".to_owned()));
        }
        Ok(count as u32)
    }

    /// Retains a device's primary context.
    pub(crate) fn new(ordinal: u32) -> Result<Self> {
        // SAFETY: all pointers are to local variables of the types that the functions write.
        unsafe {
            let no_device = |error: Error| Error::NoDevice { ordinal, reason: error.to_string() };
            let count = Self::count()?;
            let (mut version, mut device) = (0, 0);
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut version))?;
            if ordinal >= count {
                return Err(Error::NoDevice { ordinal, reason: format!("the driver has {count} devices") });
            }
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
            let mut name = [0; 256];
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let attribute = |attribute| {
                let mut value = 0;
                check("cuDeviceGetAttribute", sys::cuDeviceGetAttribute(&raw mut value, attribute, device))?;
                Ok::<u32, Error>(value as u32)
            };
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            if major < CAPABILITY_MIN {
                return Err(Error::DeviceTooOld { ordinal, name, major, minor });
            }
            let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
            let mut total_bytes = 0;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut total_bytes, device))?;
            let mut context = std::ptr::null_mut();
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))
                .map_err(no_device)?;
            let version = version as u32;
            Ok(Self(Arc::new(Retained {
                context,
                device,
                ordinal,
                name,
                capability: (major, minor),
                processors,
                total_bytes: total_bytes as u64,
                driver: (version / 1000, version % 1000 / 10),
            })))
        }
    }

    /// Returns whether modules and libraries load all kernels at once.
    ///
    /// # Source
    /// NVIDIA: "CUDA C++ Programming Guide", environment variables, `CUDA_MODULE_LOADING`.
    pub(crate) fn loads_eagerly() -> Result<bool> {
        let mut mode = sys::CUmoduleLoadingMode::CU_MODULE_LAZY_LOADING;
        // SAFETY: the pointer is to a local variable.
        check("cuModuleGetLoadingMode", unsafe { sys::cuModuleGetLoadingMode(&raw mut mode) })?;
        Ok(mode == sys::CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING)
    }

    /// Makes the context current on this thread.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Returns the device ordinal.
    pub(crate) fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Returns the device name.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the compute capability, major and minor.
    pub(crate) fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// Returns the number of streaming multiprocessors.
    pub(crate) fn processors(&self) -> u32 {
        self.0.processors
    }

    /// Returns the device memory in bytes.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.0.total_bytes
    }

    /// Returns the CUDA version that the driver supports, major and minor.
    pub(crate) fn driver_version(&self) -> (u32, u32) {
        self.0.driver
    }
}
