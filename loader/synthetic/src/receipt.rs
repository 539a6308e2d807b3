//! Generates receipt scans: gray paper with lines of dark glyphs.

use std::io;

use jpeg_encoder::ColorType;

use crate::jpeg::encode_jpeg;
use crate::rng::Rng;

/// JPEG quality for scans, up to 100.
const QUALITY: u8 = 60;
/// Dot columns and dot rows in a glyph; a blank column follows each glyph.
const GLYPH_COLUMNS: usize = 5;
const GLYPH_ROWS: usize = 7;
/// Number of dot rows between line starts.
const LINE_ROWS: usize = 12;
/// Number of characters in a full line.
const LINE_GLYPHS: usize = 36;
/// Amplitude of the single-pixel noise.
const GRAIN: i32 = 2;

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
    encode_jpeg(&pixels, width, height, ColorType::Luma, QUALITY)
}

/// Draws paper that darkens towards the lower edge.
fn draw_paper(width: usize, height: usize, paper: i32, rng: &mut Rng) -> Vec<u8> {
    let mut pixels = Vec::with_capacity(width * height);
    for y in 0..height {
        let shade = paper - (20 * y / height) as i32;
        pixels.extend((0..width).map(|_| (shade + rng.between(-GRAIN, GRAIN + 1)).clamp(0, 255) as u8));
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
