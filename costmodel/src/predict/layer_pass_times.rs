//! Looks up the measured times per layer and outside the layers, in one pass.

use super::curve_query::CurveQuery;
use super::layer_flops::LayerFlops;
use crate::curve::{Curve, Estimate, Surface};
use crate::error::Result;
use crate::module::Module;
use crate::profile::{Part, Phase, SelectedPoints};

/// Measured times in a pass.
#[derive(Debug, Clone)]
pub(super) struct LayerPassTimes {
    linear: Option<LayersAndConstant<Curve>>,
    /// Attention per layer, if it was measured separately.
    attention: Option<Surface>,
    whole: Option<LayersAndConstant<Surface>>,
    outside_layers: Option<Curve>,
    /// LM head and loss, if they were measured separately for target tokens.
    head: Option<Curve>,
    /// Share of the measured time that is outside the layers; 0 if it was measured separately.
    outside_share: f64,
    /// Number of layers that the share refers to.
    measured_layers: f64,
}

/// Times at two layer counts: one layer with the constant, and the constant.
#[derive(Debug, Clone)]
struct LayersAndConstant<T> {
    one_layer: T,
    no_layer: T,
}

impl LayerPassTimes {
    pub(super) fn new(
        selected: &SelectedPoints,
        module: Module,
        phase: Phase,
        tp: u32,
        flops_split: LayerFlops,
    ) -> Result<Self> {
        let all = CurveQuery::new(selected, module, phase, tp, 1).same_session();
        let query = |layers| all.with_layers(layers);
        let mut warnings = Vec::new();
        let linear =
            query(1).curve(Part::Linear, &mut warnings).zip(query(0).curve(Part::Linear, &mut warnings));
        let attention = query(1).attention(&mut warnings);
        let is_separate = linear.is_some() && attention.is_some();
        let whole = query(1).whole(&mut warnings).zip(query(0).whole(&mut warnings)).filter(|_| !is_separate);
        if !is_separate && whole.is_none() {
            let missing = if linear.is_some() { Part::Attention } else { Part::Linear };
            return Err(query(1).lacks(missing));
        }
        let outside_layers = query(0).curve(Part::OutsideLayers, &mut warnings);
        let head = query(0).curve(Part::Head, &mut warnings);
        let part = if is_separate { Part::Linear } else { Part::Whole };
        let mut counts: Vec<u32> = selected
            .points
            .iter()
            .filter(|p| p.setting.part == part && p.setting.tp == tp && p.setting.phase == phase)
            .map(|point| point.setting.layers)
            .collect();
        counts.sort_unstable();
        counts.dedup();
        let measured_layers = f64::from(counts.last().copied().unwrap_or(1));
        // With a single layer count and no rows of `ends`, zero layers scale to no time, and the constant is
        // unknown.
        let is_separable = outside_layers.is_some() || counts.len() > 1;
        let all = flops_split.layer * measured_layers + flops_split.outside;
        Ok(Self {
            linear: linear
                .filter(|_| is_separate)
                .map(|(one_layer, no_layer)| LayersAndConstant { one_layer, no_layer }),
            attention: attention.filter(|_| is_separate),
            whole: whole.map(|(one_layer, no_layer)| LayersAndConstant { one_layer, no_layer }),
            outside_layers,
            head,
            outside_share: if is_separable { 0.0 } else { flops_split.outside / all },
            measured_layers,
        })
    }

    /// Returns the measured time for a layer with the constant, and for the constant.
    fn measured_ns(&self, sequences: f64, tokens: f64) -> [f64; 2] {
        if let Some(linear) = &self.linear {
            let all = sequences * tokens;
            return [linear.one_layer.at(all), linear.no_layer.at(all)];
        }
        self.whole.as_ref().map_or([0.0; 2], |whole| {
            [whole.one_layer.at(sequences, tokens), whole.no_layer.at(sequences, tokens)]
        })
    }

    /// Whether attention was measured separately.
    pub(super) fn is_attention_separate(&self) -> bool {
        self.attention.is_some()
    }

    pub(super) fn layer_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        (one_layer - no_layer).max(0.0) * (1.0 - self.outside_share)
    }

    /// Returns the attention time in a layer; 0 if it was not measured separately.
    pub(super) fn attention_ns(&self, sequences: f64, tokens: f64) -> f64 {
        self.attention.as_ref().map_or(0.0, |attention| attention.at(sequences, tokens))
    }

    /// Returns the time for a layer including attention, with uncertainty.
    ///
    /// The uncertainty is for a layer with the constant, because both come from the same measurements.
    pub(super) fn layer_estimate(&self, sequences: f64, tokens: f64, samples: [f64; 2]) -> Estimate {
        let with_constant = match (&self.linear, &self.whole) {
            (Some(linear), _) => linear.one_layer.estimate(sequences * tokens),
            (None, Some(whole)) => whole.one_layer.estimate(sequences, tokens),
            (None, None) => Estimate::default(),
        };
        let attention = self.attention.as_ref();
        let attention =
            attention.map_or_else(Estimate::default, |surface| surface.estimate(samples[0], samples[1]));
        if with_constant.ns <= 0.0 {
            return attention;
        }
        let share = self.layer_ns(sequences, tokens) / with_constant.ns;
        with_constant.times(share).plus(attention)
    }

    pub(super) fn outside_layers_ns(&self, sequences: f64, tokens: f64) -> f64 {
        let [one_layer, no_layer] = self.measured_ns(sequences, tokens);
        let of = |curve: &Option<Curve>| curve.as_ref().map_or(0.0, |curve| curve.at(sequences * tokens));
        let separate = of(&self.outside_layers) + of(&self.head);
        separate + no_layer + (one_layer - no_layer).max(0.0) * self.outside_share * self.measured_layers
    }
}
