//! Arguments for random image augmentation.

use clap::Args;
use dflop_loader::media::augment::{Augment, ColorJitter};

use crate::failure::Failure;

/// Area fraction that a random crop keeps; below, the width-to-height ratio.
const CROP_SCALE: std::ops::RangeInclusive<f64> = 0.08..=1.0;
const CROP_RATIO: std::ops::RangeInclusive<f64> = 0.75..=4.0 / 3.0;

/// Random image augmentation; without arguments, images are not changed.
#[derive(Debug, Args)]
pub(crate) struct AugmentArgs {
    /// Crop each image to a random part: 8 % to 100 % of the area, width over height 3/4 to 4/3.
    #[arg(long)]
    random_crop: bool,
    /// Mirror every image left to right with probability 1/2.
    #[arg(long)]
    flip: bool,
    /// Change brightness, contrast, saturation and hue at random by up to these amounts, such as
    /// `0.4,0.4,0.4,0.1`.
    #[arg(long, value_name = "B,C,S,H", value_parser = parse_jitter)]
    color_jitter: Option<Jitter>,
}

#[derive(Debug, Clone, Copy)]
struct Jitter(ColorJitter);

fn parse_jitter(text: &str) -> Result<Jitter, String> {
    let numbers: Result<Vec<f64>, _> = text.split(',').map(|number| number.trim().parse()).collect();
    match numbers.as_deref() {
        Ok(&[brightness, contrast, saturation, hue]) => {
            Ok(Jitter(ColorJitter { brightness, contrast, saturation, hue }))
        }
        _ => Err("expected four numbers: brightness, contrast, saturation, hue".to_owned()),
    }
}

impl AugmentArgs {
    /// Builds the augmentation; `None` if no argument is given.
    pub(crate) fn augment(&self) -> Result<Option<Augment>, Failure> {
        if !self.random_crop && !self.flip && self.color_jitter.is_none() {
            return Ok(None);
        }
        let mut builder = Augment::builder();
        if self.random_crop {
            builder = builder.random_crop(CROP_SCALE, CROP_RATIO);
        }
        if self.flip {
            builder = builder.flip(0.5);
        }
        if let Some(Jitter(jitter)) = self.color_jitter {
            builder = builder.color_jitter(jitter);
        }
        Ok(Some(builder.build()?))
    }
}
