//! Adds weighted rows to target rows: `y[target] += sum of weight * x[source]`.
//!
//! A sparse matrix ([`super::sparse_rows`]) selects and weights the rows. Embedding, media token scatter,
//! pooling, bilinear resizing, pixel shuffle and convolution unfolding all have this form and differ only in
//! the matrix; the gradient uses the transposed matrix.

use rayon::prelude::*;

use super::operation::operation;
use super::parallel::chunk_rows;
use super::real::Real;
use super::sparse_rows::SparseBuffers;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Row selection and weighted row sums.
    pub trait GatherScatter: Runtime {
        /// Adds weighted rows in `x` to rows in `y`.
        fn gather_scatter(
            &self,
            matrix: &SparseBuffers<Self>,
            columns: usize,
            x: &Tensor<Self>,
            y: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl GatherScatter for Cpu {
    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &Tensor<Self>,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        let SparseBuffers { targets, starts, sources, weights } = matrix;
        let (x, weights) = (self.operand(x)?, weights.f32());
        let (targets, starts, sources) = (targets.u32(), starts.u32(), sources.u32());
        let matrix = SparseView { targets, starts, sources, weights };
        self.update(y, |y| self.on_pool(|| add(matrix, columns, &x, y)))
    }
}

/// Sparse matrix stored by non-empty rows.
#[derive(Debug, Clone, Copy)]
pub struct SparseView<'a> {
    /// Written rows, ascending.
    pub targets: &'a [u32],
    /// First entry for every written row, then the number of entries.
    pub starts: &'a [u32],
    /// Read rows.
    pub sources: &'a [u32],
    /// Weights for the read rows; all 1 if empty.
    pub weights: &'a [f32],
}

/// Adds weighted rows in `x` to the target rows in `y`; remaining rows in `y` are unchanged.
///
/// # Panics
/// If a row is out of bounds.
pub fn add<F: Real>(matrix: SparseView<'_>, columns: usize, x: &[F], y: &mut [F]) {
    if let Some(&last) = matrix.targets.last() {
        assert!((last as usize) < y.len() / columns.max(1), "targets are rows");
    }
    let rows = chunk_rows(columns);
    y.par_chunks_mut(rows * columns).enumerate().for_each(|(chunk, y)| {
        let first = chunk * rows;
        // targets ascend: a row chunk finds its entries without a full search
        let begin = matrix.targets.partition_point(|&target| (target as usize) < first);
        for (index, &target) in matrix.targets.iter().enumerate().skip(begin) {
            let Some(y) = y.chunks_mut(columns).nth(target as usize - first) else { break };
            for entry in matrix.starts[index] as usize..matrix.starts[index + 1] as usize {
                let x = &x[matrix.sources[entry] as usize * columns..][..columns];
                match matrix.weights.get(entry) {
                    None => super::parallel::add_to(y, x),
                    Some(&weight) => {
                        let weight = F::from_f64(f64::from(weight));
                        y.iter_mut().zip(x).for_each(|(y, &x)| *y += weight * x);
                    }
                }
            }
        }
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::super::sparse_rows::SparseRows;
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let x = input(d, LEN, 1)?;
        let rows = [vec![(3, 0.5), (0, 0.25)], vec![], vec![(5, 2.0), (3, 1.0)]];
        let matrix = SparseRows::weighted(rows).upload(d)?.forward;
        let run = |y: &mut Tensor<D>| d.gather_scatter(&matrix, COLUMNS, &x, y);
        Ok(vec![("mix rows", changed(d, 3 * COLUMNS, 4, run)?)])
    }

    const MATRIX: SparseView<'_> = SparseView {
        targets: &[1, 2, 1999],
        starts: &[0, 2, 3, 6],
        sources: &[0, 3, 3, 1, 1, 0],
        weights: &[0.5, 0.25, 2.0, -1.0, 0.5, 1.0],
    };
    const TRANSPOSED: SparseView<'_> = SparseView {
        targets: &[0, 1, 3],
        starts: &[0, 2, 4, 6],
        sources: &[1, 1999, 1999, 1999, 1, 2],
        weights: &[0.5, 1.0, -1.0, 0.5, 0.25, 2.0],
    };

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (x, dy) = (numbers(4 * 7, 1), numbers(2000 * 7, 2));
        let mut dx = vec![0.0; x.len()];
        add(TRANSPOSED, 7, &dy, &mut dx);
        check("x", &x, &dx, |x| {
            let mut y = numbers(dy.len(), 3);
            add(MATRIX, 7, x, &mut y);
            project(&y, &dy)
        });
    }

    #[test]
    fn rows_that_are_not_targets_stay_unchanged() {
        let mut y = vec![7.0; 2000];
        add(SparseView { weights: &[], ..MATRIX }, 1, &[1.0, 2.0, 3.0, 4.0], &mut y);
        assert_eq!((y[0], y[1], y[2], y[1999], y[1998]), (7.0, 12.0, 11.0, 12.0, 7.0));
    }

    #[test]
    #[should_panic(expected = "targets are rows")]
    fn a_target_out_of_bounds_is_refused() {
        add(MATRIX, 1, &[0.0; 4], &mut [0.0; 1999]);
    }
}
