//! Predicts a held-out measurement from the remaining profile.

use super::curve_query::CurveQuery;
use super::predicted_time::PredictedTime;
use crate::curve::{Curve, Estimate, Surface};
use crate::error::Result;
use crate::profile::{ModuleWidths, Part, Phase, Profile, Setting};

/// Times for one module part in one pass, at one TP degree and layer count.
#[derive(Debug)]
pub(super) struct HeldOutTimes(Times);

#[derive(Debug)]
enum Times {
    /// Time over all tokens.
    Linear(Curve),
    /// Time over batch and tokens, and the number of layers to multiply it by.
    Attention(Surface, f64),
    /// Linear work, attention per layer, and the number of layers to multiply the attention by.
    Sum(Curve, Surface, f64),
    /// Time that does not depend on the shape.
    Fixed(Estimate),
}

impl HeldOutTimes {
    /// Prepares the times for all settings that differ from `like` only in batch and tokens.
    ///
    /// Whole layers are looked up as measured, otherwise as the sum of linear work and attention.
    ///
    /// # Errors
    /// [`crate::Error::ProfileLacks`] with the points to measure.
    pub(super) fn new(profile: &Profile, widths: &ModuleWidths, like: &Setting) -> Result<Self> {
        let Setting { module, part, phase, tp, layers, .. } = *like;
        let selected = profile.select(module, widths)?;
        let query = CurveQuery::new(&selected, module, phase, tp, layers);
        let mut warnings = Vec::new();
        let count = f64::from(layers);
        let times = match (phase, part) {
            // Attention has no weights, so whole layers have the same weights as their linear work.
            (Phase::Optimizer, Part::Whole) => query
                .optimizer_time(Part::Whole)
                .or_else(|| query.optimizer_time(Part::Linear))
                .map(Times::Fixed),
            (Phase::Optimizer, _) => query.optimizer_time(part).map(Times::Fixed),
            (_, Part::Attention) => {
                query.attention(&mut warnings).map(|surface| Times::Attention(surface, count))
            }
            (_, Part::Linear | Part::OutsideLayers | Part::Head) => {
                query.curve(part, &mut warnings).map(Times::Linear)
            }
            (_, Part::Whole) => match query.whole(&mut warnings) {
                Some(whole) => Some(Times::Attention(whole, 1.0)),
                None => query
                    .curve(Part::Linear, &mut warnings)
                    .zip(query.attention(&mut warnings))
                    .map(|(linear, attention)| Times::Sum(linear, attention, count)),
            },
        };
        times.map(Self).ok_or_else(|| query.lacks(part))
    }

    /// Predicts the time for a batch of sequences.
    pub(super) fn time(&self, batch: u32, tokens: u32) -> PredictedTime {
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
