//! Builds curves and surfaces from the points for one module, pass, TP degree and layer count.

use super::calibration::interval_rule;
use super::measured_points::{Method, at_layers, knots, per_layer, shapes, surface_points};
use super::predicted_time::ProfileWarning;
use crate::Module;
use crate::curve::{Curve, Estimate, IntervalRule, LocalError, Surface, SurfacePoint};
use crate::error::Error;
use crate::profile::{Part, Phase, Point, SelectedPoints, Setting};

/// Point selection: which times to build, and the points to build them from.
#[derive(Debug, Clone, Copy)]
pub(super) struct CurveQuery<'a> {
    /// Module points.
    pub(super) points: &'a [Point],
    pub(super) module: Module,
    pub(super) phase: Phase,
    pub(super) tp: u32,
    pub(super) layers: u32,
    /// Rule that converts uncertainties to 90 % intervals.
    interval: IntervalRule,
}

impl<'a> CurveQuery<'a> {
    /// Selects a module's points, and calibrates the uncertainty for curves built from them.
    pub(super) fn new(
        selected: &'a SelectedPoints,
        module: Module,
        phase: Phase,
        tp: u32,
        layers: u32,
    ) -> Self {
        let interval = interval_rule(selected, phase, tp);
        Self { points: &selected.points, module, phase, tp, layers, interval }
    }

    /// Leaves the difference between sessions out of the uncertainty.
    pub(super) fn same_session(self) -> Self {
        Self { interval: self.interval.same_session(), ..self }
    }

    /// Selects the same points for a different layer count.
    pub(super) fn with_layers(self, layers: u32) -> Self {
        Self { layers, ..self }
    }

    /// Builds a part's time over all tokens: for all layers, or for what is outside them; `None` if it was
    /// not measured.
    pub(super) fn curve(&self, part: Part, warnings: &mut Vec<ProfileWarning>) -> Option<Curve> {
        let points = self.part_points(part);
        let surface_points = match part {
            Part::OutsideLayers | Part::Head => {
                surface_points(&shapes(&points), |points| at_layers(points, points[0].setting.layers))
            }
            _ => self.points_at_layers(part, &points, warnings),
        };
        let knots = knots(&surface_points);
        self.warn_single(part, knots.len(), warnings);
        (!knots.is_empty()).then(|| Curve::new(&knots).interval(self.interval))
    }

    /// Builds the attention time in a **single** layer over batch and tokens.
    ///
    /// Attention was measured separately, or is the difference of whole layers and linear work.
    pub(super) fn attention(&self, warnings: &mut Vec<ProfileWarning>) -> Option<Surface> {
        let separate = self.part_points(Part::Attention);
        let points = if separate.is_empty() { self.attention_by_difference() } else { separate };
        let surface_points = surface_points(&shapes(&points), per_layer);
        self.warn_single(Part::Attention, surface_points.len(), warnings);
        (!surface_points.is_empty()).then(|| Surface::new(surface_points).interval(self.interval))
    }

    /// Builds the time for all layers, attention included, over batch and tokens.
    pub(super) fn whole(&self, warnings: &mut Vec<ProfileWarning>) -> Option<Surface> {
        let points = self.part_points(Part::Whole);
        let surface_points = self.points_at_layers(Part::Whole, &points, warnings);
        self.warn_single(Part::Whole, surface_points.len(), warnings);
        (!surface_points.is_empty()).then(|| Surface::new(surface_points).interval(self.interval))
    }

    /// Returns the optimizer time over a part's weights.
    pub(super) fn optimizer_time(&self, part: Part) -> Option<Estimate> {
        let points = CurveQuery { phase: Phase::Optimizer, ..*self }.part_points(part);
        // These parts do not depend on the layer count, so the measured time is used unchanged.
        let layers = if part.is_outside_layers() { points.first()?.setting.layers } else { self.layers };
        let points: Vec<&Point> = points.iter().collect();
        let time = at_layers(points.first().map(|_| &points[..])?, layers);
        let local = LocalError { ns: time.ns, spread_ns: time.spread_ns, ..LocalError::default() };
        Some(self.interval.estimate(local))
    }

    /// Creates the error that names the points to measure for a part.
    pub(super) fn lacks(&self, part: Part) -> Error {
        let Self { points, module, phase, tp, .. } = self;
        let of_phase = points.iter().filter(|point| point.setting.phase == *phase);
        let mut degrees: Vec<String> = of_phase
            .filter(|point| point.setting.part == part)
            .map(|point| point.setting.tp.to_string())
            .collect();
        // Points are sorted by setting, so equal degrees are adjacent.
        degrees.dedup();
        let found = if degrees.is_empty() {
            "none at all".to_owned()
        } else {
            format!("tp {} only", degrees.join(", "))
        };
        let shapes = match (phase, module) {
            (Phase::Optimizer, _) => "batch 0 x tokens 0",
            (_, Module::Llm) => "batch 1 x tokens 512, 1024, 2048, 4096, 8192",
            _ => "batches 1, 2, 4, 8, 16, 32 x the tokens of one image, tile or window",
        };
        let layers = match part {
            Part::OutsideLayers | Part::Head => "layers 0",
            Part::Attention => "layers 1",
            _ => "two layer counts",
        };
        let needed = format!(
            "module {module}, part {part}, phase {phase}, tp {tp}, {layers}, {shapes}; found: {found}"
        );
        Error::ProfileLacks { needed }
    }

    fn part_points(&self, part: Part) -> Vec<Point> {
        let is_wanted = |point: &&Point| {
            let setting = point.setting;
            setting.part == part && setting.phase == self.phase && setting.tp == self.tp
        };
        self.points.iter().filter(is_wanted).copied().collect()
    }

    /// Subtracts linear work from whole layers if both were measured with the same setting; at least 0.
    fn attention_by_difference(&self) -> Vec<Point> {
        let linear = self.part_points(Part::Linear);
        let mut points = Vec::new();
        for whole in self.part_points(Part::Whole) {
            let same = |point: &&Point| point.setting == (Setting { part: Part::Linear, ..whole.setting });
            let Some(linear) = linear.iter().find(same) else { continue };
            points.push(Point {
                setting: Setting { part: Part::Attention, ..whole.setting },
                microseconds: (whole.microseconds - linear.microseconds).max(0.0),
                spread_microseconds: whole.spread_microseconds + linear.spread_microseconds,
                repeats: whole.repeats.min(linear.repeats),
                bytes: None,
            });
        }
        points
    }

    /// Returns points at the required layer count.
    ///
    /// If some shapes have two layer counts, shapes with only one are left out: scaled in proportion they
    /// would not be on the same curve.
    fn points_at_layers(
        &self,
        part: Part,
        points: &[Point],
        warnings: &mut Vec<ProfileWarning>,
    ) -> Vec<SurfacePoint> {
        let Self { module, phase, layers, .. } = *self;
        let mut shapes = shapes(points);
        let method = |points: &Vec<&Point>| at_layers(points, layers).method;
        let all = shapes.len();
        if shapes.values().any(|points| method(points) < Method::Proportion) {
            shapes.retain(|_, points| method(points) < Method::Proportion);
        } else if let Some(point) = points.last() {
            let measured = point.setting.layers;
            warnings.push(ProfileWarning::LayersInProportion {
                module,
                part,
                phase,
                measured,
                asked: layers,
            });
        }
        if shapes.len() < all {
            let shapes = all - shapes.len();
            warnings.push(ProfileWarning::ShapesLeftOut { module, part, phase, shapes });
        }
        surface_points(&shapes, |points| at_layers(points, layers))
    }

    fn warn_single(&self, part: Part, shapes: usize, warnings: &mut Vec<ProfileWarning>) {
        if shapes == 1 {
            warnings.push(ProfileWarning::SingleShape { module: self.module, part, phase: self.phase });
        }
    }
}
