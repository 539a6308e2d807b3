//! Times of one module: curves and surfaces of its passes, looked up by load.

use super::compose::Question;
use super::curve::{Curve, Estimate};
use super::measurement::{Part, Phase, Point};
use super::surface::Surface;
use super::timing::{Load, ProfileOptions};
use super::warning::ProfileWarning;
use crate::error::Result;
use crate::module::Module;

/// What runs of a module's backward pass, as shares of the measured one, and what it computes again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Training {
    /// Of the linear work of the layers.
    pub(super) linear: f64,
    /// Of attention.
    pub(super) attention: f64,
    /// Of what is outside the layers.
    pub(super) ends: f64,
    /// Whether the layers run forward a second time.
    pub(super) recomputes_layers: bool,
}

/// Times of one module with all its layers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModuleTiming {
    module: Module,
    /// Forward and backward as measured: everything trained, nothing computed again.
    measured: [PassTiming; 2],
    /// What runs.
    passes: Vec<PassTiming>,
    /// All passes in one where they were measured at the same shapes, which saves look-ups; or each of them.
    summed: Vec<PassTiming>,
    full_layers: f64,
    windowed_layers: f64,
    packed_tokens: Option<f64>,
    optimizer: Option<Estimate>,
}

#[derive(Debug, Clone, PartialEq)]
struct PassTiming {
    phase: Phase,
    layers: LayersTiming,
    ends: Option<Curve>,
    /// What runs for learned tokens alone, where it was measured apart.
    head: Option<Curve>,
}

#[derive(Debug, Clone, PartialEq)]
enum LayersTiming {
    /// Linear work of all layers, and attention of one layer.
    Apart(Curve, Surface),
    /// All layers in one.
    Whole(Surface),
}

impl ModuleTiming {
    /// Folds the points of a module with this many layers of full and of windowed attention.
    pub(super) fn new(
        points: &[Point],
        module: Module,
        [full, windowed]: [u32; 2],
        options: ProfileOptions,
        warnings: &mut Vec<ProfileWarning>,
    ) -> Result<Self> {
        let tp = options.tp_of(module);
        let question = |phase| Question { points, module, phase, tp, layers: full + windowed };
        let forward = PassTiming::new(&question(Phase::Forward), warnings)?;
        let backward = PassTiming::new(&question(Phase::Backward), warnings)?;
        let passes = vec![forward.clone(), backward.clone()];
        Ok(Self {
            module,
            measured: [forward, backward],
            summed: sum(&passes),
            passes,
            full_layers: full.into(),
            windowed_layers: windowed.into(),
            packed_tokens: options.packed_tokens_of(module).map(|tokens| tokens as f64),
            optimizer: question(Phase::Optimizer).optimizer(),
        })
    }

    /// The same module trained in another way than it was measured.
    pub(super) fn trained(&self, training: Training) -> Self {
        let [forward, backward] = &self.measured;
        let mut passes = vec![forward.clone(), backward.shares(training)];
        if training.recomputes_layers {
            passes.push(PassTiming { ends: None, head: None, ..forward.clone() });
        }
        Self { summed: sum(&passes), passes, ..self.clone() }
    }

    /// The update of the weights.
    pub(super) fn optimizer(&self) -> Option<Estimate> {
        self.optimizer
    }

    /// Forward and backward in nanoseconds.
    pub(super) fn ns(&self, load: &Load) -> f64 {
        let ((linear, linear_count), (attention, attention_count)) = self.shares(load);
        let mut total = 0.0;
        for pass in &self.summed {
            total += pass.linear_ns(linear.tokens) / linear_count + pass.head_ns(load.targets);
            total += self.attention_ns(pass, &attention) / attention_count;
        }
        total
    }

    /// The same with uncertainty.
    pub(super) fn predict(&self, load: &Load) -> Estimate {
        let ((linear, linear_count), (attention, attention_count)) = self.shares(load);
        let mut total = Estimate::default();
        for pass in &self.passes {
            let linear_time = pass.linear_estimate(linear.tokens).times(1.0 / linear_count);
            let attention_time = self.attention_estimate(pass, &attention).times(1.0 / attention_count);
            total = total.plus(linear_time).plus(attention_time).plus(pass.head_estimate(load.targets));
        }
        total
    }

    /// Linear work and attention in nanoseconds, of this load alone.
    pub(super) fn apart_ns(&self, load: &Load) -> [f64; 2] {
        let mut apart = [0.0, 0.0];
        for pass in &self.summed {
            apart[0] += pass.linear_ns(load.tokens) + pass.head_ns(load.targets);
            apart[1] += self.attention_ns(pass, load);
        }
        apart
    }

    /// Parts whose measured shapes do not reach this load.
    pub(super) fn beyond(&self, load: &Load) -> Vec<ProfileWarning> {
        let ((linear, _), (attention, _)) = self.shares(load);
        let mut warnings = Vec::new();
        for pass in &self.measured {
            let warning = |part, [batch, tokens]: [f64; 2], [tokens_min, tokens_max]: [f64; 2]| {
                let (module, phase) = (self.module, pass.phase);
                ProfileWarning::Beyond { module, part, phase, batch, tokens, tokens_min, tokens_max }
            };
            match &pass.layers {
                LayersTiming::Whole(whole)
                    if whole.estimate(attention.attention[0], attention.attention[1]).is_beyond =>
                {
                    warnings.push(warning(Part::Whole, attention.attention, whole.token_range()));
                }
                LayersTiming::Whole(_) => {}
                LayersTiming::Apart(curve, surface) => {
                    if curve.estimate(linear.tokens).is_beyond {
                        warnings.push(warning(Part::Linear, [1.0, linear.tokens], curve.range()));
                    }
                    let layers =
                        [(self.full_layers, attention.attention), (self.windowed_layers, attention.windows)];
                    let run = layers.into_iter().filter(|(layers, _)| *layers > 0.0);
                    let beyond = run.filter(|(_, shape)| surface.estimate(shape[0], shape[1]).is_beyond);
                    warnings.extend(
                        beyond.map(|(_, shape)| warning(Part::Attention, shape, surface.token_range())),
                    );
                }
            }
        }
        warnings
    }

    /// The loads that linear work and attention are looked up with, and how many such samples they hold.
    fn shares(&self, load: &Load) -> ((Load, f64), (Load, f64)) {
        let alone = (*load, 1.0);
        match self.packed_tokens {
            Some(packed) if load.tokens > 0.0 && load.tokens < packed => {
                let count = packed / load.tokens;
                let shared = (load.repeat(count), count);
                (shared, if self.module == Module::Llm { alone } else { shared })
            }
            _ => (alone, alone),
        }
    }

    fn attention_ns(&self, pass: &PassTiming, load: &Load) -> f64 {
        let ([sequences, length], [windows, window_length]) = (load.attention, load.windows);
        match &pass.layers {
            LayersTiming::Whole(whole) => whole.at(sequences, length),
            LayersTiming::Apart(_, attention) if self.windowed_layers > 0.0 => {
                self.full_layers * attention.at(sequences, length)
                    + self.windowed_layers * attention.at(windows, window_length)
            }
            LayersTiming::Apart(_, attention) => self.full_layers * attention.at(sequences, length),
        }
    }

    fn attention_estimate(&self, pass: &PassTiming, load: &Load) -> Estimate {
        let ([sequences, length], [windows, window_length]) = (load.attention, load.windows);
        match &pass.layers {
            LayersTiming::Whole(whole) => whole.estimate(sequences, length),
            LayersTiming::Apart(_, attention) if self.windowed_layers > 0.0 => {
                let windowed = attention.estimate(windows, window_length).times(self.windowed_layers);
                attention.estimate(sequences, length).times(self.full_layers).plus(windowed)
            }
            LayersTiming::Apart(_, attention) => {
                attention.estimate(sequences, length).times(self.full_layers)
            }
        }
    }
}

/// The sum of two curves that may be missing; `None` if one alone is, or their work differs.
#[expect(clippy::option_option, reason = "no sum, and the sum of nothing, are two answers")]
fn both(own: Option<&Curve>, added: Option<&Curve>) -> Option<Option<Curve>> {
    match (own, added) {
        (Some(own), Some(added)) => own.plus(added).map(Some),
        (None, None) => Some(None),
        _ => None,
    }
}

/// Joins passes as far as they go together.
fn sum(passes: &[PassTiming]) -> Vec<PassTiming> {
    let mut summed: Vec<PassTiming> = Vec::new();
    for pass in passes {
        let last = summed.pop();
        match last.as_ref().and_then(|last| last.plus(pass)) {
            Some(joined) => summed.push(joined),
            None => summed.extend(last.into_iter().chain([pass.clone()])),
        }
    }
    summed
}

impl PassTiming {
    /// Shares of a backward pass; of layers that were measured in one, that of their linear work.
    fn shares(&self, training: Training) -> Self {
        let layers = match &self.layers {
            LayersTiming::Apart(linear, attention) => {
                LayersTiming::Apart(linear.times(training.linear), attention.times(training.attention))
            }
            LayersTiming::Whole(whole) => LayersTiming::Whole(whole.times(training.linear)),
        };
        let times = |curve: &Option<Curve>| curve.as_ref().map(|curve| curve.times(training.ends));
        Self { phase: self.phase, layers, ends: times(&self.ends), head: times(&self.head) }
    }

    fn new(question: &Question<'_>, warnings: &mut Vec<ProfileWarning>) -> Result<Self> {
        let Question { module, phase, .. } = *question;
        let ends = question.curve(Part::Ends, &mut Vec::new());
        let head = question.curve(Part::Head, &mut Vec::new());
        let mut of_parts = Vec::new();
        let parts = (question.curve(Part::Linear, &mut of_parts), question.attention(&mut of_parts));
        if let (Some(linear), Some(attention)) = parts {
            warnings.append(&mut of_parts);
            return Ok(Self { phase, layers: LayersTiming::Apart(linear, attention), ends, head });
        }
        let Some(whole) = question.whole(warnings) else {
            let missing = if question.curve(Part::Linear, &mut Vec::new()).is_some() {
                Part::Attention
            } else {
                Part::Linear
            };
            return Err(question.lacks(missing));
        };
        if module == Module::Llm {
            warnings.push(ProfileWarning::AttentionNotApart { module, phase });
        }
        Ok(Self { phase, layers: LayersTiming::Whole(whole), ends, head })
    }

    /// Both passes as one, what is outside the layers joined with their linear work; `None` where shapes differ.
    fn plus(&self, other: &Self) -> Option<Self> {
        let ends = both(self.ends.as_ref(), other.ends.as_ref())?;
        let head = both(self.head.as_ref(), other.head.as_ref())?;
        let (layers, ends) = match (&self.layers, &other.layers) {
            (LayersTiming::Apart(linear, attention), LayersTiming::Apart(added, added_attention)) => {
                let linear = linear.plus(added)?;
                let joined = ends.as_ref().and_then(|ends| linear.plus(ends));
                let rest = if joined.is_some() { None } else { ends };
                (LayersTiming::Apart(joined.unwrap_or(linear), attention.plus(added_attention)?), rest)
            }
            (LayersTiming::Whole(whole), LayersTiming::Whole(added)) => {
                (LayersTiming::Whole(whole.plus(added)?), ends)
            }
            _ => return None,
        };
        Some(Self { phase: self.phase, layers, ends, head })
    }

    fn linear_ns(&self, tokens: f64) -> f64 {
        let ends_ns = self.ends.as_ref().map_or(0.0, |ends| ends.at(tokens));
        match &self.layers {
            LayersTiming::Apart(linear, _) => ends_ns + linear.at(tokens),
            LayersTiming::Whole(_) => ends_ns,
        }
    }

    fn head_ns(&self, targets: f64) -> f64 {
        self.head.as_ref().map_or(0.0, |head| head.at(targets))
    }

    fn head_estimate(&self, targets: f64) -> Estimate {
        self.head.as_ref().map_or_else(Estimate::default, |head| head.estimate(targets))
    }

    fn linear_estimate(&self, tokens: f64) -> Estimate {
        let ends = self.ends.as_ref().map_or_else(Estimate::default, |ends| ends.estimate(tokens));
        match &self.layers {
            LayersTiming::Apart(linear, _) => ends.plus(linear.estimate(tokens)),
            LayersTiming::Whole(_) => ends,
        }
    }
}
