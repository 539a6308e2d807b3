//! Rounds lengths up to a few values, so that compiled models see few shapes.

use dflop_samples::inputs::{IGNORED, MediaRun, PixelValues};
use dflop_samples::media::Modality;

use super::{PreparedSample, Preparer};
use crate::family::PixelLayout;

/// Number of ladder steps between two powers of two.
const LADDER_STEPS: usize = 8;
/// Minimum distance between two ladder steps.
const LADDER_STEP_LEAST: usize = 16;

/// Lengths that other lengths are rounded up to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// Multiples of a number, at least 1.
    Multiple(usize),
    /// A list of lengths, and beyond the longest, multiples of the longest.
    Lengths(Vec<usize>),
    /// Eight lengths between two powers of two: at most an eighth is padding, on average about a sixteenth.
    Ladder,
}

impl Buckets {
    /// Returns the bucket for a length; 0 has a separate bucket.
    #[must_use]
    pub fn round_up(&self, length: usize) -> usize {
        if length == 0 {
            return 0;
        }
        match self {
            Self::Multiple(multiple) => length.next_multiple_of(*multiple),
            Self::Lengths(lengths) => {
                let longest = lengths.iter().copied().max().unwrap_or(1);
                let fitting = lengths.iter().copied().filter(|bucket| *bucket >= length).min();
                fitting.unwrap_or_else(|| length.next_multiple_of(longest))
            }
            Self::Ladder => {
                let octave = 1 << length.ilog2();
                length.next_multiple_of((octave / LADDER_STEPS).max(LADDER_STEP_LEAST))
            }
        }
    }

    /// Returns whether the settings are valid.
    pub(super) fn is_valid(&self) -> bool {
        match self {
            Self::Multiple(multiple) => *multiple > 0,
            Self::Lengths(lengths) => !lengths.is_empty() && lengths.iter().all(|length| *length > 0),
            Self::Ladder => true,
        }
    }
}

impl Preparer {
    /// Creates a blank medium that rounds a microbatch's pixels up to a bucket: patches or tiles with zeros,
    /// in a separate sequence.
    pub(super) fn media_filler(&self, samples: &[PreparedSample]) -> Option<PreparedSample> {
        let buckets = self.media_buckets.as_ref()?;
        let images = || samples.iter().flat_map(|sample| &sample.images);
        let first = images().find(|image| !image.values.is_empty())?;
        let rows: usize = images().map(|image| image.shape[0]).sum();
        let (rows_of_token, tokens_of_row) = match self.packer.pixel_layout? {
            PixelLayout::Patches { merge, .. } => ((merge * merge) as usize, 1),
            PixelLayout::Tiles | PixelLayout::TypedTiles => {
                (1, first.tokens as usize / first.shape[0].max(1))
            }
            PixelLayout::PaddedTiles
            | PixelLayout::SizedTiles
            | PixelLayout::TileRow
            | PixelLayout::PaddedImages => return None,
        };
        let missing = buckets.round_up(rows).next_multiple_of(rows_of_token) - rows;
        let tokens = missing / rows_of_token * tokens_of_row;
        let (ids, start, has_markers) =
            self.expander.lone(Modality::Image, tokens).filter(|_| missing > 0)?;
        let row_values: usize = first.shape[1..].iter().product();
        let mut shape = first.shape.clone();
        shape[0] = missing;
        let grid_thw = first.grid_thw.map(|_| {
            let side = rows_of_token.isqrt();
            [1, side as u32, (missing / side) as u32]
        });
        let values = first.values.zeros(missing * row_values);
        let blank = PixelValues { values, shape, grid_thw, image_size: None, tokens: tokens as u32 };
        let run = MediaRun { modality: Modality::Image, start, tokens, has_markers };
        let labels = vec![IGNORED; ids.len()];
        Some(PreparedSample {
            input_ids: ids,
            labels,
            runs: vec![run],
            images: vec![blank],
            ..PreparedSample::default()
        })
    }
}
