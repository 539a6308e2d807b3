//! Settings of the processor: the conversion of samples to the tensors that the model takes.

use dflop_processors::{Buckets, LongSample, PreparerBuilder};
use dflop_samples::media::PixelType;
use dflop_samples::sample::{BatchLayout, PaddingSide};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::spelling::choices;
use crate::error::{Error, Result};
use crate::plan::BlankMedia;

/// Conversion of samples to the tensors that the model takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ProcessorSettings {
    /// Jinja source of the chat template. Default: the tokenizer's, else the published one of the model
    /// family.
    pub chat_template: Option<String>,
    /// Prompt that captions answer. Default: captions are trained on without a chat template.
    pub caption_prompt: Option<String>,
    /// `packed` puts all samples into one row, one after another, with `cu_seqlens`; `padded` and
    /// `padded_left` give each sample a row. Attention must not cross packed samples: microbatches have
    /// `use_cache=False`, because that of `transformers` crosses them with a cache.
    pub layout: LayoutName,
    /// Pads the tensors of all microbatches to this many tokens, for pipelines that need equal shapes;
    /// padding is masked from the loss and has a cost.
    pub pad_to_tokens: Option<u64>,
    /// Pads each row up to one of few lengths, so that `torch.compile` makes few graphs: a number, to its
    /// multiples; a list, to the next in it; `ladder`, to one of eight lengths between powers of two.
    pub length_buckets: Option<BucketSizes>,
    /// The same for the patches, or tiles, of a microbatch, by a blank image.
    pub media_buckets: Option<BucketSizes>,
    /// Pads each packed sequence to a multiple: twice the degree of context parallelism.
    pub sample_multiple_of: usize,
    /// Treatment of samples over `plan.tokens_max` or `sample_tokens_max`: `error` (skipped as bad),
    /// `truncate` (the text is truncated), `drop`.
    pub long_sample: LongSampleName,
    /// Maximum tokens of a sample. Default: no limit.
    pub sample_tokens_max: Option<u64>,
    /// Whether a step in which no token is a training target is an error. Without it such steps, whose
    /// documents mostly have a layout that is not read, are delivered with a loss scale of 0.
    pub require_targets: bool,
    /// `exact` counts texts with the tokenizer, once, and keeps the counts in the index, so that plans and
    /// loss scales are exact; `estimated` uses estimates from headers, unless the index has counts: loss
    /// scales are then off by one factor per step, counted over planned tokens.
    pub token_counts: TokenCountsName,
    /// Type of the pixels: `float32`; `bfloat16`, half the memory; `uint8`, a quarter, to be normalized on
    /// the device.
    pub dtype: PixelTypeName,
    /// Gives microbatches without an image (or a clip) a blank one, so that every rank runs the encoder,
    /// without which DDP lacks gradients and FSDP waits for ever: `auto` with several ranks, if the data has
    /// such media, `always`, or `never`. It is not in planned costs, and takes some tokens of
    /// `pad_to_tokens`.
    pub blank_media: BlankMediaName,
    /// Counts the tokens of media and delivers no pixels, for ranks that run the LLM only.
    pub skip_media_tensors: bool,
}

impl Default for ProcessorSettings {
    fn default() -> Self {
        Self {
            chat_template: None,
            caption_prompt: None,
            layout: LayoutName::default(),
            pad_to_tokens: None,
            length_buckets: None,
            media_buckets: None,
            sample_multiple_of: 1,
            long_sample: LongSampleName::default(),
            sample_tokens_max: None,
            require_targets: true,
            token_counts: TokenCountsName::default(),
            dtype: PixelTypeName::default(),
            blank_media: BlankMediaName::default(),
            skip_media_tensors: false,
        }
    }
}

choices! {
    /// Names of [`BatchLayout`].
    LayoutName for BatchLayout {
        #[default]
        Packed, "packed" => BatchLayout::Packed;
        Padded, "padded" => BatchLayout::Padded { side: PaddingSide::Right };
        PaddedLeft, "padded_left" => BatchLayout::Padded { side: PaddingSide::Left };
    }
}

choices! {
    /// Names of [`LongSample`].
    LongSampleName for LongSample {
        #[default]
        Error, "error" => LongSample::Error;
        Truncate, "truncate" => LongSample::TruncateText;
        Drop, "drop" => LongSample::Drop;
    }
}

choices! {
    /// Names of the ways to count the tokens of texts: whether exactly.
    TokenCountsName for bool {
        #[default]
        Exact, "exact" => true;
        Estimated, "estimated" => false;
    }
}

choices! {
    /// Names of [`PixelType`].
    PixelTypeName for PixelType {
        #[default]
        Float32, "float32" => PixelType::Float32;
        BFloat16, "bfloat16" => PixelType::BFloat16;
        UInt8, "uint8" => PixelType::UInt8;
    }
}

choices! {
    /// Names of [`BlankMedia`].
    BlankMediaName for BlankMedia {
        #[default]
        Auto, "auto" => BlankMedia::Auto;
        Always, "always" => BlankMedia::Always;
        Never, "never" => BlankMedia::Never;
    }
}

/// Sizes of buckets: a number, a list of numbers, or `ladder`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketSizes(pub Buckets);

impl<'de> Deserialize<'de> for BucketSizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        use serde_json::Value;
        let given = Value::deserialize(deserializer)?;
        let expected = "a number, a list of numbers or \"ladder\"";
        let buckets = match &given {
            Value::Number(_) => serde_json::from_value(given.clone()).ok().map(Buckets::Multiple),
            Value::Array(_) => serde_json::from_value(given.clone()).ok().map(Buckets::Lengths),
            Value::String(name) if name == "ladder" => Some(Buckets::Ladder),
            Value::String(name) => {
                return Err(D::Error::custom(format!("expected {expected}, found `{name}`")));
            }
            _ => None,
        };
        buckets
            .map(Self)
            .ok_or_else(|| D::Error::custom(format!("invalid type: {given}, expected {expected}")))
    }
}

impl Serialize for BucketSizes {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match &self.0 {
            Buckets::Multiple(multiple) => multiple.serialize(serializer),
            Buckets::Lengths(lengths) => lengths.serialize(serializer),
            Buckets::Ladder => serializer.serialize_str("ladder"),
        }
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for BucketSizes {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BucketSizes".into()
    }

    fn json_schema(_generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let number = serde_json::json!({"type": "integer", "minimum": 1});
        schemars::json_schema!({
            "anyOf": [number, {"type": "array", "items": number}, {"type": "string", "enum": ["ladder"]}]
        })
    }
}

impl ProcessorSettings {
    /// Returns the layout of a microbatch.
    #[must_use]
    pub fn layout(&self) -> BatchLayout {
        self.layout.into()
    }

    /// Applies the settings to a preparer builder, except for the chat template and the caption prompt.
    #[must_use]
    pub fn apply(&self, builder: PreparerBuilder) -> PreparerBuilder {
        let mut builder = builder
            .layout(self.layout())
            .long_sample(self.long_sample.into())
            .require_targets(self.require_targets)
            .pixel_type(self.dtype.into())
            .sample_multiple(self.sample_multiple_of);
        if let Some(BucketSizes(buckets)) = &self.length_buckets {
            builder = builder.length_buckets(buckets.clone());
        }
        if let Some(BucketSizes(buckets)) = &self.media_buckets {
            builder = builder.media_buckets(buckets.clone());
        }
        if let Some(tokens) = self.sample_tokens_max {
            builder = builder.tokens_max(tokens);
        }
        if self.skip_media_tensors { builder.counted_media() } else { builder }
    }

    /// Checks that no setting is about tensors, which a loader without a tokenizer does not create.
    ///
    /// # Errors
    /// [`Error::Config`] with the setting.
    pub fn check_without_tensors(&self) -> Result<()> {
        let settings = [
            ("pad_to_tokens", self.pad_to_tokens.is_some()),
            ("length_buckets", self.length_buckets.is_some()),
            ("media_buckets", self.media_buckets.is_some()),
            ("sample_multiple_of", self.sample_multiple_of != 1),
            ("dtype", self.dtype != PixelTypeName::Float32),
        ];
        match settings.into_iter().find(|(_, is_set)| *is_set) {
            None => Ok(()),
            Some((setting, _)) => {
                let reason = "needs a tokenizer: it is about tensors".into();
                Err(Error::Config { setting, reason })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    #[test]
    fn buckets_are_a_number_a_list_or_the_ladder() {
        for (text, buckets) in [
            ("64", Buckets::Multiple(64)),
            ("64,128", Buckets::Lengths(vec![64, 128])),
            ("ladder", Buckets::Ladder),
        ] {
            let settings = Settings::from_pairs([format!("processor.length_buckets={text}")]).unwrap();
            assert_eq!(settings.processor.length_buckets.clone().unwrap().0, buckets);
            let written = serde_json::to_value(&settings).unwrap();
            assert_eq!(serde_json::from_value::<Settings>(written).unwrap(), settings);
        }
        for text in ["stairs", "1.5", "true"] {
            let refused = Settings::from_pairs([format!("processor.length_buckets={text}")]).unwrap_err();
            assert!(refused.to_string().contains("\"ladder\""), "{refused}");
        }
    }
}
