//! Arranges square tiles with a fixed size as encoder rows, and their projected rows as tokens.
//!
//! LLaVA-OneVision tokens (any-resolution tiling): an image becomes the base tile, then the map of the
//! remaining tiles without padding, scaled down if it is too large, with a newline after every row. A video
//! becomes half-size frames with one newline after all frames.
//!
//! # Source
//! Any-resolution tiling: Li et al.: "LLaVA-OneVision", 2024, arXiv:2408.03326; rounding as in transformers.

use dflop_costmodel::ImageSize;
use dflop_costmodel::tokens::any_res::{AnyRes, VideoNewline};
use dflop_device::ops::sparse_rows::SparseRows;

use super::{HostContext, TiledMedium, refuse};
use crate::error::Result;

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
            TileRule::AnyRes(rule) => Some(arrange_any_res(rule, shown)?).unzip(),
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

/// Factor per side by which a map may exceed the limit before it is scaled down.
const SCALED_ABOVE: f64 = 1.1;

/// Selects projected rows that become tokens, and newline positions.
fn arrange_any_res(rule: &AnyRes, shown: &[TiledMedium]) -> Result<(SparseRows, SparseRows)> {
    let side = usize::from(rule.patches_per_side);
    let mut tokens = Tokens::default();
    let mut first = 0;
    for medium in shown {
        match *medium {
            TiledMedium::Video { frames } => add_video(rule, frames as usize, first, &mut tokens),
            TiledMedium::Image { height, width, tiles } => {
                (0..side * side).for_each(|row| tokens.row(first + row));
                match tiles {
                    1 => tokens.newline(),
                    _ => add_tile_map(rule, ImageSize { width, height }, tiles, first, &mut tokens)?,
                }
            }
        }
        first += medium.tiles() * side * side;
    }
    Ok((SparseRows::weighted(tokens.rows), SparseRows::gather(tokens.newlines)))
}

/// Adds every frame at half size, with newlines as the rule requires.
fn add_video(rule: &AnyRes, frames: usize, first: usize, tokens: &mut Tokens) {
    let side = usize::from(rule.patches_per_side);
    // odd sides round up, as in transformers
    let half = side.div_ceil(2);
    for frame in 0..frames {
        let start = first + frame * side * side;
        for row in 0..half {
            for column in 0..half {
                let places = [taps(row, side, half), taps(column, side, half)];
                tokens.scaled(places, |row, column| (start + row * side + column) as u32);
            }
            if rule.video_newline == VideoNewline::EveryRow {
                tokens.newline();
            }
        }
    }
    if rule.video_newline == VideoNewline::Once {
        tokens.newline();
    }
}

/// Tokens in order: each token is weighted rows or a newline.
#[derive(Default)]
struct Tokens {
    rows: Vec<Vec<(u32, f32)>>,
    newlines: Vec<Option<u32>>,
}

impl Tokens {
    fn row(&mut self, row: usize) {
        self.mixed(vec![(row as u32, 1.0)]);
    }

    fn mixed(&mut self, row: Vec<(u32, f32)>) {
        self.rows.push(row);
        self.newlines.push(None);
    }

    /// Adds a row interpolated between four rows.
    fn scaled(&mut self, [y, x]: [[(usize, f32); 2]; 2], place: impl Fn(usize, usize) -> u32) {
        let pairs = y.iter().flat_map(|y| x.iter().map(move |x| (y, x)));
        self.mixed(pairs.map(|(y, x)| (place(y.0, x.0), y.1 * x.1)).collect());
    }

    fn newline(&mut self) {
        self.rows.push(Vec::new());
        self.newlines.push(Some(0));
    }
}

/// Adds the tile map that follows the base tile at `first`.
fn add_tile_map(rule: &AnyRes, size: ImageSize, tiles: u32, first: usize, tokens: &mut Tokens) -> Result<()> {
    let side = usize::from(rule.patches_per_side);
    let grid = rule.grid(size)?;
    let (grid_columns, grid_rows) = (grid.columns as usize, grid.rows as usize);
    if tiles as usize != 1 + grid_columns * grid_rows {
        let problem = format!(
            "expected 1 + {grid_columns} x {grid_rows} tiles for an image of {} x {} pixels, found {tiles}",
            size.width, size.height
        );
        return refuse("shown", problem);
    }
    let (columns, rows) = (side * grid_columns, side * grid_rows);
    let [top, left] = padding(size, columns, rows);
    let (columns, rows) = (columns - 2 * left, rows - 2 * top);
    let place = |row: usize, column: usize| {
        let (row, column) = (top + row, left + column);
        let tile = 1 + row / side * grid_columns + column / side;
        (first + (tile * side + row % side) * side + column % side) as u32
    };
    let limit = usize::from(rule.feature_tiles_max) * side * side;
    let ratio = ((columns * rows) as f64 / limit as f64).sqrt();
    // slightly larger maps stay unscaled, as in transformers
    if ratio <= SCALED_ABOVE {
        for row in 0..rows {
            (0..columns).for_each(|column| tokens.row(place(row, column) as usize));
            tokens.newline();
        }
        return Ok(());
    }
    // as in transformers, the length is first reduced to a multiple of the ratio
    let scaled = |length: usize| ((length as f64 - length as f64 % ratio) / ratio).round() as usize;
    let (out_columns, out_rows) = (scaled(columns), scaled(rows));
    for row in 0..out_rows {
        for column in 0..out_columns {
            tokens.scaled([taps(row, rows, out_rows), taps(column, columns, out_columns)], place);
        }
        tokens.newline();
    }
    Ok(())
}

/// Returns rows and columns of padding on each side, which the aspect ratio determines.
fn padding(size: ImageSize, columns: usize, rows: usize) -> [usize; 2] {
    let (width, height) = (u64::from(size.width), u64::from(size.height));
    let (columns, rows) = (columns as u64, rows as u64);
    if width * rows > height * columns {
        [((rows - height * columns / width) / 2) as usize, 0]
    } else {
        [0, ((columns - width * rows / height) / 2) as usize]
    }
}

/// Returns the two neighbors and weights for an index on a scaled axis, corners not aligned.
fn taps(index: usize, length: usize, scaled: usize) -> [(usize, f32); 2] {
    let source = ((index as f32 + 0.5) * (length as f32 / scaled as f32) - 0.5).max(0.0);
    let low = (source as usize).min(length - 1);
    let share = source - low as f32;
    [(low, 1.0 - share), ((low + 1).min(length - 1), share)]
}
