//! Compares model parameters and FLOPs with PyTorch's counts, as recorded by `tests/record/flops.py`.

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::flops::{Attention, EncoderFlops, Gradients, LlmFlops, Recomputation};
use dflop_costmodel::{AudioLength, ImageSize, ModelSpec, Module, SampleShape, VideoShape};
use serde::Deserialize;
use serde_json::Value;

/// Maximum relative difference; in models a few tokens wide, the product that computes the rotary position
/// angles is visible.
const TOLERANCE: f64 = 0.000_2;

#[derive(Deserialize)]
struct Case {
    name: String,
    documents: Value,
    parameters: std::collections::BTreeMap<String, u64>,
    flops: Vec<Counted>,
}

#[derive(Deserialize)]
struct Counted {
    part: String,
    #[serde(default)]
    images: Vec<[u32; 2]>,
    /// Frames, width, height.
    #[serde(default)]
    videos: Vec<[u32; 3]>,
    /// Samples at 16 kHz.
    #[serde(default)]
    audio: Vec<u64>,
    #[serde(default)]
    tokens: u32,
    /// Computed gradients, if a part or everything before it is frozen.
    #[serde(default)]
    gradients: Option<String>,
    forward: u64,
    backward: u64,
}

/// Reads the recorded cases; newer families have separate files.
fn cases() -> Vec<Case> {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
    let own = std::fs::read_dir(format!("{golden}/flops")).unwrap().map(|entry| entry.unwrap().path());
    let paths = std::iter::once(format!("{golden}/flops.json").into()).chain(own);
    let read = |path| -> Vec<Case> { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    paths.flat_map(read).collect()
}

impl Case {
    /// Returns the model in the recorded files; a separate encoder is joined with a small language model.
    fn spec(&self) -> ModelSpec {
        let file = |name: &str| self.documents.get(name).cloned();
        let documents = Documents {
            config: file("config").expect("a configuration"),
            preprocessor: file("preprocessor"),
            video_preprocessor: None,
            processor: None,
        };
        let part =
            PartialModelSpec::from_hugging_face(&documents).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let llm = PartialModelSpec {
            llm: Some(ModelSpec::preset("tiny").unwrap().llm),
            ..PartialModelSpec::default()
        };
        let parts = if part.llm.is_some() { vec![part] } else { vec![part, llm] };
        ModelSpec::compose(&self.name, &parts).unwrap()
    }
}

impl Counted {
    fn shape(&self) -> SampleShape {
        let image = |&[width, height]: &[u32; 2]| ImageSize { width, height };
        let video = |&[frames, width, height]: &[u32; 3]| VideoShape { frames, width, height };
        SampleShape {
            images: self.images.iter().map(image).collect(),
            videos: self.videos.iter().map(video).collect(),
            audio: self.audio.iter().map(|&frames| AudioLength { frames, sample_rate_hz: 16_000 }).collect(),
            ..SampleShape::default()
        }
    }

    fn gradients(&self) -> Gradients {
        match self.gradients.as_deref() {
            None => Gradients::All,
            Some("inputs") => Gradients::Inputs,
            Some("weights") => Gradients::Weights,
            Some(other) => panic!("{other}"),
        }
    }

    /// Returns the part's forward and backward FLOPs by the cost model, with full attention.
    fn predicted(&self, spec: &ModelSpec) -> [u128; 2] {
        let Some((module, part)) = self.part.split_once('.') else {
            let flops = LlmFlops::new(&spec.llm).gradients(self.gradients());
            let flops = flops.training(&[self.tokens], Attention::Full, Recomputation::None);
            return [flops.forward, flops.backward];
        };
        let found = spec.encoders().find(|(encoder, ..)| encoder.name() == module);
        let (_, encoder, rule) = found.expect("the encoder");
        let work = rule.work(&self.shape()).unwrap();
        let flops = EncoderFlops::new(&encoder, spec.llm.hidden).gradients(Gradients::All, self.gradients());
        let passes = [flops.forward_pass(&work), flops.backward_pass(&work)];
        passes.map(|pass| if part == "tower" { pass.tower } else { pass.projector })
    }
}

#[test]
fn forward_and_backward_flops_agree_with_the_counter() {
    let (mut worst, mut compared) = (0.0_f64, 0);
    for case in cases() {
        let spec = case.spec();
        for counted in &case.flops {
            let recorded = [counted.forward, counted.backward];
            for (predicted, recorded) in counted.predicted(&spec).into_iter().zip(recorded) {
                let difference = (predicted as f64 / recorded as f64 - 1.0).abs();
                let of = format!("{} {}: {predicted} for {recorded}", case.name, counted.part);
                assert!(difference <= TOLERANCE, "{of}, {:.4} % off", 100.0 * difference);
                worst = worst.max(difference);
                compared += 1;
            }
        }
    }
    assert!(compared > 150, "{compared} figures");
    assert!(worst < TOLERANCE, "{worst}");
}

#[test]
fn parameters_are_exact() {
    for case in cases() {
        let spec = case.spec();
        let encoders = spec.encoder_parameters();
        let counted = |part: &str| {
            let Some((module, part)) = part.split_once('.') else { return spec.llm_parameters().total() };
            let find = |(encoder, _): &&(Module, _)| encoder.name() == module;
            let (_, parameters) = encoders.iter().find(find).expect("the encoder");
            if part == "tower" { parameters.tower() } else { parameters.projector }
        };
        for (part, recorded) in &case.parameters {
            assert_eq!(counted(part), *recorded, "{} {part}", case.name);
        }
    }
}
