//! Combines balanced loader settings with the data.

mod buckets;
mod order;
mod plan;
mod processor;

use std::ffi::{CStr, CString};
use std::sync::Arc;

use dflop_costmodel::Module;
use dflop_loader::index::TokenCounts;
use dflop_loader::processors::Preparer;
use dflop_loader::{Mixture, StepPlanner};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;

pub(super) use self::order::{OrderSettings, RunSettings};
pub(crate) use self::plan::strategy;
pub(super) use self::plan::{PlanSettings, cost};
pub(super) use self::processor::ProcessorSettings;
use super::loader_config::LoaderConfig;
use crate::cost::CostedModel;
use crate::dataset::Source;
use crate::error::DflopError;
use crate::filter::filtered;
use crate::read::ReadSettings;

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
    pub(super) processor: ProcessorSettings,
    pub(super) read: ReadSettings,
}

impl<'py> Settings<'py> {
    /// Opens the data and combines it with the settings.
    pub(super) fn loader_config(self, py: Python<'py>, data: Source<'py>) -> PyResult<LoaderConfig> {
        let preparer = self.preparer(py)?;
        let counts = preparer.as_ref().map_or(TokenCounts::Estimated, |preparer| {
            let counter = Arc::new(preparer.text_counter());
            if self.processor.counts_exactly {
                TokenCounts::Of(counter)
            } else {
                TokenCounts::IfPresent(counter)
            }
        });
        let Self { filter, inputs, model, run, plan, order, processor, read } = self;
        let mut mixture = data.mixture(py, &counts)?;
        if preparer.is_some() {
            warn_of_targets(py, &mixture, &model)?;
        }
        if let Some(filter) = &filter {
            mixture = filtered(mixture, filter, &model.costs)?;
        }
        let mut planner = run.apply(StepPlanner::builder(mixture, model.costs));
        planner = plan.apply(order.apply(planner), model.cost.as_ref());
        if let Some(tokens) = processor.pad_to_tokens {
            planner = planner.pad_to_tokens(tokens, processor.layout);
        }
        if let Some(preparer) = &preparer {
            let tokens = preparer.blank_tokens().map_err(DflopError::from)?;
            planner = planner.blank_media(processor.blank_media, tokens);
        }
        Ok(LoaderConfig {
            planner,
            inputs,
            preparer: preparer.map(Arc::new),
            read,
            steps: run.steps,
            dp_rank: run.dp_rank,
            accepts_changed_data: order.accepts_changed_data,
        })
    }

    /// Returns the built-in processor; `None` if there is no tokenizer, or user code creates the inputs.
    fn preparer(&self, py: Python<'py>) -> PyResult<Option<Preparer>> {
        let Self { inputs, model, processor, read, .. } = self;
        let is_own = inputs.is_some() || model.is_custom();
        if processor.tokenizer.is_given() && is_own {
            let reason = "has no use where your own code makes the inputs: drop it, or give it to the dataset for \
                          token counts";
            return Err(DflopError::config("tokenizer", reason).into());
        }
        let preparer =
            if is_own { None } else { py.detach(|| processor.preparer(&model.names, model.costs.spec()))? };
        if preparer.is_none() {
            processor.check_without_tensors()?;
            if inputs.is_none() && !processor.tokenizer.is_refused() && read.is_decoded() {
                PyErr::warn(py, &py.get_type::<PyUserWarning>(), NO_TOKENIZER, 1)?;
            }
        }
        Ok(preparer)
    }
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
