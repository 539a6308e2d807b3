//! Generates photos: a sky, a ground, some shapes, and texture that compresses as a photo does.

use std::io;

use jpeg_encoder::ColorType;

use crate::jpeg::encode_jpeg;
use crate::rng::Rng;

/// JPEG quality for photos, up to 100.
const QUALITY: u8 = 75;
/// Texture octaves: distance between random values in pixels, and amplitude.
const OCTAVES: [(usize, i32); 3] = [(64, 26), (16, 16), (4, 7)];
/// Amplitude of the single-pixel noise.
const GRAIN: i32 = 4;

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
        light.fill_with(|| rng.between(-GRAIN, GRAIN + 1));
        for octave in &octaves {
            octave.add_row(y, &mut light);
        }
        for (color, light) in colors.iter().zip(&light) {
            pixels.extend(color.map(|channel| (channel + light).clamp(0, 255) as u8));
        }
    }
    encode_jpeg(&pixels, width, height, ColorType::Rgb, QUALITY)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_photo_takes_as_many_bytes_as_a_photo_does() {
        let file = photo_jpeg(640, 480, &mut Rng::new(1, 2)).unwrap();
        let bytes_per_pixel = file.len() as f64 / (640.0 * 480.0);
        assert!((0.08..0.25).contains(&bytes_per_pixel), "{bytes_per_pixel}");
    }
}
