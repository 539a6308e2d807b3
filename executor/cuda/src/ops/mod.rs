//! Device operations, by group: each launches the kernels in the corresponding file in `kernels/`.
//!
//! Shapes are checked where a kernel could otherwise access memory outside the tensors; [`dflop_device::ops`]
//! documents them.

mod activation;
mod attention;
mod attention_sinks;
mod clamped_gate;
mod column_sums;
mod elementwise;
mod experts;
mod gather_scatter;
mod gemm;
mod head_norm;
mod latent_heads;
mod loss;
mod norm;
mod rope;
mod update;

use dflop_device::{Dtype, Result, Tensor};

use crate::compiler::{Kernels, Macros, Source};
use crate::device::{Address, Cuda};
use crate::driver::{Arguments, Grid};

/// Number of threads per block in most kernels.
const THREADS: u32 = 256;

/// Number of elements that a thread handles at a time if all tensors are aligned: 16 bytes in bf16.
const WIDTH: usize = crate::compiler::WIDE as usize;

/// Returns the number of elements that a thread handles at a time.
///
/// - `run`: number of consecutive elements in all tensors, such as a row
fn width(run: usize, tensors: &[&Tensor<Cuda>]) -> u32 {
    let is_wide = run.is_multiple_of(WIDTH) && tensors.iter().all(|tensor| tensor.is_aligned());
    if is_wide { WIDTH as u32 } else { 1 }
}

/// Returns the number of columns that a thread keeps in registers: `OWN` in `own_columns.cuh`.
fn own_columns(macros: Macros) -> usize {
    match (macros.number, macros.types) {
        (Some((_, 1)), _) => 4,
        (_, [Some(Dtype::Bf16), Some(Dtype::Bf16), _]) => 16,
        _ => 8,
    }
}

impl Grid {
    /// Returns a grid with a thread for every `width` elements.
    fn elements(len: usize, width: u32) -> Self {
        Self::blocks(len.div_ceil((THREADS * width) as usize), THREADS)
    }

    /// Returns a grid with blocks along the first axis.
    fn blocks(blocks: usize, threads: u32) -> Self {
        let blocks = u32::try_from(blocks).expect("fewer than 2^32 blocks");
        Self { blocks: (blocks, 1), threads, shared_bytes: 0 }
    }

    /// Adds blocks along the second axis.
    fn by(mut self, blocks: usize) -> Self {
        self.blocks.1 = u32::try_from(blocks).expect("fewer than 2^16 blocks");
        self
    }
}

impl Arguments {
    /// Adds a tensor that is read.
    fn read(self, tensor: &Tensor<Cuda>) -> Self {
        self.address(tensor.address())
    }

    /// Adds an optional input tensor.
    fn read_if(self, tensor: Option<&Tensor<Cuda>>) -> Self {
        self.address(tensor.map_or(0, Address::address))
    }

    /// Adds a tensor that is written.
    fn write(self, tensor: &mut Tensor<Cuda>) -> Self {
        self.address(tensor.address())
    }

    /// Adds an optional output tensor.
    fn write_if(self, tensor: Option<&mut Tensor<Cuda>>) -> Self {
        self.address(tensor.map_or(0, |tensor| tensor.address()))
    }
}

/// Checks that all tensors have the same type.
fn same_type(tensors: &[&Tensor<Cuda>]) -> Dtype {
    let first = tensors[0].dtype();
    assert!(tensors.iter().all(|tensor| tensor.dtype() == first), "operands have one type");
    first
}

impl Cuda {
    /// Launches a kernel with tensors whose shapes the operation has checked.
    #[expect(unsafe_code, reason = "kernels take addresses")]
    fn launch(
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
