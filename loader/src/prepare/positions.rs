//! Positions of tokens for rotary embeddings.
//!
//! Text counts up; models of native resolution give the tokens of a picture a row and a column, and go on after the
//! longer side.
//!
//! # Source
//! Multimodal rotary embedding: Wang et al., "Qwen2-VL", 2024, arXiv:2409.12191, section 2.1.

use super::PreparedSample;
use crate::text::MediumSlot;

/// Frame, row and column of every token of a sample.
///
/// `merge` is how many patches along a side become one token. A picture without a grid counts as text.
pub(super) fn grid_positions(sample: &PreparedSample, merge: u32) -> [Vec<i64>; 3] {
    let mut positions = [const { Vec::new() }; 3];
    let (mut at, mut next) = (0, 0i64);
    let pictures = sample.runs.iter().filter(|run| run.slot == MediumSlot::Image);
    for (run, picture) in pictures.zip(&sample.images) {
        let Some([frames, rows, columns]) = picture.grid_thw else { continue };
        count_up(&mut positions, run.start - at, &mut next);
        let (rows, columns) = (i64::from(rows / merge), i64::from(columns / merge));
        for frame in 0..i64::from(frames) {
            for row in 0..rows {
                for column in 0..columns {
                    for (axis, step) in positions.iter_mut().zip([frame, row, column]) {
                        axis.push(next + step);
                    }
                }
            }
        }
        next += rows.max(columns);
        at = run.start + run.tokens;
    }
    count_up(&mut positions, sample.input_ids.len() - at, &mut next);
    positions
}

fn count_up(positions: &mut [Vec<i64>; 3], tokens: usize, next: &mut i64) {
    let until = *next + tokens as i64;
    for axis in positions {
        axis.extend(*next..until);
    }
    *next = until;
}
