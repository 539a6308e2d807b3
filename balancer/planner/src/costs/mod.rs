//! Module costs for the planner: time and memory per pipeline stage.
//!
//! Tabulates a time over units for lookup in a few operations.
//!
//! A *unit* counts a module's work: encoder tiles, encoder patches for native-resolution media, and LLM
//! tokens. All units in a microbatch run together in a layer. LLM attention depends on the original samples,
//! and attention over patches on each medium; both are separate costs.
//!
//! The planner's times *are* these tables: piecewise linear between knots 1/16 of an octave apart, so that a
//! lower bound made from the knots bounds every simulated time.

mod builder;
mod experts;
mod model;

pub use builder::ModelCostsBuilder;
pub(crate) use builder::unit_tokens;
pub use experts::ExpertParallel;
pub use model::{ModelCosts, PlannedModel};

/// Part of a module held by a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StagePart {
    /// Number of layers.
    pub layers: u32,
    /// Whether this is the module's first stage.
    pub is_first: bool,
    /// Whether this is the module's last stage.
    pub is_last: bool,
}

/// GPU memory for a stage:
/// `fixed + optimizer + kept * units in flight + working * units of the microbatch computed`, but at least
/// `fixed + optimizer + sums`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StageBytes {
    /// Bytes for parameters and gradients.
    pub fixed: f64,
    /// Optimizer state bytes, which data-parallel ranks may share.
    pub optimizer: f64,
    /// Optimizer state bytes for experts, which data-parallel ranks with the same experts may share.
    pub expert_optimizer: f64,
    /// Number of ranks that divide the experts; 0 and 1 for none.
    pub expert_parallel: u32,
    /// Additional bytes while gradients are summed, when no activations are held.
    pub sums: f64,
    /// The same for bytes that data-parallel ranks may share, with the optimizer state.
    pub shared_sums: f64,
    /// Bytes kept per unit in all microbatches in flight.
    pub kept_per_unit: f64,
    /// Additional bytes per unit in the microbatch being computed.
    pub working_per_unit: f64,
}

impl StageBytes {
    /// Returns the bytes for this many units.
    #[must_use]
    pub fn at(&self, units_in_flight: f64, units_at_once: f64) -> f64 {
        let units = self.kept_per_unit * units_in_flight + self.working_per_unit * units_at_once;
        self.state() + units.max(self.all_sums())
    }

    /// Returns the bytes for parameters, gradients and optimizer state.
    pub(crate) fn state(&self) -> f64 {
        self.fixed + self.optimizer + self.expert_optimizer
    }

    /// Returns the additional bytes while gradients are summed.
    pub(crate) fn all_sums(&self) -> f64 {
        self.sums + self.shared_sums
    }

    /// Returns the memory if this many ranks share the optimizer state.
    #[must_use]
    pub fn shared_by(self, ranks: u32) -> Self {
        let alike = ranks / self.expert_parallel.max(1);
        Self {
            optimizer: self.optimizer / f64::from(ranks.max(1)),
            shared_sums: self.shared_sums / f64::from(ranks.max(1)),
            expert_optimizer: self.expert_optimizer / f64::from(alike.max(1)),
            ..self
        }
    }
}

/// Time and memory for one module.
///
/// Times are nanoseconds for forward and backward together, for a whole tensor-parallel group, with
/// everything trained; they must be finite and non-decreasing in units. Only degrees in
/// [`ModuleCosts::tp_degrees`] are requested.
pub trait ModuleCosts: Sync {
    /// Returns the module name, unique among a model's encoders.
    fn name(&self) -> &'static str {
        "encoder"
    }

    /// Returns the number of layers, at least 1.
    fn layers(&self) -> u32;

    /// Returns the tensor-parallel degrees that heads and costs allow, ascending.
    fn tp_degrees(&self) -> Vec<u32>;

    /// Returns the time for one layer over a microbatch's units, without [`ModuleCosts::sample_ns`].
    fn layer_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the attention time that an original sample with this size adds to one layer, in any packing.
    fn sample_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the time that attention within a sample's media adds to one layer, in any packing.
    ///
    /// 0 if all units have the same size. The planner uses the mean time per pair over all samples, in
    /// proportion to pairs.
    ///
    /// - `units`, `pairs`: patches in the sample, and query-key pairs in its media in a mean layer
    fn media_attention_ns(&self, _tp: u32, _units: u64, _pairs: u64) -> f64 {
        0.0
    }

    /// Returns the time outside the layers, which the last stage computes.
    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64;

    /// Returns the backward time divided by the forward time, for layers and outside layers: 2 if everything
    /// is trained, 0 if no gradient is computed.
    fn backward_ratios(&self) -> [f64; 2] {
        [2.0; 2]
    }

    /// Returns the half width of the 90 % interval around the layer time, as a fraction of that time; 0 if
    /// unknown.
    ///
    /// - `samples`: number of original samples in the microbatch, and units per sample
    fn relative_half_width(&self, _tp: u32, _units: f64, _samples: [f64; 2]) -> f64 {
        0.0
    }

    /// Returns the memory of a stage; recomputed layers keep their inputs alone.
    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes;

    /// Returns the bytes per unit that a stage sends to the next stage, and that return as gradient.
    fn border_bytes(&self) -> f64;

    /// Returns the gradient bytes on one GPU of a stage, without [`ModuleCosts::expert_gradient_bytes`].
    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64;

    /// Returns the expert gradient bytes on one GPU of a stage, which only ranks with the same experts sum; 0
    /// if every rank has all experts.
    fn expert_gradient_bytes(&self, _tp: u32, _part: StagePart) -> f64 {
        0.0
    }

    /// Returns the expert-parallel degree for these costs, which divides the DP degree.
    fn expert_parallel(&self) -> u32 {
        1
    }

    /// Returns the expert-parallel degrees to plan with on this many GPUs, ascending.
    fn expert_parallel_degrees(&self, _gpus: u32) -> Vec<u32> {
        vec![self.expert_parallel()]
    }

    /// Returns the costs at a different expert-parallel degree; `None` if the degree is not available.
    fn at_expert_parallel(&self, _degree: u32) -> Option<Box<dyn ModuleCosts>> {
        None
    }

    /// Returns the load imbalance between ranks that share experts, if each rank has a microbatch with
    /// `units`; `None` for a module without experts.
    fn expert_loads(&self, _units: u64) -> Option<ExpertLoads> {
        None
    }
}

/// Load imbalance between ranks that share experts: largest rank load divided by the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLoads {
    /// Imbalance used for planned times.
    pub planned: f64,
    /// Expected imbalance with uniform routing.
    pub expected: f64,
    /// Imbalance if all tokens select the same experts.
    pub worst: f64,
}

/// Knots per octave.
const STEPS: u64 = 16;

/// Times at knots, linear between knots, non-decreasing, 0 at 0.
#[derive(Debug, Clone)]
pub(crate) struct TimeTable {
    ns: Vec<f64>,
    /// Slope from each knot to the next, nanoseconds per unit.
    slopes: Vec<f64>,
    /// Units at the knot with the minimum time per unit.
    cheapest: f64,
    /// Time per unit there.
    cheapest_ns: f64,
}

impl TimeTable {
    /// Tabulates a time up to `units_max`; a falling time is held constant.
    pub(crate) fn new(units_max: u64, time_ns: impl Fn(u64) -> f64) -> Self {
        let mut ns = vec![0.0];
        for at in 1..=index(units_max.max(1)) + 1 {
            let before: f64 = ns[at - 1];
            ns.push(time_ns(knot(at)).max(before));
        }
        Self::of(ns)
    }

    fn of(ns: Vec<f64>) -> Self {
        let slope = |at: usize| (ns[at + 1] - ns[at]) / (knot(at + 1) - knot(at)) as f64;
        let ratio = |at: usize| ns[at] / knot(at) as f64;
        let cheapest = (1..ns.len()).min_by(|one, other| ratio(*one).total_cmp(&ratio(*other))).unwrap_or(1);
        let (slopes, cheapest_ns) = ((0..ns.len() - 1).map(slope).collect(), ratio(cheapest));
        Self { slopes, cheapest: knot(cheapest) as f64, cheapest_ns, ns }
    }

    /// Returns the least time for this many units, in parts of any size.
    pub(crate) fn least(&self, total: f64) -> f64 {
        total * self.cheapest_ns
    }

    /// Returns the minimum time for `total` units in equal parts with `low` to `high` units; the times are
    /// convex.
    ///
    /// For a convex function, the time per unit decreases up to one point and increases from there.
    pub(crate) fn least_of_parts(&self, total: f64, low: f64, high: f64) -> f64 {
        let part = self.cheapest.clamp(low, high);
        if part > 0.0 { total / part * self.at(part) } else { 0.0 }
    }

    /// Returns the time for this many units; beyond the table, extrapolates the last slope.
    pub(crate) fn at(&self, units: f64) -> f64 {
        let low = index(units as u64).min(self.slopes.len() - 1);
        self.ns[low] + self.slopes[low] * (units - knot(low) as f64)
    }

    /// Returns the greatest convex function below the times from `units_min` units on, never below 0.
    ///
    /// `count * hull(total / count)` is at most the total time for any `count` parts of `total`, each at
    /// least `units_min` or, if that is 0, empty (Jensen).
    pub(crate) fn hull(&self, units_min: u64) -> Self {
        let first = index(units_min).min(self.ns.len() - 2);
        let mut corners: Vec<usize> = Vec::new();
        for at in first..self.ns.len() {
            while let [.., before, last] = corners[..] {
                if self.slope(before, last) <= self.slope(before, at) {
                    break;
                }
                corners.pop();
            }
            corners.push(at);
        }
        let mut hull = self.ns.clone();
        for pair in corners.windows(2) {
            let slope = self.slope(pair[0], pair[1]);
            for (at, below) in hull.iter_mut().enumerate().take(pair[1]).skip(pair[0]) {
                *below = self.ns[pair[0]] + slope * (knot(at) - knot(pair[0])) as f64;
            }
        }
        // Below the smallest part the first slope continues, never below 0.
        let slope = hull[first + 1] - hull[first];
        let slope = slope / (knot(first + 1) - knot(first)) as f64;
        let least = hull[first];
        for (at, below) in hull.iter_mut().enumerate().take(first) {
            *below = (least - slope * (knot(first) - knot(at)) as f64).max(0.0);
        }
        Self::of(hull)
    }

    fn slope(&self, low: usize, high: usize) -> f64 {
        (self.ns[high] - self.ns[low]) / (knot(high) - knot(low)) as f64
    }
}

/// Returns the units at a knot: 0 to 15, then 16 to 31 times powers of two.
fn knot(at: usize) -> u64 {
    let at = at as u64;
    if at < STEPS { at } else { (STEPS + at % STEPS) << (at / STEPS - 1) }
}

/// Returns the last knot at or below this many units.
fn index(units: u64) -> usize {
    if units < STEPS {
        return units as usize;
    }
    let octave = u64::from(units.ilog2()) - 4;
    (octave * STEPS + (units >> octave)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn knots_and_indices_agree() {
        for at in 0..400 {
            assert_eq!(index(knot(at)), at);
            assert_eq!(index(knot(at + 1) - 1), at);
            assert!(knot(at) < knot(at + 1));
        }
    }

    #[test]
    fn a_line_is_met_everywhere() {
        let table = TimeTable::new(10_000, |units| 3.0 * units as f64);
        for units in [0.0, 0.5, 17.25, 999.0, 10_000.0, 1e6] {
            assert!((table.at(units) - 3.0 * units).abs() < 1e-9 * (1.0 + units), "{units}");
        }
    }

    proptest! {
        /// Times that grow faster than units, so that smaller parts take less in total.
        #[test]
        fn no_number_of_parts_takes_less(
            launch in 0.0f64..500.0, unit in 0.1f64..3.0, square in 0.0f64..0.01,
            total in 1000u64..50_000, few in 1u64..20, more in 0u64..60,
        ) {
            let time = |units: u64| launch + unit * units as f64 + square * (units * units) as f64;
            let hull = TimeTable::new(60_000, time).hull(0);
            let (many, total) = (few + more, total as f64);
            let least = hull.least_of_parts(total, total / many as f64, total / few as f64);
            for parts in few..=many {
                let all = parts as f64 * hull.at(total / parts as f64);
                prop_assert!(least <= all * (1.0 + 1e-9), "{least} {all} {parts}");
            }
        }

        #[test]
        fn the_hull_is_below_every_split(
            steps in prop::collection::vec(0.0f64..100.0, 1..60),
            parts in prop::collection::vec(1u64..5000, 1..12), launch in 0.0f64..500.0,
        ) {
            let table = TimeTable::new(60_000, |units| {
                launch + (0..units.min(2000) / 40).map(|at| steps[at as usize % steps.len()]).sum::<f64>()
            });
            let total: u64 = parts.iter().sum();
            let count = parts.len() as f64;
            let sum: f64 = parts.iter().map(|part| table.at(*part as f64)).sum();
            let least = *parts.iter().min().unwrap();
            for units_min in [0, 1, least] {
                let bound = count * table.hull(units_min).at(total as f64 / count);
                prop_assert!(bound <= sum * (1.0 + 1e-9) + 1e-6, "{bound} {sum} {units_min}");
            }
        }
    }
}
