//! Converts luma and chroma planes to RGB, as libavif with libyuv does for Pillow.
//!
//! Chroma stored at half the width or height is sampled between pixels and is interpolated linearly. BT.601,
//! BT.709 and BT.2020 are computed from 8 bits in integers with libyuv's precision, so that pixels equal
//! Pillow's; other matrices are computed in floating point.

use super::FORMAT;
use crate::media::DecodeError;
use crate::media::probe::ColorCoding;

/// Sample plane.
#[derive(Clone, Copy)]
pub(super) struct Plane<'a> {
    pub(super) bytes: &'a [u8],
    /// Distance between rows in bytes.
    pub(super) stride: usize,
    /// Whether samples are 16-bit numbers, in native byte order.
    pub(super) is_wide: bool,
}

impl Plane<'_> {
    /// Reads a row without the lowest `shift` bits.
    fn read_row(&self, row: usize, shift: u32, samples: &mut [u16]) {
        let start = row * self.stride;
        if self.is_wide {
            let bytes = &self.bytes[start..start + 2 * samples.len()];
            for (sample, bytes) in samples.iter_mut().zip(bytes.chunks_exact(2)) {
                *sample = u16::from_ne_bytes([bytes[0], bytes[1]]) >> shift;
            }
        } else {
            let bytes = &self.bytes[start..start + samples.len()];
            for (sample, &byte) in samples.iter_mut().zip(bytes) {
                *sample = u16::from(byte);
            }
        }
    }
}

/// A decoded frame.
pub(super) struct Frame<'a> {
    pub(super) width: usize,
    pub(super) height: usize,
    /// Bits per sample.
    pub(super) depth: u32,
    pub(super) luma: Plane<'a>,
    /// Blue and red difference planes; `None` if the image is gray.
    pub(super) chroma: Option<[Plane<'a>; 2]>,
    /// Whether chroma is stored at half the width, and at half the height.
    pub(super) is_halved: (bool, bool),
    pub(super) colors: ColorCoding,
}

/// Converts a frame to RGB.
///
/// # Errors
/// [`DecodeError::Unsupported`] for matrix coefficients that libavif does not convert either.
pub(super) fn convert(frame: &Frame<'_>, pixels: &mut Vec<u8>) -> Result<(), DecodeError> {
    pixels.clear();
    pixels.resize(3 * frame.width * frame.height, 0);
    match (frame.chroma, color_matrix(frame)?) {
        (None, _) => convert_gray(frame, pixels),
        (Some(chroma), Matrix::Integer(matrix)) => {
            convert_rows(frame, chroma, frame.depth - 8, pixels, matrix);
        }
        (Some(chroma), Matrix::Float(matrix)) => convert_rows(frame, chroma, 0, pixels, matrix),
    }
    Ok(())
}

fn convert_gray(frame: &Frame<'_>, pixels: &mut [u8]) {
    let scale = Scale::of(frame);
    let mut luma = vec![0; frame.width];
    for (row, pixels) in pixels.chunks_exact_mut(3 * frame.width).enumerate() {
        frame.luma.read_row(row, 0, &mut luma);
        for (pixel, &sample) in pixels.chunks_exact_mut(3).zip(&luma) {
            pixel.fill(to_byte(scale.luma(sample)));
        }
    }
}

/// Converts samples without their lowest `shift` bits.
fn convert_rows(
    frame: &Frame<'_>,
    chroma: [Plane<'_>; 2],
    shift: u32,
    pixels: &mut [u8],
    matrix: impl Convert,
) {
    let mut luma = vec![0; frame.width];
    let mut rows = [ChromaRows::new(frame), ChromaRows::new(frame)];
    for (row, pixels) in pixels.chunks_exact_mut(3 * frame.width).enumerate() {
        frame.luma.read_row(row, shift, &mut luma);
        for (rows, plane) in rows.iter_mut().zip(&chroma) {
            rows.interpolate(plane, row, shift);
        }
        let [blue, red] = &rows;
        for (((pixel, &y), &u), &v) in
            pixels.chunks_exact_mut(3).zip(&luma).zip(&blue.sixteenths).zip(&red.sixteenths)
        {
            pixel.copy_from_slice(&matrix.rgb(y, u, v));
        }
    }
}

/// Chroma row, interpolated to the image width.
struct ChromaRows {
    is_halved: (bool, bool),
    /// Plane height.
    height: usize,
    near: Vec<u16>,
    far: Vec<u16>,
    /// Interpolated samples, times 16.
    sixteenths: Vec<u16>,
}

impl ChromaRows {
    fn new(frame: &Frame<'_>) -> Self {
        let width = if frame.is_halved.0 { frame.width.div_ceil(2) } else { frame.width };
        let height = if frame.is_halved.1 { frame.height.div_ceil(2) } else { frame.height };
        let (near, far) = (vec![0; width], vec![0; width]);
        Self { is_halved: frame.is_halved, height, near, far, sixteenths: vec![0; frame.width] }
    }

    fn interpolate(&mut self, plane: &Plane<'_>, row: usize, shift: u32) {
        if self.is_halved.1 {
            let near = row / 2;
            let above = near.saturating_sub(1);
            let below = (near + 1).min(self.height - 1);
            plane.read_row(near, shift, &mut self.near);
            plane.read_row(if row.is_multiple_of(2) { above } else { below }, shift, &mut self.far);
            for (near, far) in self.near.iter_mut().zip(&self.far) {
                *near = 3 * *near + far;
            }
        } else {
            plane.read_row(row, shift, &mut self.near);
            self.near.iter_mut().for_each(|sample| *sample *= 4);
        }
        let quarters = &self.near;
        if !self.is_halved.0 {
            for (wide, quarter) in self.sixteenths.iter_mut().zip(quarters) {
                *wide = 4 * quarter;
            }
            return;
        }
        // The first pixel and, if the width is even, the last pixel are beyond the outermost sample; libyuv
        // repeats the sample for the last pixel in any case.
        let last = self.sixteenths.len() - 1;
        self.sixteenths[0] = 4 * quarters[0];
        self.sixteenths[last] = 4 * quarters[last / 2];
        for (pair, between) in self.sixteenths[1..last.max(1)].chunks_mut(2).zip(quarters.windows(2)) {
            for (wide, (near, far)) in
                pair.iter_mut().zip([(between[0], between[1]), (between[1], between[0])])
            {
                *wide = 3 * near + far;
            }
        }
    }
}

/// Converts a pixel: luma, and blue and red difference times 16.
trait Convert: Copy {
    fn rgb(&self, y: u16, u: u16, v: u16) -> [u8; 3];
}

enum Matrix {
    Integer(IntegerMatrix),
    Float(FloatMatrix),
}

fn color_matrix(frame: &Frame<'_>) -> Result<Matrix, DecodeError> {
    let ColorCoding { primaries, matrix, is_full_range } = frame.colors;
    let scale = Scale::of(frame);
    let float = |kind| Ok(Matrix::Float(FloatMatrix { scale, kind }));
    // Numbers from ITU-T H.273; 12 derives the matrix from the primaries, 2 leaves the matrix open.
    let [limited, full] = match (matrix, primaries) {
        (1, _) | (12, 1 | 2) => BT709,
        (2 | 5 | 6, _) | (12, 5 | 6) => BT601,
        (9, _) | (12, 9) => BT2020,
        (0, _) if frame.is_halved == (false, false) => return float(FloatKind::Identity),
        (4, _) => return float(FloatKind::Weights { red: 0.30, blue: 0.11 }),
        (7, _) => return float(FloatKind::Weights { red: 0.212, blue: 0.087 }),
        (8, _) => return float(FloatKind::YCgCo),
        _ if frame.chroma.is_none() => BT601,
        _ => return Err(DecodeError::unsupported(FORMAT, format!("matrix coefficients {matrix}"))),
    };
    Ok(Matrix::Integer(if is_full_range { full } else { limited }))
}

/// Matrix on 8-bit samples, in 1/64.
#[derive(Clone, Copy)]
struct IntegerMatrix {
    /// Luma factor times 257, divided by 65,536, and luma offset.
    luma: (u32, i32),
    /// Blue per blue difference; libyuv's vectors hold up to 128.
    blue: i32,
    /// Green subtracted for blue and red difference.
    green: (i32, i32),
    /// Red per red difference.
    red: i32,
}

const LIMITED: (u32, i32) = (18_997, -1_160);
const FULL: (u32, i32) = (16_320, 32);
/// Matrices for limited, then full range, as in the two constants below.
const BT601: [IntegerMatrix; 2] = [
    IntegerMatrix { luma: LIMITED, blue: 128, green: (25, 52), red: 102 },
    IntegerMatrix { luma: FULL, blue: 113, green: (22, 46), red: 90 },
];
const BT709: [IntegerMatrix; 2] = [
    IntegerMatrix { luma: LIMITED, blue: 128, green: (14, 34), red: 115 },
    IntegerMatrix { luma: FULL, blue: 119, green: (12, 30), red: 101 },
];
const BT2020: [IntegerMatrix; 2] = [
    IntegerMatrix { luma: (19_003, -1_160), blue: 128, green: (12, 42), red: 107 },
    IntegerMatrix { luma: FULL, blue: 120, green: (11, 37), red: 94 },
];

impl Convert for IntegerMatrix {
    #[inline]
    fn rgb(&self, y: u16, u: u16, v: u16) -> [u8; 3] {
        let difference = |sixteenths: u16| ((i32::from(sixteenths) + 8) >> 4) - 128;
        let (u, v) = (difference(u), difference(v));
        let luma = ((u32::from(y) * 257 * self.luma.0) >> 16) as i32 + self.luma.1;
        let green = luma - u * self.green.0 - v * self.green.1;
        [luma + v * self.red, green, luma + u * self.blue].map(|value| (value >> 6).clamp(0, 255) as u8)
    }
}

/// Sample range.
#[derive(Clone, Copy)]
struct Scale {
    black: f32,
    white: f32,
    chroma: f32,
    neutral: f32,
}

impl Scale {
    fn of(frame: &Frame<'_>) -> Self {
        let unit = (1_u32 << (frame.depth - 8)) as f32;
        let largest = ((1_u32 << frame.depth) - 1) as f32;
        let neutral = 128.0 * unit;
        if frame.colors.is_full_range {
            Self { black: 0.0, white: largest, chroma: largest, neutral }
        } else {
            Self { black: 16.0 * unit, white: 219.0 * unit, chroma: 224.0 * unit, neutral }
        }
    }

    /// Returns luma from 0 for black to 1 for white.
    fn luma(&self, sample: u16) -> f32 {
        (f32::from(sample) - self.black) / self.white
    }

    fn difference(&self, sixteenths: u16) -> f32 {
        (f32::from(sixteenths) / 16.0 - self.neutral) / self.chroma
    }
}

fn to_byte(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0 + 0.5) as u8
}

/// Matrix on samples with any bit depth.
#[derive(Clone, Copy)]
struct FloatMatrix {
    scale: Scale,
    kind: FloatKind,
}

#[derive(Clone, Copy)]
enum FloatKind {
    /// The planes are green, blue and red.
    Identity,
    /// The planes are luma, green difference and orange difference.
    YCgCo,
    /// Red and blue weights in luma.
    Weights { red: f32, blue: f32 },
}

impl Convert for FloatMatrix {
    fn rgb(&self, y: u16, u: u16, v: u16) -> [u8; 3] {
        let luma = self.scale.luma(y);
        let (blue, red) = (self.scale.difference(u), self.scale.difference(v));
        let rgb = match self.kind {
            FloatKind::Identity => [self.scale.luma(v / 16), luma, self.scale.luma(u / 16)],
            FloatKind::YCgCo => [luma - blue + red, luma + blue, luma - blue - red],
            FloatKind::Weights { red: red_weight, blue: blue_weight } => {
                let green_weight = 1.0 - red_weight - blue_weight;
                let red_part = 2.0 * (1.0 - red_weight) * red;
                let blue_part = 2.0 * (1.0 - blue_weight) * blue;
                let green_part = (red_weight * red_part + blue_weight * blue_part) / green_weight;
                [luma + red_part, luma - green_part, luma + blue_part]
            }
        };
        rgb.map(to_byte)
    }
}
