//! One square a picture: the layout of video frames and of CLIP-like encoders.

use super::normalise::Normalisation;
use super::picture::Picture;
use super::resample::{Canvas, Resampler, Resize};
use super::tiles::{Place, Tiles};

/// `[frames, 3, side, side]`, each resized as `resize` says, which must want `side` x `side` pixels.
pub(super) fn squares(
    frames: &[Picture<'_>],
    side: usize,
    normalisation: &Normalisation,
    resampler: &mut Resampler,
    resize: impl Fn(Picture<'_>) -> Resize,
) -> Vec<f32> {
    let tables = normalisation.tables();
    let mut target = Tiles::new(frames.len(), side, &tables);
    for (first_tile, &frame) in frames.iter().enumerate() {
        let place = Place { first_tile, columns: 1, left: 0, top: 0 };
        resampler.resize(&Canvas::of(frame), &resize(frame), |y, row| target.write_row(place, y, row));
    }
    target.into_values()
}
