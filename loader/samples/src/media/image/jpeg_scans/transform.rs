//! Inverse discrete cosine transform for 8 x 8 blocks, in integers, bit-exact with libjpeg's `islow`.
//!
//! # Source
//! Loeffler, Ligtenberg and Moschytz, "Practical fast 1-D DCT algorithms with 11 multiplications", 1989.

use super::Block;

/// Position of each zigzag coefficient in a block, row by row.
#[rustfmt::skip]
const ZIGZAG: [usize; 64] = [
     0,  1,  8, 16,  9,  2,  3, 10, 17, 24, 32, 25, 18, 11,  4,  5,
    12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,  6,  7, 14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
    58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
];
/// Number of fraction bits in factors.
const FACTOR_BITS: u32 = 13;
/// Number of fraction bits between the column pass and the row pass.
const PASS_BITS: u32 = 2;

/// Returns a factor as a fixed-point number.
const fn factor(value: f64) -> i32 {
    (value * (1 << FACTOR_BITS) as f64 + if value < 0.0 { -0.5 } else { 0.5 }) as i32
}

/// Returns the samples in a block, row by row.
pub(super) fn samples(block: &Block, quantization: &[u16; 64]) -> [u8; 64] {
    let mut values = [0_i32; 64];
    for ((&coefficient, &step), place) in block.iter().zip(quantization).zip(ZIGZAG) {
        values[place] = i32::from(coefficient).wrapping_mul(step.into());
    }
    for column in 0..8 {
        let line = std::array::from_fn(|row| values[8 * row + column]);
        for (row, value) in inverse(line, FACTOR_BITS - PASS_BITS).into_iter().enumerate() {
            values[8 * row + column] = value;
        }
    }
    let mut samples = [0; 64];
    for (line, samples) in values.chunks_exact(8).zip(samples.chunks_exact_mut(8)) {
        let line = std::array::from_fn(|column| line[column]);
        for (value, sample) in inverse(line, FACTOR_BITS + PASS_BITS + 3).into_iter().zip(samples) {
            *sample = (value.wrapping_add(128)).clamp(0, 255) as u8;
        }
    }
    samples
}

/// Transforms a line; the result is rounded by `shift` bits. Values in damaged files wrap around.
fn inverse(line: [i32; 8], shift: u32) -> [i32; 8] {
    let times = |value: i32, by: f64| value.wrapping_mul(factor(by));
    let add = i32::wrapping_add;

    let common = times(add(line[2], line[6]), 0.541_196_100);
    let (low, high) =
        (add(common, times(line[6], -1.847_759_065)), add(common, times(line[2], 0.765_366_865)));
    let sum = add(line[0], line[4]).wrapping_shl(FACTOR_BITS);
    let difference = line[0].wrapping_sub(line[4]).wrapping_shl(FACTOR_BITS);
    let even = [add(sum, high), add(difference, low), difference.wrapping_sub(low), sum.wrapping_sub(high)];

    let common = times(add(add(line[7], line[3]), add(line[5], line[1])), 1.175_875_602);
    let outer = times(add(line[7], line[1]), -0.899_976_223);
    let inner = times(add(line[5], line[3]), -2.562_915_447);
    let left = add(times(add(line[7], line[3]), -1.961_570_560), common);
    let right = add(times(add(line[5], line[1]), -0.390_180_644), common);
    let odd = [
        add(times(line[1], 1.501_321_110), add(outer, right)),
        add(times(line[3], 3.072_711_026), add(inner, left)),
        add(times(line[5], 2.053_119_869), add(inner, right)),
        add(times(line[7], 0.298_631_336), add(outer, left)),
    ];
    let rounded = |value: i32| add(value, 1 << (shift - 1)) >> shift;
    std::array::from_fn(|place| {
        let value = if place < 4 {
            add(even[place], odd[place])
        } else {
            even[7 - place].wrapping_sub(odd[7 - place])
        };
        rounded(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_those_of_the_defining_sum_but_for_rounding() {
        let mut block = [0_i16; 64];
        let mut state = 9_u32;
        for coefficient in &mut block {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *coefficient = (state >> 24) as i16 % 40 - 20;
        }
        let angle = |at: usize, frequency: usize| {
            let scale = if frequency == 0 { 0.5_f64.sqrt() } else { 1.0 };
            scale * ((2 * at + 1) as f64 * frequency as f64 * std::f64::consts::PI / 16.0).cos()
        };
        let samples = samples(&block, &[3; 64]);
        for (place, sample) in samples.into_iter().enumerate() {
            let (y, x) = (place / 8, place % 8);
            let terms = ZIGZAG
                .iter()
                .zip(block)
                .map(|(at, value)| f64::from(value) * 3.0 * angle(x, at % 8) * angle(y, at / 8));
            let exact = (terms.sum::<f64>() / 4.0 + 128.0).clamp(0.0, 255.0);
            assert!((exact - f64::from(sample)).abs() <= 0.6, "{exact} {sample} at {x} {y}");
        }
    }
}
