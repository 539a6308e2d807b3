//! Draws the random resized crop.
//!
//! # Source
//! Szegedy et al., "Going Deeper with Convolutions", 2014, arXiv:1409.4842, section 6; the ten attempts and
//! the centered fallback follow torchvision's `RandomResizedCrop`.

use dflop_costmodel::ImageSize;

use super::builder::RandomCrop;
use super::random::{Quantity, RandomSource};
use crate::media::image::Crop;

/// Number of attempts before the centered crop is used.
const ATTEMPTS: u64 = 10;

impl RandomCrop {
    /// Draws a rectangle for an image with this size.
    pub(super) fn draw(&self, random: RandomSource, displayed: ImageSize) -> Crop {
        let area = f64::from(displayed.width) * f64::from(displayed.height);
        let fits = |length: f64, most: u32| length >= 1.0 && length <= f64::from(most);
        for attempt in 0..ATTEMPTS {
            let area = area * random.between(Quantity::Area(attempt), self.scale_min, self.scale_max);
            let ratio = random.log_between(Quantity::Ratio(attempt), self.ratio_min, self.ratio_max);
            let [width, height] = [area * ratio, area / ratio].map(|square| square.sqrt().round());
            if fits(width, displayed.width) && fits(height, displayed.height) {
                let (width, height) = (width as u32, height as u32);
                let left = random.whole(Quantity::Left(attempt), displayed.width - width);
                let top = random.whole(Quantity::Top(attempt), displayed.height - height);
                return Crop { left, top, width, height };
            }
        }
        self.center(displayed)
    }

    /// Returns the largest centered rectangle with an allowed ratio.
    fn center(&self, displayed: ImageSize) -> Crop {
        let ratio = f64::from(displayed.width) / f64::from(displayed.height);
        let whole = |length: f64, most: u32| (length.round() as u32).clamp(1, most);
        let (width, height) = if ratio < self.ratio_min {
            (displayed.width, whole(f64::from(displayed.width) / self.ratio_min, displayed.height))
        } else if ratio > self.ratio_max {
            (whole(f64::from(displayed.height) * self.ratio_max, displayed.width), displayed.height)
        } else {
            (displayed.width, displayed.height)
        };
        Crop { left: (displayed.width - width) / 2, top: (displayed.height - height) / 2, width, height }
    }
}
