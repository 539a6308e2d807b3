//! Converts the keywords of a balanced loader to the settings that it is built from.

use std::ffi::CStr;
use std::sync::Arc;

use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::ModelSpec;
use dflop_loader::decode::{Decode, Transforms};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::TokenCounts;
use dflop_loader::loader::BalancedLoaderBuilder;
use dflop_loader::media::PixelType;
use dflop_loader::model::image_processor_of;
use dflop_loader::order::{Shuffle, Tail};
use dflop_loader::plan::{BlankMedia, CostFunction, StepPlanner, StepPlannerBuilder, Synchronization};
use dflop_loader::processors::{Buckets, LongSample, Preparer};
use dflop_loader::sample::{BatchLayout, PaddingSide};
use dflop_loader::shard::FieldSelection;
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

use super::loader_config::LoaderConfig;
use crate::dataset::Source;
use crate::error::DflopError;
use crate::filter::filtered;
use crate::image::AugmentSettings;
use crate::model::ModelSettings;
use crate::tokenizer::TokenizerSettings;
use crate::transform::FirstException;

/// Default sizes of a block shuffle: samples per run of neighbors, and below, runs per window.
const BLOCK_SAMPLES: u64 = 1024;
const OPEN_BLOCKS: u64 = 64;

/// Warning where microbatches have no tensors, which `tokenizer=False` confirms.
const NO_TOKENIZER: &CStr =
    c"no tokenizer: microbatches are empty mappings with decoded samples; pass `tokenizer`, or a \
    model directory that has one; `tokenizer=False` says that this is meant";

/// Settings of the step planner.
pub(super) struct PlanSettings {
    pub(super) global_batch_size: u64,
    pub(super) microbatches: usize,
    pub(super) dp_rank: usize,
    pub(super) dp_size: usize,
    /// Pipeline stages of every module; `None` if the modules share a device.
    pub(super) stages: Option<Vec<usize>>,
    pub(super) synchronize: String,
    pub(super) strategy: String,
    pub(super) caps: Caps,
    pub(super) search_effort: u64,
    pub(super) seed: u64,
    pub(super) tail: String,
    pub(super) repeats_samples: bool,
    pub(super) shuffle: String,
    pub(super) block_samples: Option<u64>,
    pub(super) open_blocks: Option<u64>,
    pub(super) epochs: Option<u64>,
    pub(super) first_epoch: u64,
    pub(super) is_validation: bool,
    pub(super) accepts_changed_data: bool,
    pub(super) cost: Option<Arc<dyn CostFunction>>,
}

/// Settings of preparing samples for the model.
pub(super) struct PrepareSettings {
    pub(super) tokenizer: TokenizerSettings,
    pub(super) layout: String,
    pub(super) pad_to_tokens: Option<u64>,
    pub(super) length_buckets: Option<Buckets>,
    pub(super) media_buckets: Option<Buckets>,
    pub(super) sample_multiple: usize,
    pub(super) long_sample: String,
    pub(super) sample_tokens_max: Option<u64>,
    pub(super) skip_media_tensors: bool,
    pub(super) pixels: PixelType,
    pub(super) blank_media: String,
    /// Counting of texts for the plan, `exact` or `estimated`, if the dataset does not name a tokenizer.
    pub(super) token_counts: String,
}

/// Settings of reading and decoding samples.
#[derive(Clone)]
pub(super) struct ReadSettings {
    pub(super) decode: Decode,
    pub(super) fields: Option<Vec<String>>,
    pub(super) augment: Option<AugmentSettings>,
    pub(super) workers: Option<usize>,
    pub(super) steps: Option<u64>,
    pub(super) steps_ahead: usize,
    pub(super) buffered_bytes: u64,
    pub(super) microbatch_bytes: Option<u64>,
    pub(super) error_budget: ErrorBudget,
    pub(super) stall_seconds: f64,
    pub(super) transforms: Transforms,
    pub(super) first_exception: FirstException,
}

/// All settings but the data.
pub(super) struct Settings<'py> {
    /// Selects samples by their shapes and costs.
    pub(super) filter: Option<Bound<'py, PyAny>>,
    /// The user's code that makes model inputs.
    pub(super) inputs: Option<Py<PyAny>>,
    pub(super) model: ModelSettings,
    pub(super) plan: PlanSettings,
    pub(super) prepare: PrepareSettings,
    pub(super) read: ReadSettings,
}

impl<'py> Settings<'py> {
    /// Opens the data and combines it with the settings.
    pub(super) fn loader_config(self, py: Python<'py>, data: Source<'py>) -> PyResult<LoaderConfig> {
        let Self { filter, inputs, model, plan, prepare, read } = self;
        let layout = layout(&prepare.layout)?;
        let pad_to_tokens = prepare.pad_to_tokens;
        // Checked before anything is opened, so that a wrong keyword fails early.
        let is_exact = is_exact(&prepare.token_counts)?;
        let blank_media = blank_media(&prepare.blank_media)?;
        if prepare.tokenizer.is_given() && (inputs.is_some() || model.custom.is_some()) {
            let reason = "has no use where your own code makes the inputs: drop it, or give it to the dataset for token counts";
            return Err(DflopError::config("tokenizer", reason).into());
        }
        let wants_tensors =
            inputs.is_none() && !prepare.tokenizer.is_refused() && read.decode == Decode::Media;
        let is_own = inputs.is_some() || model.custom.is_some();
        let of_tensors = prepare.setting_of_tensors();
        let (cost_model, preparer) = py.detach(|| {
            let spec = model.spec()?;
            let preparer = if is_own { None } else { prepare.preparer(&model, &spec, layout)? };
            Ok::<_, DflopError>((model.cost_model()?, preparer))
        })?;
        if preparer.is_none() && pad_to_tokens.is_some() {
            return Err(DflopError::config("pad_to_tokens", "needs a tokenizer: it pads tensors").into());
        }
        if let (None, Some(setting)) = (&preparer, of_tensors) {
            return Err(DflopError::config(setting, "needs a tokenizer: it is about tensors").into());
        }
        if preparer.is_none() && wants_tensors {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), NO_TOKENIZER, 1)?;
        }
        let counts = preparer.as_ref().map_or(TokenCounts::Estimated, |preparer| {
            let counter = Arc::new(preparer.text_counter());
            if is_exact { TokenCounts::Of(counter) } else { TokenCounts::IfPresent(counter) }
        });
        let mut mixture = data.mixture(py, &counts)?;
        if let Some(filter) = &filter {
            mixture = filtered(mixture, filter, &cost_model)?;
        }
        let mut planner = plan.planner(StepPlanner::builder(mixture, cost_model))?;
        if let Some(tokens) = pad_to_tokens {
            planner = planner.pad_to_tokens(tokens, layout);
        }
        if let Some(preparer) = &preparer {
            let tokens = preparer.blank_tokens().map_err(DflopError::from)?;
            planner = planner.blank_media(blank_media, tokens);
        }
        let first_exception = read.first_exception.clone();
        let settings = read.apply(plan.seed)?;
        Ok(LoaderConfig {
            planner,
            inputs,
            preparer: preparer.map(Arc::new),
            settings,
            first_exception,
            dp_rank: plan.dp_rank,
            accepts_changed_data: plan.accepts_changed_data,
        })
    }
}

impl PlanSettings {
    fn planner(&self, builder: StepPlannerBuilder) -> Result<StepPlannerBuilder, DflopError> {
        let mut builder = builder
            .global_batch(self.global_batch_size)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .strategy(strategy(&self.strategy)?)
            .caps(self.caps)
            .work(self.search_effort)
            .seed(self.seed)
            .first_epoch(self.first_epoch)
            .tail(tail(&self.tail)?)
            .shuffle(self.shuffle()?);
        if self.repeats_samples {
            builder = builder.repeat_samples();
        }
        if self.is_validation {
            builder = builder.validation();
        }
        if let Some(epochs) = self.epochs {
            builder = builder.epochs(epochs);
        }
        let meet = synchronization(&self.synchronize)?;
        builder = match &self.stages {
            Some(stages) => builder.stages(stages.clone()),
            None => builder.one_device(meet),
        };
        if let Some(function) = &self.cost {
            builder = builder.cost_function(function.clone());
        }
        Ok(builder)
    }

    fn shuffle(&self) -> Result<Shuffle, DflopError> {
        let has_sizes = self.block_samples.is_some() || self.open_blocks.is_some();
        match self.shuffle.as_str() {
            "blocks" => Ok(Shuffle::Blocks {
                block_samples: self.block_samples.unwrap_or(BLOCK_SAMPLES),
                open_blocks: self.open_blocks.unwrap_or(OPEN_BLOCKS),
            }),
            _ if has_sizes => Err(DflopError::config(
                "shuffle",
                "`block_samples` and `open_blocks` need `shuffle=\"blocks\"`",
            )),
            "global" => Ok(Shuffle::Global),
            "none" => Ok(Shuffle::None),
            name => {
                Err(DflopError::config("shuffle", format!("expected global, blocks or none, found `{name}`")))
            }
        }
    }
}

impl PrepareSettings {
    /// Returns the first setting that has no meaning without tensors.
    fn setting_of_tensors(&self) -> Option<&'static str> {
        let settings = [
            ("length_buckets", self.length_buckets.is_some()),
            ("media_buckets", self.media_buckets.is_some()),
            ("sample_multiple_of", self.sample_multiple != 1),
            ("dtype", self.pixels != PixelType::Float32),
        ];
        settings.into_iter().find(|(_, is_set)| *is_set).map(|(setting, _)| setting)
    }

    /// Returns the preparer; `None` without a tokenizer.
    fn preparer(
        self,
        model: &ModelSettings,
        spec: &ModelSpec,
        layout: BatchLayout,
    ) -> Result<Option<Preparer>, DflopError> {
        let Some(builder) = self.tokenizer.or_from_model(&model.names)?.preparer(spec)? else {
            return Ok(None);
        };
        let mut builder = builder.layout(layout).long_sample(long_sample(&self.long_sample)?);
        builder = builder.pixel_type(self.pixels).sample_multiple_of(self.sample_multiple);
        if let Some(buckets) = self.length_buckets {
            builder = builder.length_buckets(buckets);
        }
        if let Some(buckets) = self.media_buckets {
            builder = builder.media_buckets(buckets);
        }
        if let Some(images) = image_processor_of(&model.names, spec)? {
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

impl ReadSettings {
    /// Returns a function that applies the settings to a loader builder.
    fn apply(
        self,
        seed: u64,
    ) -> Result<Box<dyn Fn(BalancedLoaderBuilder) -> BalancedLoaderBuilder + Send + Sync>, DflopError> {
        let augment = self.augment.as_ref().map(|augment| augment.build(seed)).transpose()?;
        let fields = self.fields.as_ref().map(FieldSelection::new).transpose()?;
        Ok(Box::new(move |builder| {
            let read = self.clone();
            let mut builder = builder
                .decode(read.decode)
                .steps_ahead(read.steps_ahead)
                .buffered_bytes_max(read.buffered_bytes)
                .error_budget(read.error_budget)
                .stall_seconds_error(read.stall_seconds)
                .transforms(read.transforms);
            if let Some(bytes) = read.microbatch_bytes {
                builder = builder.microbatch_bytes_max(bytes);
            }
            if let Some(fields) = &fields {
                builder = builder.fields(fields.clone());
            }
            if let Some(augment) = augment {
                builder = builder.augment(augment);
            }
            if let Some(workers) = read.workers {
                builder = builder.workers(workers);
            }
            if let Some(steps) = read.steps {
                builder = builder.steps(steps);
            }
            builder
        }))
    }
}

/// Parses a strategy by its name or an alias.
pub(crate) fn strategy(name: &str) -> Result<Strategy, DflopError> {
    name.parse().map_err(|_| {
        let known = Strategy::describe(Strategy::ALL.iter().copied());
        DflopError::config("strategy", format!("expected {known}, found `{name}`"))
    })
}

fn synchronization(name: &str) -> Result<Synchronization, DflopError> {
    match name {
        "step" => Ok(Synchronization::PerStep),
        "microbatch" => Ok(Synchronization::PerMicrobatch),
        _ => Err(DflopError::config("synchronize", format!("expected step or microbatch, found `{name}`"))),
    }
}

fn tail(name: &str) -> Result<Tail, DflopError> {
    match name {
        "carry" => Ok(Tail::Carry),
        "drop" => Ok(Tail::Drop),
        "short" => Ok(Tail::Short),
        _ => Err(DflopError::config("tail", format!("expected carry, drop or short, found `{name}`"))),
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
