//! Recorded models, and comparisons with them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_device::Device;
use dflop_models::weights::{Checkpoint, WeightSource};
use dflop_models::{
    BlockOutput, BlockStage, LlmConfig, MicrobatchContext, Stage, StageBlocks, StageOptions, TextBatch,
};
use serde_json::Value;

/// Maximum tensor difference, relative to the tensor norm or to a thousandth of the largest norm.
pub(crate) const TOLERANCE: f64 = 1e-4;

/// Recorded model.
pub(crate) struct Fixture {
    pub(crate) name: &'static str,
    pub(crate) config: Value,
    pub(crate) weights: Checkpoint,
    expected: Checkpoint,
}

impl Fixture {
    pub(crate) fn open(name: &'static str) -> Self {
        let directory = directory(name);
        let text = std::fs::read(directory.join("config.json")).unwrap();
        Self {
            name,
            config: serde_json::from_slice(&text).unwrap(),
            weights: Checkpoint::open(&directory).unwrap(),
            expected: Checkpoint::open(&directory.join("expected.safetensors")).unwrap(),
        }
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.expected.tensor(name).unwrap().1
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<i64> {
        self.expected.integers(name).unwrap().1
    }

    pub(crate) fn loss(&self) -> f64 {
        f64::from(self.floats("loss")[0])
    }

    pub(crate) fn gradients(&self) -> BTreeMap<String, Vec<f32>> {
        let names = self.expected.names().filter_map(|name| name.strip_prefix("grad."));
        names.map(|name| (name.to_owned(), self.floats(&format!("grad.{name}")))).collect()
    }

    /// Compares gradients with the recorded gradients and returns the worst relative difference. Gradients of
    /// parameters that transformers does not reach must be zero.
    pub(crate) fn compare_gradients(&self, found: &BTreeMap<String, Vec<f32>>) -> f64 {
        let truth = self.gradients();
        let least = 1e-3 * truth.values().map(|values| norm(values)).fold(0.0, f64::max);
        for (name, values) in found.iter().filter(|(name, _)| !truth.contains_key(*name)) {
            assert!(values.iter().all(|&value| value == 0.0), "{}: gradient of {name}", self.name);
        }
        let mut worst = 0.0_f64;
        for (name, truth) in &truth {
            let found = found.get(name).unwrap_or_else(|| panic!("{}: no gradient of {name}", self.name));
            let relative = difference(found, truth) / norm(truth).max(least);
            assert!(relative <= TOLERANCE, "{}: gradient of {name} is off by {relative}", self.name);
            worst = worst.max(relative);
        }
        worst
    }
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor").join(name)
}

pub(crate) fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

pub(crate) fn difference(found: &[f32], truth: &[f32]) -> f64 {
    assert_eq!(found.len(), truth.len());
    let squares = found.iter().zip(truth).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
    squares.sum::<f64>().sqrt()
}

/// Fixture text.
pub(crate) struct Text {
    input_ids: Vec<i64>,
    labels: Vec<i64>,
    positions: Vec<i64>,
    cu_seqlens: Vec<i32>,
    media_places: Vec<u32>,
}

impl Text {
    pub(crate) fn of(fixture: &Fixture, media: &[i64]) -> Self {
        let input_ids = fixture.integers("input_ids");
        let places = (0..).zip(&input_ids).filter(|(_, id)| media.contains(id)).map(|(place, _)| place);
        Self {
            labels: fixture.integers("labels"),
            positions: fixture.integers("positions"),
            cu_seqlens: fixture.integers("cu_seqlens").into_iter().map(|start| start as i32).collect(),
            media_places: places.collect(),
            input_ids,
        }
    }

    /// Sets the media places, in the order of the encoder output rows.
    pub(crate) fn with_media_places(self, media_places: Vec<u32>) -> Self {
        Self { media_places, ..self }
    }

    /// Returns 1 / target tokens in the step.
    pub(crate) fn loss_scale(&self) -> f64 {
        1.0 / self.labels.iter().filter(|&&label| label != -100).count() as f64
    }

    pub(crate) fn context<D: Device>(&self, config: &LlmConfig, device: &D) -> MicrobatchContext<D> {
        let batch = TextBatch {
            input_ids: &self.input_ids,
            labels: &self.labels,
            positions: &self.positions,
            cu_seqlens: &self.cu_seqlens,
            media_places: &self.media_places,
            loss_scale: self.loss_scale(),
        };
        config.context(device, &batch).unwrap()
    }

    /// Returns the context for a single sample, with the loss scale for all samples.
    pub(crate) fn context_of_sample<D: Device>(
        &self,
        sample: usize,
        config: &LlmConfig,
        device: &D,
    ) -> MicrobatchContext<D> {
        let (start, end) = (self.cu_seqlens[sample] as usize, self.cu_seqlens[sample + 1] as usize);
        let axes = self.positions.chunks(self.input_ids.len());
        let positions: Vec<i64> = axes.flat_map(|axis| axis[start..end].to_vec()).collect();
        let batch = TextBatch {
            input_ids: &self.input_ids[start..end],
            labels: &self.labels[start..end],
            positions: &positions,
            cu_seqlens: &[0, (end - start) as i32],
            media_places: &[],
            loss_scale: self.loss_scale(),
        };
        config.context(device, &batch).unwrap()
    }

    pub(crate) fn samples(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

/// Builds a stage with some language model layers.
pub(crate) fn llm_stage<D: Device>(
    config: &LlmConfig,
    layers: std::ops::Range<usize>,
    device: &D,
    options: StageOptions,
    weights: &dyn WeightSource,
) -> BlockStage<D> {
    let mut parts = StageBlocks::default();
    parts.add(false, |declaration| config.blocks(layers, declaration)).unwrap();
    BlockStage::new(device.clone(), options, parts, weights).unwrap()
}

/// Runs forward and backward through stages; returns the loss sum.
pub(crate) fn train<D: Device>(
    stages: &mut [BlockStage<D>],
    microbatch: usize,
    context: &Arc<MicrobatchContext<D>>,
) -> f64 {
    let mut rows = None;
    let mut loss = f64::NAN;
    for stage in &mut *stages {
        match stage.forward(microbatch, Arc::clone(context), rows.take()).unwrap() {
            BlockOutput::Rows(output) => rows = Some(output),
            BlockOutput::Loss(sum) => loss = stage.read_loss(microbatch, &sum).unwrap(),
        }
    }
    let mut gradient = None;
    for stage in stages.iter_mut().rev() {
        gradient = stage.backward(microbatch, gradient).unwrap();
    }
    loss
}

/// Returns the gradients in all stages by name; gradients of a parameter on two stages are added.
pub(crate) fn gradients<D: Device>(stages: &[BlockStage<D>]) -> BTreeMap<String, Vec<f32>> {
    let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for stage in stages {
        for (name, gradient) in stage.parameters().gradients(stage.device()).unwrap() {
            match all.get_mut(&name) {
                Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value),
                None => drop(all.insert(name, gradient)),
            }
        }
    }
    all
}
