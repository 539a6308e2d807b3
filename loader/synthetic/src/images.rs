//! Generates JPEG files: photos, receipt scans, and images for which only the size matters.

use std::io;

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

use crate::draws::Rng;

/// JPEG quality for photos, up to 100.
const PHOTO_QUALITY: u8 = 75;
/// Texture octaves: distance between random values in pixels, and amplitude.
const OCTAVES: [(usize, i32); 3] = [(64, 26), (16, 16), (4, 7)];
/// Amplitude of the single-pixel noise.
const PHOTO_GRAIN: i32 = 4;

type Color = [i32; 3];

/// Generates a photo with this size as a JPEG file.
///
/// # Errors
/// If the encoder rejects the size.
pub(crate) fn photo_jpeg(width: usize, height: usize, rng: &mut Rng) -> io::Result<Vec<u8>> {
    let scene = Scene::new(width, height, rng);
    let octaves = OCTAVES.map(|(cell, amplitude)| Octave::new(width, height, cell, amplitude, rng));
    let mut pixels = Vec::with_capacity(3 * width * height);
    let mut colors = vec![[0; 3]; width];
    let mut light = vec![0; width];
    for y in 0..height {
        scene.draw_row(y, &mut colors);
        light.fill_with(|| rng.between(-PHOTO_GRAIN, PHOTO_GRAIN + 1));
        for octave in &octaves {
            octave.add_row(y, &mut light);
        }
        for (color, light) in colors.iter().zip(&light) {
            pixels.extend(color.map(|channel| (channel + light).clamp(0, 255) as u8));
        }
    }
    encode_jpeg(&pixels, width, height, ColorType::Rgb, PHOTO_QUALITY)
}

/// Background and shapes below the texture.
struct Scene {
    /// Row where the sky ends.
    horizon: usize,
    height: usize,
    /// Sky colors from the top to the horizon, and ground colors from there down.
    background: [Color; 4],
    shapes: Vec<Shape>,
}

impl Scene {
    fn new(width: usize, height: usize, rng: &mut Rng) -> Self {
        let horizon = height * (30 + rng.below(40)) / 100;
        let background = [0; 4].map(|_: i32| draw_color(rng));
        let shapes = (0..8 + rng.below(10)).map(|_| Shape::new(width, height, rng)).collect();
        Self { horizon, height, background, shapes }
    }

    fn draw_row(&self, y: usize, row: &mut [Color]) {
        let [zenith, haze, far, near] = self.background;
        let color = if y < self.horizon {
            blend(zenith, haze, y, self.horizon)
        } else {
            blend(far, near, y - self.horizon, self.height - self.horizon)
        };
        row.fill(color);
        for shape in &self.shapes {
            shape.draw_row(y, row);
        }
    }
}

/// Ellipse or rectangle, lit from above.
struct Shape {
    is_ellipse: bool,
    center: [f64; 2],
    radii: [f64; 2],
    color: Color,
}

impl Shape {
    fn new(width: usize, height: usize, rng: &mut Rng) -> Self {
        let is_ellipse = rng.chance(60);
        let center = [rng.fraction() * width as f64, rng.fraction() * height as f64];
        let radius = width.min(height) as f64;
        let radii = [rng.range(0.03, 0.22) * radius, rng.range(0.03, 0.22) * radius];
        Self { is_ellipse, center, radii, color: draw_color(rng) }
    }

    fn draw_row(&self, y: usize, row: &mut [Color]) {
        let offset = (y as f64 - self.center[1]) / self.radii[1];
        if offset.abs() >= 1.0 {
            return;
        }
        let share = if self.is_ellipse { (1.0 - offset * offset).sqrt() } else { 1.0 };
        let edge = |x: f64| (x.max(0.0) as usize).min(row.len());
        let span = edge(self.center[0] - share * self.radii[0])..edge(self.center[0] + share * self.radii[0]);
        let light = (-30.0 * offset) as i32;
        // The shade is not clamped here: texture is added first, and the sum is clamped.
        row[span].fill(self.color.map(|channel| channel + light));
    }
}

/// Value noise: random values on a grid, interpolated linearly.
struct Octave {
    cell: usize,
    columns: usize,
    values: Vec<i32>,
}

impl Octave {
    fn new(width: usize, height: usize, cell: usize, amplitude: i32, rng: &mut Rng) -> Self {
        // One more column and row than cells, for interpolation at the right and lower edge.
        let (columns, rows) = (width / cell + 2, height / cell + 2);
        let values = (0..columns * rows).map(|_| rng.between(-amplitude, amplitude + 1)).collect();
        Self { cell, columns, values }
    }

    /// Adds a noise row to `row`.
    fn add_row(&self, y: usize, row: &mut [i32]) {
        let (above, cell) = (y / self.cell * self.columns, self.cell as i32);
        let weight = (y % self.cell) as i32;
        let at = |column: usize| {
            self.values[above + column] * (cell - weight)
                + self.values[above + self.columns + column] * weight
        };
        for (column, pixels) in row.chunks_mut(self.cell).enumerate() {
            let (left, right) = (at(column), at(column + 1));
            for (x, pixel) in (0..cell).zip(pixels) {
                *pixel += (left * (cell - x) + right * x) / (cell * cell);
            }
        }
    }
}

fn draw_color(rng: &mut Rng) -> Color {
    [0; 3].map(|_: i32| rng.between(40, 216))
}

fn blend(from: Color, to: Color, place: usize, length: usize) -> Color {
    let (place, length) = (place as i32, length as i32);
    [0, 1, 2].map(|channel| (from[channel] * (length - place) + to[channel] * place) / length)
}

/// JPEG quality for scans, up to 100.
const RECEIPT_QUALITY: u8 = 60;
/// Dot columns and dot rows in a glyph; a blank column follows each glyph.
const GLYPH_COLUMNS: usize = 5;
const GLYPH_ROWS: usize = 7;
/// Number of dot rows between line starts.
const LINE_ROWS: usize = 12;
/// Number of characters in a full line.
const LINE_GLYPHS: usize = 36;
/// Amplitude of the single-pixel noise.
const RECEIPT_GRAIN: i32 = 2;

/// Generates a scan with this size as a JPEG file.
///
/// # Errors
/// If the encoder rejects the size.
pub(crate) fn receipt_jpeg(width: usize, height: usize, rng: &mut Rng) -> io::Result<Vec<u8>> {
    let paper = rng.between(225, 250);
    let ink = rng.between(30, 90);
    // Six glyphs of margin; at least a pixel per dot on narrow scans.
    let dot = (width / ((LINE_GLYPHS + 6) * (GLYPH_COLUMNS + 1))).max(1);
    let mut pixels = draw_paper(width, height, paper, rng);
    let pitch = dot * LINE_ROWS;
    let margin = 3 * dot * (GLYPH_COLUMNS + 1);
    for top in (pitch..height.saturating_sub(pitch)).step_by(pitch) {
        let mut left = margin;
        for glyph in draw_line(rng) {
            draw_glyph(&mut pixels, width, [left, top], dot, glyph, ink);
            left += dot * (GLYPH_COLUMNS + 1);
        }
    }
    encode_jpeg(&pixels, width, height, ColorType::Luma, RECEIPT_QUALITY)
}

/// Draws paper that darkens towards the lower edge.
fn draw_paper(width: usize, height: usize, paper: i32, rng: &mut Rng) -> Vec<u8> {
    let mut pixels = Vec::with_capacity(width * height);
    for y in 0..height {
        let shade = paper - (20 * y / height) as i32;
        pixels.extend(
            (0..width).map(|_| (shade + rng.between(-RECEIPT_GRAIN, RECEIPT_GRAIN + 1)).clamp(0, 255) as u8),
        );
    }
    pixels
}

/// Draws a glyph line, a bit per dot; 0 is a space. Every sixth line is blank on average.
fn draw_line(rng: &mut Rng) -> Vec<u64> {
    if rng.below(6) == 0 {
        return Vec::new();
    }
    let glyphs = LINE_GLYPHS / 3 + rng.below(LINE_GLYPHS * 2 / 3);
    (0..glyphs).map(|_| if rng.below(6) == 0 { 0 } else { draw_strokes(rng) }).collect()
}

/// Draws a glyph with two vertical and two horizontal strokes.
fn draw_strokes(rng: &mut Rng) -> u64 {
    let column = (0..GLYPH_ROWS).fold(0, |bits, row| bits | 1_u64 << (row * GLYPH_COLUMNS));
    let row = (1_u64 << GLYPH_COLUMNS) - 1;
    // A stroke in the left and a stroke in the right half; below, a stroke in the upper and a stroke in the
    // lower half.
    let upright = column << rng.below(2) | column << (2 + rng.below(3));
    let level = row << (GLYPH_COLUMNS * rng.below(3)) | row << (GLYPH_COLUMNS * (3 + rng.below(4)));
    // A quarter of the dots is left out, so that glyphs differ.
    (upright | level) & (rng.bits() | rng.bits())
}

fn draw_glyph(pixels: &mut [u8], width: usize, [left, top]: [usize; 2], dot: usize, glyph: u64, ink: i32) {
    for bit in (0..GLYPH_COLUMNS * GLYPH_ROWS).filter(|bit| glyph >> bit & 1 == 1) {
        let (x, y) = (left + bit % GLYPH_COLUMNS * dot, top + bit / GLYPH_COLUMNS * dot);
        for row in y..y + dot {
            pixels[row * width + x..][..dot].fill(ink as u8);
        }
    }
}

/// JPEG quality, up to 100.
const TILE_QUALITY: u8 = 85;

/// Generates an image with shaded squares as a JPEG file.
///
/// - `width`, `height`: in pixels, at least 1
///
/// # Errors
/// If a side is over 65,535 pixels.
pub fn tiles_jpeg(width: usize, height: usize, rng: &mut Rng) -> io::Result<Vec<u8>> {
    let base: [usize; 3] = [0; 3].map(|_| rng.below(200));
    let mut pixels = Vec::with_capacity(3 * width * height);
    for row in 0..height {
        for column in 0..width {
            let shade = 8 * (row / 8 + column / 8) % 56;
            pixels.extend(base.map(|color| (color + shade).min(255) as u8));
        }
    }
    encode_jpeg(&pixels, width, height, ColorType::Rgb, TILE_QUALITY)
}

/// Encodes 8-bit pixels, color at half the resolution.
///
/// # Errors
/// If a side is over 65,535 pixels.
fn encode_jpeg(
    pixels: &[u8],
    width: usize,
    height: usize,
    color: ColorType,
    quality: u8,
) -> io::Result<Vec<u8>> {
    let side = |pixels: usize| u16::try_from(pixels).map_err(io::Error::other);
    let mut file = Vec::with_capacity(pixels.len() / 8);
    let mut encoder = Encoder::new(&mut file, quality);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    encoder.encode(pixels, side(width)?, side(height)?, color).map_err(io::Error::other)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use dflop_samples::media::{ImageLimits, decode_rgb};

    use super::*;

    #[test]
    fn a_photo_takes_as_many_bytes_as_a_photo_does() {
        let file = photo_jpeg(640, 480, &mut Rng::new(1, 2)).unwrap();
        let bytes_per_pixel = file.len() as f64 / (640.0 * 480.0);
        assert!((0.08..0.25).contains(&bytes_per_pixel), "{bytes_per_pixel}");
    }

    #[test]
    fn a_receipt_takes_as_many_bytes_as_a_scan_does() {
        let file = receipt_jpeg(800, 1600, &mut Rng::new(1, 2)).unwrap();
        let bytes_per_pixel = file.len() as f64 / (800.0 * 1600.0);
        assert!((0.05..0.25).contains(&bytes_per_pixel), "{bytes_per_pixel}");
    }

    #[test]
    fn the_smallest_paper_is_wide_enough() {
        assert!(receipt_jpeg(260, 300, &mut Rng::new(1, 2)).is_ok());
    }

    #[test]
    fn an_image_has_the_size_that_was_asked_for() {
        let file = tiles_jpeg(96, 40, &mut Rng::new(0, 0)).unwrap();
        let image = decode_rgb(&file, &ImageLimits::default()).unwrap();
        assert_eq!((image.width, image.height), (96, 40));
        assert!(tiles_jpeg(70_000, 1, &mut Rng::new(0, 0)).is_err(), "JPEG has 16 bits for a side");
    }
}
