//! Kernel launches in the compute stream.
#![expect(unsafe_code, reason = "kernels take addresses")]

use dflop_device::Result;

use crate::compiler::Source;
use crate::device::Cuda;
use crate::driver::{Arguments, Grid};
use crate::kernels::{Kernels, Macros};

impl Cuda {
    /// Launches a kernel with tensors whose shapes the operation has checked.
    pub(super) fn launch(
        &self,
        source: Source,
        name: &'static str,
        macros: Macros,
        grid: Grid,
        mut arguments: Arguments,
    ) -> Result<()> {
        if Kernels::is_recorded((source, name, macros, grid.shared_bytes)) {
            return Ok(());
        }
        self.count_launch();
        let shared = self.shared();
        let function = shared.kernels.get(source, name, macros, grid.shared_bytes)?;
        // SAFETY: operations pass arguments that match the kernel parameters, from tensors that they have
        // checked. A tensor is freed in stream order, and written memory is borrowed mutably.
        let launch = || unsafe { function.launch(&shared.compute, grid, &mut arguments) };
        Ok(shared.times.time(&shared.compute, || name.to_owned(), launch)?)
    }
}
