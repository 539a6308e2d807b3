//! Runs the same global batch sample by sample through complete modules, without any pipeline.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_device::{Device, Runtime};
use dflop_models::weights::Seed;
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange,
};

use super::batch::{Sample, media_context, text_context};
use crate::device::TestBackend;

/// Loss and gradients in a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Truth {
    /// Mean loss over target tokens.
    pub loss: f64,
    /// Gradients by name.
    pub gradients: BTreeMap<String, Vec<f32>>,
}

fn rows<D: Device>(device: &D, output: BlockOutput<D>) -> Vec<f32> {
    match output {
        BlockOutput::Rows(rows) => device.download(&rows).unwrap(),
        BlockOutput::Loss(_) => panic!("an encoder has no loss"),
    }
}

/// Runs every sample and every medium in it separately.
pub fn one_by_one<B: TestBackend>(model: &ModelConfig, frozen: FrozenModules, samples: &[Sample]) -> Truth {
    let device = B::open(1);
    let stage = |module: ModuleKind| -> BlockStage<B::Device> {
        let range = StageRange { module, layers: 0..model.layers(module) };
        model.stage(&device, &range, frozen, Activations::Stored, &Seed(1)).unwrap()
    };
    let mut modules: BTreeMap<ModuleKind, BlockStage<B::Device>> =
        model.modules().into_iter().map(|module| (module, stage(module))).collect();
    let targets: u64 = samples.iter().map(Sample::target_tokens).sum();
    let scale = 1.0 / targets as f64;
    let mut loss = 0.0;
    for sample in samples {
        let mut media = Vec::new();
        for (index, &item) in sample.media.iter().enumerate().filter(|(_, item)| item.tokens() > 0) {
            let context = Arc::new(media_context(model, item.module(), &[item], &device));
            let encoder = modules.get_mut(&item.module()).unwrap();
            media.extend(rows(&device, encoder.forward(index, context, None).unwrap()));
        }
        let context = Arc::new(text_context(model, &[sample], scale, &device));
        let input = (!media.is_empty()).then(|| device.upload(&media).unwrap());
        let llm = modules.get_mut(&ModuleKind::Llm).unwrap();
        let BlockOutput::Loss(sum) = llm.forward(0, context, input).unwrap() else {
            panic!("the LLM has a loss")
        };
        loss += llm.read_loss(0, &sum).unwrap();
        let gradient = llm.backward(0, None).unwrap();
        let gradient = gradient.map(|gradient| device.download(&gradient).unwrap()).unwrap_or_default();
        let mut taken = 0;
        for (index, &item) in sample.media.iter().enumerate().filter(|(_, item)| item.tokens() > 0) {
            let elements = item.tokens() * model.llm.input_width();
            let encoder = modules.get_mut(&item.module()).unwrap();
            if encoder.has_backward() {
                let own = device.upload(&gradient[taken..taken + elements]).unwrap();
                encoder.backward(index, Some(own)).unwrap();
            }
            taken += elements;
        }
    }
    let mut gradients = BTreeMap::new();
    for stage in modules.values_mut() {
        stage.parameters_mut().fold_shared_gradients(&device).unwrap();
        gradients.extend(stage.parameters().gradients(&device).unwrap());
    }
    Truth { loss: loss * scale, gradients }
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

impl Truth {
    /// Compares a second run over the same global batch with this run, up to `f32` rounding.
    #[track_caller]
    pub fn assert_close(&self, found: &Self) {
        assert!((self.loss - found.loss).abs() <= 1e-6 * self.loss, "{} for {}", found.loss, self.loss);
        assert!(self.gradients.keys().eq(found.gradients.keys()));
        let least = 1e-5 * self.gradients.values().map(|values| norm(values)).fold(0.0, f64::max);
        for (name, truth) in &self.gradients {
            let difference: Vec<f32> = truth.iter().zip(&found.gradients[name]).map(|(a, b)| a - b).collect();
            let relative = norm(&difference) / norm(truth).max(least);
            assert!(relative < 1e-5, "gradient of {name} is off by {relative}");
        }
    }
}
