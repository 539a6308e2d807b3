//! Matrix products with epilogues.

#![expect(unsafe_code, reason = "matrices are addresses")]

use dflop_device::ops::activation::{Activate, Activation};
use dflop_device::ops::bias::{Biases, Columns};
use dflop_device::ops::elementwise::Elementwise;
use dflop_device::ops::gemm::{Epilogue, Gemm, GemmShape, MatrixLayout};
use dflop_device::{Dtype, Result, Tensor};

use crate::blas::{Addresses, Fused, Operand, Product};
use crate::compiler::Kernels;
use crate::device::{Address, Cuda};

/// Multiple, in bf16 elements, that rows of sums before an activation must have, for the library to store
/// them.
const SUMS_MULTIPLE: usize = 8;

impl Gemm for Cuda {
    fn gemm(
        &self,
        shape: GemmShape,
        a: (&Tensor<Self>, MatrixLayout),
        b: (&Tensor<Self>, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
        epilogue: Epilogue<'_, Self>,
    ) -> Result<()> {
        match epilogue {
            Epilogue::None => self.product(shape, a, b, is_added, (c, c_layout), None),
            Epilogue::Bias(bias) => self.product(shape, a, b, false, (c, c_layout), Some(bias)),
            Epilogue::Activation(bias, Activation::GeluTanh, y)
                if !is_added && can_store_sums(c, c_layout, shape) =>
            {
                self.product_gelu(shape, a, b, (c, c_layout), bias, y)
            }
            Epilogue::Activation(bias, activation, y) => {
                self.product(shape, a, b, is_added, (c, c_layout), bias)?;
                self.activate(activation, c, y)
            }
            // The library also sums the bias gradient, but rounds it to bf16.
            Epilogue::BiasGradient(d_bias) => {
                let (dy, layout) = a;
                self.bias_backward(dy, Columns { first: layout.offset, stride: layout.stride }, d_bias)?;
                self.product(shape, a, b, is_added, (c, c_layout), None)
            }
        }
    }
}

/// Returns whether the library can store the sums before an activation in this tensor.
fn can_store_sums(c: &Tensor<Cuda>, layout: MatrixLayout, shape: GemmShape) -> bool {
    let is_plain = layout == MatrixLayout::rows(shape.columns);
    is_plain && shape.columns.is_multiple_of(SUMS_MULTIPLE) && c.is_aligned() && shape.inner > 0
}

impl Cuda {
    /// Computes a product, with an optional bias in every row.
    fn product(
        &self,
        shape: GemmShape,
        (a, a_layout): (&Tensor<Self>, MatrixLayout),
        (b, b_layout): (&Tensor<Self>, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
        bias: Option<&Tensor<Self>>,
    ) -> Result<()> {
        if c_layout.is_transposed {
            assert!(bias.is_none(), "a bias is of the columns of rows");
            let shape = GemmShape { rows: shape.columns, columns: shape.rows, ..shape };
            let (a, b) = ((b, b_layout.transposed()), (a, a_layout.transposed()));
            return self.product(shape, a, b, is_added, (c, c_layout.transposed()), None);
        }
        check(shape, (a, a_layout), (b, b_layout), (c, c_layout));
        let GemmShape { rows, columns, inner } = shape;
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        if inner == 0 {
            return self.empty_sums(shape, is_added, (c, c_layout), bias);
        }
        assert!(bias.is_none_or(|bias| bias.len() == columns), "every column has a bias");
        // a bias with a type other than the result's uses a separate kernel
        let fused = bias.filter(|bias| bias.dtype() == c.dtype());
        if let (Some(bias), None) = (bias, fused) {
            self.bias(bias, c, Columns { first: c_layout.offset, stride: c_layout.stride })?;
        }
        let product = Product {
            rows: columns,
            columns: rows,
            inner,
            a: operand(b, b_layout),
            b: operand(a, a_layout),
            d: operand(c, c_layout),
            is_added: is_added || (bias.is_some() && fused.is_none()),
            fused: if fused.is_some() { Fused::Bias } else { Fused::None },
        };
        let addresses = Addresses {
            a: at(b, b_layout),
            b: at(a, a_layout),
            d: at(c, c_layout),
            bias: fused.map_or(0, Address::address),
            sums: 0,
        };
        self.multiply(&product, &addresses)
    }

    /// Computes a product, with bias and GELU in a single pass.
    fn product_gelu(
        &self,
        shape: GemmShape,
        (a, a_layout): (&Tensor<Self>, MatrixLayout),
        (b, b_layout): (&Tensor<Self>, MatrixLayout),
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
        bias: Option<&Tensor<Self>>,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        check(shape, (a, a_layout), (b, b_layout), (c, c_layout));
        assert!(y.len() == c.len() && y.dtype() == c.dtype(), "activations have the shape of the sums");
        assert!(bias.is_none_or(|bias| bias.len() == shape.columns), "every column has a bias");
        if bias.is_some_and(|bias| bias.dtype() != c.dtype()) || !y.is_aligned() {
            self.product(shape, (a, a_layout), (b, b_layout), false, (c, c_layout), bias)?;
            return self.activate(Activation::GeluTanh, c, y);
        }
        if shape.rows == 0 || shape.columns == 0 {
            return Ok(());
        }
        let product = Product {
            rows: shape.columns,
            columns: shape.rows,
            inner: shape.inner,
            a: operand(b, b_layout),
            b: operand(a, a_layout),
            d: operand(y, c_layout),
            is_added: false,
            fused: Fused::Gelu { has_bias: bias.is_some(), stride: c_layout.stride },
        };
        let addresses = Addresses {
            a: at(b, b_layout),
            b: at(a, a_layout),
            d: y.address(),
            bias: bias.map_or(0, Address::address),
            sums: c.address(),
        };
        self.multiply(&product, &addresses)
    }

    fn multiply(&self, product: &Product, addresses: &Addresses) -> Result<()> {
        if Kernels::is_recording() {
            return Ok(());
        }
        self.count_launch();
        let shared = self.shared();
        // SAFETY: `check` has shown that the matrices are inside their tensors, which are freed in stream
        // order; the result is borrowed mutably.
        let multiply = || unsafe { shared.blas.multiply(&shared.compute, product, addresses) };
        Ok(shared.times.time(&shared.compute, || product.to_string(), multiply)?)
    }

    /// Writes empty sums.
    fn empty_sums(
        &self,
        shape: GemmShape,
        is_added: bool,
        (c, layout): (&mut Tensor<Self>, MatrixLayout),
        bias: Option<&Tensor<Self>>,
    ) -> Result<()> {
        let columns = Columns { first: layout.offset, stride: layout.stride };
        if let Some(bias) = bias {
            return self.bias(bias, c, columns);
        }
        if is_added {
            return Ok(());
        }
        let mut zeros = self.allocate(Dtype::F32, shape.columns)?;
        self.zero(&mut zeros)?;
        self.bias(&zeros, c, columns)
    }
}

/// Returns a matrix address.
fn at(tensor: &Tensor<Cuda>, layout: MatrixLayout) -> u64 {
    tensor.address() + (layout.offset * tensor.dtype().bytes()) as u64
}

/// Describes a matrix by columns: rows in memory are columns of the transpose, which the library receives.
fn operand(tensor: &Tensor<Cuda>, layout: MatrixLayout) -> Operand {
    let address = at(tensor, layout);
    let alignment = 1 << address.trailing_zeros().min(8);
    let MatrixLayout { stride, is_transposed, .. } = layout;
    Operand { dtype: tensor.dtype(), stride, is_transposed, alignment }
}

/// Checks that no matrix exceeds its tensor.
fn check(
    GemmShape { rows, columns, inner }: GemmShape,
    (a, a_layout): (&Tensor<Cuda>, MatrixLayout),
    (b, b_layout): (&Tensor<Cuda>, MatrixLayout),
    (c, c_layout): (&Tensor<Cuda>, MatrixLayout),
) {
    assert!(a_layout.end(rows, inner) <= a.len(), "the left matrix lies in its tensor");
    assert!(b_layout.end(inner, columns) <= b.len(), "the right matrix lies in its tensor");
    assert!(c_layout.end(rows, columns) <= c.len(), "the result lies in its tensor");
    assert_eq!(a.dtype(), b.dtype(), "factors have one type");
}
