//! Settings of the processor: the conversion of samples to the tensors that the model takes.

use dflop_processors::{Buckets, LongSample, PreparerBuilder};
use dflop_samples::media::PixelType;
use dflop_samples::sample::{BatchLayout, PaddingSide};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::fmt;
use std::str::FromStr;

use super::spelling::{choices, text};
use crate::error::{Error, Result};
use crate::order::RowLayout;
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
    /// `packed` puts all samples into one row, one after another, with `cu_seqlens`, and `packed:N` pads each
    /// to a multiple of N, twice the degree of context parallelism; `padded` and `padded_left` give each
    /// sample a row. Attention must not cross packed samples: microbatches have `use_cache=False`, because
    /// that of `transformers` crosses them with a cache. `split:N` and `fit:N` make every microbatch one row
    /// of N tokens, and the global batch counts rows: `split` cuts documents at row ends, `fit` fills rows by
    /// best fit from windows of 16,384 documents, or of as many as `fit:N:DOCUMENTS` names.
    #[serde(with = "text")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub layout: LayoutSetting,
    /// Pads each row up to one of few lengths, so that `torch.compile` makes few graphs: a number, to its
    /// multiples; a list, to the next in it; `ladder`, to one of eight lengths between powers of two.
    /// `fixed:N` pads the tensors of all microbatches to N tokens, for pipelines that need equal shapes, and
    /// plans for that; padding is masked from the loss and has a cost.
    pub length_buckets: Option<RowLengths>,
    /// The same for the patches, or tiles, of a microbatch, by a blank image, without `fixed:N`.
    pub media_buckets: Option<BucketSizes>,
    /// Treatment of samples with more tokens than a microbatch may have, or than a number: `error` or
    /// `error:N` (skipped as bad), `truncate` or `truncate:N` (the text is truncated), `drop` or `drop:N`.
    #[serde(with = "text")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub long_sample: LongSampleSetting,
    /// Whether a step in which no token is a training target is an error. Without it such steps, whose
    /// documents mostly have a layout that is not read, are delivered with a loss scale of 0.
    pub require_targets: bool,
    /// `exact` counts texts with the tokenizer, once, and keeps the counts in the index, so that plans and
    /// loss scales are exact; `estimated` uses estimates from headers, unless the index has counts: loss
    /// scales are then off by one factor per step, counted over planned tokens.
    pub token_counts: TokenCountsName,
    /// Type of the pixels: `float32`; `bfloat16`, half the memory; `uint8`, a quarter, to be normalized on
    /// the device; `none` counts the tokens of media and delivers no pixels, for ranks that run the LLM only.
    pub dtype: PixelTypeName,
    /// Gives microbatches without an image (or a clip) a blank one, so that every rank runs the encoder,
    /// without which DDP lacks gradients and FSDP waits for ever: `auto` with several ranks, if the data has
    /// such media, `always`, or `never`. It is not in planned costs, and takes some tokens of a fixed length.
    pub blank_media: BlankMediaName,
}

impl Default for ProcessorSettings {
    fn default() -> Self {
        Self {
            chat_template: None,
            caption_prompt: None,
            layout: LayoutSetting::default(),
            length_buckets: None,
            media_buckets: None,
            long_sample: LongSampleSetting::default(),
            require_targets: true,
            token_counts: TokenCountsName::default(),
            dtype: PixelTypeName::default(),
            blank_media: BlankMediaName::default(),
        }
    }
}

/// Layout of a microbatch, and the multiple that each packed sample is padded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutSetting {
    /// Arrangement of the samples.
    pub layout: BatchLayout,
    /// Multiple of tokens, at least 1; 1 for padded layouts.
    pub sample_multiple: usize,
    /// Rows of documents in place of whole samples.
    pub rows: Option<RowLayout>,
}

impl Default for LayoutSetting {
    fn default() -> Self {
        Self { layout: BatchLayout::Packed, sample_multiple: 1, rows: None }
    }
}

impl fmt::Display for LayoutSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rows) = self.rows {
            return rows.fmt(f);
        }
        match (self.layout, self.sample_multiple) {
            (BatchLayout::Packed, 1) => f.write_str("packed"),
            (BatchLayout::Packed, multiple) => write!(f, "packed:{multiple}"),
            (BatchLayout::Padded { side: PaddingSide::Right }, _) => f.write_str("padded"),
            (BatchLayout::Padded { side: PaddingSide::Left }, _) => f.write_str("padded_left"),
        }
    }
}

impl FromStr for LayoutSetting {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let layout = match text {
            "packed" => BatchLayout::Packed,
            "padded" => BatchLayout::Padded { side: PaddingSide::Right },
            "padded_left" => BatchLayout::Padded { side: PaddingSide::Left },
            _ => {
                if let Ok(rows) = text.parse() {
                    return Ok(Self { rows: Some(rows), ..Self::default() });
                }
                let multiple = text.strip_prefix("packed:").and_then(positive);
                let multiple = multiple.and_then(|multiple| usize::try_from(multiple).ok());
                let sample_multiple = multiple.ok_or_else(|| {
                    format!(
                        "expected packed, packed:N, padded, padded_left, split:N, fit:N or fit:N:DOCUMENTS, found \
                         `{text}`"
                    )
                })?;
                return Ok(Self { sample_multiple, ..Self::default() });
            }
        };
        Ok(Self { layout, ..Self::default() })
    }
}

/// Treatment of samples with too many tokens, and the number that is too many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LongSampleSetting {
    /// Treatment of a long sample.
    pub policy: LongSample,
    /// Maximum tokens of a sample; `None` for the limits of a microbatch alone.
    pub tokens_max: Option<u64>,
}

/// Names of [`LongSample`].
const LONG_SAMPLES: [(&str, LongSample); 3] =
    [("error", LongSample::Error), ("truncate", LongSample::TruncateText), ("drop", LongSample::Drop)];

impl fmt::Display for LongSampleSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            LONG_SAMPLES.iter().find(|(_, policy)| *policy == self.policy).map_or("", |(name, _)| *name);
        match self.tokens_max {
            None => f.write_str(name),
            Some(tokens) => write!(f, "{name}:{tokens}"),
        }
    }
}

impl FromStr for LongSampleSetting {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, tokens) = match text.split_once(':') {
            Some((name, tokens)) => (name, Some(positive(tokens))),
            None => (text, None),
        };
        let policy = LONG_SAMPLES.iter().find(|(known, _)| *known == name).map(|(_, policy)| *policy);
        match (policy, tokens) {
            (Some(policy), None) => Ok(Self { policy, tokens_max: None }),
            (Some(policy), Some(Some(tokens))) => Ok(Self { policy, tokens_max: Some(tokens) }),
            _ => Err(format!("expected error, truncate or drop, with or without `:TOKENS`, found `{text}`")),
        }
    }
}

/// Parses a number of at least 1.
fn positive(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number| *number > 0)
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
    /// Names of [`PixelType`]; none if media are only counted.
    PixelTypeName for Option<PixelType> {
        #[default]
        Float32, "float32" => Some(PixelType::Float32);
        BFloat16, "bfloat16" => Some(PixelType::BFloat16);
        UInt8, "uint8" => Some(PixelType::UInt8);
        None, "none" => None;
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

/// Lengths of rows: buckets, or one length for all microbatches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowLengths {
    /// The next bucket.
    Buckets(Buckets),
    /// The same number of tokens for all microbatches.
    Fixed(u64),
}

impl<'de> Deserialize<'de> for BucketSizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let given = Value::deserialize(deserializer)?;
        let expected = "a number, a list of numbers or \"ladder\"";
        buckets(&given).map(Self).ok_or_else(|| D::Error::custom(refusal(&given, expected)))
    }
}

impl<'de> Deserialize<'de> for RowLengths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let given = Value::deserialize(deserializer)?;
        let expected = "a number, a list of numbers, \"ladder\" or \"fixed:N\"";
        let fixed = given.as_str().and_then(|text| positive(text.strip_prefix("fixed:")?));
        let lengths = fixed.map(Self::Fixed).or_else(|| buckets(&given).map(Self::Buckets));
        lengths.ok_or_else(|| D::Error::custom(refusal(&given, expected)))
    }
}

fn buckets(given: &Value) -> Option<Buckets> {
    match given {
        Value::Number(_) => serde_json::from_value(given.clone()).ok().map(Buckets::Multiple),
        Value::Array(_) => serde_json::from_value(given.clone()).ok().map(Buckets::Lengths),
        Value::String(name) if name == "ladder" => Some(Buckets::Ladder),
        _ => None,
    }
}

fn refusal(given: &Value, expected: &str) -> String {
    match given {
        Value::String(name) => format!("expected {expected}, found `{name}`"),
        _ => format!("invalid type: {given}, expected {expected}"),
    }
}

impl Serialize for BucketSizes {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serialize_buckets(&self.0, serializer)
    }
}

impl Serialize for RowLengths {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Buckets(buckets) => serialize_buckets(buckets, serializer),
            Self::Fixed(tokens) => serializer.collect_str(&format_args!("fixed:{tokens}")),
        }
    }
}

fn serialize_buckets<S: Serializer>(
    buckets: &Buckets,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match buckets {
        Buckets::Multiple(multiple) => multiple.serialize(serializer),
        Buckets::Lengths(lengths) => lengths.serialize(serializer),
        Buckets::Ladder => serializer.serialize_str("ladder"),
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

#[cfg(feature = "schema")]
impl schemars::JsonSchema for RowLengths {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "RowLengths".into()
    }

    fn json_schema(_generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let number = serde_json::json!({"type": "integer", "minimum": 1});
        schemars::json_schema!({
            "anyOf": [number, {"type": "array", "items": number}, {"type": "string"}]
        })
    }
}

impl ProcessorSettings {
    /// Returns the layout of a microbatch.
    #[must_use]
    pub fn layout(&self) -> BatchLayout {
        self.layout.layout
    }

    /// Returns the length in tokens that all microbatches are padded to, if it is fixed.
    #[must_use]
    pub fn fixed_tokens(&self) -> Option<u64> {
        match self.length_buckets {
            Some(RowLengths::Fixed(tokens)) => Some(tokens),
            _ => None,
        }
    }

    /// Returns the rows that microbatches are, in place of whole samples.
    ///
    /// # Errors
    /// [`Error::Config`] if another setting does not go with rows.
    pub fn rows(&self) -> Result<Option<RowLayout>> {
        let Some(rows) = self.layout.rows else { return Ok(None) };
        let of_one_length = "rows have one length";
        let settings = [
            ("length_buckets", self.length_buckets.is_none(), of_one_length),
            ("media_buckets", self.media_buckets.is_none(), of_one_length),
            (
                "long_sample",
                self.long_sample == LongSampleSetting::default(),
                "texts longer than a row are cut into rows, and samples with media are skipped",
            ),
            ("token_counts", self.token_counts == TokenCountsName::Exact, "rows are filled by exact counts"),
        ];
        match settings.into_iter().find(|(_, is_default, _)| !is_default) {
            None => Ok(Some(rows)),
            Some((setting, _, why)) => {
                let reason = format!("does not go with the layout {rows}: {why}; leave it out");
                Err(Error::Config { setting, reason })
            }
        }
    }

    /// Applies the settings to a preparer builder, except for the chat template and the caption prompt.
    #[must_use]
    pub fn apply(&self, builder: PreparerBuilder) -> PreparerBuilder {
        let mut builder = builder
            .layout(self.layout())
            .long_sample(self.long_sample.policy)
            .require_targets(self.require_targets)
            .sample_multiple(self.layout.sample_multiple);
        if let Some(RowLengths::Buckets(buckets)) = &self.length_buckets {
            builder = builder.length_buckets(buckets.clone());
        }
        if let Some(BucketSizes(buckets)) = &self.media_buckets {
            builder = builder.media_buckets(buckets.clone());
        }
        if let Some(tokens) = self.long_sample.tokens_max {
            builder = builder.tokens_max(tokens);
        }
        let pixel_type: Option<PixelType> = self.dtype.into();
        match pixel_type {
            Some(pixel_type) => builder.pixel_type(pixel_type),
            None => builder.counted_media(),
        }
    }

    /// Checks that no setting is about tensors, which a loader without a tokenizer does not create.
    ///
    /// # Errors
    /// [`Error::Config`] with the setting.
    pub fn check_without_tensors(&self) -> Result<()> {
        let settings = [
            ("length_buckets", self.length_buckets.is_some()),
            ("media_buckets", self.media_buckets.is_some()),
            ("layout", self.layout.sample_multiple != 1 || self.layout.rows.is_some()),
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
    fn a_layout_and_a_limit_are_read_as_they_are_written() {
        let read = |key: &str, text: &str| Settings::from_pairs([format!("processor.{key}={text}")]);
        for text in ["packed", "packed:8", "padded", "padded_left", "split:4096", "fit:4096", "fit:4096:512"]
        {
            assert_eq!(read("layout", text).unwrap().processor.layout.to_string(), text);
        }
        for text in ["dense", "packed:0", "packed:", "padded:8"] {
            assert!(read("layout", text).unwrap_err().to_string().contains("packed:N"), "{text}");
        }
        for text in ["error", "truncate", "drop:40", "error:1"] {
            assert_eq!(read("long_sample", text).unwrap().processor.long_sample.to_string(), text);
        }
        for text in ["cut", "drop:0", "drop:", "drop:some"] {
            assert!(read("long_sample", text).unwrap_err().to_string().contains(":TOKENS"), "{text}");
        }
        assert_eq!(
            Option::<PixelType>::from(read("dtype", "none").unwrap().processor.dtype),
            None::<PixelType>
        );
    }

    #[test]
    fn buckets_are_a_number_a_list_or_the_ladder() {
        for (text, buckets) in [
            ("64", RowLengths::Buckets(Buckets::Multiple(64))),
            ("64,128", RowLengths::Buckets(Buckets::Lengths(vec![64, 128]))),
            ("ladder", RowLengths::Buckets(Buckets::Ladder)),
            ("fixed:640", RowLengths::Fixed(640)),
        ] {
            let settings = Settings::from_pairs([format!("processor.length_buckets={text}")]).unwrap();
            assert_eq!(settings.processor.length_buckets, Some(buckets));
            let written = serde_json::to_value(&settings).unwrap();
            assert_eq!(serde_json::from_value::<Settings>(written).unwrap(), settings);
        }
        for text in ["stairs", "1.5", "true", "fixed:0", "fixed:"] {
            let refused = Settings::from_pairs([format!("processor.length_buckets={text}")]).unwrap_err();
            assert!(refused.to_string().contains("\"ladder\""), "{refused}");
        }
    }
}
