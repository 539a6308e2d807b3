//! Arranges image and video patches at native resolution as encoder rows.

use super::{HostContext, refuse};
use crate::error::Result;
use crate::layers::Rope;
use dflop_device::ops::sparse_rows::SparseRows;

/// Patch arrangement in rows.
#[derive(Debug, Clone, PartialEq)]
pub struct NativeResolution {
    /// Number of elements in a patch.
    pub patch_inputs: usize,
    /// Number of patches along the side of a block that becomes one token.
    pub merge: usize,
    /// Number of blocks along a window side.
    pub window: Option<usize>,
    /// Rotation by row and column.
    pub rope: Rope,
    /// Number of positions along the side of the learned table, which is stretched over every image; `None`
    /// without learned positions.
    pub table_side: Option<usize>,
}

impl NativeResolution {
    /// Returns the number of elements in a patch.
    pub(super) fn patch_inputs(&self) -> usize {
        self.patch_inputs
    }

    pub(super) fn rope(&self) -> &Rope {
        &self.rope
    }

    pub(super) fn plan(&self, values: &[f32], grids: &[[u32; 3]]) -> Result<HostContext> {
        let block = self.merge * self.merge;
        let mut plan = HostContext { segments: vec![0], windows: vec![0], ..HostContext::default() };
        // row and column for every patch, and blocks in window order
        let (mut rows, mut columns, mut order) = (Vec::new(), Vec::new(), Vec::new());
        let mut learned = Vec::new();
        for (index, &grid) in grids.iter().enumerate() {
            let [layers, height, width] = grid.map(|length| length as usize);
            if [height, width].iter().any(|&side| side == 0 || !side.is_multiple_of(self.merge)) {
                return refuse("grids", format!("image {index} has {height} x {width} patches"));
            }
            // video frames do not attend to each other: each patch layer is a segment
            for _ in 0..layers {
                let first = rows.len() / block;
                self.layer(height, width, &mut rows, &mut columns);
                if let Some(side) = self.table_side {
                    let taken = rows[first * block..].iter().zip(&columns[first * block..]);
                    learned
                        .extend(taken.map(|(&row, &column)| stretched([row, column], [height, width], side)));
                }
                plan.segments.push(rows.len() as u32);
                self.windows(
                    first,
                    [height, width].map(|side| side / self.merge),
                    &mut order,
                    &mut plan.windows,
                );
            }
        }
        if values.len() != rows.len() * self.patch_inputs {
            let problem = format!("has {} elements for {} x {}", values.len(), rows.len(), self.patch_inputs);
            return refuse("patches", problem);
        }
        plan.medium = values.to_vec();
        plan.medium_rows = rows.len();
        plan.projected_rows = order.len();
        plan.positions = self.table_side.map(|_| SparseRows::weighted(learned));
        if self.window.is_some() {
            // patches move block by block, so that merged rows stay contiguous
            let patch = |index: usize| order[index / block] * block + index % block;
            let patches = || (0..rows.len()).map(patch);
            plan.stem = vec![SparseRows::gather(patches().map(|patch| Some(patch as u32)))];
            let ordered = |axis: &[u32]| patches().map(|patch| axis[patch]).collect();
            plan.rotation = Some([ordered(&rows), ordered(&columns)]);
            // the inverse permutation, because the LLM reads blocks in image order
            let mut back = vec![None; order.len()];
            (0..).zip(&order).for_each(|(place, &block)| back[block] = Some(place));
            plan.arranged = Some(SparseRows::gather(back));
        } else {
            plan.windows.clear();
            plan.rotation = Some([rows, columns]);
        }
        Ok(plan)
    }

    /// Adds patch rows and columns for a layer, block by block.
    fn layer(&self, height: usize, width: usize, rows: &mut Vec<u32>, columns: &mut Vec<u32>) {
        let merge = self.merge;
        for (top, left) in pairs(height / merge, width / merge) {
            for (row, column) in pairs(merge, merge) {
                rows.push((top * merge + row) as u32);
                columns.push((left * merge + column) as u32);
            }
        }
    }

    /// Adds the blocks in a layer in window order; windows are cut off at the lower and right edges.
    fn windows(
        &self,
        first: usize,
        [height, width]: [usize; 2],
        order: &mut Vec<usize>,
        ends: &mut Vec<u32>,
    ) {
        // without windows, blocks stay in image order
        let Some(window) = self.window else { return order.extend(first..first + height * width) };
        for (top, left) in pairs(height.div_ceil(window), width.div_ceil(window)) {
            let (top, left) = (top * window, left * window);
            let (bottom, right) = ((top + window).min(height), (left + window).min(width));
            for row in top..bottom {
                order.extend((left..right).map(|column| first + row * width + column));
            }
            ends.push((order.len() * self.merge * self.merge) as u32);
        }
    }
}

/// Returns the position table entries and weights for a patch position in a square table: bilinear, table
/// corners on image corners.
fn stretched(place: [u32; 2], sides: [usize; 2], table_side: usize) -> [(u32, f32); 4] {
    let axis = |at: usize| {
        let place = place[at] as f32 * (table_side - 1) as f32 / (sides[at] - 1).max(1) as f32;
        let (first, after) = (place.floor(), place - place.floor());
        let entry = |offset: usize| (first as usize + offset).min(table_side - 1) as u32;
        [(entry(0), 1.0 - after), (entry(1), 1.0 - (1.0 - after))]
    };
    let [[top, bottom], [left, right]] = [axis(0), axis(1)];
    let both = |(row, of_row): (u32, f32), (column, of_column): (u32, f32)| {
        (row * table_side as u32 + column, of_row * of_column)
    };
    [both(top, left), both(top, right), both(bottom, left), both(bottom, right)]
}

fn pairs(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}
