//! Qwen2.5-Omni: two encoders, each a separate module, into one decoder.

use std::sync::Arc;

use dflop_device::{Device, Runtime};
use dflop_models::encoder::{EncoderConfig, EncoderInput, FrozenEncoder};
use dflop_models::{
    BlockOutput, BlockStage, MicrobatchContext, ModelConfig, Stage, StageBlocks, StageOptions,
};

use super::fixture::{Fixture, TOLERANCE, Text, difference, gradients, llm_stage, norm};
use crate::claim::{claims, report};
use crate::device::TestBackend;

claims! {
    logits_loss_and_gradients_of_both_encoders_match_transformers,
    the_thinker_is_found_in_a_whole_checkpoint,
    clips_that_do_not_fit_their_frames_are_refused,
}

const NAME: &str = "qwen2_5_omni";
/// Placeholder ids for images, videos and audio.
const SEEN: [i64; 2] = [47, 46];
const HEARD: i64 = 44;

/// Encoder stages, cut after the first layer, and the context for recorded media.
struct Encoder<D: Device> {
    stages: Vec<BlockStage<D>>,
    context: Arc<MicrobatchContext<D>>,
}

impl<D: Device> Encoder<D> {
    fn new(fixture: &Fixture, config: &EncoderConfig, device: &D, input: &EncoderInput<'_>) -> Self {
        let stage = |cut: &[usize]| {
            let mut parts = StageBlocks::default();
            config.add_to(cut[0]..cut[1], FrozenEncoder::default(), &mut parts).unwrap();
            let options = StageOptions { is_input_trained: cut[0] > 0, ..StageOptions::new("encoder") };
            BlockStage::new(device.clone(), options, parts, &fixture.weights).unwrap()
        };
        let context = Arc::new(config.context(device, input).unwrap());
        Self { stages: [0, 1, config.layers()].windows(2).map(stage).collect(), context }
    }

    fn forward(&mut self, device: &D) -> Vec<f32> {
        let mut rows = None;
        for stage in &mut self.stages {
            let BlockOutput::Rows(output) = stage.forward(0, Arc::clone(&self.context), rows).unwrap() else {
                panic!("an encoder has no loss")
            };
            rows = Some(output);
        }
        device.download(&rows.unwrap()).unwrap()
    }

    fn backward(&mut self, device: &D, gradient: &[f32]) {
        let mut gradient = Some(device.upload(gradient).unwrap());
        for stage in self.stages.iter_mut().rev() {
            gradient = stage.backward(0, gradient).unwrap();
        }
        assert!(gradient.is_none(), "a medium has no gradient");
    }
}

fn unsigned(fixture: &Fixture, name: &str) -> Vec<u32> {
    fixture.integers(name).into_iter().map(|value| u32::try_from(value).unwrap()).collect()
}

/// Returns image and video places by sample, then all clip places, and the number of image and video places.
fn media_places(fixture: &Fixture) -> (Vec<u32>, usize) {
    let (ids, bounds) = (fixture.integers("input_ids"), fixture.integers("cu_seqlens"));
    let places = |bound: &[i64], id: i64| -> Vec<u32> {
        let within = bound[0] as usize..bound[1] as usize;
        within.filter(|&place| ids[place] == id).map(|place| place as u32).collect()
    };
    let mut all: Vec<u32> =
        bounds.windows(2).flat_map(|bound| SEEN.map(|id| places(bound, id)).concat()).collect();
    let seen = all.len();
    all.extend(places(&[0, ids.len() as i64], HEARD));
    (all, seen)
}

fn logits_loss_and_gradients_of_both_encoders_match_transformers<B: TestBackend>() {
    let (fixture, device) = (Fixture::open(NAME), B::open(2));
    let model = ModelConfig::from_config(&fixture.config).unwrap();
    model.check::<B::Device>(&fixture.weights).unwrap();
    let (grids, frames) = (unsigned(&fixture, "grids"), unsigned(&fixture, "frames"));
    let (values, features) = (fixture.floats("patches"), fixture.floats("input_features"));
    let patches = EncoderInput::Patches { values: &values, grids: grids.as_chunks::<3>().0 };
    let clips = EncoderInput::Clips { features: &features, frames: &frames };
    let mut vision = Encoder::new(&fixture, model.vision.as_ref().unwrap(), &device, &patches);
    let mut audio = Encoder::new(&fixture, model.audio.as_ref().unwrap(), &device, &clips);
    let options = StageOptions { is_input_trained: true, ..StageOptions::new("llm") };
    let mut decoder = llm_stage(&model.llm, 0..model.llm.layers(), &device, options, &fixture.weights);

    let (places, seen) = media_places(&fixture);
    let text = Text::of(&fixture, &[]).with_media_places(places);
    let context = Arc::new(text.context(&model.llm, &device));
    let rows = [vision.forward(&device), audio.forward(&device)].concat();
    let media = || Some(device.upload(&rows).unwrap());
    let logits = device.download(&decoder.logits(&context, media()).unwrap().unwrap()).unwrap();
    let truth = fixture.floats("logits");
    let of_logits = difference(&logits, &truth) / norm(&truth);
    assert!(of_logits < TOLERANCE, "logits are off by {of_logits}");

    let BlockOutput::Loss(loss) = decoder.forward(0, context, media()).unwrap() else {
        panic!("the LLM has a loss")
    };
    let loss = decoder.read_loss(0, &loss).unwrap() * text.loss_scale();
    let of_loss = (loss - fixture.loss()).abs() / fixture.loss();
    assert!(of_loss < TOLERANCE, "{loss}");
    let gradient = device.download(&decoder.backward(0, None).unwrap().unwrap()).unwrap();
    let (of_seen, of_heard) = gradient.split_at(seen * model.llm.hidden());
    vision.backward(&device, of_seen);
    audio.backward(&device, of_heard);
    let stages: Vec<_> = vision.stages.into_iter().chain(audio.stages).chain([decoder]).collect();
    let of_gradients = fixture.compare_gradients(&gradients(&stages));
    report!("{NAME}: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
}

/// Tensors in a full checkpoint start with `thinker.`, and tensors in the speech parts are not used.
fn the_thinker_is_found_in_a_whole_checkpoint<B: TestBackend>() {
    let fixture = Fixture::open(NAME);
    let alone = ModelConfig::from_config(&fixture.config).unwrap();
    let config = serde_json::json!({"model_type": "qwen2_5_omni", "thinker_config": fixture.config});
    let whole = ModelConfig::from_config(&config).unwrap();
    let names = |model: &ModelConfig, prefix: &str| -> Vec<String> {
        let specs = model.parameters::<B::Device>().unwrap();
        specs.iter().map(|spec| format!("{prefix}{}", spec.name)).collect()
    };
    assert_eq!(names(&whole, ""), names(&alone, "thinker."));
    assert_eq!(alone.ignored(), ["audio_tower.audio_bos_eos_token."]);
    let ignored = ["talker.", "token2wav.", "thinker.audio_tower.audio_bos_eos_token."];
    assert_eq!(whole.ignored(), ignored);
}

fn clips_that_do_not_fit_their_frames_are_refused<B: TestBackend>() {
    let (fixture, device) = (Fixture::open(NAME), B::open(1));
    let audio = ModelConfig::from_config(&fixture.config).unwrap().audio.unwrap();
    let refused = |input: EncoderInput<'_>| audio.context(&device, &input).err().unwrap().to_string();
    let short = refused(EncoderInput::Clips { features: &[0.0; 15], frames: &[2] });
    assert!(short.contains("`input_features`: has 15 elements for 2 frames of 8"), "{short}");
    let other = refused(EncoderInput::Windows { features: &[0.0; 16], frames: &[2] });
    assert!(other.contains("`medium`: is of another kind"), "{other}");
}
