//! Safe wrapper for the matrix product in the crate `gemm`.
//!
//! The crate takes raw pointers and strides; here matrices are slices, and every element that a product can
//! access is checked to be in bounds.
//!
//! Each result element is a sum over `k` in blocks whose size depends only on the shapes; threads divide rows
//! and columns, never `k`. Results are therefore bit-equal for any number of threads, which a test checks.
#![expect(unsafe_code, reason = "`gemm` takes raw pointers; bounds are checked here")]

use super::activation::{Activate, Activation};
use super::argument::{Argument, Operands, Places, Queues, values};
use super::bias::{Biases, Columns};
use super::operation::operation;
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Work on a matrix product result that a device can do in the same pass.
pub enum Epilogue<'a, D: Runtime> {
    /// No additional work.
    None,
    /// Adds a bias to every row.
    Bias(&'a Tensor<D>),
    /// Adds a bias to every row if there is one, and writes the activated result to a second tensor; result
    /// rows have no gaps.
    Activation(Option<&'a Tensor<D>>, Activation, &'a mut Tensor<D>),
    /// Accumulates sums over rows in the transposed first matrix: a bias gradient.
    BiasGradient(&'a mut Tensor<D>),
}

/// Epilogue of a queued product.
pub(crate) enum QueuedEpilogue {
    None,
    Bias,
    Activation { has_bias: bool, activation: Activation },
    BiasGradient,
}

impl<Q: Queues> Argument<Q> for Epilogue<'_, Q> {
    type Kept = QueuedEpilogue;
    type Opened<'a> = Epilogue<'a, Q::Inner>;
    type Inner<'a> = Epilogue<'a, Q::Inner>;

    fn keep(self, places: &mut Places<Q>) -> QueuedEpilogue {
        match self {
            Self::None => QueuedEpilogue::None,
            Self::Bias(bias) => {
                places.read(bias);
                QueuedEpilogue::Bias
            }
            Self::Activation(bias, activation, y) => {
                let has_bias = bias.map(|bias| places.read(bias)).is_some();
                places.write(y);
                QueuedEpilogue::Activation { has_bias, activation }
            }
            Self::BiasGradient(d_bias) => {
                places.write(d_bias);
                QueuedEpilogue::BiasGradient
            }
        }
    }

    fn open<'a>(kept: QueuedEpilogue, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        Ok(match kept {
            QueuedEpilogue::None => Epilogue::None,
            QueuedEpilogue::Bias => Epilogue::Bias(operands.read()),
            QueuedEpilogue::Activation { has_bias, activation } => {
                let bias = has_bias.then(|| operands.read());
                Epilogue::Activation(bias, activation, operands.write())
            }
            QueuedEpilogue::BiasGradient => Epilogue::BiasGradient(operands.write()),
        })
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        match opened {
            Epilogue::None => Epilogue::None,
            Epilogue::Bias(bias) => Epilogue::Bias(bias),
            Epilogue::Activation(bias, activation, y) => Epilogue::Activation(*bias, *activation, y),
            Epilogue::BiasGradient(d_bias) => Epilogue::BiasGradient(d_bias),
        }
    }
}

operation! {
    /// Matrix products.
    pub trait Gemm: Runtime {
        /// Multiplies matrices: `c = a b`, or `c += a b`.
        ///
        /// - `epilogue`: a bias applies to the columns in `c`, and is not allowed if the product is added
        fn gemm(
            &self,
            shape: GemmShape,
            a: (&Tensor<Self>, MatrixLayout),
            b: (&Tensor<Self>, MatrixLayout),
            is_added: bool,
            c: (&mut Tensor<Self>, MatrixLayout),
            epilogue: Epilogue<'_, Self>,
        ) -> Result<()>;
    }
}

impl Cpu {
    fn product(
        &self,
        shape: GemmShape,
        (a, a_layout): (&Tensor<Self>, MatrixLayout),
        (b, b_layout): (&Tensor<Self>, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
    ) -> Result<()> {
        // `gemm` computes `keep * c + a b`, and does not read `c` if `keep` is 0
        let keep = if is_added { 1.0 } else { 0.0 };
        let (a, b, threads) = (self.operand(a)?, self.operand(b)?, self.threads());
        self.update(c, |c| {
            self.on_pool(|| gemm(threads, shape, 1.0, (&*a, a_layout), (&*b, b_layout), keep, (c, c_layout)));
        })
    }
}

impl Gemm for Cpu {
    fn gemm(
        &self,
        shape: GemmShape,
        a: (&Tensor<Self>, MatrixLayout),
        b: (&Tensor<Self>, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Tensor<Self>, MatrixLayout),
        epilogue: Epilogue<'_, Self>,
    ) -> Result<()> {
        let columns = Columns { first: c_layout.offset, stride: c_layout.stride };
        match epilogue {
            Epilogue::None => self.product(shape, a, b, is_added, (c, c_layout)),
            // the product is added to the bias, which saves a pass over the result
            Epilogue::Bias(bias) => {
                self.bias(bias, c, columns)?;
                self.product(shape, a, b, true, (c, c_layout))
            }
            Epilogue::Activation(bias, activation, y) => {
                if let Some(bias) = bias {
                    self.bias(bias, c, columns)?;
                }
                self.product(shape, a, b, bias.is_some() || is_added, (c, c_layout))?;
                self.activate(activation, c, y)
            }
            Epilogue::BiasGradient(d_bias) => {
                let (dy, layout) = a;
                self.bias_backward(dy, Columns { first: layout.offset, stride: layout.stride }, d_bias)?;
                self.product(shape, a, b, is_added, (c, c_layout))
            }
        }
    }
}

/// Multiply-adds below which a product stays on the calling thread.
const PARALLEL_MULTIPLY_ADDS: usize = 1 << 17;

/// Matrix inside a slice: rows start `stride` elements apart, or columns if it is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixLayout {
    /// First element.
    pub offset: usize,
    /// Number of elements from a stored row to the next.
    pub stride: usize,
    /// Whether stored rows are matrix columns.
    pub is_transposed: bool,
}

values!(MatrixLayout);

impl MatrixLayout {
    /// Returns the layout for a matrix with contiguous rows.
    #[must_use]
    pub const fn rows(columns: usize) -> Self {
        Self { offset: 0, stride: columns, is_transposed: false }
    }

    /// Returns the transposed layout.
    #[must_use]
    pub const fn transposed(mut self) -> Self {
        self.is_transposed = !self.is_transposed;
        self
    }

    /// Returns the layout for a matrix that starts `elements` later.
    #[must_use]
    pub const fn at(mut self, elements: usize) -> Self {
        self.offset += elements;
        self
    }

    /// Returns the row stride and the column stride.
    const fn strides(self) -> (isize, isize) {
        if self.is_transposed { (1, self.stride as isize) } else { (self.stride as isize, 1) }
    }

    /// Returns the number of elements that a slice needs for a matrix with this shape; 0 for an empty matrix.
    #[must_use]
    pub fn end(self, rows: usize, columns: usize) -> usize {
        let (stored_rows, stored_columns) =
            if self.is_transposed { (columns, rows) } else { (rows, columns) };
        if rows == 0 || columns == 0 {
            return 0;
        }
        // several threads would write to overlapping result rows
        assert!(stored_columns <= self.stride || stored_rows == 1, "rows overlap");
        (stored_rows - 1)
            .checked_mul(self.stride)
            .and_then(|start| start.checked_add(stored_columns)?.checked_add(self.offset))
            .expect("a matrix that fits into memory")
    }
}

/// Product sizes: `[rows, inner] x [inner, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmShape {
    /// Number of rows in the result.
    pub rows: usize,
    /// Number of columns in the result.
    pub columns: usize,
    /// Number of summands per result element.
    pub inner: usize,
}

values!(GemmShape);

/// Computes `c = keep * c + scale * a b`; with `keep` = 0 the old contents of `c` are not read.
///
/// `threads` is the maximum number of threads that take part.
///
/// # Panics
/// If a matrix exceeds the slice.
pub(crate) fn gemm<F: Real>(
    threads: usize,
    shape: GemmShape,
    scale: F,
    (a, a_layout): (&[F], MatrixLayout),
    (b, b_layout): (&[F], MatrixLayout),
    keep: F,
    (c, c_layout): (&mut [F], MatrixLayout),
) {
    let GemmShape { rows, columns, inner } = shape;
    assert!(a_layout.end(rows, inner) <= a.len(), "the left matrix lies in its slice");
    assert!(b_layout.end(inner, columns) <= b.len(), "the right matrix lies in its slice");
    assert!(c_layout.end(rows, columns) <= c.len(), "the result lies in its slice");
    if rows == 0 || columns == 0 {
        return;
    }
    let (a_row, a_column) = a_layout.strides();
    let (b_row, b_column) = b_layout.strides();
    let (c_row, c_column) = c_layout.strides();
    let is_small = rows.saturating_mul(columns).saturating_mul(inner) < PARALLEL_MULTIPLY_ADDS;
    let parallelism = match threads {
        threads if threads > 1 && !is_small => gemm::Parallelism::Rayon(threads),
        _ => gemm::Parallelism::None,
    };
    // an empty operand may have an offset beyond its slice
    let first = |layout: MatrixLayout| if inner == 0 { 0 } else { layout.offset };
    let (a_at, b_at) = (first(a_layout), first(b_layout));
    // SAFETY: the three matrices are within their slices, as asserted above; result rows do not overlap; the
    // result is borrowed mutably, so it does not alias the operands. If `inner` is 0, neither operand is
    // read.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            c[c_layout.offset..].as_mut_ptr(),
            c_column,
            c_row,
            keep != F::ZERO,
            a[a_at..].as_ptr(),
            a_column,
            a_row,
            b[b_at..].as_ptr(),
            b_column,
            b_row,
            keep,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, input};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let (a, b) = (input(d, ROWS * 5, 1)?, input(d, COLUMNS * 5, 2)?);
        let shape = GemmShape { rows: ROWS, columns: COLUMNS, inner: 5 };
        let (a_layout, b_layout) = (MatrixLayout::rows(5), MatrixLayout::rows(5).transposed());
        let product = |is_added| {
            // into some columns in wider rows: remaining columns are unchanged
            changed(d, ROWS * 7, 4, |c| {
                let c = (c, MatrixLayout::rows(7).at(2));
                d.gemm(shape, (&a, a_layout), (&b, b_layout), is_added, c, Epilogue::None)
            })
        };
        let mut all = vec![("gemm", product(false)?), ("gemm added", product(true)?)];
        let bias = input(d, COLUMNS, 6)?;
        let epilogue = |epilogue: Epilogue<'_, D>| {
            changed(d, LEN, 4, |c| {
                let c = (c, MatrixLayout::rows(COLUMNS));
                d.gemm(shape, (&a, a_layout), (&b, b_layout), false, c, epilogue)
            })
        };
        all.push(("gemm with bias", epilogue(Epilogue::Bias(&bias))?));
        let mut y = d.alloc(LEN)?;
        let product = epilogue(Epilogue::Activation(Some(&bias), Activation::Silu, &mut y))?;
        all.extend([("gemm before activation", product), ("gemm with activation", d.download(&y)?)]);
        let mut d_bias = input(d, 5, 7)?;
        let columns = GemmShape { rows: 5, columns: 5, inner: ROWS };
        let product = changed(d, 25, 4, |c| {
            let (a, b) = ((&a, MatrixLayout::rows(5).transposed()), (&a, MatrixLayout::rows(5)));
            d.gemm(columns, a, b, true, (c, MatrixLayout::rows(5)), Epilogue::BiasGradient(&mut d_bias))
        });
        all.extend([("gemm with bias gradient", product?), ("bias gradient", d.download(&d_bias)?)]);
        Ok(all)
    }

    fn matrix(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 + seed * 11) % 23) as f32 / 7.0 - 1.5).collect()
    }

    fn naive(shape: GemmShape, a: (&[f32], MatrixLayout), b: (&[f32], MatrixLayout)) -> Vec<f32> {
        let get = |(slice, layout): (&[f32], MatrixLayout), row: usize, column: usize| {
            let (row_stride, column_stride) = layout.strides();
            slice[layout.offset + row * row_stride as usize + column * column_stride as usize]
        };
        let element = |row, column| (0..shape.inner).map(|k| get(a, row, k) * get(b, k, column)).sum();
        (0..shape.rows)
            .flat_map(|row| (0..shape.columns).map(move |column| (row, column)))
            .map(|(r, c)| element(r, c))
            .collect()
    }

    #[test]
    fn products_match_the_definition() {
        let shape = GemmShape { rows: 5, columns: 7, inner: 3 };
        let (a, b) = (matrix(64, 1), matrix(64, 2));
        for a_layout in
            [MatrixLayout::rows(3), MatrixLayout::rows(6).transposed().at(2), MatrixLayout::rows(9).at(1)]
        {
            for b_layout in [MatrixLayout::rows(7), MatrixLayout::rows(4).transposed().at(3)] {
                let truth = naive(shape, (&a, a_layout), (&b, b_layout));
                let mut c = vec![1.0; 40];
                let layout = MatrixLayout::rows(7);
                gemm(1, shape, 2.0, (&a, a_layout), (&b, b_layout), 3.0, (&mut c, layout));
                for (found, truth) in c.iter().zip(&truth) {
                    assert!((found - (3.0 + 2.0 * truth)).abs() < 1e-4);
                }
                assert_eq!(c[35..], [1.0; 5]);
            }
        }
    }

    /// The three products in a linear layer, as models compute them.
    #[test]
    fn gradients_of_a_linear_layer_match_finite_differences() {
        use crate::ops::finite_difference::{check, numbers, project};
        let (rows, inputs, outputs) = (21, 9, 13);
        let (x, w, dy) =
            (numbers(rows * inputs, 1), numbers(outputs * inputs, 2), numbers(rows * outputs, 3));
        let (by_input, by_output) = (MatrixLayout::rows(inputs), MatrixLayout::rows(outputs));
        let forward = |x: &[f64], w: &[f64]| {
            let mut y = vec![f64::NAN; rows * outputs];
            let shape = GemmShape { rows, columns: outputs, inner: inputs };
            gemm(1, shape, 1.0, (x, by_input), (w, by_input.transposed()), 0.0, (&mut y, by_output));
            project(&y, &dy)
        };
        let (mut dx, mut dw) = (vec![f64::NAN; x.len()], vec![0.0; w.len()]);
        let shape = GemmShape { rows, columns: inputs, inner: outputs };
        gemm(1, shape, 1.0, (&dy, by_output), (&w, by_input), 0.0, (&mut dx, by_input));
        let shape = GemmShape { rows: outputs, columns: inputs, inner: rows };
        gemm(1, shape, 1.0, (&dy, by_output.transposed()), (&x, by_input), 1.0, (&mut dw, by_input));
        check("x", &x, &dx, |x| forward(x, &w));
        check("weight", &w, &dw, |w| forward(&x, w));
    }

    #[test]
    fn old_contents_are_read_only_if_they_are_kept() {
        let shape = GemmShape { rows: 1, columns: 1, inner: 0 };
        let mut c = [f32::NAN];
        gemm(
            1,
            shape,
            1.0,
            (&[], MatrixLayout::rows(0)),
            (&[], MatrixLayout::rows(1)),
            0.0,
            (&mut c, MatrixLayout::rows(1)),
        );
        assert_eq!(c, [0.0]);
    }

    #[test]
    #[should_panic(expected = "the right matrix lies in its slice")]
    fn a_matrix_beyond_its_slice_is_refused() {
        let shape = GemmShape { rows: 2, columns: 2, inner: 2 };
        let mut c = [0.0; 4];
        let layout = MatrixLayout::rows(2);
        gemm(1, shape, 1.0, (&[0.0_f32; 4], layout), (&[0.0; 3], layout), 0.0, (&mut c, layout));
    }

    #[test]
    fn threads_change_no_bit() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for (rows, columns, inner) in
            [(300, 65, 513), (64, 1000, 129), (1, 700, 600), (700, 1, 600), (33, 257, 2048)]
        {
            let shape = GemmShape { rows, columns, inner };
            let (a, b) = (matrix(rows * inner, 3), matrix(columns * inner, 4));
            let product = |threads| {
                let mut c = vec![0.0_f32; rows * columns];
                let weight = (&b[..], MatrixLayout::rows(inner).transposed());
                pool.install(|| {
                    gemm(
                        threads,
                        shape,
                        1.0,
                        (&a, MatrixLayout::rows(inner)),
                        weight,
                        0.0,
                        (&mut c, MatrixLayout::rows(columns)),
                    );
                });
                c
            };
            assert_eq!(product(1), product(2), "{shape:?}");
            assert_eq!(product(1), product(3), "{shape:?}");
        }
    }
}
