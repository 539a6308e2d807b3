//! Computes the positions of tokens for rotary embeddings.
//!
//! Text counts up; models of native resolution give the tokens of an image or a video a layer, a row and a
//! column, and continue after the largest of these. The layers of a video are counted, or spaced by their
//! duration: Qwen2.5-VL. Layers that stand apart in the text are like images: Qwen3-VL.
//!
//! # Source
//! Multimodal rotary embedding: Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191, section 2.1; by time: Bai et
//! al., "Qwen2.5-VL Technical Report", 2025, arXiv:2502.13923, section 2.1.2. `get_rope_index` of
//! transformers 4.57.1 truncates the duration of a layer to whole seconds, as does this code: layers of less
//! than a second share their positions in time.

use dflop_samples::inputs::VideoValues;
use dflop_samples::media::Modality;

use super::PreparedSample;

/// Upper bound on the seconds per layer, far below the point where sums overflow.
const SECONDS_MAX: i64 = 1 << 24;

/// Returns layer, row and column of every token of a sample.
///
/// `merge` is the number of patches along a side that become one token. A medium without a grid counts as
/// text.
pub(super) fn grid_positions(
    sample: &PreparedSample,
    merge: u32,
    tokens_per_second: Option<u32>,
) -> [Vec<i64>; 3] {
    let mut positions = [const { Vec::new() }; 3];
    let (mut at, mut next) = (0, 0i64);
    let mut images = sample.images.iter().map(|image| (image.grid_thw, 1));
    let mut videos = sample.videos.iter().flat_map(|video| grids_in_text(video, tokens_per_second));
    for run in &sample.runs {
        let (grid, layer_step) = match run.modality {
            Modality::Image => images.next().unwrap_or((None, 1)),
            Modality::Video => videos.next().unwrap_or((None, 1)),
            Modality::Audio => continue,
        };
        let Some([layers, rows, columns]) = grid else { continue };
        count_up(&mut positions, run.start - at, &mut next);
        let (rows, columns) = (i64::from(rows / merge), i64::from(columns / merge));
        for layer in 0..i64::from(layers) {
            for row in 0..rows {
                for column in 0..columns {
                    for (axis, step) in positions.iter_mut().zip([layer * layer_step, row, column]) {
                        axis.push(next + step);
                    }
                }
            }
        }
        // The next text continues after the largest of the three coordinates.
        let last_layer = (i64::from(layers) - 1).max(0) * layer_step;
        next += (last_layer + 1).max(rows).max(columns);
        at = run.start + run.tokens;
    }
    count_up(&mut positions, sample.input_ids.len() - at, &mut next);
    positions
}

/// Returns the grids of a video in the text, with the distance between their layers: the whole one, or one
/// for each layer if these stand apart with their times.
fn grids_in_text(
    video: &VideoValues,
    tokens_per_second: Option<u32>,
) -> impl Iterator<Item = (Option<[u32; 3]>, i64)> {
    let layers = video.layer_seconds.len();
    let grid = match video.pixels.grid_thw {
        Some([_, rows, columns]) if layers > 0 => Some([1, rows, columns]),
        grid => grid,
    };
    std::iter::repeat_n((grid, layer_step(video, tokens_per_second)), layers.max(1))
}

/// Returns the distance between the layers of a video.
fn layer_step(video: &VideoValues, tokens_per_second: Option<u32>) -> i64 {
    let Some(tokens_per_second) = tokens_per_second else { return 1 };
    (video.seconds_per_grid as i64).clamp(0, SECONDS_MAX) * i64::from(tokens_per_second)
}

fn count_up(positions: &mut [Vec<i64>; 3], tokens: usize, next: &mut i64) {
    let until = *next + tokens as i64;
    for axis in positions {
        axis.extend(*next..until);
    }
    *next = until;
}
