//! Changes brightness, contrast, saturation and hue, in this order, as torchvision defines them on RGB.
//!
//! Values are clamped to black and white after each change and rounded once, at the end. Gray is ITU-R BT.601
//! luma; the hue rotates in HSV.

use super::builder::ColorJitter;
use super::random::{Quantity, RandomSource};

/// Red, green and blue weights for gray.
const GRAY: [f32; 3] = [0.299, 0.587, 0.114];
const WHITE: f32 = 255.0;

/// Color changes drawn for an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ColorChanges {
    brightness: f32,
    contrast: f32,
    saturation: f32,
    hue_turns: f32,
}

impl Default for ColorChanges {
    fn default() -> Self {
        Self { brightness: 1.0, contrast: 1.0, saturation: 1.0, hue_turns: 0.0 }
    }
}

impl ColorJitter {
    /// Draws the color changes for an image.
    pub(super) fn draw(&self, random: RandomSource) -> ColorChanges {
        let factor =
            |quantity, change: f64| random.between(quantity, (1.0 - change).max(0.0), 1.0 + change) as f32;
        ColorChanges {
            brightness: factor(Quantity::Brightness, self.brightness),
            contrast: factor(Quantity::Contrast, self.contrast),
            saturation: factor(Quantity::Saturation, self.saturation),
            hue_turns: random.between(Quantity::Hue, -self.hue, self.hue) as f32,
        }
    }
}

impl ColorChanges {
    /// Changes all pixels of an image.
    #[expect(clippy::float_cmp, reason = "a factor that was not drawn is exactly 1, a turn exactly 0")]
    pub(crate) fn apply(&self, pixels: &mut [[u8; 3]]) {
        if *self == Self::default() {
            return;
        }
        let table = self.value_table(pixels);
        let (has_saturation, has_hue) = (self.saturation != 1.0, self.hue_turns != 0.0);
        for pixel in pixels {
            let mut color = pixel.map(|value| table[usize::from(value)]);
            if has_saturation {
                let gray = gray(color);
                color = color.map(|value| blend(gray, value, self.saturation));
            }
            if has_hue {
                color = rotate_hue(color, self.hue_turns);
            }
            // Adding a half and truncating rounds to the nearest integer, because no value is negative.
            *pixel = color.map(|value| (value + 0.5) as u8);
        }
    }

    /// Builds the lookup table for brightness and contrast, which depend on a single value and the mean gray.
    fn value_table(&self, pixels: &[[u8; 3]]) -> [f32; 256] {
        let table: [f32; 256] = std::array::from_fn(|value| (value as f32 * self.brightness).min(WHITE));
        let grays = pixels.iter().map(|pixel| gray(pixel.map(|value| table[usize::from(value)])));
        let mean = grays.map(f64::from).sum::<f64>() / pixels.len().max(1) as f64;
        table.map(|value| blend(mean as f32, value, self.contrast))
    }
}

fn gray(color: [f32; 3]) -> f32 {
    color[0] * GRAY[0] + color[1] * GRAY[1] + color[2] * GRAY[2]
}

/// Moves `value` away from `base` by `factor`.
fn blend(base: f32, value: f32, factor: f32) -> f32 {
    (base + (value - base) * factor).clamp(0.0, WHITE)
}

/// Rotates the hue by a fraction of the color wheel, keeping HSV value and chroma.
#[expect(clippy::float_cmp, reason = "the largest of three values is one of them")]
fn rotate_hue(color: [f32; 3], turns: f32) -> [f32; 3] {
    const SECTORS: f32 = 6.0;
    let [red, green, blue] = color;
    let most = red.max(green).max(blue);
    let chroma = most - red.min(green).min(blue);
    if chroma <= 0.0 {
        return color;
    }
    let sector = if most == red {
        (green - blue) / chroma
    } else if most == green {
        (blue - red) / chroma + 2.0
    } else {
        (red - green) / chroma + 4.0
    };
    let sector = sector + SECTORS * turns;
    // The offsets place red, green and blue on the six-sector wheel.
    [5.0, 3.0, 1.0].map(|start| {
        let at = (start + sector).rem_euclid(SECTORS);
        most - chroma * at.min(4.0 - at).clamp(0.0, 1.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RED: [u8; 3] = [255, 0, 0];
    const PLAIN: ColorChanges =
        ColorChanges { brightness: 1.0, contrast: 1.0, saturation: 1.0, hue_turns: 0.0 };

    fn changed(colors: ColorChanges, mut pixels: Vec<[u8; 3]>) -> Vec<[u8; 3]> {
        colors.apply(&mut pixels);
        pixels
    }

    #[test]
    fn brightness_multiplies_and_stops_at_white() {
        let colors = ColorChanges { brightness: 1.5, ..PLAIN };
        assert_eq!(changed(colors, vec![[10, 100, 200]]), [[15, 150, 255]]);
    }

    #[test]
    fn contrast_is_about_the_mean_gray() {
        let flat = changed(ColorChanges { contrast: 0.0, ..PLAIN }, vec![[0; 3], [100; 3]]);
        assert_eq!(flat, [[50; 3]; 2]);
        let steep = changed(ColorChanges { contrast: 2.0, ..PLAIN }, vec![[40; 3], [60; 3]]);
        assert_eq!(steep, [[30; 3], [70; 3]]);
    }

    #[test]
    fn saturation_is_about_the_gray_of_the_pixel() {
        assert_eq!(changed(ColorChanges { saturation: 0.0, ..PLAIN }, vec![RED, [9; 3]]), [[76; 3], [9; 3]]);
    }

    #[test]
    fn hue_turns_red_to_green_to_blue_and_back() {
        let turned = |turns| changed(ColorChanges { hue_turns: turns, ..PLAIN }, vec![RED])[0];
        assert_eq!(turned(1.0 / 3.0), [0, 255, 0]);
        assert_eq!(turned(-1.0 / 3.0), [0, 0, 255]);
        assert_eq!(turned(0.5), [0, 255, 255]);
        let muted = changed(ColorChanges { hue_turns: 0.25, ..PLAIN }, vec![[40, 60, 50]])[0];
        assert_eq!((*muted.iter().max().unwrap(), *muted.iter().min().unwrap()), (60, 40));
    }

    #[test]
    fn no_change_keeps_every_value() {
        let all: Vec<[u8; 3]> = (0..=255).map(|value| [value, 255 - value, value / 2]).collect();
        assert_eq!(changed(PLAIN, all.clone()), all);
        let nearly = ColorChanges { hue_turns: 1e-9, ..PLAIN };
        assert_eq!(changed(nearly, all.clone()), all);
    }
}
