//! Converts frame coefficients to RGB rows: inverse transform, upsampling, color conversion.
//!
//! Components at half the image size are interpolated with libjpeg's "fancy upsampling", all other components
//! are repeated.

use super::frame::{Component, Frame};
use super::{FORMAT, transform};
use crate::media::error::DecodeError;
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
            for (line, values) in transform::samples(block, &quantization).chunks_exact(8).enumerate() {
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
