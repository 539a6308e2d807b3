//! Explains a model: the files read, the parameters, the tokens for example media, and the support level.

use dflop_costmodel::{AudioLength, ImageSize, ModelSpec, Module, SampleShape, VideoShape};
use dflop_loader::model::model_directory;
use serde::Serialize;

use super::level::{Support, model_support, transformers_version};
use crate::failure::Failure;

/// Model explanation.
#[derive(Debug, Serialize)]
pub(super) struct CheckpointReport {
    pub(super) model: String,
    pub(super) family: String,
    /// Files that were read; the word `preset` for a preset.
    pub(super) files: Vec<String>,
    pub(super) parameters: u64,
    /// Parameters that a token goes through: without the experts that it is not routed to.
    pub(super) active_parameters: u64,
    pub(super) modules: Vec<ModuleParameters>,
    pub(super) examples: Vec<Example>,
    #[serde(flatten)]
    pub(super) support: Support,
    pub(super) transformers: Option<&'static str>,
}

/// Number of parameters in a module, projector included.
#[derive(Debug, Serialize)]
pub(super) struct ModuleParameters {
    pub(super) module: Module,
    pub(super) parameters: u64,
}

/// Token count for an example medium.
#[derive(Debug, Serialize)]
pub(super) struct Example {
    pub(super) medium: &'static str,
    pub(super) tokens: u64,
    pub(super) encoder_tokens: u64,
    pub(super) refused: Option<String>,
}

/// - `names`: model names, by which the files are found
pub(super) fn checkpoint_report(names: &[String], spec: &ModelSpec) -> Result<CheckpointReport, Failure> {
    let mut files = Vec::new();
    let mut config = None;
    for name in names {
        match model_directory(name)? {
            Some(directory) => {
                files.extend(directory.files());
                config = Some(directory.documents().config.clone());
            }
            None => files.push("preset".to_owned()),
        }
    }
    let config = config.filter(|_| names.len() == 1);
    let encoders = spec.encoder_parameters().into_iter();
    let encoders = encoders.map(|(module, encoder)| ModuleParameters { module, parameters: encoder.total() });
    let idle = spec.llm_parameters().total() - spec.llm_parameters().active();
    let llm = ModuleParameters { module: Module::Llm, parameters: spec.llm_parameters().total() };
    Ok(CheckpointReport {
        model: spec.name.clone(),
        family: spec.family.to_string(),
        files,
        parameters: spec.parameters(),
        active_parameters: spec.parameters() - idle,
        modules: encoders.chain([llm]).collect(),
        examples: examples(spec),
        support: model_support(spec, config.as_ref()),
        transformers: transformers_version(spec.family.as_str()),
    })
}

/// Counts the tokens for example media, for each kind that the model has an encoder for.
fn examples(spec: &ModelSpec) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut add = |medium, shape: SampleShape| {
        let (mut tokens, mut encoder_tokens, mut refused) = (0, 0, None);
        for (_, _, rule) in spec.encoders() {
            match rule.work(&shape) {
                Ok(work) => {
                    tokens += work.tokens;
                    encoder_tokens += work.encoder_tokens;
                }
                Err(error) => refused = Some(error.to_string()),
            }
        }
        examples.push(Example { medium, tokens, encoder_tokens, refused });
    };
    if spec.vision.is_some() {
        let images = vec![ImageSize { width: 640, height: 480 }];
        add("640 x 480", SampleShape { images, ..SampleShape::default() });
        let images = vec![ImageSize { width: 2480, height: 3508 }];
        add("2480 x 3508", SampleShape { images, ..SampleShape::default() });
        let videos = vec![VideoShape { frames: 8, width: 640, height: 480 }];
        add("8 frames", SampleShape { videos, ..SampleShape::default() });
    }
    if spec.audio.is_some() {
        let audio = vec![AudioLength { frames: 160_000, sample_rate_hz: 16_000 }];
        add("10 s", SampleShape { audio, ..SampleShape::default() });
    }
    examples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_explained() {
        let spec = ModelSpec::preset("qwen2-vl-7b").expect("a preset");
        let report = checkpoint_report(&["qwen2-vl-7b".to_owned()], &spec).expect("it is explained");
        assert_eq!(report.files, ["preset"]);
        assert_eq!(report.parameters, report.modules.iter().map(|module| module.parameters).sum::<u64>());
        let tokens: Vec<u64> = report.examples.iter().map(|example| example.tokens).collect();
        assert_eq!(tokens[0], 391 + 2);
        assert_eq!(report.support.names(), "cost, plan, inputs, train");
        assert_eq!(report.support.lacks, []);
    }

    #[test]
    fn a_description_ends_where_the_processor_of_the_user_begins() {
        let text = r#"{"model_type": "described", "name": "kite", "llm": {"model_type": "llama"}}"#;
        let names = [text.to_owned()];
        let spec = dflop_loader::model::spec_from_names(&names).expect("a model");
        let report = checkpoint_report(&names, &spec).expect("it is explained");
        assert_eq!((report.model.as_str(), report.support.names().as_str()), ("kite", "cost"));
        let because = |at: usize| report.support.lacks[at].because.as_str();
        assert!(because(0).contains("has no encoder"), "{}", because(0));
        assert!(because(1).contains("docs/any-model.md"), "{}", because(1));
    }
}
