//! Computes token positions for rotary embeddings.
//!
//! Text and audio positions count up; native-resolution models assign a layer, a row and a column to the
//! tokens of an image or a video, and continue after the largest coordinate. Video layers are counted, or
//! spaced by duration: Qwen2.5-VL and Qwen2.5-Omni. Layers that are separate in the text are like images:
//! Qwen3-VL.
//!
//! # Source
//! Multimodal rotary embedding: Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191, section 2.1; by time: Bai et
//! al., "Qwen2.5-VL Technical Report", 2025, arXiv:2502.13923, section 2.1.2; Xu et al., "Qwen2.5-Omni
//! Technical Report", 2025, arXiv:2503.20215, section 2.1. The begin of every layer is truncated to a
//! position, in single precision, as in `get_rope_index` in transformers 5.24.0; version 4.57.1 truncates the
//! layer duration in Qwen2.5-VL to whole seconds. In version 5.24.0 the text after a Qwen2-VL or Qwen2.5-VL
//! video continues after the larger side, regardless of the number of layers; here the text continues after
//! the largest position, as Qwen2-VL defines it.

use dflop_samples::inputs::{PreparedSample, VideoValues};
use dflop_samples::media::Modality;

use crate::family::LayerTime;

/// Upper bound for the seconds per layer, far below the point where sums overflow.
const SECONDS_MAX: f32 = 16_777_216.0;

/// Returns layer, row and column for every token in a sample.
///
/// `merge` is the number of patches along a side that become one token. A medium without a grid counts as
/// text.
pub(super) fn grid_positions(sample: &PreparedSample, merge: u32, time: LayerTime) -> [Vec<i64>; 3] {
    let mut positions = [const { Vec::new() }; 3];
    let (mut at, mut next) = (0, 0i64);
    let mut images = sample.images.iter().map(|image| (image.grid_thw, None));
    let mut videos = sample.videos.iter().flat_map(grids_in_text);
    for run in &sample.runs {
        let (grid, seconds) = match run.modality {
            Modality::Image => images.next().unwrap_or_default(),
            Modality::Video => videos.next().unwrap_or_default(),
            Modality::Audio => continue,
        };
        let Some([layers, rows, columns]) = grid else { continue };
        count_up(&mut positions, run.start - at, &mut next);
        let (rows, columns) = (i64::from(rows / merge), i64::from(columns / merge));
        for layer in 0..layers {
            let layer = layer_position(layer, seconds, time);
            for row in 0..rows {
                for column in 0..columns {
                    for (axis, step) in positions.iter_mut().zip([layer, row, column]) {
                        axis.push(next + step);
                    }
                }
            }
        }
        // The next text continues after the largest of the three coordinates.
        let last_layer = layer_position(layers.saturating_sub(1), seconds, time);
        next += (last_layer + 1).max(rows).max(columns);
        at = run.start + run.tokens;
    }
    count_up(&mut positions, sample.input_ids.len() - at, &mut next);
    positions
}

/// Returns a video's grids in the text, with the seconds per layer: the whole grid, or a grid for each layer
/// if layers are separate in the text, with times.
fn grids_in_text(video: &VideoValues) -> impl Iterator<Item = (Option<[u32; 3]>, Option<f32>)> {
    let layers = video.layer_seconds.len();
    let grid = match video.pixels.grid_thw {
        Some([_, rows, columns]) if layers > 0 => Some([1, rows, columns]),
        grid => grid,
    };
    std::iter::repeat_n((grid, Some(video.seconds_per_grid)), layers.max(1))
}

/// Returns the time position of a layer in a video with `seconds` per layer; image layers are counted.
fn layer_position(layer: u32, seconds: Option<f32>, time: LayerTime) -> i64 {
    match (seconds, time) {
        (None, _) | (_, LayerTime::Counted) => i64::from(layer),
        (Some(seconds), LayerTime::TypedSeconds { positions } | LayerTime::Seconds { positions }) => {
            (layer as f32 * seconds.clamp(0.0, SECONDS_MAX) * positions as f32) as i64
        }
    }
}

fn count_up(positions: &mut [Vec<i64>; 3], tokens: usize, next: &mut i64) {
    let until = *next + tokens as i64;
    for axis in positions {
        axis.extend(*next..until);
    }
    *next = until;
}
