//! Solves small symmetric positive definite systems by Cholesky factorization.

/// Symmetric positive definite matrix, factored as `L Lᵀ`.
#[derive(Debug)]
pub(super) struct Cholesky {
    size: usize,
    lower: Vec<f64>,
}

impl Cholesky {
    /// Factors a matrix in row-major order; `None` if it is not positive definite.
    pub(super) fn new(matrix: &[f64], size: usize) -> Option<Self> {
        let mut lower = vec![0.0; size * size];
        for row in 0..size {
            for column in 0..=row {
                let dot: f64 = (0..column).map(|k| lower[row * size + k] * lower[column * size + k]).sum();
                let rest = matrix[row * size + column] - dot;
                if row == column {
                    if rest.is_nan() || rest <= 0.0 {
                        return None;
                    }
                    lower[row * size + row] = rest.sqrt();
                } else {
                    lower[row * size + column] = rest / lower[column * size + column];
                }
            }
        }
        Some(Self { size, lower })
    }

    /// Solves for a single right-hand side.
    pub(super) fn solve(&self, right: &[f64]) -> Vec<f64> {
        let mut x = right.to_vec();
        for row in 0..self.size {
            let dot: f64 = (0..row).map(|k| self.at(row, k) * x[k]).sum();
            x[row] = (x[row] - dot) / self.at(row, row);
        }
        for row in (0..self.size).rev() {
            let dot: f64 = (row + 1..self.size).map(|k| self.at(k, row) * x[k]).sum();
            x[row] = (x[row] - dot) / self.at(row, row);
        }
        x
    }

    /// Returns the diagonal of the inverse matrix.
    pub(super) fn inverse_diagonal(&self) -> Vec<f64> {
        let unit = |at: usize| (0..self.size).map(|k| if k == at { 1.0 } else { 0.0 }).collect::<Vec<f64>>();
        (0..self.size).map(|at| self.solve(&unit(at))[at]).collect()
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.lower[row * self.size + column]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solutions_and_inverses_are_those_of_the_matrix() {
        let matrix = [4.0, 2.0, 0.6, 2.0, 5.0, 1.0, 0.6, 1.0, 3.0];
        let cholesky = Cholesky::new(&matrix, 3).unwrap();
        let x = cholesky.solve(&[1.0, 2.0, 3.0]);
        for row in 0..3 {
            let product: f64 = (0..3).map(|k| matrix[row * 3 + k] * x[k]).sum();
            assert!((product - [1.0, 2.0, 3.0][row]).abs() < 1e-12);
        }
        let [a, ..] = cholesky.inverse_diagonal()[..] else { panic!("three") };
        assert!((a - 14.0 / 44.6).abs() < 1e-9, "{a}");
        assert!(Cholesky::new(&[1.0, 2.0, 2.0, 1.0], 2).is_none());
    }
}
