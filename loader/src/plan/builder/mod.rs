//! Configures a [`StepPlanner`].
//!
//! Checks the planner settings, each alone and against the model.

use super::config::{COUNT_MAX, ContextGroups, PAD_TO_TOKENS_MAX, PadTo, PlanConfig};
use super::cost_function::CostFunction;
use super::lockstep::Synchronization;
use super::media_shares::BlankMedia;
use super::planner::StepPlanner;
use super::rows::RowSteps;
use super::stage_layers::StageLayers;
use crate::error::{Error, Result, check_at_most, error_reason};
use crate::order::{LoaderState, Mixture, RowLayout, RowRule, RowSettings, RunBuilder, Shuffle, Tail};
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{CostModel, Module, SampleShape};
use dflop_samples::sample::BatchLayout;
use std::num::NonZeroU64;
use std::sync::Arc;

/// Settings of a [`StepPlanner`].
#[derive(Debug, Clone)]
pub struct StepPlannerBuilder {
    run: RunBuilder,
    model: CostModel,
    stages: Option<Vec<usize>>,
    layers: Option<Vec<Vec<usize>>>,
    cost_function: Option<Arc<dyn CostFunction>>,
    blank_media: BlankMedia,
    /// Tokens in a blank medium, per encoder.
    blank_tokens: Vec<(Module, u64)>,
    repeats_samples: bool,
    rows: Option<RowLayout>,
    config: PlanConfig,
}

impl StepPlanner {
    /// Starts the settings of a planner over a dataset, a split of one or a mixture; only the global batch
    /// has no default.
    #[must_use]
    pub fn builder(data: impl Into<Mixture>, model: CostModel) -> StepPlannerBuilder {
        StepPlannerBuilder::new(data.into(), model)
    }
}

impl StepPlannerBuilder {
    fn new(mixture: Mixture, model: CostModel) -> Self {
        let config = PlanConfig {
            dp_size: 1,
            microbatches: 1,
            stages: Vec::new(),
            module_dp_sizes: Vec::new(),
            stage_layers: None,
            synchronization: None,
            strategy: Strategy::SEARCH,
            schedule: ScheduleKind::OneForwardOneBackward,
            caps: Caps::default(),
            pad_to: None,
            required_encoders: Vec::new(),
            context: None,
            work: 20_000,
        };
        Self {
            run: RunBuilder::new(mixture),
            model,
            stages: None,
            layers: None,
            cost_function: None,
            blank_media: BlankMedia::Never,
            blank_tokens: Vec::new(),
            repeats_samples: false,
            rows: None,
            config,
        }
    }

    /// Sets how many samples a step has, over all ranks; with [`Self::rows`], how many rows. Must be set.
    #[must_use]
    pub fn global_batch(mut self, samples: u64) -> Self {
        self.run.global_batch = samples;
        self
    }

    /// Sets the number of data-parallel ranks. Default: 1.
    #[must_use]
    pub fn dp_size(mut self, ranks: usize) -> Self {
        self.config.dp_size = ranks;
        self
    }

    /// Sets the number of microbatches per rank. Default: 1.
    #[must_use]
    pub fn microbatches(mut self, microbatches: usize) -> Self {
        self.config.microbatches = microbatches;
        self
    }

    /// Sets the number of pipeline stages per module, in [`CostModel::modules`] order. Default: one each.
    #[must_use]
    pub fn stages(mut self, stages: Vec<usize>) -> Self {
        self.stages = Some(stages);
        self
    }

    /// Sets the number of DP ranks per module, in [`CostModel::modules`] order, with the LLM last. The ranks
    /// of an encoder with a different DP size share the media in all LLM ranks' microbatches of a round.
    /// Default: all modules have [`Self::dp_size`].
    #[must_use]
    pub fn module_dp_sizes(mut self, dp_sizes: Vec<usize>) -> Self {
        self.config.module_dp_sizes = dp_sizes;
        self
    }

    /// Lets stages hold layers from multiple modules, cut from one chain: the stage time is the sum over
    /// the layers' shares of the module times. In place of [`Self::stages`]. Default: one module per
    /// stage.
    ///
    /// - `layers`: `[modules, stages]`, in [`CostModel::modules`] order; a module without any layer is left
    ///   out of the pipeline, such as an encoder that runs before and after it
    #[must_use]
    pub fn stage_layers(mut self, layers: Vec<Vec<usize>>) -> Self {
        self.layers = Some(layers);
        self
    }

    /// Runs all modules of a rank in sequence on one device, as DDP, FSDP and HSDP do, instead of a pipeline:
    /// a sample costs the sum over the modules. Default: pipeline stages, see [`Self::stages`].
    ///
    /// - `synchronization`: when data-parallel ranks wait for each other
    #[must_use]
    pub fn one_device(mut self, synchronization: Synchronization) -> Self {
        self.config.synchronization = Some(synchronization);
        self
    }

    /// Replaces the model's nanoseconds by the results of a function; token counts remain the model's. The
    /// function must be pure and the same on all ranks. [`StepPlanner::correct`] then returns an error:
    /// measured times belong in the function. Default: the model's times.
    #[must_use]
    pub fn cost_function(mut self, function: Arc<dyn CostFunction>) -> Self {
        self.cost_function = Some(function);
        self
    }

    /// Sets how samples are assigned. Default: [`Strategy::SEARCH`].
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.config.strategy = strategy;
        self
    }

    /// Sets the schedule that runs the microbatches: `gpipe`, `1f1b`, `1f1b-ahead`, or `interleaved`, which
    /// treats the stages of all modules as one chain. Default: 1F1B.
    ///
    /// [`Self::build`] returns [`Error::Config`] for `zb-h1`, whose backward passes are split, and for
    /// `interleaved` if the number of stages is not a multiple of the chunks or a module has a different DP
    /// size.
    #[must_use]
    pub fn schedule(mut self, schedule: ScheduleKind) -> Self {
        self.config.schedule = schedule;
        self
    }

    /// Sets hard microbatch limits, in tokens and payload bytes. Default: no byte limit; at most a quarter
    /// more tokens than the mean of the step's microbatches, or the mean plus the longest sample if that is
    /// more.
    #[must_use]
    pub fn caps(mut self, caps: Caps) -> Self {
        self.config.caps = caps;
        self
    }

    /// Pads all microbatches to tensors with the same shape, for `tokens` tokens, and includes the padding
    /// cost in plans. With [`BatchLayout::Packed`] every microbatch is `[1, tokens]` and holds no more; with
    /// padded layouts every row has `tokens` tokens, `[samples, tokens]`, and the number of rows differs. A
    /// loader configures the preparer with this length; the preparer layout must match. Default: microbatches
    /// are as long as the samples.
    ///
    /// Every microbatch then has the same linear LLM work. The balancer distributes the encoder and attention
    /// work so that all samples fit; a microbatch may even have no sample. A token cap counts rows in padded
    /// layouts with padding. A suitable length is the global batch tokens divided by the number of
    /// microbatches, plus a tenth; errors name a sufficient length.
    #[must_use]
    pub fn pad_to_tokens(mut self, tokens: u64, layout: BatchLayout) -> Self {
        self.config.pad_to = Some(PadTo { tokens, layout, blank_tokens: 0 });
        self
    }

    /// Fills rows with documents, samples in the order of the run: every microbatch is one row,
    /// `[1, tokens]`, and the global batch counts rows, as many as the microbatches of all ranks. Rows need
    /// [exact token counts](crate::index::TokenCounts) and a packed layout without buckets; a loader
    /// configures the preparer with their length. Default: microbatches of whole samples.
    ///
    /// Rows do not depend on the number of ranks, and the state of a run is a position inside a document. The
    /// run may resume with another global batch, and rows that are split with another length.
    #[must_use]
    pub fn rows(mut self, layout: RowLayout) -> Self {
        self.rows = Some(layout);
        self
    }

    /// Sets which microbatches without a medium receive a blank medium, so that every rank runs the encoder.
    /// Blank media are not in planned costs, and come on top of token caps; microbatches with a fixed length
    /// leave room for them. Default: [`BlankMedia::Never`].
    ///
    /// - `tokens`: LLM tokens in a blank medium, per model encoder: `Preparer::blank_tokens` in
    ///   `dflop_processors`
    #[must_use]
    pub fn blank_media(mut self, policy: BlankMedia, tokens: Vec<(Module, u64)>) -> Self {
        (self.blank_media, self.blank_tokens) = (policy, tokens);
        self
    }

    /// Lets ranks share samples where that shortens the step, or where a sample is above the token cap:
    /// context parallelism, see [`StepPlanner::plan_context`]. Fixed lengths, cost functions and stages with
    /// layers of several modules have no slices. Default: every sample is whole on one rank.
    #[must_use]
    pub fn context(mut self, groups: ContextGroups) -> Self {
        self.config.context = Some(groups);
        self
    }

    /// Allows a global batch that is larger than the dataset, so that a step repeats samples. Default: it is
    /// an error, unless the tail is short.
    #[must_use]
    pub fn repeat_samples(mut self) -> Self {
        self.repeats_samples = true;
        self
    }

    /// Sets the maximum number of work units for the search per step. Default: 20,000, a few milliseconds.
    #[must_use]
    pub fn work(mut self, units: u64) -> Self {
        self.config.work = units;
        self
    }

    /// Sets the seed that fixes all order. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.run.seed = seed;
        self
    }

    /// Sets the epoch whose first sample begins step 0. Default: 0.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.run.first_epoch = epoch;
        self
    }

    /// Sets the treatment of samples that do not fill a global batch. Default: [`Tail::Carry`].
    #[must_use]
    pub fn tail(mut self, tail: Tail) -> Self {
        self.run.tail = tail;
        self
    }

    /// Sets how the samples in an epoch are shuffled. Default: [`Shuffle::Global`].
    #[must_use]
    pub fn shuffle(mut self, shuffle: Shuffle) -> Self {
        self.run.shuffle = shuffle;
        self
    }

    /// Ends the run after this many epochs of every dataset without a limit from
    /// [`crate::dataset::Dataset::repeat`]. Default: without end.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.run.mixture = self.run.mixture.epochs(epochs);
        self
    }

    /// Sets the validation order: once through the dataset, in index order, every sample exactly once over
    /// any number of ranks. All ranks have the same steps; the last may be short, with empty microbatches.
    /// Sets [`Self::epochs`] to 1, [`Tail::Short`] and [`Shuffle::None`].
    #[must_use]
    pub fn validation(self) -> Self {
        self.epochs(1).tail(Tail::Short).shuffle(Shuffle::None)
    }

    /// Resumes from a saved state, on any number of ranks and microbatches.
    ///
    /// Seed, shuffle and tail must equal the state's; the saved first epoch replaces [`Self::first_epoch`]. A
    /// different global batch applies from the state's step on, under [`Tail::Carry`]. Steps before the
    /// state's cannot be planned if the batch or the data changed.
    #[must_use]
    pub fn restore(mut self, state: LoaderState) -> Self {
        self.run.state = Some(state);
        self
    }

    /// Restores even if a dataset has changed: it resumes with the next epoch, the remaining datasets at the
    /// saved position. Default: a state for changed data is an error.
    #[must_use]
    pub fn accept_changed_data(mut self) -> Self {
        self.run.accepts_changed_data = true;
        self
    }

    /// Checks that the settings fit each other, the model and the dataset.
    ///
    /// # Errors
    /// [`Error::Config`] if a count is zero, if shard groups do not divide the ranks, if the stages do not
    /// name every model module or do not fit the schedule, if the global batch has fewer samples than there
    /// are microbatches on all ranks or more than the datasets, if the tail drops every sample, or if mixture
    /// weights do not fit the datasets; [`Error::State`] if a state does not fit, with the shard that
    /// changed.
    pub fn build(mut self) -> Result<StepPlanner> {
        self.set_rows()?;
        let zero_cost = self.model.predict(&SampleShape::default());
        let zero_cost =
            zero_cost.map_err(|error| Error::Config { setting: "model", reason: error_reason(&error) })?;
        let stage_layers = self.checked_layers()?;
        let stages = stage_layers.as_ref().map_or_else(|| self.checked_stages(), |own| Ok(own.stages()))?;
        self.check_module_dp_sizes()?;
        let global_batch = self.checked_batch()?.get();
        let may_repeat = self.repeats_samples || self.run.tail != Tail::Carry || self.rows.is_some();
        let run = self.run.build()?;
        let samples = run.steps.epoch_samples();
        if global_batch > samples && !may_repeat {
            return Err(larger_than_data(global_batch, samples));
        }
        let required_encoders =
            self.blank_media.required_encoders(&self.blank_tokens, self.config.dp_size, run.datasets());
        let required = self.blank_tokens.iter().filter(|(module, _)| required_encoders.contains(module));
        let blank_tokens = required.map(|(_, tokens)| tokens).sum();
        // Rows leave the same room on any number of ranks.
        let pad_to = match self.rows {
            Some(_) => self.config.pad_to,
            None => self.config.pad_to.map(|to| PadTo { blank_tokens, ..to }),
        };
        let config = PlanConfig { stages, stage_layers, pad_to, required_encoders, ..self.config };
        let planner = StepPlanner {
            rows: RowSteps::new(&run).map(Arc::new),
            run,
            model: Arc::new(self.model),
            config,
            zero_cost,
            cost_function: self.cost_function,
            corrections: Arc::default(),
            planned: Arc::default(),
        };
        planner.check_schedule()?;
        if let Some(groups) = &planner.config.context {
            planner.check_context(groups)?;
        }
        Ok(planner)
    }
}

/// Largest global batch, in samples.
const GLOBAL_BATCH_MAX: u64 = 1 << 24;
/// Maximum number of pipeline stages per module.
const STAGES_MAX: usize = 1_024;

impl StepPlannerBuilder {
    /// Returns the global batch, if it fills the microbatches of all ranks.
    fn checked_batch(&self) -> Result<NonZeroU64> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let Some(global_batch) = NonZeroU64::new(self.run.global_batch) else {
            return invalid("global_batch", "must be at least 1".into());
        };
        if self.config.dp_size == 0 {
            return invalid("dp_size", "must be at least 1".into());
        }
        if self.config.microbatches == 0 {
            return invalid("microbatches", "must be at least 1".into());
        }
        if let Some(Synchronization::PerShardGroup(ranks)) = self.config.synchronization
            && !self.config.dp_size.is_multiple_of(ranks.get())
        {
            let reason = format!("shard groups of {ranks} ranks do not divide {} ranks", self.config.dp_size);
            return invalid("synchronize", reason);
        }
        check_at_most("global_batch", self.run.global_batch, GLOBAL_BATCH_MAX)?;
        check_at_most("first_epoch", self.run.first_epoch, COUNT_MAX)?;
        if let Some(PadTo { tokens, .. }) = self.config.pad_to {
            check_at_most("pad_to_tokens", tokens, PAD_TO_TOKENS_MAX)?;
            if tokens == 0 {
                return invalid("pad_to_tokens", "must be at least 1".into());
            }
        }
        let groups = self.config.dp_size.saturating_mul(self.config.microbatches) as u64;
        if self.run.global_batch < groups {
            let reason = format!("{} samples cannot fill {groups} microbatches", self.run.global_batch);
            return invalid("global_batch", reason);
        }
        Ok(global_batch)
    }

    /// Checks rows against the other settings and the data, and sets the length of microbatches.
    fn set_rows(&mut self) -> Result<()> {
        let Some(layout) = self.rows else { return Ok(()) };
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        check_at_most("rows", layout.tokens.into(), PAD_TO_TOKENS_MAX)?;
        if layout.tokens < 2 || matches!(layout.rule, RowRule::Fit { window: 0 }) {
            return invalid(
                "rows",
                format!("a row has at least 2 tokens, a window 1 document; found {layout}"),
            );
        }
        if self.config.context.is_some() {
            return invalid("context", "a row stays on one rank: leave it out".into());
        }
        if self.config.pad_to.is_some() {
            return invalid("pad_to_tokens", format!("rows have {} tokens: leave it out", layout.tokens));
        }
        if self.config.caps.tokens_max.is_some() {
            return invalid("tokens_max", format!("rows have {} tokens: leave it out", layout.tokens));
        }
        let groups = self.config.dp_size.saturating_mul(self.config.microbatches) as u64;
        if self.run.global_batch != groups {
            let (ranks, microbatches) = (self.config.dp_size, self.config.microbatches);
            let reason = format!(
                "a microbatch is one row of {}, and {ranks} ranks with {microbatches} microbatches have {groups}, \
                 found {}",
                layout.tokens, self.run.global_batch
            );
            return invalid("global_batch", reason);
        }
        let datasets = self.run.mixture.datasets();
        let with_media = self.model.modules().iter().filter_map(|&module| {
            let dataset = datasets.iter().find(|dataset| dataset.index().has_media(module))?;
            (module != Module::Llm).then(|| dataset.name().clone())
        });
        if layout.rule == RowRule::Split
            && let Some(dataset) = with_media.into_iter().next()
        {
            let tokens = layout.tokens;
            let reason = format!(
                "dataset `{dataset}` has media, which are not cut: use fit:{tokens}, which cuts no sample with media"
            );
            return invalid("rows", reason);
        }
        if let Some(dataset) = datasets.iter().find(|dataset| dataset.index().token_counts().is_none()) {
            let reason = format!(
                "the texts of dataset `{}` are estimated, and rows need exact token counts: count them with the \
                 tokenizer",
                dataset.name()
            );
            return invalid("rows", reason);
        }
        // As on several ranks, so that rows are the same on one.
        let required = self.blank_media.required_encoders(&self.blank_tokens, 2, datasets);
        let blank_tokens: u64 = self
            .blank_tokens
            .iter()
            .filter(|(module, _)| required.contains(module))
            .map(|(_, tokens)| tokens)
            .sum();
        let to = PadTo { tokens: layout.tokens.into(), layout: BatchLayout::Packed, blank_tokens };
        let Some(room) = u32::try_from(to.capacity_tokens()).ok().filter(|room| *room > 1) else {
            let reason =
                format!("blank media take {blank_tokens} of {} tokens: use longer rows", layout.tokens);
            return invalid("rows", reason);
        };
        self.run.rows = Some(RowSettings { layout, room });
        self.config.pad_to = Some(to);
        Ok(())
    }

    /// Checks that every module has a DP size, and that the last one equals the number of ranks.
    fn check_module_dp_sizes(&self) -> Result<()> {
        let (sizes, modules) = (&self.config.module_dp_sizes, self.model.modules());
        let is_right = sizes.len() == modules.len()
            && sizes.last() == Some(&self.config.dp_size)
            && !sizes.contains(&0)
            && self.config.synchronization.is_none();
        if sizes.is_empty() || is_right {
            return Ok(());
        }
        let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
        let reason = format!(
            "expected one DP size of at least 1 for each of {}, {} for the last, of modules on devices of their \
             own; got {sizes:?}",
            names.join(", "),
            self.config.dp_size
        );
        Err(Error::Config { setting: "module_dp_sizes", reason })
    }

    /// Returns the stage layers, where stages hold multiple modules.
    fn checked_layers(&self) -> Result<Option<StageLayers>> {
        let Some(layers) = &self.layers else { return Ok(None) };
        let PlanConfig { module_dp_sizes, synchronization, pad_to, .. } = &self.config;
        let is_alone = self.stages.is_none() && module_dp_sizes.is_empty();
        if !is_alone || synchronization.is_some() || pad_to.is_some() {
            let reason =
                "cannot be used with `stages`, `module_dp_sizes`, `one_device`, rows or a fixed length"
                    .into();
            return Err(Error::Config { setting: "stage_layers", reason });
        }
        StageLayers::new(layers, self.model.modules(), STAGES_MAX).map(Some)
    }

    /// Returns the pipeline stages of every module.
    fn checked_stages(&self) -> Result<Vec<usize>> {
        let modules = self.model.modules();
        if self.config.synchronization.is_some() {
            if self.stages.is_none() {
                return Ok(vec![1]);
            }
            let reason = "modules that share one device have no pipeline stages".into();
            return Err(Error::Config { setting: "stages", reason });
        }
        let stages = self.stages.clone().unwrap_or_else(|| vec![1; modules.len()]);
        if stages.len() == modules.len() && stages.iter().all(|count| (1..=STAGES_MAX).contains(count)) {
            return Ok(stages);
        }
        let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
        let reason =
            format!("give one number of stages, 1 to {STAGES_MAX}, for each of {}", names.join(", "));
        Err(Error::Config { setting: "stages", reason })
    }
}

/// Returns the error for a global batch with more samples than the data.
fn larger_than_data(global_batch: u64, samples: u64) -> Error {
    let reason = format!(
        "{global_batch} samples are more than the {samples} of the data, so that a step would have samples several \
         times; use a smaller global batch, or the tail `repeat`"
    );
    Error::Config { setting: "global_batch", reason }
}
