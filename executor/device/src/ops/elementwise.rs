//! Element-wise sums and scalings of whole buffers.

use rayon::prelude::*;

use super::parallel::{add_to, chunk_len, dot, vectorized};
use super::real::Real;

/// Adds: `y += x`.
pub fn add<F: Real>(x: &[F], y: &mut [F]) {
    assert_eq!(x.len(), y.len(), "summands have the same shape");
    let chunk = chunk_len(1);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        vectorized(
            #[inline(always)]
            || add_to(y, x),
        );
    });
}

/// Scales: `y *= factor`.
pub fn scale<F: Real>(factor: F, y: &mut [F]) {
    y.par_chunks_mut(chunk_len(1)).for_each(|y| y.iter_mut().for_each(|y| *y *= factor));
}

/// Fills with zeros.
pub fn zero<F: Real>(y: &mut [F]) {
    y.par_chunks_mut(chunk_len(1)).for_each(|y| y.fill(F::ZERO));
}

/// Sums squares: within chunks in the type of the numbers, over chunks in `f64`.
pub fn sum_of_squares<F: Real>(x: &[F]) -> f64 {
    let sums: Vec<f64> = x
        .par_chunks(chunk_len(1))
        .map(|x| {
            vectorized(
                #[inline(always)]
                || dot(x, x),
            )
            .to_f64()
        })
        .collect();
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::super::finite_difference::numbers;
    use super::*;

    #[test]
    fn squares_add_up() {
        let x = numbers(20_000, 1);
        let truth: f64 = x.iter().map(|x| x * x).sum();
        assert!((sum_of_squares(&x) - truth).abs() < 1e-9 * truth);
        let mut y = x.clone();
        add(&x, &mut y);
        scale(0.5, &mut y);
        assert_eq!(x, y);
        zero(&mut y);
        assert_eq!(sum_of_squares(&y), 0.0);
    }
}
