//! Arguments for a model: checkpoint or preset, measured profile, tokenizer, chat template, and trainer.

use super::set::{Accepted, SetArgs};
use crate::failure::{Failure, did_you_mean};
use clap::{Args, ValueEnum};
use dflop_costmodel::flops::Recomputation;
use dflop_costmodel::memory::Trainer;
use dflop_costmodel::profile::reference_model;
use dflop_costmodel::{
    CostModel, DevicePreset, Error, KeyExchange, KeyExchangeKind, ModelSpec, Profile, ProfileCheck,
};
use dflop_loader::index::TokenCounts;
use dflop_loader::model::{
    image_processor_from_names, model_profile, read_profile, spec_from_names, unknown_name_hint,
};
use dflop_loader::processors::image::ImageProcessor;
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::settings::{EncoderShare, ProcessorSettings, Settings, machine_device};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Model, and the device that costs are predicted for.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Model preset, checkpoint directory with a `config.json`, or checkpoint name in the local Hugging Face
    /// cache; an unknown name lists the presets.
    ///
    /// Several models are joined: one language model, and encoders such as CLIP, SigLIP or Whisper.
    #[arg(long, value_name = "NAME|DIR", default_value = "omni-7b")]
    model: Vec<String>,
    /// Device preset: a stated FLOP rate, not a measurement [default: `DFLOP_DEVICE`, else h100].
    #[arg(long, value_name = "NAME", conflicts_with = "profile")]
    device: Option<String>,
    #[command(flatten)]
    pub(crate) profile: MeasuredProfileArgs,
}

impl ModelArgs {
    /// Model name as given; joined models are separated by `+`.
    pub(crate) fn name(&self) -> String {
        self.model.join("+")
    }

    /// Device preset as given, or the machine's default.
    pub(crate) fn device(&self) -> String {
        self.device.clone().unwrap_or_else(machine_device)
    }

    /// Model names as given, or the default.
    pub(crate) fn names(&self) -> &[String] {
        &self.model
    }

    /// Builds the cost model. Warnings about a profile go to standard error.
    pub(crate) fn cost_model(&self, settings: &Settings) -> Result<CostModel, Failure> {
        if self.profile.path().is_none() && settings.cost.profile_tp.is_some() {
            return Err(Failure::Misuse("`cost.profile_tp` needs `--profile`".into()));
        }
        if self.profile.path().is_none() && !settings.cost.profile_check {
            return Err(Failure::Misuse("`cost.profile_check` needs `--profile`".into()));
        }
        let model = settings.cost.cost_model(self.spec()?, &self.device(), self.profile.path());
        let model = model.map_err(|error| match self.profile.path() {
            Some(path) => Failure::from(error).in_file(path),
            None => error.into(),
        })?;
        warn(model.profile_warnings());
        Ok(model)
    }

    /// Describes the time source and the training setup, for people.
    pub(crate) fn times_from(&self, settings: &Settings) -> String {
        let device = self.profile.name().unwrap_or_else(|| format!("{} (a stated rate)", self.device()));
        let frozen = settings.cost.freeze.map(|frozen| format!(", {frozen} frozen"));
        let again = match settings.cost.recompute.into() {
            Recomputation::None => "",
            Recomputation::Scores => ", attention scores recomputed",
            Recomputation::Layers => ", layers recomputed",
        };
        device + &frozen.unwrap_or_default() + again
    }

    /// Profile path or device preset.
    pub(crate) fn device_name(&self) -> String {
        self.profile.name().unwrap_or_else(|| self.device())
    }

    /// Returns the exchange of keys and values between devices of a node that share a sample; `None` if the
    /// links are unknown.
    pub(crate) fn key_exchange(&self) -> Option<KeyExchange> {
        let preset = DevicePreset::named(&self.device()).ok().filter(|_| !self.profile.is_given())?;
        let links = preset.links()?;
        Some(KeyExchange { kind: KeyExchangeKind::Ring, link: Some(links.nvlink), element_bytes: 2 })
    }

    pub(crate) fn spec(&self) -> Result<ModelSpec, Failure> {
        model_spec(&self.model)
    }

    /// Returns the checkpoint's image processor; `None` if the processor for the model family applies.
    pub(crate) fn image_processor(&self, spec: &ModelSpec) -> Result<Option<Arc<ImageProcessor>>, Failure> {
        Ok(image_processor_from_names(&self.model, spec)?.map(Arc::new))
    }
}

/// Returns the spec for a preset or directory, or for several joined.
pub(crate) fn model_spec(names: &[String]) -> Result<ModelSpec, Failure> {
    spec_from_names(names).map_err(|error| match error {
        dflop_loader::Error::Model(Error::UnknownModel { ref name, .. }) => {
            let similar = did_you_mean(name, ModelSpec::preset_names().iter().copied());
            Failure::Misuse(format!("{error}; {}{similar}", unknown_name_hint(name)))
        }
        error => error.into(),
    })
}

/// Measured profile that replaces a device preset.
#[derive(Debug, Args)]
pub(crate) struct MeasuredProfileArgs {
    /// Measured profile that replaces `--device`: a CSV file, a directory with CSV files, or `h200-torch`,
    /// which comes with dflop.
    #[arg(long, value_name = "DIR_OR_FILE")]
    profile: Option<PathBuf>,
}

impl MeasuredProfileArgs {
    pub(crate) const fn is_given(&self) -> bool {
        self.profile.is_some()
    }

    /// Profile path.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.profile.as_deref()
    }

    /// Profile path as text for people.
    pub(crate) fn name(&self) -> Option<String> {
        self.profile.as_ref().map(|path| path.display().to_string())
    }
}

/// Reads and checks a profile, if there is one, and reads the model.
///
/// - `names`: model names; empty for the model that the profile's files name
pub(crate) fn profile_and_spec(
    names: &[String],
    profile: Option<&Path>,
    settings: &Settings,
) -> Result<(Option<Profile>, ModelSpec), Failure> {
    let is_checked = settings.cost.profile_check;
    if profile.is_none() && !is_checked {
        return Err(Failure::Misuse("`cost.profile_check` needs `--profile`".into()));
    }
    if !names.is_empty() {
        let spec = model_spec(names)?;
        let read = |path: &Path| checked(model_profile(path, &spec)?, path, is_checked);
        let profile = profile.map(read).transpose()?;
        return Ok((profile, spec));
    }
    let unnamed = || Failure::Misuse("the profile's files do not name a model: give `--model`".into());
    let path = profile.ok_or_else(unnamed)?;
    if !path.exists() && Profile::shipped_names().iter().any(|name| path == Path::new(name)) {
        return Err(unnamed());
    }
    let profile = checked(read_profile(path)?, path, is_checked)?;
    let spec = reference_model(&profile).ok_or_else(unnamed)??;
    Ok((Some(profile), spec))
}

/// Rejects a profile that does not predict the held-out microbatches, if the profile is to be checked.
fn checked(profile: Profile, path: &Path, is_checked: bool) -> Result<Profile, Failure> {
    let check = ProfileCheck::new(&profile).filter(|_| is_checked);
    check
        .map_or(Ok(()), |check| check.require_within())
        .map_err(|error| Failure::from(error).in_file(path))?;
    Ok(profile)
}

/// Prints profile warnings on standard error.
#[expect(clippy::print_stderr, reason = "warnings go to standard error")]
pub(crate) fn warn(warnings: &[dflop_costmodel::ProfileWarning]) {
    for warning in warnings {
        eprintln!("dflop: warning: {warning}");
    }
}

/// Text token counting [default: estimates].
#[derive(Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// Count text tokens exactly, as prepared for the model: `tokenizer.json`, or the directory that holds
    /// it. The counts are kept in the index [default: estimates].
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

impl TokenizerArgs {
    /// Returns the text token counter that the index is read with.
    ///
    /// - `model`: writes conversations in the chat format of this model; `None` counts the bare text
    pub(crate) fn token_counts(
        &self,
        model: Option<&ModelSpec>,
        settings: &Settings,
    ) -> Result<TokenCounts, Failure> {
        let Some(file) = &self.tokenizer else {
            let ProcessorSettings { chat_template, caption_prompt, .. } = &settings.processor;
            if chat_template.is_some() || caption_prompt.is_some() {
                let reason = "`processor.chat_template` and `processor.caption_prompt` need `--tokenizer`";
                return Err(Failure::Misuse(reason.into()));
            }
            return Ok(TokenCounts::Estimated);
        };
        let Some(model) = model else {
            return Ok(TokenCounts::Of(Arc::new(Tokenizer::open(file)?.text_counter())));
        };
        let preparer = preparer(model, file, settings)?.build()?;
        Ok(TokenCounts::Of(Arc::new(preparer.text_counter())))
    }
}

/// Returns a preparer builder for the model with a tokenizer and a template.
pub(crate) fn preparer(
    model: &ModelSpec,
    tokenizer: &Path,
    settings: &Settings,
) -> Result<PreparerBuilder, Failure> {
    let mut builder = Preparer::builder(model).tokenizer(Tokenizer::open(tokenizer)?);
    if let Some(source) = &settings.processor.chat_template {
        builder = builder.chat_template(source.clone());
    }
    if let Some(question) = &settings.processor.caption_prompt {
        builder = builder.plain_text(PlainText::Answer { question: question.clone() });
    }
    Ok(builder)
}

/// Settings without effect on plans whose stages run on one rank each.
const OF_SEVERAL_RANKS: [&str; 3] =
    ["space.sequence_parallel", "space.expert_parallel", "space.expert_imbalance"];

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum TrainerName {
    /// `dflop train`.
    #[default]
    Dflop,
    /// PyTorch modules.
    Torch,
}

/// Trainer.
#[derive(Debug, Default, Args)]
pub(crate) struct TrainerArgs {
    /// Trainer that the answer is for: `dflop train`, or eager PyTorch modules in `dflop.torch.Pipeline`.
    #[arg(long, value_enum, default_value_t = TrainerName::Dflop)]
    trainer: TrainerName,
}

impl TrainerArgs {
    pub(crate) const fn trainer(&self) -> Trainer {
        match self.trainer {
            TrainerName::Dflop => Trainer::Dflop,
            TrainerName::Torch => Trainer::Torch,
        }
    }

    /// Rejects settings that the trainer does not run, or that have no effect on it.
    ///
    /// # Errors
    /// [`Failure::Misuse`] with the first such setting.
    pub(crate) fn check<A: Accepted>(&self, set: &SetArgs<A>, settings: &Settings) -> Result<(), Failure> {
        if self.trainer() == Trainer::Dflop {
            return Ok(());
        }
        let reason = "has no effect with `--trainer torch`, whose stages run on one rank each; leave it out";
        set.refuse(&OF_SEVERAL_RANKS, reason)?;
        if settings.space.encoder_share == EncoderShare::Tile {
            return Err(Failure::Misuse(
                "invalid `space.encoder_share`: `dflop.torch.Pipeline` shares whole media between ranks, not \
                 tiles; give `medium` or `sample`"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Arguments {
        #[command(flatten)]
        model: ModelArgs,
    }

    fn arguments(words: &[&str]) -> ModelArgs {
        let words = ["dflop"].into_iter().chain(words.iter().copied());
        Arguments::try_parse_from(words).expect("the arguments are good").model
    }

    fn misuse(words: &[&str]) -> String {
        match arguments(words).spec() {
            Err(Failure::Misuse(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn directory_with(config: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("config.json"), config).expect("a file");
        directory
    }

    #[test]
    fn a_preset_or_a_directory_is_a_model() {
        assert_eq!(arguments(&[]).spec().unwrap().name, "omni-7b");
        assert_eq!(arguments(&["--model", "tiny"]).spec().unwrap().name, "tiny");
        let directory = directory_with(r#"{"model_type": "llama", "num_hidden_layers": 3}"#);
        let path = directory.path().to_str().unwrap();
        let spec = arguments(&["--model", path]).spec().unwrap();
        assert_eq!((spec.llm.layers, spec.vision), (3, None));
        let file = format!("{path}/config.json");
        assert_eq!(arguments(&["--model", &file]).spec().unwrap(), spec);
    }

    #[test]
    fn several_are_joined() {
        let whisper = directory_with(r#"{"model_type": "whisper"}"#);
        let path = whisper.path().to_str().unwrap();
        let words = ["--model", path, "--model", "qwen2-vl-7b"];
        let spec = arguments(&words).spec().unwrap();
        assert_eq!(spec.name, format!("{path}+qwen2-vl-7b"));
        assert!(spec.vision.is_some() && spec.audio.is_some());
        assert!(misuse(&["--model", "tiny", "--model", "tiny"]).contains("2 language models"));
        assert!(misuse(&["--model", path]).contains("join it with a language model"));
    }

    #[test]
    fn errors_say_what_was_asked_for() {
        let unknown = misuse(&["--model", "no-such-model"]);
        assert!(unknown.starts_with("unknown model `no-such-model`, known are "), "{unknown}");
        assert!(unknown.contains("`config.json`"), "{unknown}");
        let broken = directory_with(r#"{"model_type": "llama", "num_attention_heads": 0}"#);
        let refused = misuse(&["--model", broken.path().to_str().unwrap()]);
        assert!(refused.contains("`num_attention_heads` must be at least 1, found 0"), "{refused}");
    }
}
