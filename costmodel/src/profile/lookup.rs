//! The time of one measured setting, from another profile: what held-out points are compared with.

use super::Profile;
use super::compose::Question;
use super::curve::{Curve, Estimate};
use super::dimensions::Dimensions;
use super::measurement::{Part, Phase, Setting};
use super::surface::Surface;
use super::timing::PredictedTime;
use crate::error::Result;

/// Times of one part of a module in one pass, at one TP degree and layer count.
#[derive(Debug)]
pub(crate) struct PartTimes(Times);

#[derive(Debug)]
enum Times {
    /// Over tokens in all.
    Linear(Curve),
    /// Over batch and tokens, times this many layers.
    Attention(Surface, f64),
    /// Linear work, and attention of one layer times this many.
    Sum(Curve, Surface, f64),
    /// Whatever the shape.
    Fixed(Estimate),
}

impl PartTimes {
    /// Prepares the times of settings that differ from `like` in nothing but batch and tokens.
    ///
    /// Whole layers are taken as measured, or else as linear work and attention together.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure.
    pub(crate) fn new(profile: &Profile, widths: &Dimensions, like: &Setting) -> Result<Self> {
        let Setting { module, part, phase, tp, layers, .. } = *like;
        let (points, _) = profile.select(module, widths)?;
        let question = Question { points: &points, module, phase, tp, layers };
        let mut warnings = Vec::new();
        let count = f64::from(layers);
        let times = match (phase, part) {
            // Attention has no weights, so those of whole layers are those of their linear work.
            (Phase::Optimizer, Part::Whole) => question
                .optimizer_of(Part::Whole)
                .or_else(|| question.optimizer_of(Part::Linear))
                .map(Times::Fixed),
            (Phase::Optimizer, _) => question.optimizer_of(part).map(Times::Fixed),
            (_, Part::Attention) => {
                question.attention(&mut warnings).map(|surface| Times::Attention(surface, count))
            }
            (_, Part::Linear | Part::Ends | Part::Head) => {
                question.curve(part, &mut warnings).map(Times::Linear)
            }
            (_, Part::Whole) => match question.whole(&mut warnings) {
                Some(whole) => Some(Times::Attention(whole, 1.0)),
                None => question
                    .curve(Part::Linear, &mut warnings)
                    .zip(question.attention(&mut warnings))
                    .map(|(linear, attention)| Times::Sum(linear, attention, count)),
            },
        };
        times.map(Self).ok_or_else(|| question.lacks(part))
    }

    /// The time of a batch of sequences.
    pub(crate) fn time(&self, batch: u32, tokens: u32) -> PredictedTime {
        let (batch, tokens) = (f64::from(batch), f64::from(tokens));
        let estimate = match &self.0 {
            Times::Linear(curve) => curve.estimate(batch * tokens),
            Times::Attention(surface, layers) => surface.estimate(batch, tokens).times(*layers),
            Times::Sum(linear, attention, layers) => {
                linear.estimate(batch * tokens).plus(attention.estimate(batch, tokens).times(*layers))
            }
            Times::Fixed(estimate) => *estimate,
        };
        estimate.into()
    }
}
