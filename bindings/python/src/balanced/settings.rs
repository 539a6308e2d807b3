//! Combines balanced loader settings with the data.

use std::ffi::{CStr, CString};
use std::sync::Arc;

use dflop_costmodel::{ModelSpec, Module};
use dflop_loader::index::TokenCounts;
use dflop_loader::model::image_processor_from_names;
use dflop_loader::processors::Preparer;
use dflop_loader::settings::{OrderSettings, PixelTypeName, PlanSettings, ProcessorSettings};
use dflop_loader::{BlankMedia, Mixture, StepPlanner, StepPlannerBuilder};
use pyo3::exceptions::{PyTypeError, PyUserWarning};
use pyo3::prelude::*;

use super::loader_config::LoaderConfig;
use super::role::Role;
use crate::arrays::framework::Framework;
use crate::cost::{CostedModel, PyCost};
use crate::dataset::Source;
use crate::error::DflopError;
use crate::filter::{ReadSettings, filtered};
use crate::image::pixel_type;
use crate::runtime::Group;
use crate::tokenizer::TokenizerSettings;

/// Warning for microbatches without tensors, which `tokenizer=False` confirms.
const NO_TOKENIZER: &CStr =
    c"no tokenizer: microbatches are empty mappings with decoded samples; pass `tokenizer`, or a \
    model directory that has one; `tokenizer=False` confirms that this is meant";

/// All settings but the data.
pub(super) struct Settings<'py> {
    /// Selects samples by shape and cost.
    pub(super) filter: Option<Bound<'py, PyAny>>,
    /// User code that creates model inputs.
    pub(super) inputs: Option<Py<PyAny>>,
    pub(super) model: CostedModel,
    pub(super) run: RunSettings,
    pub(super) plan: PlanSettings,
    pub(super) order: OrderSettings,
    pub(super) tokenizer: TokenizerSettings,
    pub(super) processor: ProcessorSettings,
    pub(super) read: ReadSettings,
    /// Role of the rank in a schedule, if modules run on separate ranks.
    pub(super) role: Option<Arc<Role>>,
}

/// Global batch size, ranks, and the resulting run: loader keywords.
pub(super) struct RunSettings {
    pub(super) global_batch_size: u64,
    pub(super) microbatches: usize,
    pub(super) dp_rank: usize,
    pub(super) dp_size: usize,
    pub(super) seed: u64,
    pub(super) epochs: Option<u64>,
    /// Number of steps after which an iteration ends.
    pub(super) steps: Option<u64>,
}

impl RunSettings {
    /// Fills in ranks and microbatches from a schedule.
    pub(super) fn with_role(self, role: &Role) -> Result<Self, DflopError> {
        let microbatches = role.schedule().microbatches();
        let dp_size = role.schedule().layout().modules().last().map_or(1, |llm| llm.dp_size);
        for (setting, found, default, own) in [
            ("microbatches", self.microbatches, 1, microbatches),
            ("dp_size", self.dp_size, 1, dp_size),
            ("dp_rank", self.dp_rank, 0, 0),
        ] {
            if found != default && found != own {
                let reason = format!("follows from `role`: leave it out, found {found}");
                return Err(DflopError::config(setting, reason));
            }
        }
        // An encoder selects samples by share, for which the DP rank has no meaning.
        let dp_rank = if role.is_llm() { role.rank_role().replica } else { 0 };
        Ok(Self { microbatches, dp_rank, dp_size, ..self })
    }

    /// Applies the settings to a planner builder.
    fn apply(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let builder = builder
            .global_batch(self.global_batch_size)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .seed(self.seed);
        match self.epochs {
            Some(epochs) => builder.epochs(epochs),
            None => builder,
        }
    }
}

/// Reads the cost function in a `dflop.Plan`.
pub(super) fn cost(group: &Group<'_>) -> PyResult<Option<Arc<PyCost>>> {
    let Some(function) = group.get::<Option<Bound<'_, PyAny>>>("cost")? else { return Ok(None) };
    if !function.is_callable() {
        let found = function.get_type().name()?;
        let message = format!("expected `cost` of `dflop.Plan` to be a function, found {found}");
        return Err(PyTypeError::new_err(message));
    }
    Ok(Some(PyCost::new(function.unbind())))
}

/// Reads a `dflop.Processor`.
///
/// - `framework`: tensor library, which may lack the type of the pixels
pub(super) fn processor(group: &Group<'_>, framework: Framework) -> PyResult<ProcessorSettings> {
    let settings: ProcessorSettings = group.settings()?;
    let dtype = group.get::<String>("dtype")?;
    if settings.dtype != PixelTypeName::None {
        pixel_type(&dtype, framework)?;
    }
    Ok(settings)
}

impl<'py> Settings<'py> {
    /// Opens the data and combines it with the settings.
    pub(super) fn loader_config(self, py: Python<'py>, data: Source<'py>) -> PyResult<LoaderConfig> {
        let preparer = self.preparer(py)?;
        if let Some(role) = &self.role {
            role.check(preparer.is_some(), self.model.costs.modules(), &self.processor)?;
        }
        let counts = preparer.as_ref().map_or(TokenCounts::Estimated, |preparer| {
            let counter = Arc::new(preparer.text_counter());
            if self.processor.token_counts.into() {
                TokenCounts::Of(counter)
            } else {
                TokenCounts::IfPresent(counter)
            }
        });
        let Self { filter, inputs, model, run, plan, order, processor, read, role, .. } = self;
        if role.is_some() && plan.context.is_some() {
            let reason = "ranks with a `role` run parts of a model, and have no slices of samples";
            return Err(DflopError::config("context", reason.to_owned()).into());
        }
        let mut mixture = data.mixture(py, &counts)?;
        if preparer.is_some() {
            warn_of_targets(py, &mixture, &model)?;
        }
        if let Some(filter) = &filter {
            mixture = filtered(mixture, filter, &model.costs)?;
        }
        if let Some(role) = &role {
            role.check_media(mixture.datasets())?;
        }
        let mut planner = run.apply(StepPlanner::builder(mixture, model.costs));
        planner = plan.apply(order.apply(planner));
        plan.check().map_err(DflopError::from)?;
        if plan.stages.is_none() {
            planner = planner.one_device(plan.synchronization().unwrap_or_default());
        }
        if let Some(function) = &model.cost {
            planner = planner.cost_function(function.clone());
        }
        if let Some(tokens) = processor.fixed_tokens() {
            planner = planner.pad_to_tokens(tokens, processor.layout());
        }
        if let Some(rows) = processor.rows().map_err(DflopError::from)? {
            planner = planner.rows(rows);
        }
        if let Some(preparer) = &preparer {
            let tokens = preparer.blank_tokens().map_err(DflopError::from)?;
            // With roles, a blank medium would need an encoder rank.
            let blank = if role.is_some() { BlankMedia::Never } else { processor.blank_media.into() };
            planner = planner.blank_media(blank, tokens);
        }
        Ok(LoaderConfig {
            planner,
            inputs,
            preparer: preparer.map(Arc::new),
            read,
            steps: run.steps,
            dp_rank: run.dp_rank,
            role,
        })
    }

    /// Returns the built-in processor; `None` if there is no tokenizer, or user code creates the inputs.
    fn preparer(&self, py: Python<'py>) -> PyResult<Option<Preparer>> {
        let Self { inputs, model, tokenizer, processor, read, role, .. } = self;
        let is_own = inputs.is_some() || model.is_custom();
        if tokenizer.is_given() && is_own {
            let reason = "has no use where your own code makes the inputs: drop it, or count the tokens of the \
                          dataset with it: `dataset.count_tokens(tokenizer)`";
            return Err(DflopError::config("tokenizer", reason).into());
        }
        let preparer = if is_own {
            None
        } else {
            let counted = match role {
                Some(role) => role.counted_modules(),
                None if processor.dtype == PixelTypeName::None => vec![Module::Vision, Module::Audio],
                None => Vec::new(),
            };
            py.detach(|| model_preparer(tokenizer, processor, &model.names, model.costs.spec(), &counted))?
        };
        if preparer.is_none() {
            processor.check_without_tensors().map_err(DflopError::from)?;
            if inputs.is_none() && !tokenizer.is_refused() && read.is_decoded() {
                PyErr::warn(py, &py.get_type::<PyUserWarning>(), NO_TOKENIZER, 1)?;
            }
        }
        Ok(preparer)
    }
}

/// Returns the preparer of a model; `None` without a tokenizer.
///
/// - `names`: model names, whose files may contain the tokenizer and the image processor
/// - `counted`: encoders whose media are counted only
fn model_preparer(
    tokenizer: &TokenizerSettings,
    processor: &ProcessorSettings,
    names: &[String],
    spec: &ModelSpec,
    counted: &[Module],
) -> Result<Option<Preparer>, DflopError> {
    let Some(builder) = tokenizer.clone().or_from_model(names)?.preparer(spec)? else {
        return Ok(None);
    };
    let mut builder = processor.apply(builder);
    if let Some(images) = image_processor_from_names(names, spec)? {
        builder = builder.image_processor(Arc::new(images));
    }
    let builder = counted.iter().fold(builder, |builder, module| builder.counted(*module));
    Ok(Some(builder.build()?))
}

/// Warns about datasets with samples without targets, with unused keys and fields, or with media that the
/// model does not support.
fn warn_of_targets(py: Python<'_>, mixture: &Mixture, model: &CostedModel) -> PyResult<()> {
    let modules = model.costs.modules();
    for dataset in mixture.datasets() {
        let mut warnings = dataset.index().target_warnings();
        for (module, media) in [(Module::Vision, "images or videos"), (Module::Audio, "audio")] {
            let samples =
                if modules.contains(&module) { 0 } else { dataset.index().samples_with_media(module) };
            if samples > 0 {
                warnings.push(format!("the model takes no {media}: that of {samples} samples is not used"));
            }
        }
        if !warnings.is_empty() {
            let text = format!("dataset `{}`: {}", dataset.name(), warnings.join("; "));
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(text.replace('\0', "\\0"))?, 1)?;
        }
    }
    Ok(())
}
