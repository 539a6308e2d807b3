//! Transforms JPEG coefficients to pixels.
//!
//! Components at half the image size are interpolated with libjpeg's "fancy upsampling", all other components
//! are repeated.
//!
//! # Source
//! Loeffler, Ligtenberg and Moschytz, "Practical fast 1-D DCT algorithms with 11 multiplications", 1989.

use super::frame::{Component, Frame};
use super::{Block, FORMAT};
use crate::media::DecodeError;
use crate::media::probe::{JpegColors, JpegHeader};

/// Minimum row width for interpolation.
const INTERPOLATED_MIN: usize = 3;

/// Component samples, and the ratios to the image size.
struct Plane {
    samples: Vec<u8>,
    stride: usize,
    width: usize,
    height: usize,
    across: usize,
    down: usize,
}

/// Writes the image as RGB.
pub(super) fn write(frame: &Frame, header: &JpegHeader, pixels: &mut Vec<u8>) -> Result<(), DecodeError> {
    let mut planes = Vec::with_capacity(frame.components.len());
    let (across_max, down_max) = header.sampling_max();
    for component in &frame.components {
        let (across, down) = component.unit;
        let (across_max, down_max) = (usize::from(across_max), usize::from(down_max));
        if across_max % across != 0 || down_max % down != 0 {
            let reason = format!("sampling factors {across} of {across_max}, {down} of {down_max}");
            return Err(DecodeError::unsupported(FORMAT, reason));
        }
        planes.push(Plane::new(component, across_max / across, down_max / down));
    }
    let (width, height) = (header.width as usize, header.height as usize);
    pixels.clear();
    pixels.resize(3 * width * height, 0);
    let mut rows = vec![Vec::new(); planes.len()];
    for (y, pixels) in pixels.chunks_exact_mut(3 * width).enumerate() {
        for (plane, row) in planes.iter().zip(&mut rows) {
            plane.row(y, row);
        }
        for (x, pixel) in pixels.chunks_exact_mut(3).enumerate() {
            let at = |component: usize| rows[component][x];
            pixel.copy_from_slice(&match header.colors {
                JpegColors::Gray => [at(0); 3],
                JpegColors::Rgb => [at(0), at(1), at(2)],
                JpegColors::YCbCr => rgb_of_ycc([at(0), at(1), at(2)]),
                JpegColors::Cmyk => rgb_of_cmyk([at(0), at(1), at(2)], at(3)),
                JpegColors::Ycck => {
                    let inks = rgb_of_ycc([at(0), at(1), at(2)]).map(|value| 255 - value);
                    rgb_of_cmyk(inks, at(3))
                }
            });
        }
    }
    Ok(())
}

impl Plane {
    fn new(component: &Component, across: usize, down: usize) -> Self {
        let stride = component.stride * 8;
        let mut samples = vec![0; component.blocks.len() * 64];
        let quantization = component.quantization.unwrap_or([0; 64]);
        for (number, block) in component.blocks.iter().enumerate() {
            let (row, column) = (number / component.stride, number % component.stride);
            let start = row * 8 * stride + column * 8;
            for (line, values) in block_samples(block, &quantization).chunks_exact(8).enumerate() {
                samples[start + line * stride..][..8].copy_from_slice(values);
            }
        }
        let (width, height) = component.size;
        Self { samples, stride, width, height, across, down }
    }

    fn stored(&self, row: usize) -> &[u8] {
        &self.samples[row * self.stride..][..self.width]
    }

    /// Writes an image row, or more.
    fn row(&self, y: usize, row: &mut Vec<u8>) {
        row.clear();
        let near = self.stored((y / self.down).min(self.height - 1));
        match (self.across, self.down) {
            (1, 1) => row.extend_from_slice(near),
            (1, 2) => {
                let bias = 1 + (y as u16 & 1);
                let far = self.stored(self.far(y)).iter();
                row.extend(
                    near.iter()
                        .zip(far)
                        .map(|(&near, &far)| ((u16::from(near) * 3 + u16::from(far) + bias) >> 2) as u8),
                );
            }
            (2, 1) if self.width >= INTERPOLATED_MIN => {
                let sums: Vec<u16> = near.iter().map(|&near| near.into()).collect();
                interpolate(&sums, [1, 2], 2, row);
            }
            (2, 2) if self.width >= INTERPOLATED_MIN => {
                let far = self.stored(self.far(y)).iter();
                let sum = |(&near, &far): (&u8, &u8)| u16::from(near) * 3 + u16::from(far);
                let sums: Vec<u16> = near.iter().zip(far).map(sum).collect();
                interpolate(&sums, [8, 7], 4, row);
            }
            (across, _) => row.extend(near.iter().flat_map(|&sample| std::iter::repeat_n(sample, across))),
        }
    }

    /// Returns the second nearest row in a component at half the image height.
    fn far(&self, y: usize) -> usize {
        let near = y / 2;
        if y.is_multiple_of(2) { near.saturating_sub(1) } else { (near + 1).min(self.height - 1) }
    }
}

/// Doubles a row: three parts of the nearest sample and one part of the next sample, with separate rounding
/// on the left and the right.
fn interpolate(sums: &[u16], bias: [u16; 2], shift: u32, row: &mut Vec<u8>) {
    let last = sums.len() - 1;
    for (at, &sum) in sums.iter().enumerate() {
        let [left, right] = [sums[at.saturating_sub(1)], sums[(at + 1).min(last)]];
        row.push(((sum * 3 + left + bias[0]) >> shift) as u8);
        row.push(((sum * 3 + right + bias[1]) >> shift) as u8);
    }
}

/// Converts a pixel with the JFIF matrix, in 16 fraction bits.
pub(in crate::media::image) fn rgb_of_ycc([luma, blue, red]: [u8; 3]) -> [u8; 3] {
    const HALF: i32 = 1 << 15;
    let [luma, blue, red] = [i32::from(luma), i32::from(blue) - 128, i32::from(red) - 128];
    let add = |offset: i32| (luma + (offset >> 16)).clamp(0, 255) as u8;
    [add(91_881 * red + HALF), add(-22_554 * blue - 46_802 * red + HALF), add(116_130 * blue + HALF)]
}

/// Converts inks stored inverted, as Pillow does.
fn rgb_of_cmyk(inks: [u8; 3], black: u8) -> [u8; 3] {
    let black = u32::from(black);
    inks.map(|ink| {
        let product = (255 - u32::from(ink)) * black + 128;
        (black - ((product + (product >> 8)) >> 8)) as u8
    })
}

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
pub(super) fn block_samples(block: &Block, quantization: &[u16; 64]) -> [u8; 64] {
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
        let samples = block_samples(&block, &[3; 64]);
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
