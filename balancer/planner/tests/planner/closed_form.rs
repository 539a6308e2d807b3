//! Modules with closed-form costs, and problems built from them.

use dflop_planner::{
    Cluster, EncoderSplit, ItemSize, Link, Links, ModuleCosts, PlanProblem, SearchSpaceOptions, StageBytes,
    StagePart, Workload,
};

/// Closed-form module: a launch cost, work in proportion to units, attention in proportion to squared units.
#[derive(Debug, Clone)]
pub(crate) struct ClosedForm {
    pub(crate) layers: u32,
    pub(crate) degrees: Vec<u32>,
    pub(crate) launch_ns: f64,
    pub(crate) unit_ns: f64,
    pub(crate) square_ns: f64,
    pub(crate) ends_ns: f64,
    pub(crate) layer_bytes: f64,
    pub(crate) unit_bytes: f64,
}

impl ModuleCosts for ClosedForm {
    fn layers(&self) -> u32 {
        self.layers
    }

    fn tp_degrees(&self) -> Vec<u32> {
        self.degrees.clone()
    }

    /// Every degree costs a tenth more than the share that it removes.
    fn layer_ns(&self, tp: u32, units: u64) -> f64 {
        let tp = f64::from(tp);
        self.launch_ns + self.unit_ns * units as f64 * (0.9 / tp + 0.1)
    }

    fn sample_ns(&self, tp: u32, units: u64) -> f64 {
        self.square_ns * (units * units) as f64 / f64::from(tp)
    }

    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64 {
        self.ends_ns * units as f64 / f64::from(tp)
    }

    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes {
        let (layers, tp) = (f64::from(part.layers), f64::from(tp));
        let kept = self.unit_bytes * if is_recomputed { layers / 8.0 } else { layers } / tp;
        StageBytes {
            fixed: self.layer_bytes * layers / tp / 4.0,
            optimizer: 0.75 * self.layer_bytes * layers / tp,
            kept_per_unit: kept,
            working_per_unit: if is_recomputed { self.unit_bytes / tp } else { 0.0 },
            ..StageBytes::default()
        }
    }

    fn border_bytes(&self) -> f64 {
        1000.0
    }

    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        self.layer_bytes * f64::from(part.layers) / f64::from(tp) / 8.0
    }
}

pub(crate) fn encoder() -> ClosedForm {
    ClosedForm {
        layers: 4,
        degrees: vec![1, 2],
        launch_ns: 2_000.0,
        unit_ns: 30_000.0,
        square_ns: 0.0,
        ends_ns: 9_000.0,
        layer_bytes: 1e6,
        unit_bytes: 1e4,
    }
}

pub(crate) fn llm() -> ClosedForm {
    ClosedForm {
        layers: 6,
        degrees: vec![1, 2, 4],
        launch_ns: 5_000.0,
        unit_ns: 60.0,
        square_ns: 0.01,
        ends_ns: 90.0,
        layer_bytes: 8e6,
        unit_bytes: 2e3,
    }
}

pub(crate) fn sizes() -> Vec<ItemSize> {
    (0..97).map(|at: u32| ItemSize::from_tiles(at * 7919 % 11 % 7, 100 + at * 104_729 % 1900)).collect()
}

pub(crate) fn cluster(gpus: u32, memory_bytes: u64) -> Cluster {
    Cluster { gpus, gpus_per_node: 4, memory_bytes, links: None }
}

pub(crate) fn links() -> Links {
    let link = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
    Links { nvlink: link(2e11, 1e-6), infiniband: link(1e10, 1e-5) }
}

pub(crate) fn problem<'a>(
    costs: &'a (ClosedForm, ClosedForm),
    workload: &'a Workload,
    cluster: Cluster,
) -> PlanProblem<'a> {
    PlanProblem {
        encoders: vec![&costs.0],
        llm: &costs.1,
        workload,
        cluster,
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.0,
    }
}
