//! Writes a square per image: the layout for video frames and CLIP-like encoders.

use super::Pixel;
use super::normalize::Normalization;
use super::resample::{Canvas, Resampler, Resize};
use super::rgb_view::RgbView;
use super::tiles::{TilePlacement, Tiles};

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
