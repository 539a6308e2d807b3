//! Matrix products with cuBLASLt.
//!
//! The library works on columns. A row-major matrix is the transpose of a column-major matrix in the same
//! memory, so the transposed product is computed: `cᵀ = bᵀ aᵀ`.

mod descriptors;
mod plan;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys::{cublasLtHandle_t, cublasStatus_t};
use dflop_device::Dtype;

use crate::driver::{Context, MemoryPool, Stream};
use crate::error::{Error, Result};
use plan::{Plan, Workspace};

/// Maximum number of plans: shapes follow from microbatch token counts, which differ.
const PLANS_MAX: usize = 4096;

/// Library handle, with the plans for all products so far.
pub(crate) struct Blas {
    handle: plan::Handle,
    pool: MemoryPool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    plans: HashMap<Product, Plan>,
    workspace: Option<Workspace>,
}

/// Matrix in memory: columns start `stride` elements apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    pub(crate) dtype: Dtype,
    pub(crate) stride: usize,
    /// Whether the product uses the transpose.
    pub(crate) is_transposed: bool,
    /// Largest power of two, up to 256, that divides the address.
    pub(crate) alignment: u32,
}

/// Library work on the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fused {
    None,
    /// Adds a bias.
    Bias,
    /// Adds an optional bias, stores the sums, and applies the hyperbolic tangent approximation of GELU to
    /// them; column starts in `sums` are `stride` elements apart.
    Gelu {
        has_bias: bool,
        stride: usize,
    },
}

/// Product by columns: `d = op(a) op(b)`, or `d += op(a) op(b)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) inner: usize,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) d: Operand,
    pub(crate) is_added: bool,
    pub(crate) fused: Fused,
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, columns, inner, a, b, d, .. } = self;
        let letter = |operand: &Operand| if operand.is_transposed { 'T' } else { 'N' };
        let added = if self.is_added { ", added" } else { "" };
        let fused = match self.fused {
            Fused::None => "",
            Fused::Bias => ", bias",
            Fused::Gelu { .. } => ", GELU",
        };
        write!(
            f,
            "product {rows} x {columns} x {inner} {}{} to {:?}{added}{fused}",
            letter(a),
            letter(b),
            d.dtype
        )
    }
}

/// Matrix addresses in a product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) d: u64,
    /// Bias, if added.
    pub(crate) bias: u64,
    /// Sums before the activation, if there is an activation.
    pub(crate) sums: u64,
}

impl Blas {
    pub(crate) fn new(context: &Context, pool: &MemoryPool) -> Result<Self> {
        Ok(Self { handle: plan::Handle::new(context)?, pool: pool.clone(), state: Mutex::default() })
    }

    /// Queues a product.
    ///
    /// # Safety
    /// The addresses point to matrices with these shapes, which live until the work is done; `d` and the sums
    /// are written by no other work meanwhile.
    #[expect(unsafe_code, reason = "matrices are addresses")]
    pub(crate) unsafe fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        addresses: &Addresses,
    ) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { plans, workspace } = &mut *state;
        if plans.len() >= PLANS_MAX && !plans.contains_key(product) {
            plans.clear();
        }
        let plan = match plans.entry(*product) {
            std::collections::hash_map::Entry::Occupied(plan) => plan.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(Plan::new(&self.handle, product)?)
            }
        };
        if plan.needs_workspace() && workspace.is_none() {
            *workspace = Some(Workspace::new(&self.pool)?);
        }
        // SAFETY: the caller's contract.
        unsafe { plan.run(&self.handle, stream, product, addresses, workspace.as_ref()) }
    }
}

/// Turns a library status into a result.
fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Blas { call, status: format!("{status:?}") })
}

/// Raw library handle, for calls.
type RawHandle = cublasLtHandle_t;
