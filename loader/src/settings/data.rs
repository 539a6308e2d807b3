//! Settings of data: index, reading, augmentation.
//!
//! Settings of the search for a parallelism plan.

use super::spelling::{Names, choices};
use super::store::machine_workers;
use crate::deliver::{BalancedLoaderBuilder, LoaderSettings};
use crate::error::{Error, Result};
use crate::flow::ErrorBudget;
use crate::shard::{FIELD_BYTES_MAX, FieldSelection};
use dflop_samples::media::augment::{Augment, ColorJitter};
use dflop_samples::media::{Strictness, VideoSampling};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::path::PathBuf;

/// Index of a dataset.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct IndexSettings {
    /// Directory of the index. Default: `.dflop` next to the shards, or the user's cache directory.
    pub directory: Option<PathBuf>,
    /// File that defines the splits. Default: `splits.json` next to the shards.
    pub splits: Option<PathBuf>,
    /// Frames of each video: `fps:RATE:MAX`, `uniform:N` or `keyframes:MAX`; an index built with others is
    /// rebuilt. Needs a build with the feature `video`. Default: `fps:2:64`.
    #[serde(with = "videos")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub videos: Option<VideoSampling>,
}

impl IndexSettings {
    /// Returns the frames of each video, if they are set.
    ///
    /// # Errors
    /// [`Error::Config`] in a build without the feature `video`.
    pub fn video_sampling(&self) -> Result<Option<VideoSampling>> {
        if self.videos.is_some() && !cfg!(feature = "video") {
            let reason = "this build has no FFmpeg; build with the feature `video`".into();
            return Err(Error::Config { setting: "videos", reason });
        }
        Ok(self.videos)
    }
}

/// Text form of the frames of a video.
mod videos {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::VideoSampling;

    #[expect(clippy::ref_option, reason = "serde passes a reference")]
    pub(super) fn serialize<S: Serializer>(
        videos: &Option<VideoSampling>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match videos {
            None => serializer.serialize_none(),
            Some(VideoSampling::Uniform { frames }) => {
                serializer.collect_str(&format_args!("uniform:{frames}"))
            }
            Some(VideoSampling::Keyframes { frames_max }) => {
                serializer.collect_str(&format_args!("keyframes:{frames_max}"))
            }
            Some(VideoSampling::Fps { per_second, frames_max }) => {
                serializer.collect_str(&format_args!("fps:{per_second}:{frames_max}"))
            }
        }
    }

    pub(super) fn deserialize<'de, De: Deserializer<'de>>(
        deserializer: De,
    ) -> Result<Option<VideoSampling>, De::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        parse(&text).map(Some).ok_or_else(|| {
            De::Error::custom(format!("expected fps:RATE:MAX, uniform:N or keyframes:MAX, found `{text}`"))
        })
    }

    fn parse(text: &str) -> Option<VideoSampling> {
        let (how, rest) = text.split_once(':')?;
        let positive = |text: &str| text.parse().ok().filter(|number: &u32| *number > 0);
        match how {
            "uniform" => Some(VideoSampling::Uniform { frames: positive(rest)? }),
            "keyframes" => Some(VideoSampling::Keyframes { frames_max: positive(rest)? }),
            "fps" => {
                let (rate, most) = rest.split_once(':')?;
                let per_second = rate.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite())?;
                Some(VideoSampling::Fps { per_second, frames_max: positive(most)? })
            }
            _ => None,
        }
    }
}

/// Reading and decoding of samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ReadSettings {
    /// Names of the fields to read: extensions, several of them as `jpg;png`, patterns (`img_*.png`), or
    /// `images`, `audio`, `video`, `text`. An extension that no sample has is an error. Default: all fields,
    /// or the images where images become one array.
    pub fields: Option<Names>,
    /// `media` decodes every field by its extension; a medium that ends too early makes its sample bad, and
    /// other damage does not, as for Pillow without `LOAD_TRUNCATED_IMAGES`. With `strict` any damage does.
    /// `raw` delivers fields as stored.
    pub decode: DecodeName,
    /// Number of decoder threads. Default: the environment variable `DFLOP_WORKERS`, else one per core.
    pub workers: Option<usize>,
    /// Maximum bytes in memory. Default: a loader in shard order lets 64 MiB of payload wait for the
    /// decoders; in a balanced loader 256 MiB of samples wait, decoded and prepared, and a larger microbatch
    /// is loaded alone.
    pub buffered_bytes: Option<u64>,
    /// Tolerated fraction of bad samples, 0 to 1, checked after the first 1,000 and at the end; 0 tolerates
    /// none, from the first sample on. `FRACTION:SAMPLES` tolerates at most this number, too.
    pub error_budget: BudgetSetting,
    /// Ends the stream with an error after this many seconds without progress. Default: never.
    pub stall_seconds: Option<f64>,
    /// Logs a warning after this many seconds without progress.
    pub stall_log_seconds: f64,
    /// Maximum field length; a sample with a longer field is bad. Loader in shard order only.
    pub field_bytes: u64,
    /// Decodes a JPEG that becomes an array at a half, a quarter or an eighth of its size if that is still
    /// large enough; pixels differ slightly. Needs a build with the feature `turbojpeg`.
    pub scaled_decode: bool,
    /// Number of steps that are planned, read and decoded before they are asked for, as far as
    /// `buffered_bytes` allows; balanced loader only. Default: 2.
    pub steps_ahead: Option<usize>,
}

impl Default for ReadSettings {
    fn default() -> Self {
        Self {
            fields: None,
            decode: DecodeName::default(),
            workers: None,
            buffered_bytes: None,
            error_budget: BudgetSetting::default(),
            stall_seconds: None,
            stall_log_seconds: 60.0,
            field_bytes: FIELD_BYTES_MAX,
            scaled_decode: false,
            steps_ahead: None,
        }
    }
}

impl ReadSettings {
    /// Applies the settings that both loaders share.
    ///
    /// # Errors
    /// [`Error::Config`] for a budget out of range and for invalid field names.
    pub fn apply(&self, settings: LoaderSettings) -> Result<LoaderSettings> {
        let BudgetSetting { fraction, samples } = self.error_budget;
        let budget = ErrorBudget::new(fraction)?;
        let strictness: Option<Strictness> = self.decode.into();
        let mut settings = settings
            .error_budget(samples.map_or(budget, |samples| budget.at_most(samples)))
            .strictness(strictness.unwrap_or_default())
            .stall_seconds_max(self.stall_log_seconds)
            .stall_seconds_error(self.stall_seconds.unwrap_or(f64::INFINITY));
        if let Some(Names(names)) = &self.fields {
            settings = settings.fields(FieldSelection::new(names.clone())?);
        }
        let workers = match self.workers {
            Some(workers) => Some(workers),
            None => machine_workers()?,
        };
        if let Some(workers) = workers {
            settings = settings.workers(workers);
        }
        if let Some(bytes) = self.buffered_bytes {
            settings = settings.buffered_bytes_max(bytes);
        }
        Ok(settings)
    }

    /// Applies the settings that only the balanced loader has.
    #[must_use]
    pub fn apply_to_steps(&self, builder: BalancedLoaderBuilder) -> BalancedLoaderBuilder {
        match self.steps_ahead {
            Some(steps) => builder.steps_ahead(steps),
            None => builder,
        }
    }

    /// Checks that no setting is set that only the balanced loader has.
    ///
    /// # Errors
    /// [`Error::Config`] with the setting.
    pub fn check_without_steps(&self) -> Result<()> {
        if self.steps_ahead.is_none() {
            return Ok(());
        }
        let reason = "has a use in the balanced loader only: drop it".into();
        Err(Error::Config { setting: "steps_ahead", reason })
    }
}

choices! {
    /// Names of the ways to decode fields; none if fields are delivered as stored.
    DecodeName for Option<Strictness> {
        #[default]
        Media, "media" => Some(Strictness::Standard);
        Strict, "strict" => Some(Strictness::Strict);
        Raw, "raw" => None;
    }
}

/// Tolerated fraction and number of bad samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetSetting {
    /// Fraction, 0 to 1.
    pub fraction: f64,
    /// Number of samples; `None` for no limit but the fraction.
    pub samples: Option<u64>,
}

impl Default for BudgetSetting {
    fn default() -> Self {
        Self { fraction: ErrorBudget::default().fraction, samples: None }
    }
}

impl<'de> Deserialize<'de> for BudgetSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let given = Value::deserialize(deserializer)?;
        let expected = "a fraction, or a text FRACTION:SAMPLES";
        match &given {
            Value::Number(number) => {
                Ok(Self { fraction: number.as_f64().unwrap_or(f64::NAN), samples: None })
            }
            Value::String(text) => {
                let (fraction, samples) = match text.split_once(':') {
                    Some((fraction, samples)) => (fraction, samples.parse().ok().map(Some)),
                    None => (text.as_str(), Some(None)),
                };
                let budget = fraction.parse().ok().zip(samples);
                let budget = budget.map(|(fraction, samples)| Self { fraction, samples });
                budget.ok_or_else(|| D::Error::custom(format!("expected {expected}, found `{text}`")))
            }
            _ => Err(D::Error::custom(format!("invalid type: {given}, expected {expected}"))),
        }
    }
}

impl Serialize for BudgetSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.samples {
            None => serializer.serialize_f64(self.fraction),
            Some(samples) => serializer.collect_str(&format_args!("{}:{samples}", self.fraction)),
        }
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for BudgetSetting {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BudgetSetting".into()
    }

    fn json_schema(_generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"anyOf": [{"type": "number"}, {"type": "string"}]})
    }
}

/// Least and largest width over height of a crop.
const CROP_RATIO: [f64; 2] = [0.75, 4.0 / 3.0];

/// Random augmentation of images; by default images are not changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AugmentSettings {
    /// Crops each image to a random part: least and largest fraction of the area, such as `0.08,1`, and, if
    /// they are not to be 3/4 and 4/3, least and largest width over height. Default: no crop.
    pub crop: Option<Vec<f64>>,
    /// Probability with which an image is mirrored left to right.
    pub flip: f64,
    /// Random changes of brightness, contrast, saturation and hue, by at most these amounts.
    pub color_jitter: [f64; 4],
}

impl Default for AugmentSettings {
    fn default() -> Self {
        Self { crop: None, flip: 0.0, color_jitter: [0.0; 4] }
    }
}

impl AugmentSettings {
    /// Builds the augmentation; `None` if images are not changed.
    ///
    /// # Errors
    /// [`Error::Config`] for a number out of range, and for a crop of other than two or four numbers.
    pub fn augment(&self) -> Result<Option<Augment>> {
        if *self == Self::default() {
            return Ok(None);
        }
        let mut builder = Augment::builder();
        builder = match self.crop.as_deref() {
            None => builder,
            Some(&[least, most]) => builder.random_crop(least..=most, CROP_RATIO[0]..=CROP_RATIO[1]),
            Some(&[least, most, narrowest, widest]) => builder.random_crop(least..=most, narrowest..=widest),
            Some(other) => {
                let reason = format!("expected two or four numbers, found {}", other.len());
                return Err(Error::Config { setting: "crop", reason });
            }
        };
        if self.flip != 0.0 {
            builder = builder.flip(self.flip);
        }
        let [brightness, contrast, saturation, hue] = self.color_jitter;
        if self.color_jitter.iter().any(|amount| *amount != 0.0) {
            builder = builder.color_jitter(ColorJitter { brightness, contrast, saturation, hue });
        }
        Ok(Some(builder.build()?))
    }
}

/// Kinds of parallelism plans that are searched, and what ranks share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "one for each kind of plan")]
pub struct SpaceSettings {
    /// Kinds of plans and costs: `basic`, even layers, stated rates alike for all widths, transfers free
    /// unless links are given; `full`, uneven layers, recomputation and encoders that run ahead as well, with
    /// links and matrix-width rates from the device preset. Default: `full` with a device preset, `basic`
    /// with a profile.
    pub kinds: Option<SpaceKinds>,
    /// Encoder placement: `disaggregated`, on separate GPUs; `colocated`, on the GPUs of the LLM, before and
    /// after it; `joint`, in the stages of the LLM, so that every rank holds layers from both; or `any`,
    /// the fastest of these.
    pub placement: SpacePlacement,
    /// Allows fewer layers in the stage with the LM head.
    pub uneven_layers: bool,
    /// Allows an encoder on separate GPUs to run some rounds ahead, so that LLM ranks wait less.
    pub encoder_ahead: bool,
    /// Allows more activation checkpointing than was profiled; the full space always does.
    pub recompute: bool,
    /// Shares optimizer state over the data-parallel ranks of a module (ZeRO stage 1).
    pub zero1: bool,
    /// Splits norms and inputs of layers over the tensor-parallel ranks (sequence parallelism); measured
    /// memory stays as it is.
    pub sequence_parallel: bool,
    /// Unit in which ranks share media, for plans and baselines alike: `medium`, single media within a
    /// tensor-parallel group with joint placement, and whole samples between encoder ranks; `sample`, as
    /// `dflop train` does; or `tile`, for trainers that divide the tiles of an image.
    pub encoder_share: EncoderShare,
    /// Expert parallelism degree: the number of LLM DP ranks that divide the experts. The executor does not
    /// run degrees above 1 yet. Default: the fastest.
    pub expert_parallel: Option<u32>,
    /// Maximum rank load over the mean, where ranks share experts: a number, or `uniform` routing.
    pub expert_imbalance: String,
    /// Factor from counted to allocated memory, for fragmentation and communication buffers.
    pub memory_margin: f64,
}

impl Default for SpaceSettings {
    fn default() -> Self {
        Self {
            kinds: None,
            placement: SpacePlacement::default(),
            uneven_layers: false,
            encoder_ahead: false,
            recompute: false,
            zero1: true,
            sequence_parallel: false,
            encoder_share: EncoderShare::default(),
            expert_parallel: None,
            expert_imbalance: "uniform".to_owned(),
            memory_margin: 1.1,
        }
    }
}

choices! {
    /// Names of the kinds of plans: whether all are searched.
    SpaceKinds for bool {
        #[default]
        Basic, "basic" => false;
        Full, "full" => true;
    }
}

choices! {
    /// Encoder placements to search: separate GPUs, the GPUs of the LLM, its stages.
    SpacePlacement for [bool; 3] {
        Disaggregated, "disaggregated" => [true, false, false];
        Colocated, "colocated" => [false, true, false];
        Joint, "joint" => [false, false, true];
        #[default]
        Any, "any" => [true; 3];
    }
}

choices! {
    /// Names of the units in which ranks share media: whether it is smaller than a sample.
    EncoderShare for &'static str {
        #[default]
        Medium, "medium" => "medium";
        Sample, "sample" => "sample";
        Tile, "tile" => "tile";
    }
}

impl SpaceSettings {
    /// Returns whether the full space is searched.
    #[must_use]
    pub fn is_full(&self, has_profile: bool) -> bool {
        self.kinds.map_or(!has_profile, bool::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frames_of_a_video_have_a_text_form() {
        for (text, videos) in [
            ("\"uniform:8\"", VideoSampling::Uniform { frames: 8 }),
            ("\"keyframes:4\"", VideoSampling::Keyframes { frames_max: 4 }),
            ("\"fps:0.5:16\"", VideoSampling::Fps { per_second: 0.5, frames_max: 16 }),
        ] {
            let document = format!("{{\"videos\":{text}}}");
            let settings: IndexSettings = serde_json::from_str(&document).unwrap();
            assert_eq!(settings.videos, Some(videos));
            assert!(serde_json::to_string(&settings).unwrap().contains(text));
            assert_eq!(settings.video_sampling().is_ok(), cfg!(feature = "video"));
        }
        for text in ["fps", "fps:2", "fps:0:3", "uniform:0", "keyframes:x", "all:3", ""] {
            let document = format!("{{\"videos\":\"{text}\"}}");
            assert!(serde_json::from_str::<IndexSettings>(&document).is_err(), "{text}");
        }
    }

    #[test]
    fn a_setting_without_effect_is_refused() {
        let steps = ReadSettings { steps_ahead: Some(3), ..ReadSettings::default() };
        assert!(steps.check_without_steps().unwrap_err().to_string().contains("steps_ahead"));
        let crop = |numbers: &[f64]| {
            AugmentSettings { crop: Some(numbers.to_vec()), ..AugmentSettings::default() }.augment()
        };
        assert!(crop(&[0.1, 1.0, 0.5]).unwrap_err().to_string().contains("two or four numbers, found 3"));
        assert_eq!(crop(&[0.1, 1.0]).unwrap(), crop(&[0.1, 1.0, 0.75, 4.0 / 3.0]).unwrap());
        assert!(AugmentSettings::default().augment().unwrap().is_none());
    }

    #[test]
    fn an_error_budget_is_a_fraction_and_a_number() {
        let read = |text: &str| serde_json::from_str::<ReadSettings>(&format!("{{\"error_budget\":{text}}}"));
        for (text, fraction, samples) in
            [("0.2", 0.2, None), ("1", 1.0, None), ("\"0.05:3\"", 0.05, Some(3)), ("\"1:0\"", 1.0, Some(0))]
        {
            let settings = read(text).unwrap();
            assert_eq!(settings.error_budget, BudgetSetting { fraction, samples });
            let again = serde_json::to_string(&settings).unwrap();
            assert_eq!(serde_json::from_str::<ReadSettings>(&again).unwrap(), settings);
        }
        for text in ["\"3 samples\"", "\"0.1:\"", "\":3\"", "\"0.1:-3\"", "[0.1]"] {
            assert!(read(text).unwrap_err().to_string().contains("FRACTION:SAMPLES"), "{text}");
        }
    }
}
