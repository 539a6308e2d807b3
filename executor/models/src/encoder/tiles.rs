//! Arranges square tiles with a fixed size as encoder rows.

use dflop_costmodel::tokens::any_res::AnyRes;

use super::{HostContext, TiledMedium, any_res, refuse};
use crate::error::Result;
use dflop_device::ops::sparse_rows::SparseRows;

/// Row arrangement for square tiles, and selection of projected rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Tiles {
    /// Number of color channels.
    pub channels: usize,
    /// Number of pixels along a tile side.
    pub side: usize,
    /// Number of pixels along a patch side.
    pub patch: usize,
    /// Whether a learned class row precedes the patches in a tile.
    pub has_class: bool,
    /// Selection and arrangement of projected rows.
    pub rule: TileRule,
}

/// Selection and arrangement of projected rows.
#[derive(Debug, Clone, PartialEq)]
pub enum TileRule {
    /// All rows, for an encoder without projector.
    All,
    /// Patches, arranged by the any-resolution rule.
    AnyRes(AnyRes),
    /// Means over blocks with this many patches along both sides.
    Pooled(usize),
    /// Pixel shuffle: each block with this many patches along both sides is merged into a single row.
    Shuffled(usize),
}

impl Tiles {
    /// Returns the number of elements in a tile.
    pub(super) fn elements(&self) -> usize {
        self.channels * self.side * self.side
    }

    /// Returns the number of patches along a tile side.
    #[must_use]
    pub fn patches_per_side(&self) -> usize {
        self.side / self.patch
    }

    /// Returns the number of patches in a tile.
    #[must_use]
    pub fn patches(&self) -> usize {
        self.patches_per_side().pow(2)
    }

    /// Returns the number of rows per tile.
    fn rows(&self) -> usize {
        self.patches() + usize::from(self.has_class)
    }

    pub(super) fn plan(&self, pixels: &[f32], shown: &[TiledMedium]) -> Result<HostContext> {
        let of_tile = self.elements();
        let tiles = shown.iter().map(TiledMedium::tiles).sum::<usize>();
        if pixels.len() != tiles * of_tile {
            let problem = format!("has {} elements for {tiles} tiles of {of_tile}", pixels.len());
            return refuse("pixel_values", problem);
        }
        // a medium without tiles would read the next medium's rows
        if let Some(index) = shown.iter().position(|shown| shown.tiles() == 0) {
            return refuse("shown", format!("medium {index} has no tile"));
        }
        let rows = self.rows();
        // maps a tile row to a patch; the class token is the first row
        let patch = |row: usize| {
            let (tile, row) = (row / rows, row % rows);
            let patch = (row + 1).checked_sub(1 + usize::from(self.has_class))?;
            Some((tile * self.patches() + patch) as u32)
        };
        let all = 0..tiles * rows;
        let (taken, projected_rows) = self.taken(tiles);
        let (arranged, newlines) = match &self.rule {
            TileRule::AnyRes(rule) => Some(any_res::arrange(rule, shown)?).unzip(),
            _ => (None, None),
        };
        Ok(HostContext {
            medium: pixels.chunks(of_tile).flat_map(|tile| self.tile_patches(tile)).collect(),
            medium_rows: tiles * self.patches(),
            stem: if self.has_class { vec![SparseRows::gather(all.clone().map(patch))] } else { Vec::new() },
            class: self
                .has_class
                .then(|| SparseRows::gather(all.clone().map(|row| row.is_multiple_of(rows).then_some(0)))),
            positions: Some(SparseRows::gather(all.map(|row| Some((row % rows) as u32)))),
            segments: (0..=tiles).map(|tile| (tile * rows) as u32).collect(),
            taken,
            projected_rows,
            arranged,
            newlines,
            ..HostContext::default()
        })
    }

    /// Selects last-layer rows, and returns the number of projected rows.
    fn taken(&self, tiles: usize) -> (Option<SparseRows>, usize) {
        let (side, class) = (self.patches_per_side(), usize::from(self.has_class));
        let place = |tile: usize, patch: usize| Some((tile * self.rows() + class + patch) as u32);
        let patches = 0..tiles * self.patches();
        match self.rule {
            TileRule::All => (None, tiles * self.rows()),
            TileRule::AnyRes(_) if !self.has_class => (None, patches.end),
            TileRule::AnyRes(_) => {
                let place = |patch| place(patch / self.patches(), patch % self.patches());
                (Some(SparseRows::gather(patches.clone().map(place))), patches.end)
            }
            TileRule::Pooled(block) => {
                let (per_side, share) = (side / block, 1.0 / (block * block) as f32);
                let merged = 0..tiles * per_side * per_side;
                let of_block = |index: usize| {
                    let (tile, index) = (index / (per_side * per_side), index % (per_side * per_side));
                    let (top, left) = (index / per_side * block, index % per_side * block);
                    let patches = (0..block * block)
                        .map(move |inside| (top + inside / block) * side + left + inside % block);
                    patches.filter_map(move |patch| Some((place(tile, patch)?, share)))
                };
                (Some(SparseRows::weighted(merged.clone().map(of_block))), merged.end)
            }
            // pixel shuffle: patches in a block become neighbors, so that the projector reads them as one row
            TileRule::Shuffled(block) => {
                let per_side = side / block;
                let shuffled = patches.clone().map(|index| {
                    let (tile, index) = (index / self.patches(), index % self.patches());
                    let (merged, inside) = (index / (block * block), index % (block * block));
                    let row = merged / per_side * block + inside / block;
                    let column = merged % per_side * block + inside % block;
                    place(tile, row * side + column)
                });
                (Some(SparseRows::gather(shuffled)), patches.end / (block * block))
            }
        }
    }

    /// Returns tile pixels patch by patch: channels, rows, columns.
    fn tile_patches<'a>(&self, tile: &'a [f32]) -> impl Iterator<Item = f32> + use<'a> {
        let (side, patch, channels, across) = (self.side, self.patch, self.channels, self.patches_per_side());
        (0..across * across).flat_map(move |index| {
            let (top, left) = (index / across * patch, index % across * patch);
            (0..channels).flat_map(move |channel| {
                (0..patch).flat_map(move |row| {
                    let start = (channel * side + top + row) * side + left;
                    tile[start..start + patch].iter().copied()
                })
            })
        })
    }
}
