//! Kernels: compiled modules, module functions, and launches.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};

use super::check;
use super::context::{Context, during};
use super::stream::Stream;
use crate::error::Result;

/// Maximum shared memory per block without an opt-in attribute, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

/// Loaded compiled code.
#[derive(Clone)]
pub(crate) struct Module(Arc<Loaded>);

struct Loaded {
    module: sys::CUmodule,
    context: Context,
}

// SAFETY: the driver allows calls on a module from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.context.make_current().is_ok() {
            // SAFETY: functions keep the module, so no launch uses it any more.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// Module function.
#[derive(Clone)]
pub(crate) struct Function {
    function: sys::CUfunction,
    module: Module,
}

// SAFETY: the driver allows launches of a function from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads compiled code.
    pub(crate) fn load(context: &Context, image: &[u8]) -> Result<Self> {
        context.make_current()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is complete compiled code, or refused by the driver.
        let load = || unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        let status = during("cuModuleLoadData", load);
        check("cuModuleLoadData", status)?;
        Ok(Self(Arc::new(Loaded { module, context: context.clone() })))
    }

    /// Finds a function and allows `shared_bytes` shared memory per block.
    pub(crate) fn function(&self, name: &str, shared_bytes: u32) -> Result<Function> {
        self.0.context.make_current()?;
        let symbol = CString::new(name).expect("names of kernels have no zeros");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is alive, and the name ends with a zero.
        let find = || unsafe { sys::cuModuleGetFunction(&raw mut function, self.0.module, symbol.as_ptr()) };
        let status = during("cuModuleGetFunction", find);
        check("cuModuleGetFunction", status)?;
        if shared_bytes > SHARED_BYTES {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is alive.
            let status = unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32) };
            check("cuFuncSetAttribute", status)?;
        }
        Ok(Function { function, module: self.clone() })
    }
}

/// Launch dimensions: blocks and threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Number of blocks along both axes.
    pub(crate) blocks: (u32, u32),
    /// Number of threads per block.
    pub(crate) threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub(crate) shared_bytes: u32,
}

/// Kernel arguments, in parameter order.
#[derive(Default)]
pub(crate) struct Arguments {
    values: Vec<u64>,
}

impl Arguments {
    /// Adds an address of device memory.
    pub(crate) fn address(mut self, address: u64) -> Self {
        self.values.push(address);
        self
    }

    /// Adds a `long long`.
    pub(crate) fn long(self, value: usize) -> Self {
        self.address(value as u64)
    }

    /// Adds an `int`.
    ///
    /// # Panics
    /// If the number exceeds `int`; microbatch shapes never do.
    pub(crate) fn int(self, value: usize) -> Self {
        self.address(u64::from(i32::try_from(value).expect("sizes below 2^31").cast_unsigned()))
    }

    /// Adds a `float`.
    pub(crate) fn float(self, value: f32) -> Self {
        self.address(u64::from(value.to_bits()))
    }

    /// Adds a `double`.
    pub(crate) fn double(self, value: f64) -> Self {
        self.address(value.to_bits())
    }
}

impl Function {
    /// Launches the kernel; a grid without blocks does nothing.
    ///
    /// # Safety
    /// The arguments must have the kernel's parameter types; the memory at the passed addresses must live
    /// until the work is done, be as large as the kernel assumes, and not be written by concurrent work.
    pub(crate) unsafe fn launch(&self, stream: &Stream, grid: Grid, arguments: &mut Arguments) -> Result<()> {
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        self.module.0.context.make_current()?;
        // little endian: a smaller number is in the first bytes of its slot
        let mut pointers: Vec<*mut std::ffi::c_void> =
            arguments.values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        // SAFETY: the caller's contract; the driver copies the values before it returns.
        let status = unsafe {
            sys::cuLaunchKernel(
                self.function,
                grid.blocks.0,
                grid.blocks.1,
                1,
                grid.threads,
                1,
                1,
                grid.shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", status)
    }
}
