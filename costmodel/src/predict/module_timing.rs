//! Looks up a module's times in curves and surfaces for each pass.

use super::ModuleWorkload;
use super::curve_query::CurveQuery;
use super::measured_points::{WholeRun, whole_runs};
use super::microbatch_curve::{MeasuredPack, MicrobatchCurve};
use super::predicted_time::ProfileWarning;
use crate::Module;
use crate::curve::{Curve, Estimate, Surface};
use crate::error::Result;
use crate::model::WindowedAttention;
use crate::profile::{Part, Phase, Point, SelectedPoints, Setting};

/// Minimum number of whole-module runs that are preferred to the sum over parts.
const RUNS_MIN: usize = 4;

/// Computed shares of a module's measured backward pass, and the share of the layers that are recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BackwardShares {
    /// Share of the layers' linear work.
    pub(super) linear: f64,
    /// Share of attention.
    pub(super) attention: f64,
    /// Share of the work outside the layers.
    pub(super) outside_layers: f64,
    /// Share of the layers that run forward a second time.
    pub(super) recomputed: f64,
}

impl BackwardShares {
    /// Everything is trained, and nothing recomputed.
    const ALL: Self = Self { linear: 1.0, attention: 1.0, outside_layers: 1.0, recomputed: 0.0 };
}

/// Size and measured points for a module in a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModuleQuery<'a> {
    pub(super) module: Module,
    pub(super) selected: &'a SelectedPoints,
    /// Fastest repeat for every setting.
    pub(super) fastest: &'a [Point],
    pub(super) tp: u32,
    /// Number of layers with full and with windowed attention.
    pub(super) layers: [u32; 2],
    /// LLM windows.
    pub(super) llm_windows: Option<WindowedAttention>,
    /// Tokens per encoder window; 0 without windows.
    pub(super) window_tokens: u32,
    /// Held-out microbatch time divided by whole-module run time.
    pub(super) level: f64,
}

/// Times for a module with all layers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModuleTiming {
    module: Module,
    /// Microbatch time curve, from the packs below and the present passes.
    curve: MicrobatchCurve,
    packs: Packs,
    /// Forward and backward as measured: everything trained, nothing recomputed.
    measured: [PassTiming; 2],
    /// Passes that run: forward, the computed shares of backward, and recomputed layers.
    passes: Vec<PassTiming>,
    /// Sum over the passes if they were measured at the same shapes, which saves lookups; otherwise the
    /// individual passes.
    summed: Vec<PassTiming>,
    full_layers: f64,
    windowed_layers: f64,
    /// LLM windows, whose work follows from a sample's tokens; encoder windows are in the workload.
    llm_windows: Option<WindowedAttention>,
    /// Tokens per encoder window; 0 without windows.
    window_tokens: f64,
    /// Held-out microbatch time divided by whole-module run time.
    level: f64,
}

/// Microbatches for the curve fit.
#[derive(Debug, Clone, PartialEq)]
enum Packs {
    /// Whole-module runs.
    Whole(Vec<WholeRun>),
    /// Number of sequences and tokens per sequence, at which parts were measured; part times are added.
    Parts(Vec<[f64; 2]>),
}

#[derive(Debug, Clone, PartialEq)]
struct PassTiming {
    phase: Phase,
    layers: LayersTiming,
    outside_layers: Option<Curve>,
    /// LM head and loss, if they were measured separately for target tokens.
    head: Option<Curve>,
}

#[derive(Debug, Clone, PartialEq)]
enum LayersTiming {
    /// Linear work for all layers, and attention per layer.
    Separate(Curve, Surface),
    /// Linear work and attention for all layers together.
    Whole(Surface),
}

impl ModuleTiming {
    /// Folds a module's points.
    pub(super) fn new(query: ModuleQuery<'_>, warnings: &mut Vec<ProfileWarning>) -> Result<Self> {
        let ModuleQuery { module, selected, tp, layers: [full, windowed], .. } = query;
        let pass = |phase, warnings: &mut Vec<ProfileWarning>| {
            PassTiming::new(&CurveQuery::new(selected, module, phase, tp, full + windowed), warnings)
        };
        let forward = pass(Phase::Forward, warnings)?;
        let backward = pass(Phase::Backward, warnings)?;
        let passes = vec![forward.clone(), backward.clone()];
        let mut timing = Self {
            module,
            curve: MicrobatchCurve::default(),
            packs: Packs::new(&query),
            measured: [forward, backward],
            summed: sum(&passes),
            passes,
            full_layers: full.into(),
            windowed_layers: windowed.into(),
            llm_windows: query.llm_windows,
            window_tokens: query.window_tokens.into(),
            level: query.level,
        };
        timing.curve = timing.fit(BackwardShares::ALL);
        Ok(timing)
    }

    /// Returns the microbatch time curve without the part that depends only on target tokens.
    pub(super) const fn curve(&self) -> &MicrobatchCurve {
        &self.curve
    }

    /// Whether the curve was fitted to whole-module runs.
    pub(super) const fn is_whole(&self) -> bool {
        matches!(self.packs, Packs::Whole(_))
    }

    /// Returns the time that a workload adds to a microbatch, forward and backward, in nanoseconds.
    pub(super) fn added_ns(&self, workload: &ModuleWorkload) -> f64 {
        let head_ns: f64 = self.summed.iter().map(|pass| pass.head_ns(workload.targets)).sum();
        self.curve.added_ns(workload.tokens, self.pairs(workload)) + head_ns
    }

    /// Returns the query-key pairs in a mean layer that grow with the squared length. Encoder windows have a
    /// fixed length, so window time is time per token.
    fn pairs(&self, workload: &ModuleWorkload) -> f64 {
        let workload = self.windowed(workload);
        let of = |[sequences, length]: [f64; 2]| sequences * length * length;
        let full = of(workload.attention);
        if self.llm_windows.is_none() {
            return full;
        }
        let layers = self.full_layers + self.windowed_layers;
        (self.full_layers * full + self.windowed_layers * of(workload.windows)) / layers.max(1.0)
    }

    fn fit(&self, shares: BackwardShares) -> MicrobatchCurve {
        let workload = |[sequences, length]: [f64; 2]| {
            let tokens = sequences * length;
            let windows = if self.window_tokens > 0.0 {
                [tokens / self.window_tokens, self.window_tokens]
            } else {
                [0.0, 0.0]
            };
            ModuleWorkload { tokens, targets: 0.0, attention: [sequences, length], windows }
        };
        let pack = |shape: [f64; 2], ns: f64| {
            let workload = workload(shape);
            MeasuredPack { tokens: workload.tokens, pairs: self.pairs(&workload), ns }
        };
        let packs: Vec<MeasuredPack> = match &self.packs {
            Packs::Whole(runs) => {
                let outside = |tokens| self.passes.iter().map(|pass| pass.outside_ns(tokens)).sum::<f64>();
                let layers = |[forward, backward]: [f64; 2]| {
                    forward + shares.linear * backward + shares.recomputed * forward
                };
                let run = |run: &WholeRun| {
                    pack(run.shape, layers(run.passes_ns) + outside(run.shape[0] * run.shape[1]))
                };
                runs.iter().map(run).collect()
            }
            Packs::Parts(shapes) => {
                let time = |shape| self.linear_and_attention_ns(&workload(shape)).iter().sum();
                shapes.iter().map(|&shape| pack(shape, time(shape))).collect()
            }
        };
        let curve = MicrobatchCurve::fit(&packs).unwrap_or_default();
        if self.is_whole() { curve.times(self.level) } else { curve }
    }

    /// Fills in the windows for an LLM workload: shorter sequences with as many query-key pairs.
    fn windowed(&self, workload: &ModuleWorkload) -> ModuleWorkload {
        let Some(windows) = self.llm_windows else { return *workload };
        let [sequences, tokens] = workload.attention;
        let length = windows.mean_length(tokens as u64);
        let windows = if length > 0.0 { [sequences * tokens / length, length] } else { [0.0, 0.0] };
        ModuleWorkload { windows, ..*workload }
    }

    /// Adapts the module to frozen parts and recomputation.
    pub(super) fn trained(&self, shares: BackwardShares) -> Self {
        let [forward, backward] = &self.measured;
        let mut passes = vec![forward.clone(), backward.scaled(shares)];
        if shares.recomputed > 0.0 {
            // Activation checkpointing repeats the layers only.
            let layers = PassTiming { outside_layers: None, head: None, ..forward.clone() };
            let (linear, attention) = (shares.recomputed, shares.recomputed);
            let again = BackwardShares { linear, attention, ..BackwardShares::ALL };
            passes.push(if shares.recomputed < 1.0 { layers.scaled(again) } else { layers });
        }
        let mut trained = Self { summed: sum(&passes), passes, ..self.clone() };
        trained.curve = trained.fit(shares);
        trained
    }

    /// Returns the forward and backward time for a workload run separately, with the uncertainty.
    pub(super) fn predict(&self, workload: &ModuleWorkload) -> Estimate {
        let windowed = self.windowed(workload);
        let mut total = Estimate::default();
        for pass in &self.passes {
            let linear = pass.linear_estimate(workload.tokens);
            let attention = self.attention_estimate(pass, &windowed);
            total = total.plus(linear).plus(attention).plus(pass.head_estimate(workload.targets));
        }
        total
    }

    /// Returns linear work and attention in nanoseconds, only for this workload.
    pub(super) fn linear_and_attention_ns(&self, workload: &ModuleWorkload) -> [f64; 2] {
        let workload = &self.windowed(workload);
        let mut separate = [0.0, 0.0];
        for pass in &self.summed {
            separate[0] += pass.linear_ns(workload.tokens) + pass.head_ns(workload.targets);
            separate[1] += self.attention_ns(pass, workload);
        }
        separate
    }

    /// Returns a warning for each part whose measured points do not reach this workload.
    pub(super) fn extrapolated(&self, workload: &ModuleWorkload) -> Vec<ProfileWarning> {
        let ModuleWorkload { tokens, attention, windows, .. } = self.windowed(workload);
        let mut warnings = Vec::new();
        // Shares and recomputation do not change which shapes were measured.
        for pass in &self.measured {
            let warning = |part, [batch, tokens]: [f64; 2], [tokens_min, tokens_max]: [f64; 2]| {
                let (module, phase) = (self.module, pass.phase);
                ProfileWarning::Extrapolated { module, part, phase, batch, tokens, tokens_min, tokens_max }
            };
            match &pass.layers {
                LayersTiming::Whole(whole) if whole.estimate(attention[0], attention[1]).is_extrapolated => {
                    warnings.push(warning(Part::Whole, attention, whole.token_range()));
                }
                LayersTiming::Whole(_) => {}
                LayersTiming::Separate(curve, surface) => {
                    if curve.estimate(tokens).is_extrapolated {
                        warnings.push(warning(Part::Linear, [1.0, tokens], curve.range()));
                    }
                    let layers = [(self.full_layers, attention), (self.windowed_layers, windows)];
                    let run = layers.into_iter().filter(|(layers, _)| *layers > 0.0);
                    let extrapolated =
                        run.filter(|(_, shape)| surface.estimate(shape[0], shape[1]).is_extrapolated);
                    warnings.extend(
                        extrapolated.map(|(_, shape)| warning(Part::Attention, shape, surface.token_range())),
                    );
                }
            }
        }
        warnings
    }

    fn attention_ns(&self, pass: &PassTiming, workload: &ModuleWorkload) -> f64 {
        let ([sequences, length], [windows, window_length]) = (workload.attention, workload.windows);
        match &pass.layers {
            LayersTiming::Whole(whole) => whole.at(sequences, length),
            LayersTiming::Separate(_, attention) if self.windowed_layers > 0.0 => {
                self.full_layers * attention.at(sequences, length)
                    + self.windowed_layers * attention.at(windows, window_length)
            }
            LayersTiming::Separate(_, attention) => self.full_layers * attention.at(sequences, length),
        }
    }

    fn attention_estimate(&self, pass: &PassTiming, workload: &ModuleWorkload) -> Estimate {
        let ([sequences, length], [windows, window_length]) = (workload.attention, workload.windows);
        match &pass.layers {
            LayersTiming::Whole(whole) => whole.estimate(sequences, length),
            LayersTiming::Separate(_, attention) if self.windowed_layers > 0.0 => {
                let windowed = attention.estimate(windows, window_length).times(self.windowed_layers);
                attention.estimate(sequences, length).times(self.full_layers).plus(windowed)
            }
            LayersTiming::Separate(_, attention) => {
                attention.estimate(sequences, length).times(self.full_layers)
            }
        }
    }
}

/// Adds two curves that may be missing; `None` if only one is missing, or the work differs.
impl Packs {
    /// Uses whole-module runs if there are enough for a fit, or at least as many as part shapes, which then
    /// know no more; otherwise the part shapes.
    fn new(query: &ModuleQuery<'_>) -> Self {
        let ModuleQuery { selected, tp, layers: [full, windowed], .. } = *query;
        let runs = whole_runs(query.fastest, tp, full + windowed);
        let is_part = |point: &&Point| {
            let Setting { part, phase, tp: of, .. } = point.setting;
            of == tp && phase == Phase::Forward && matches!(part, Part::Linear | Part::Attention)
        };
        let mut shapes: Vec<[u32; 2]> = selected.points.iter().filter(is_part).map(Point::shape).collect();
        shapes.sort_unstable();
        shapes.dedup();
        if runs.len() >= RUNS_MIN.min(shapes.len()) {
            return Self::Whole(runs);
        }
        Self::Parts(shapes.into_iter().map(|shape| shape.map(f64::from)).collect())
    }
}

#[expect(clippy::option_option, reason = "no sum, and the sum of nothing, are two answers")]
fn sum_of_both(own: Option<&Curve>, added: Option<&Curve>) -> Option<Option<Curve>> {
    match (own, added) {
        (Some(own), Some(added)) => own.plus(added).map(Some),
        (None, None) => Some(None),
        _ => None,
    }
}

/// Adds consecutive passes as long as they were measured at the same shapes.
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
    /// Scales a backward pass by the computed shares; layers measured as a whole scale with the share for
    /// linear work.
    fn scaled(&self, shares: BackwardShares) -> Self {
        let layers = match &self.layers {
            LayersTiming::Separate(linear, attention) => {
                LayersTiming::Separate(linear.times(shares.linear), attention.times(shares.attention))
            }
            LayersTiming::Whole(whole) => LayersTiming::Whole(whole.times(shares.linear)),
        };
        let times = |curve: &Option<Curve>| curve.as_ref().map(|curve| curve.times(shares.outside_layers));
        Self {
            phase: self.phase,
            layers,
            outside_layers: times(&self.outside_layers),
            head: times(&self.head),
        }
    }

    fn new(query: &CurveQuery<'_>, warnings: &mut Vec<ProfileWarning>) -> Result<Self> {
        let CurveQuery { module, phase, .. } = *query;
        let outside_layers = query.curve(Part::OutsideLayers, &mut Vec::new());
        let head = query.curve(Part::Head, &mut Vec::new());
        // Warnings about separate parts only matter if the parts are used.
        let mut part_warnings = Vec::new();
        let parts = (query.curve(Part::Linear, &mut part_warnings), query.attention(&mut part_warnings));
        if let (Some(linear), Some(attention)) = parts {
            warnings.append(&mut part_warnings);
            return Ok(Self {
                phase,
                layers: LayersTiming::Separate(linear, attention),
                outside_layers,
                head,
            });
        }
        let Some(whole) = query.whole(warnings) else {
            let missing = if query.curve(Part::Linear, &mut Vec::new()).is_some() {
                Part::Attention
            } else {
                Part::Linear
            };
            return Err(query.lacks(missing));
        };
        // Only the LLM packs samples, which requires a separate attention time.
        if module == Module::Llm {
            warnings.push(ProfileWarning::AttentionNotSeparate { module, phase });
        }
        Ok(Self { phase, layers: LayersTiming::Whole(whole), outside_layers, head })
    }

    /// Adds two passes, and joins what is outside the layers with the linear work; `None` if shapes differ.
    fn plus(&self, other: &Self) -> Option<Self> {
        let outside = sum_of_both(self.outside_layers.as_ref(), other.outside_layers.as_ref())?;
        let head = sum_of_both(self.head.as_ref(), other.head.as_ref())?;
        let (layers, outside_layers) = match (&self.layers, &other.layers) {
            (LayersTiming::Separate(linear, attention), LayersTiming::Separate(added, added_attention)) => {
                let linear = linear.plus(added)?;
                // A single lookup instead of two, if both were measured at the same tokens.
                let joined = outside.as_ref().and_then(|outside| linear.plus(outside));
                let rest = if joined.is_some() { None } else { outside };
                (LayersTiming::Separate(joined.unwrap_or(linear), attention.plus(added_attention)?), rest)
            }
            (LayersTiming::Whole(whole), LayersTiming::Whole(added)) => {
                (LayersTiming::Whole(whole.plus(added)?), outside)
            }
            _ => return None,
        };
        Some(Self { phase: self.phase, layers, outside_layers, head })
    }

    fn outside_ns(&self, tokens: f64) -> f64 {
        self.outside_layers.as_ref().map_or(0.0, |outside| outside.at(tokens))
    }

    fn linear_ns(&self, tokens: f64) -> f64 {
        let outside_ns = self.outside_ns(tokens);
        match &self.layers {
            LayersTiming::Separate(linear, _) => outside_ns + linear.at(tokens),
            LayersTiming::Whole(_) => outside_ns,
        }
    }

    fn head_ns(&self, targets: f64) -> f64 {
        self.head.as_ref().map_or(0.0, |head| head.at(targets))
    }

    fn head_estimate(&self, targets: f64) -> Estimate {
        self.head.as_ref().map_or_else(Estimate::default, |head| head.estimate(targets))
    }

    fn linear_estimate(&self, tokens: f64) -> Estimate {
        let outside =
            self.outside_layers.as_ref().map_or_else(Estimate::default, |outside| outside.estimate(tokens));
        match &self.layers {
            LayersTiming::Separate(linear, _) => outside.plus(linear.estimate(tokens)),
            LayersTiming::Whole(_) => outside,
        }
    }
}
