//! Trains a model on some ranks for a step, and collects the results.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::{Device, Tensor};
use dflop_models::encoder::EncoderConfig;
use dflop_models::weights::{ParameterSpec, WeightSource};
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, MicrobatchContext, ModelConfig, ModuleKind, Stage,
    StageRange, StageSettings, TensorParallel,
};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::device::TestBackend;
use crate::parity::fixture::{Fixture, Text, difference, norm};
use crate::parity::{PLACEHOLDERS, encoder_context};
use crate::support::{Transport, patient, run};

/// Values for all tensors, including biases and norms, derived from tensor names.
pub(crate) struct Anything;

impl WeightSource for Anything {
    fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
        let value = |index: usize| {
            let hash = xxh3_64_with_seed(&index.to_le_bytes(), xxh3_64_with_seed(spec.name.as_bytes(), 1));
            ((hash >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.6
        };
        let whole: Vec<f32> = (0..spec.shape.iter().product()).map(value).collect();
        Ok(spec.cut_part(&whole))
    }
}

/// Training step settings.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "the choices are independent")]
pub(crate) struct Job<'a> {
    pub(crate) config: &'a Value,
    /// Recorded model whose text and media are used.
    pub(crate) inputs: &'static str,
    pub(crate) weights: &'a (dyn WeightSource + Sync),
    pub(crate) transport: Transport,
    pub(crate) ranks: usize,
    /// Whether ranks share the encoder; if not, each rank has the complete encoder.
    pub(crate) is_encoder_shared: bool,
    pub(crate) is_llm_shared: bool,
    pub(crate) activations: Activations,
    /// Number of LLM layers before a cut into two stages.
    pub(crate) cut: Option<usize>,
    /// Whether every text sample is a microbatch, with all microbatches in flight at the same time.
    pub(crate) is_by_sample: bool,
    pub(crate) frozen: FrozenModules,
    /// Whether all ranks compute on the same single-threaded device.
    pub(crate) is_device_shared: bool,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        config: &'a Value,
        inputs: &'static str,
        weights: &'a (dyn WeightSource + Sync),
    ) -> Self {
        Self {
            config,
            inputs,
            weights,
            transport: Transport::Threads,
            ranks: 1,
            is_encoder_shared: true,
            is_llm_shared: true,
            activations: Activations::Stored,
            cut: None,
            is_by_sample: false,
            frozen: FrozenModules::default(),
            is_device_shared: false,
        }
    }

    /// Trains a step; results that all ranks must agree on are compared with the results on the first rank.
    pub(crate) fn run<B: TestBackend>(self) -> Trained {
        let shared = self.is_device_shared.then(|| B::open(1));
        let mut ranks = run(self.transport, self.ranks, patient(), |comm| {
            let device = shared.as_ref().map_or_else(|| B::open(1), B::on_same_threads);
            self.rank(Arc::new(comm), &device)
        });
        for rank in 1..ranks.len() {
            assert_eq!(ranks[rank].loss.to_bits(), ranks[0].loss.to_bits(), "loss of rank {rank}");
            assert_eq!(bits(&ranks[rank].logits), bits(&ranks[0].logits), "logits of rank {rank}");
            for (spec, gradient) in &ranks[rank].held {
                let original = spec.shard.original(rank);
                let held = ranks[original].held.iter().find(|(other, _)| other.name == spec.name).unwrap();
                assert_eq!(bits(gradient), bits(&held.1), "{} on ranks {original} and {rank}", spec.name);
            }
        }
        ranks.swap_remove(0)
    }

    fn rank<D: Device>(self, comm: Arc<dyn Comm>, device: &D) -> Trained {
        let (model, fixture) = (ModelConfig::from_config(self.config).unwrap(), Fixture::open(self.inputs));
        let group = Arc::new(TensorParallel::new(device.clone(), comm));
        group.start_step(7);
        let mut encoders = self.stages(&model, &group, device, false);
        let mut decoders = self.stages(&model, &group, device, true);
        let text = Text::of(&fixture, if encoders.is_empty() { &[] } else { &PLACEHOLDERS });
        let context = Arc::new(text.context(&model.llm, device));
        let encoder = model.vision.as_ref().or(model.audio.as_ref());
        let media = encoder.map(|config| forward_media(&mut encoders, config, &fixture, device));
        let logits = logits(&decoders, &context, media.as_ref());
        let contexts = if self.is_by_sample {
            let of_sample = |sample| Arc::new(text.context_of_sample(sample, &model.llm, device));
            (0..text.samples()).map(of_sample).collect()
        } else {
            vec![context]
        };
        let loss = forward(&mut decoders, &contexts, media) * text.loss_scale();
        for microbatch in 0..contexts.len() {
            let mut gradient = None;
            for stage in decoders.iter_mut().rev().chain(encoders.iter_mut().rev()) {
                gradient = stage.backward(microbatch, gradient).unwrap();
            }
        }
        encoders.append(&mut decoders);
        let (held, gradients) = gradients(&mut encoders);
        Trained { loss, logits, held, gradients }
    }

    fn stages<D: Device>(
        self,
        model: &ModelConfig,
        group: &Arc<TensorParallel<D>>,
        device: &D,
        is_llm: bool,
    ) -> Vec<BlockStage<D>> {
        let mut stages = Vec::new();
        for module in model.modules() {
            if (module == ModuleKind::Llm) != is_llm {
                continue;
            }
            let is_shared = if is_llm { self.is_llm_shared } else { self.is_encoder_shared };
            let layers = model.layers(module);
            let cuts = self.cut.filter(|_| is_llm).map_or(vec![0, layers], |cut| vec![0, cut, layers]);
            for cut in cuts.windows(2) {
                let settings = StageSettings {
                    activations: self.activations,
                    tensor_parallel: is_shared.then(|| Arc::clone(group)),
                    ..StageSettings::default()
                };
                let range = StageRange { module, layers: cut[0]..cut[1] };
                let stage = model.stage_with(device, &range, self.frozen, settings, self.weights);
                stages.push(stage.unwrap());
            }
        }
        stages
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn forward_media<D: Device>(
    stages: &mut [BlockStage<D>],
    config: &EncoderConfig,
    fixture: &Fixture,
    device: &D,
) -> Tensor<D> {
    let context = Arc::new(encoder_context(fixture, config, device));
    match stages[0].forward(0, context, None).unwrap() {
        BlockOutput::Rows(rows) => rows,
        BlockOutput::Loss(_) => unreachable!("an encoder has no loss"),
    }
}

fn logits<D: Device>(
    stages: &[BlockStage<D>],
    context: &MicrobatchContext<D>,
    media: Option<&Tensor<D>>,
) -> Vec<f32> {
    let copy = |rows: &Tensor<D>| stages[0].device().copy(rows).unwrap();
    let (last, before) = stages.split_last().unwrap();
    let mut rows = media.map(copy);
    for stage in before {
        let BlockOutput::Rows(next) = stage.evaluate(context, rows).unwrap() else {
            unreachable!("the last stage has the loss")
        };
        rows = Some(next);
    }
    last.device().download(&last.logits(context, rows).unwrap().unwrap()).unwrap()
}

/// Runs all microbatches, the first with media, and returns the loss sum.
fn forward<D: Device>(
    stages: &mut [BlockStage<D>],
    contexts: &[Arc<MicrobatchContext<D>>],
    mut media: Option<Tensor<D>>,
) -> f64 {
    let mut loss = 0.0;
    for (microbatch, context) in contexts.iter().enumerate() {
        let mut rows = media.take();
        for stage in &mut *stages {
            match stage.forward(microbatch, Arc::clone(context), rows.take()).unwrap() {
                BlockOutput::Rows(next) => rows = Some(next),
                BlockOutput::Loss(sum) => loss += stage.read_loss(microbatch, &sum).unwrap(),
            }
        }
    }
    loss
}

type Named = BTreeMap<String, Vec<f32>>;

/// Returns the gradients of the parts on this rank, and the complete gradients on the first rank.
pub(crate) fn gradients<D: Device>(stages: &mut [BlockStage<D>]) -> (Vec<(ParameterSpec, Vec<f32>)>, Named) {
    let (mut held, mut whole) = (Vec::new(), Named::new());
    for stage in stages {
        let device = stage.device().clone();
        stage.parameters_mut().fold_shared_gradients(&device).unwrap();
        let by_name = stage.parameters().gradients(&device).unwrap();
        for spec in stage.parameters().specs().iter().filter(|spec| spec.is_trained && spec.shares.is_none())
        {
            let gradient = by_name[&spec.name].clone();
            let all = match stage.tensor_parallel() {
                Some(group) => group.assemble(spec, &gradient).unwrap(),
                None => Some(gradient.clone()),
            };
            if let Some(values) = all {
                match whole.get_mut(&spec.name) {
                    Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
                    None => drop(whole.insert(spec.name.clone(), values)),
                }
            }
            held.push((spec.clone(), gradient));
        }
    }
    (held, whole)
}

/// Rank results.
pub(crate) struct Trained {
    /// Mean loss over target tokens.
    pub(crate) loss: f64,
    pub(crate) logits: Vec<f32>,
    /// Gradients of the parts on this rank.
    pub(crate) held: Vec<(ParameterSpec, Vec<f32>)>,
    /// Complete gradients, on the first rank.
    pub(crate) gradients: Named,
}

/// Maximum relative difference of loss, logits or gradients.
pub(crate) const TOLERANCE: f64 = 1e-5;

impl Trained {
    /// Compares the results with single-rank results; returns the worst relative difference.
    pub(crate) fn compare(&self, truth: &Self, what: &str) -> f64 {
        let of_logits = difference(&self.logits, &truth.logits) / norm(&truth.logits);
        let of_loss = (self.loss - truth.loss).abs() / truth.loss;
        let mut worst = of_logits.max(of_loss);
        assert!(worst <= TOLERANCE, "{what}: logits are off by {of_logits}, the loss by {of_loss}");
        assert_eq!(self.gradients.len(), truth.gradients.len(), "{what}");
        let least = 1e-3 * truth.gradients.values().map(|values| norm(values)).fold(0.0, f64::max);
        for (name, truth) in &truth.gradients {
            assert!(norm(truth) > 0.0, "{what}: nothing comes to {name}");
            let relative = difference(&self.gradients[name], truth) / norm(truth).max(least);
            assert!(relative <= TOLERANCE, "{what}: gradient of {name} is off by {relative}");
            worst = worst.max(relative);
        }
        worst
    }

    pub(crate) fn assert_same_bits(&self, truth: &Self, what: &str) {
        assert_eq!(self.loss.to_bits(), truth.loss.to_bits(), "{what}");
        assert_eq!(bits(&self.logits), bits(&truth.logits), "{what}");
        assert_eq!(self.gradients.len(), truth.gradients.len(), "{what}");
        for (name, truth) in &truth.gradients {
            assert_eq!(bits(&self.gradients[name]), bits(truth), "{what}: {name}");
        }
    }
}
