//! Builds a [`Preparer`] from settings.

use std::sync::Arc;
use std::time::SystemTime;

use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_costmodel::{ModelSpec, Module};
use dflop_samples::media::PixelType;
use dflop_samples::sample::BatchLayout;
use dflop_samples::{Error, Result};

use super::count::{LongSample, MarkerTokens};
use super::expand::Expander;
use super::pack::{Buckets, Packer};
use super::{PlainText, Preparer};
use crate::chat::{ChatTemplate, Labeler, Tokenizer};
use crate::family::{Family, PixelLayout, ProcessorFamilies};
use crate::image::ImageProcessor;
use crate::tensors::{AudioTensors, CountedAudio, CountedImages, CountedVideos, ImageTensors, VideoTensors};

/// Model family, with image and audio processors.
type Inputs = (Family, Option<ImageProcessor>, Option<Arc<dyn AudioTensors>>);

fn inputs(families: &ProcessorFamilies, model: &ModelSpec) -> Result<Inputs> {
    let family = Family::for_model(families, model)?;
    let images = families.vision(model)?.map(|inputs| inputs.processor);
    let audio = families.audio(model)?.map(|inputs| inputs.processor);
    Ok((family, images, audio))
}

/// Builder for a [`Preparer`].
#[derive(Debug, Clone)]
pub struct PreparerBuilder {
    family: Family,
    /// Chat templates, the preferred template first, each with the token that the vocabulary must have.
    built_in_templates: Vec<(Option<&'static str>, &'static str)>,
    /// Reason why the model's family cannot be used.
    refused: Option<String>,
    rule: Option<VisionRule>,
    audio_rule: Option<AudioRule>,
    markers: MarkerTokens,
    tokenizer: Option<Tokenizer>,
    chat_template: Option<String>,
    images: Option<Arc<dyn ImageTensors>>,
    audio: Option<Arc<dyn AudioTensors>>,
    videos: Option<Arc<dyn VideoTensors>>,
    /// Modules whose media are counted, not made.
    counted: Vec<Module>,
    plain_text: PlainText,
    layout: BatchLayout,
    tokens_max: Option<u64>,
    long_sample: LongSample,
    now: Option<SystemTime>,
    pixels: PixelType,
    length_buckets: Option<Buckets>,
    media_buckets: Option<Buckets>,
    sample_multiple: usize,
    requires_targets: bool,
}

impl PreparerBuilder {
    pub(super) fn new(families: &ProcessorFamilies, model: &ModelSpec) -> Self {
        let found = inputs(families, model);
        let refused = found.as_ref().err().map(ToString::to_string);
        let (family, images, audio) = found.unwrap_or_else(|_| (Family::text(), None, None));
        Self {
            rule: model.vision.map(|vision| vision.rule),
            audio_rule: model.audio.map(|audio| audio.rule),
            markers: MarkerTokens::from_model(model),
            built_in_templates: families.chat_templates(model),
            refused,
            family,
            images: images.clone().map(|processor| -> Arc<dyn ImageTensors> { Arc::new(processor) }),
            audio,
            videos: images.map(|processor| -> Arc<dyn VideoTensors> { Arc::new(processor) }),
            counted: Vec::new(),
            tokenizer: None,
            chat_template: None,
            plain_text: PlainText::default(),
            layout: BatchLayout::Packed,
            tokens_max: None,
            long_sample: LongSample::default(),
            now: None,
            pixels: PixelType::default(),
            length_buckets: None,
            media_buckets: None,
            sample_multiple: 1,
            requires_targets: true,
        }
    }

    /// Sets the model's tokenizer. Required.
    #[must_use]
    pub fn tokenizer(mut self, tokenizer: Tokenizer) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// Sets the chat template, in Jinja. Default: the template in the tokenizer's files, else the published
    /// format for the model's family.
    #[must_use]
    pub fn chat_template(mut self, source: impl Into<String>) -> Self {
        self.chat_template = Some(source.into());
        self
    }

    /// Sets the image processor. Default: the processor for the model's family, which equals the Hugging Face
    /// processor.
    #[must_use]
    pub fn image_processor(mut self, processor: Arc<dyn ImageTensors>) -> Self {
        self.images = Some(processor);
        self
    }

    /// Sets the pixel type for images and videos. Default: single precision.
    #[must_use]
    pub fn pixel_type(mut self, pixels: PixelType) -> Self {
        self.pixels = pixels;
        self
    }

    /// Pads packed rows, or the longest row in a padded layout, up to a few lengths, so that compiled models
    /// see few shapes. Default: no padding.
    #[must_use]
    pub fn length_buckets(mut self, buckets: Buckets) -> Self {
        self.length_buckets = Some(buckets);
        self
    }

    /// Rounds the number of image patches, or tiles, in a microbatch up to a few values, with a blank image
    /// in a separate sequence. Default: no padding.
    #[must_use]
    pub fn media_buckets(mut self, buckets: Buckets) -> Self {
        self.media_buckets = Some(buckets);
        self
    }

    /// Pads every packed sequence, within the sequence boundaries, to a multiple of `tokens`: twice the
    /// context parallelism degree, because context parallelism cuts each sequence into that many chunks.
    /// Default: 1.
    #[must_use]
    pub fn sample_multiple(mut self, tokens: usize) -> Self {
        self.sample_multiple = tokens;
        self
    }

    /// Sets the audio clip processor. Default: the processor for the model's family.
    #[must_use]
    pub fn audio_processor(mut self, processor: Arc<dyn AudioTensors>) -> Self {
        self.audio = Some(processor);
        self
    }

    /// Sets the video processor. Default: the processor for the model's family, even if images have another
    /// processor.
    #[must_use]
    pub fn video_processor(mut self, processor: Arc<dyn VideoTensors>) -> Self {
        self.videos = Some(processor);
        self
    }

    /// Counts media tokens by the model's token rules without creating tensors: ids, grids and labels for a
    /// stage that holds only the language model. Replaces all processors, in any order of calls. The balanced
    /// loader then reads no images, because the index has the image sizes.
    #[must_use]
    pub fn counted_media(self) -> Self {
        self.counted(Module::Vision).counted(Module::Audio)
    }

    /// Counts the media tokens of a single encoder in the same way: for a stage that holds only the other
    /// encoder.
    #[must_use]
    pub fn counted(mut self, encoder: Module) -> Self {
        self.counted.push(encoder);
        self
    }

    /// Sets how plain (non-chat) text is handled. Default: all text tokens are training targets.
    #[must_use]
    pub fn plain_text(mut self, plain_text: PlainText) -> Self {
        self.plain_text = plain_text;
        self
    }

    /// Sets how microbatch tensors arrange samples. Default: packed.
    #[must_use]
    pub fn layout(mut self, layout: BatchLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the maximum number of tokens per sample. Default: unlimited; a balanced loader lowers it to the
    /// cap in the microbatch plan.
    #[must_use]
    pub fn tokens_max(mut self, tokens: u64) -> Self {
        self.tokens_max = Some(tokens);
        self
    }

    /// Sets how samples over the limit are handled. Default: they are bad samples.
    #[must_use]
    pub fn long_sample(mut self, policy: LongSample) -> Self {
        self.long_sample = policy;
        self
    }

    /// Sets whether a step without target tokens is an error. Default: true, because such steps mostly come
    /// from documents with an unsupported layout.
    #[must_use]
    pub fn require_targets(mut self, is_required: bool) -> Self {
        self.requires_targets = is_required;
        self
    }

    /// Sets the UTC time that `strftime_now` returns in a chat template. Default: the time of
    /// [`build`](Self::build); set it if ranks must produce identical bytes.
    #[must_use]
    pub fn now(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }

    /// Checks that tokenizer, chat template and model match.
    ///
    /// # Errors
    /// [`Error::Config`] if the model's family has no processor, if there is no tokenizer, if the vocabulary
    /// lacks a placeholder that the model needs, if the template cannot render a question and an answer, or
    /// if there is a processor for a modality that the model does not support.
    pub fn build(mut self) -> Result<Preparer> {
        let invalid = |setting, reason: &str| Err(Error::Config { setting, reason: reason.to_owned() });
        if let Some(reason) = self.refused {
            return invalid("family", &reason);
        }
        self.check_buckets()?;
        self.count_media();
        if !self.set_pixel_type() {
            return invalid("pixel_type", "the processor of images or videos has no pixels of this type");
        }
        let Some(tokenizer) = self.tokenizer else {
            return invalid("tokenizer", "a tokenizer is required");
        };
        if self.images.is_some() && self.family.image().is_none() {
            return invalid("image_processor", "the model takes no images; remove the processor");
        }
        if self.audio.is_some() && self.family.audio().is_none() {
            return invalid("audio_processor", "the model takes no audio; remove the processor");
        }
        if self.videos.is_some() && self.family.video().is_none() {
            return invalid("video_processor", "the model takes no videos; remove the processor");
        }
        if self.tokens_max == Some(0) {
            return invalid("tokens_max", "must be at least 1");
        }
        let source = match self.chat_template.as_deref().or(tokenizer.chat_template()) {
            Some(source) => source,
            None => built_in_template(&self.built_in_templates, &tokenizer)?,
        };
        let now = self.now.unwrap_or_else(SystemTime::now);
        let variables = tokenizer.special_tokens().clone();
        let template = ChatTemplate::parse(source, variables, &self.family, now)?;
        let chat_template = source.into();
        let packer = Packer {
            layout: self.layout,
            pixel_layout: self.family.pixel_layout(),
            pad_id: tokenizer.pad_id(),
            pad_to_tokens: None,
            length_buckets: self.length_buckets,
            sample_multiple: self.sample_multiple,
        };
        Ok(Preparer {
            expander: Expander::new(&self.family, &tokenizer)?,
            media_buckets: self.media_buckets,
            labeler: Arc::new(Labeler::new(template, &tokenizer)?),
            tokenizer: Arc::new(tokenizer),
            family: self.family,
            images: self.images,
            audio: self.audio,
            videos: self.videos,
            plain_text: self.plain_text,
            packer,
            tokens_max: self.tokens_max,
            long_sample: self.long_sample,
            markers: self.markers,
            timed_videos: match self.rule {
                Some(VisionRule::Native(rule)) if rule.timed_video.is_some() => Some(rule),
                _ => None,
            },
            cut_images: match self.rule {
                Some(VisionRule::PanAndScan(rule)) => Some(rule),
                _ => None,
            },
            counted_images: self.rule.map(CountedImages),
            chat_template,
            requires_targets: self.requires_targets,
        })
    }

    fn check_buckets(&self) -> Result<()> {
        let invalid = |setting, reason: &str| Err(Error::Config { setting, reason: reason.to_owned() });
        if self.length_buckets.as_ref().is_some_and(|buckets| !buckets.is_valid()) {
            return invalid("length_buckets", "lengths must be at least 1, and there must be one");
        }
        if self.media_buckets.as_ref().is_some_and(|buckets| !buckets.is_valid()) {
            return invalid("media_buckets", "numbers must be at least 1, and there must be one");
        }
        if self.sample_multiple == 0 {
            return invalid("sample_multiple_of", "must be at least 1");
        }
        if self.sample_multiple > 1 && !self.layout.is_packed() {
            return invalid("sample_multiple_of", "only packed samples are padded one by one");
        }
        let is_joined = |layout| {
            matches!(layout, PixelLayout::Tiles | PixelLayout::TypedTiles | PixelLayout::Patches { .. })
        };
        if self.media_buckets.is_some() && !self.family.pixel_layout().is_none_or(is_joined) {
            return invalid("media_buckets", "this family's images are padded to each other, not joined");
        }
        Ok(())
    }

    /// Replaces the processors of counted media by token rules.
    fn count_media(&mut self) {
        if self.counted.contains(&Module::Vision) {
            self.images = self.rule.map(|rule| -> Arc<dyn ImageTensors> { Arc::new(CountedImages(rule)) });
            self.videos = self.rule.map(|rule| -> Arc<dyn VideoTensors> { Arc::new(CountedVideos(rule)) });
        }
        if self.counted.contains(&Module::Audio) {
            let audio = self.audio_rule;
            self.audio = audio.map(|rule| -> Arc<dyn AudioTensors> { Arc::new(CountedAudio(rule)) });
        }
    }

    /// Sets the pixel type in all processors; returns whether they support the type.
    fn set_pixel_type(&mut self) -> bool {
        if self.pixels == PixelType::Float32 {
            return true;
        }
        let images = self.images.as_ref().map(|images| images.with_pixel_type(self.pixels));
        let videos = self.videos.as_ref().map(|videos| videos.with_pixel_type(self.pixels));
        let can = !matches!(images, Some(None)) && !matches!(videos, Some(None));
        (self.images, self.videos) = (images.flatten(), videos.flatten());
        can
    }
}

/// Returns the first template whose token is in the vocabulary.
fn built_in_template(
    templates: &[(Option<&'static str>, &'static str)],
    tokenizer: &Tokenizer,
) -> Result<&'static str> {
    let is_known = |token: &str| tokenizer.id(token).is_some();
    if let Some((_, template)) = templates.iter().find(|(token, _)| token.is_none_or(is_known)) {
        return Ok(template);
    }
    let tokens: Vec<String> =
        templates.iter().flat_map(|(token, _)| token).map(|token| format!("`{token}`")).collect();
    let reason = format!(
        "neither set nor in the tokenizer's files, and its vocabulary has no {}",
        tokens.join(" or ")
    );
    Err(Error::Config { setting: "chat_template", reason })
}
