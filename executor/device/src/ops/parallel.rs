//! Divides rows into chunks for threads, and sums over rows in a fixed order.

use rayon::prelude::*;

use super::real::Real;

/// Number of elements per chunk: a few microseconds of work.
const CHUNK_ELEMENTS: usize = 1 << 13;
/// Number of partial sums in a reduction: two of the widest vector registers.
pub(crate) const LANES: usize = 16;

/// Returns the number of rows per chunk, at least one.
pub(crate) fn chunk_rows(columns: usize) -> usize {
    (CHUNK_ELEMENTS / columns.max(1)).max(1)
}

/// Returns the number of elements per chunk, a multiple of the row length.
pub(crate) fn chunk_len(columns: usize) -> usize {
    chunk_rows(columns) * columns.max(1)
}

/// Runs a loop with the widest vector instructions on this machine.
///
/// Rust does not contract multiplications and additions into fused instructions, and sums have a fixed number
/// of lanes, so results do not depend on the register width of the machine, only on whether a function that
/// fuses explicitly may do so ([`has_fused`]).
#[inline(always)]
pub(crate) fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

/// Returns whether this machine has vector instructions that multiply and add with one rounding.
pub(crate) fn has_fused() -> bool {
    !matches!(pulp::Arch::new(), pulp::Arch::Scalar)
}

/// Pads the remainder after the last complete block with zeros. A loop over a complete block compiles to
/// vector instructions, a loop over fewer elements would run element by element.
#[inline(always)]
pub(crate) fn filled_up<F: Real>(rest: &[F]) -> [F; LANES] {
    let mut block = [F::ZERO; LANES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Returns the scalar product, as [`LANES`] interleaved sums.
#[inline(always)]
pub(crate) fn dot<F: Real>(a: &[F], b: &[F]) -> F {
    let mut sums = [F::ZERO; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    if !a_rest.is_empty() {
        let (a, b) = (filled_up(a_rest), filled_up(b_rest));
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    fold(sums)
}

/// Returns the sum, as [`LANES`] interleaved sums.
#[inline(always)]
pub(crate) fn sum<F: Real>(a: &[F]) -> F {
    let mut sums = [F::ZERO; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            sums[lane] += block[lane];
        }
    }
    // a fixed tree over the lanes, then the remainder in order
    fold(sums) + rest.iter().copied().sum()
}

/// Returns the largest element; NaN if any element is NaN, minus infinity if there are no elements.
#[inline(always)]
pub(crate) fn max<F: Real>(a: &[F]) -> F {
    let least = -F::ONE / F::ZERO;
    let mut most = [least; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            most[lane] = larger(most[lane], block[lane]);
        }
    }
    rest.iter().chain(&most).fold(least, |most, &value| larger(most, value))
}

/// Returns the larger number; NaN if either is NaN.
#[inline(always)]
pub(crate) fn larger<F: Real>(most: F, value: F) -> F {
    // NaN compares false with everything: it replaces `most` in the first test and stays by the second
    if most >= value || most.is_nan() { most } else { value }
}

#[inline(always)]
fn fold<F: Real>(mut sums: [F; LANES]) -> F {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = sums[lane + width];
            sums[lane] += other;
        }
        width /= 2;
    }
    sums[0]
}

/// Accumulates into `total`, `[columns]`, the sums that `add` computes for each row chunk, in chunk order.
///
/// `add` receives a chunk number and the chunk sums, which start at zero.
pub(crate) fn sum_chunks<F: Real>(chunks: usize, total: &mut [F], add: impl Fn(usize, &mut [F]) + Sync) {
    let columns = total.len();
    if columns == 0 || chunks == 0 {
        return;
    }
    // every chunk sums into a separate row; adding the rows afterwards in order keeps the bits
    let mut partial = vec![F::ZERO; chunks * columns];
    partial.par_chunks_mut(columns).enumerate().for_each(|(chunk, sums)| add(chunk, sums));
    for sums in partial.chunks(columns) {
        add_to(total, sums);
    }
}

/// Adds: `total += values`.
#[inline(always)]
pub(crate) fn add_to<F: Real>(total: &mut [F], values: &[F]) {
    for (total, &value) in total.iter_mut().zip(values) {
        *total += value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_use_every_element_once() {
        for len in [0, 1, 15, 16, 17, 100] {
            let a: Vec<f64> = (0..len).map(f64::from).collect();
            let truth: f64 = a.iter().sum();
            assert_eq!(sum(&a), truth);
            assert_eq!(dot(&a, &vec![2.0; a.len()]), 2.0 * truth);
            assert_eq!(max(&a), if len == 0 { f64::NEG_INFINITY } else { f64::from(len - 1) });
        }
    }

    #[test]
    fn the_maximum_with_a_nan_is_nan() {
        for at in [0, 3, 16, 20] {
            let mut a = vec![1.0_f32; 21];
            a[at] = f32::NAN;
            assert!(max(&a).is_nan());
        }
    }
}
