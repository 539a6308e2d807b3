//! Distributes image rows to square tiles, channels first: `[tiles, 3, side, side]`.

use super::resample::{Canvas, Resampler, Resize};
use super::{Normalization, Pixel, RgbView, Tables};

/// Tile tensor under construction; unwritten pixels must be blackened.
#[derive(Debug)]
pub(crate) struct Tiles<'a, T> {
    values: Vec<T>,
    side: usize,
    tables: &'a Tables<T>,
}

/// Tile grid inside the tensor, and image offset in pixels on the grid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TilePlacement {
    pub(crate) first_tile: usize,
    pub(crate) columns: usize,
    pub(crate) left: usize,
    pub(crate) top: usize,
}

impl<'a, T: Pixel> Tiles<'a, T> {
    pub(crate) fn new(tiles: usize, side: usize, tables: &'a Tables<T>) -> Self {
        Self { values: vec![T::default(); tiles * 3 * side * side], side, tables }
    }

    /// Fills tiles with black.
    pub(crate) fn blacken(&mut self, tiles: std::ops::Range<usize>) {
        let plane = self.side * self.side;
        let planes = &mut self.values[tiles.start * 3 * plane..tiles.end * 3 * plane];
        for (index, plane) in planes.chunks_exact_mut(plane).enumerate() {
            plane.fill(self.tables[index % 3][0]);
        }
    }

    /// Writes an image row, `[width, 3]` bytes, `y` rows below the image top.
    pub(crate) fn write_row(&mut self, place: TilePlacement, y: usize, pixels: &[u8]) {
        let y = place.top + y;
        let first_tile = place.first_tile + y / self.side * place.columns;
        let mut left = place.left;
        let mut rest = pixels;
        while !rest.is_empty() {
            let (tile, x) = (first_tile + left / self.side, left % self.side);
            let (pixels, behind) = rest.split_at(rest.len().min(3 * (self.side - x)));
            self.write_run(tile, y % self.side, x, pixels);
            left += self.side - x;
            rest = behind;
        }
    }

    /// Writes pixels into a tile row.
    fn write_run(&mut self, tile: usize, y: usize, x: usize, pixels: &[u8]) {
        for (channel, table) in self.tables.iter().enumerate() {
            let start = ((3 * tile + channel) * self.side + y) * self.side + x;
            let bytes = pixels.iter().skip(channel).step_by(3);
            for (value, byte) in self.values[start..start + pixels.len() / 3].iter_mut().zip(bytes) {
                *value = table[usize::from(*byte)];
            }
        }
    }

    pub(crate) fn into_values(self) -> Vec<T> {
        self.values
    }
}

/// Creates `[frames, 3, side, side]`, each frame resized by `resize`, which must produce `side` x `side`
/// pixels.
pub(crate) fn squares<T: Pixel>(
    frames: &[RgbView<'_>],
    side: usize,
    normalization: &Normalization,
    resampler: &mut Resampler,
    resize: impl Fn(RgbView<'_>) -> Resize,
) -> Vec<T> {
    canvases(frames, side, normalization, resampler, Canvas::from_image, resize)
}

/// Creates the same from frames that `canvas` may pad before resizing.
pub(crate) fn canvases<'a, T: Pixel>(
    frames: &[RgbView<'a>],
    side: usize,
    normalization: &Normalization,
    resampler: &mut Resampler,
    canvas: impl Fn(RgbView<'a>) -> Canvas<'a>,
    resize: impl Fn(RgbView<'a>) -> Resize,
) -> Vec<T> {
    let tables = normalization.tables();
    let mut target = Tiles::new(frames.len(), side, &tables);
    for (first_tile, &frame) in frames.iter().enumerate() {
        let place = TilePlacement { first_tile, columns: 1, left: 0, top: 0 };
        resampler.resize(&canvas(frame), &resize(frame), |y, row| target.write_row(place, y, row));
    }
    target.into_values()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Normalization;

    #[test]
    fn a_row_is_cut_where_tiles_meet() {
        let tables =
            Normalization { scale: 1.0, mean: [0.0, 100.0, 200.0], deviation: [1.0; 3] }.tables::<f32>();
        let mut tiles = Tiles::new(4, 2, &tables);
        tiles.blacken(0..4);
        // Two tile columns without any tiles before them; the image starts in the last row and the second
        // column.
        let place = TilePlacement { first_tile: 0, columns: 2, left: 1, top: 3 };
        tiles.write_row(place, 0, &[11, 12, 13, 21, 22, 23]);
        let values = tiles.into_values();
        let at = |tile: usize, channel: usize, y: usize, x: usize| {
            values[((3 * tile + channel) * 2 + y) * 2 + x] as i32
        };
        assert_eq!([at(2, 0, 1, 1), at(2, 1, 1, 1), at(2, 2, 1, 1)], [11, -88, -187]);
        assert_eq!([at(3, 0, 1, 0), at(3, 1, 1, 0), at(3, 2, 1, 0)], [21, -78, -177]);
        assert_eq!([at(0, 0, 0, 0), at(0, 1, 0, 0), at(3, 2, 1, 1)], [0, -100, -200]);
    }
}
