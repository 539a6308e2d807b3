//! Model input settings: `dflop.Processor`, or the user's own `dflop.CustomProcessor`.

use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_loader::BlankMedia;
use dflop_loader::media::PixelType;
use dflop_loader::model::image_processor_from_names;
use dflop_loader::processors::{Buckets, LongSample, Preparer};
use dflop_loader::sample::{BatchLayout, PaddingSide};
use pyo3::prelude::*;

use super::buckets::buckets;
use crate::arrays::framework::Framework;
use crate::error::DflopError;
use crate::image::pixel_type;
use crate::settings::Group;
use crate::tokenizer::TokenizerSettings;

/// Settings for preparing samples for the model.
pub(in crate::balanced) struct ProcessorSettings {
    pub(super) tokenizer: TokenizerSettings,
    pub(super) layout: BatchLayout,
    pub(super) pad_to_tokens: Option<u64>,
    length_buckets: Option<Buckets>,
    media_buckets: Option<Buckets>,
    sample_multiple: usize,
    long_sample: LongSample,
    sample_tokens_max: Option<u64>,
    requires_targets: bool,
    skip_media_tensors: bool,
    pixels: PixelType,
    pub(super) blank_media: BlankMedia,
    /// Whether texts are counted for the plan, if the dataset does not name a tokenizer.
    pub(super) counts_exactly: bool,
}

impl ProcessorSettings {
    /// Reads the fields in a `dflop.Processor`.
    ///
    /// - `tokenizer`: loader argument
    /// - `framework`: tensor library
    pub(in crate::balanced) fn new(
        group: &Group<'_>,
        tokenizer: Option<&Bound<'_, PyAny>>,
        framework: Framework,
    ) -> PyResult<Self> {
        let (chat_template, caption_prompt) = (group.get("chat_template")?, group.get("caption_prompt")?);
        Ok(Self {
            tokenizer: TokenizerSettings::new(tokenizer, chat_template, caption_prompt)?,
            layout: layout(&group.get::<String>("layout")?)?,
            pad_to_tokens: group.get("pad_to_tokens")?,
            length_buckets: buckets(group.get::<Option<_>>("length_buckets")?.as_ref(), "length_buckets")?,
            media_buckets: buckets(group.get::<Option<_>>("media_buckets")?.as_ref(), "media_buckets")?,
            sample_multiple: group.get("sample_multiple_of")?,
            long_sample: long_sample(&group.get::<String>("long_sample")?)?,
            sample_tokens_max: group.get("sample_tokens_max")?,
            requires_targets: group.get("require_targets")?,
            skip_media_tensors: group.get("skip_media_tensors")?,
            pixels: pixel_type(&group.get::<String>("dtype")?, framework)?,
            blank_media: blank_media(&group.get::<String>("blank_media")?)?,
            counts_exactly: is_exact(&group.get::<String>("token_counts")?)?,
        })
    }

    /// Checks that no setting is about tensors, which a loader without a tokenizer does not create.
    pub(super) fn check_without_tensors(&self) -> Result<(), DflopError> {
        let settings = [
            ("pad_to_tokens", self.pad_to_tokens.is_some()),
            ("length_buckets", self.length_buckets.is_some()),
            ("media_buckets", self.media_buckets.is_some()),
            ("sample_multiple_of", self.sample_multiple != 1),
            ("dtype", self.pixels != PixelType::Float32),
        ];
        match settings.into_iter().find(|(_, is_set)| *is_set) {
            Some((setting, _)) => Err(DflopError::config(setting, "needs a tokenizer: it is about tensors")),
            None => Ok(()),
        }
    }

    /// Returns the preparer; `None` without a tokenizer.
    ///
    /// - `names`: model names, whose files may contain the tokenizer and the image processor
    pub(super) fn preparer(
        &self,
        names: &[String],
        spec: &ModelSpec,
    ) -> Result<Option<Preparer>, DflopError> {
        let Some(builder) = self.tokenizer.clone().or_from_model(names)?.preparer(spec)? else {
            return Ok(None);
        };
        let builder = builder.layout(self.layout).long_sample(self.long_sample);
        let mut builder = builder.require_targets(self.requires_targets);
        builder = builder.pixel_type(self.pixels).sample_multiple(self.sample_multiple);
        if let Some(buckets) = &self.length_buckets {
            builder = builder.length_buckets(buckets.clone());
        }
        if let Some(buckets) = &self.media_buckets {
            builder = builder.media_buckets(buckets.clone());
        }
        if let Some(images) = image_processor_from_names(names, spec)? {
            builder = builder.image_processor(Arc::new(images));
        }
        if let Some(tokens) = self.sample_tokens_max {
            builder = builder.tokens_max(tokens);
        }
        if self.skip_media_tensors {
            builder = builder.counted_media();
        }
        Ok(Some(builder.build()?))
    }
}

fn blank_media(name: &str) -> Result<BlankMedia, DflopError> {
    match name {
        "auto" => Ok(BlankMedia::Auto),
        "always" => Ok(BlankMedia::Always),
        "never" => Ok(BlankMedia::Never),
        _ => {
            Err(DflopError::config("blank_media", format!("expected auto, always or never, found `{name}`")))
        }
    }
}

fn is_exact(token_counts: &str) -> Result<bool, DflopError> {
    match token_counts {
        "exact" => Ok(true),
        "estimated" => Ok(false),
        _ => Err(DflopError::config(
            "token_counts",
            format!("expected exact or estimated, found `{token_counts}`"),
        )),
    }
}

fn layout(name: &str) -> Result<BatchLayout, DflopError> {
    match name {
        "packed" => Ok(BatchLayout::Packed),
        "padded" => Ok(BatchLayout::Padded { side: PaddingSide::Right }),
        "padded_left" => Ok(BatchLayout::Padded { side: PaddingSide::Left }),
        _ => Err(DflopError::config(
            "layout",
            format!("expected packed, padded or padded_left, found `{name}`"),
        )),
    }
}

fn long_sample(name: &str) -> Result<LongSample, DflopError> {
    match name {
        "error" => Ok(LongSample::Error),
        "truncate" => Ok(LongSample::TruncateText),
        "drop" => Ok(LongSample::Drop),
        _ => Err(DflopError::config(
            "long_sample",
            format!("expected error, truncate or drop, found `{name}`"),
        )),
    }
}
