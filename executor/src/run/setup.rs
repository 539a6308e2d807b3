//! Prepares the run parts that all ranks share, from the configuration.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::format_bytes;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, ProfileOptions};
use dflop_loader::index::{IndexOptions, TokenCounts};
use dflop_loader::model::{ModelDirectory, read_profile};
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::settings::{DatasetSettings, MixtureSettings, ReadSettings, StoreSettings};
use dflop_loader::shard::ShardAccess;
use dflop_loader::store::file;
use dflop_loader::{LoaderSettings, LoaderState, StepPlanner, StepPlannerBuilder, Tail};
use serde_json::{Value, json};

use super::cache_directory::digest;
use super::config::RunConfig;
use super::options::{CorrectionSource, RunOptions};
use super::parameter_groups::ParameterGroups;
use super::run_files::RunFiles;
use crate::inputs::costed;
use crate::models::encoder::FrozenEncoder;
use crate::models::{FrozenModules, ModelConfig, ModuleKind};
use crate::pipeline::{Job, Placement};
use crate::train::{PassPredictor, RecomputedLayers};
use crate::{Error, Result};

/// Number of compared bytes at the start of a weight file: the header and the first weights.
const HEADER_BYTES: u64 = 1 << 20;
/// Minimum weight size in memory.
const WEIGHT_BYTES: u64 = 4;

/// Run parts that every rank prepares alone, before communication with other ranks: the model, the layout
/// over ranks, and the run files.
#[derive(Debug)]
pub struct Setup {
    pub(super) config: RunConfig,
    pub(super) options: RunOptions,
    pub(super) job: Arc<Job>,
    pub(super) frozen: FrozenModules,
    pub(super) groups: ParameterGroups,
    pub(super) spec: ModelSpec,
    directory: ModelDirectory,
    files: RunFiles,
}

impl Setup {
    /// Reads the model, and generates the dataset if the configuration requests it.
    pub(super) fn new(config: &RunConfig, options: &RunOptions) -> Result<Self> {
        if let Some(problem) = config.problems(options).into_iter().next() {
            return Err(Error::Config(problem));
        }
        Self::from_files(config, options, RunFiles::prepare(config)?)
    }

    /// Reads the model from existing files.
    pub(super) fn from_files(config: &RunConfig, options: &RunOptions, files: RunFiles) -> Result<Self> {
        let directory = ModelDirectory::open(&files.model_directory)?;
        let spec = directory.spec()?;
        check_size(&spec, config.ranks(&spec), machine_memory_bytes())?;
        let mut model = ModelConfig::from_config(&directory.documents().config)?;
        let mut groups = ParameterGroups::find(&config.optimizer, config.frozen()?, &model)?;
        model.frozen = Arc::new(std::mem::take(&mut groups.frozen));
        let frozen = frozen(groups.parts);
        let job = Arc::new(job(config, model, frozen)?);
        let (config, options) = (config.clone(), options.clone());
        Ok(Self { config, options, job, frozen, groups, spec, directory, files })
    }

    /// Returns the model layout over ranks.
    #[must_use]
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Returns the model dimensions.
    #[must_use]
    pub fn model_spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns the step that the run ends before.
    pub(super) fn end_step(&self) -> u64 {
        self.options.until.unwrap_or(self.config.steps)
    }

    /// Returns the directory with the model files, including weights if the model is pretrained.
    pub(super) fn model_directory(&self) -> &Path {
        &self.files.model_directory
    }

    /// Returns the options for finding and building the index of a dataset.
    pub(super) fn index_options(&self) -> Result<IndexOptions> {
        let counter = self.preparer()?.build()?.text_counter();
        let video_sampling = self.config.index.video_sampling()?.unwrap_or_default();
        let token_counts = TokenCounts::Of(Arc::new(counter));
        Ok(IndexOptions { token_counts, video_sampling, ..IndexOptions::default() })
    }

    /// Returns the datasets of the run; none if a dataset has yet to be generated.
    pub(super) fn mixture(&self) -> Option<MixtureSettings> {
        let (data, index) = (&self.config.data, &self.config.index);
        if let Some(mixture) = &data.mixture {
            return Some(mixture.clone());
        }
        let dataset = DatasetSettings {
            shards: self.files.shards.clone(),
            split: data.split.clone(),
            splits: data.split.as_ref().and(index.splits.clone()),
            index: index.directory.clone(),
            ..DatasetSettings::default()
        };
        (!dataset.shards.is_empty()).then(|| MixtureSettings::from(dataset))
    }

    /// Returns the dataset that the run evaluates on; `None` without evaluations.
    pub(super) fn evaluation_dataset(&self) -> Option<DatasetSettings> {
        let (evaluation, index) = (self.config.evaluation.as_ref()?, &self.config.index);
        let (shards, split) = (evaluation.shards.clone(), evaluation.split.clone());
        if !shards.is_empty() {
            return Some(DatasetSettings { shards, split, ..DatasetSettings::default() });
        }
        Some(DatasetSettings {
            shards: self.files.shards.clone(),
            split,
            splits: index.splits.clone(),
            index: index.directory.clone(),
            ..DatasetSettings::default()
        })
    }

    /// Returns the reach of shard names: the stores that the environment of this machine sets.
    pub(super) fn shard_access() -> Result<ShardAccess> {
        let stores = StoreSettings::from_environment()?;
        Ok(stores.access(&stores.stores()?))
    }

    /// Returns the settings of the loaders of a rank.
    pub(super) fn loader_settings(&self) -> Result<LoaderSettings> {
        let read = ReadSettings { workers: self.config.read.workers.or(Some(1)), ..self.config.read.clone() };
        Ok(read.apply(LoaderSettings::default())?)
    }

    /// Returns a preparer builder for the model.
    pub(super) fn preparer(&self) -> Result<PreparerBuilder> {
        let processor = &self.config.processor;
        let mut builder = Preparer::builder(&self.spec).tokenizer(Tokenizer::open(&self.files.tokenizer)?);
        if let Some(images) = self.directory.image_processor(&self.spec)? {
            builder = builder.image_processor(Arc::new(images));
        }
        if let Some(source) = &processor.chat_template {
            builder = builder.chat_template(source.clone());
        }
        if let Some(question) = &processor.caption_prompt {
            builder = builder.plain_text(PlainText::Answer { question: question.clone() });
        }
        Ok(processor.apply(builder))
    }

    /// Builds the step planner of the run; indexes the dataset on first use, with texts counted by the
    /// tokenizer.
    ///
    /// - `state`: state to resume from
    ///
    /// # Errors
    /// [`Error::Loader`] if shards cannot be read, or the state belongs to another dataset.
    pub fn planner(&self, state: Option<LoaderState>) -> Result<StepPlanner> {
        let data = self.mixture().ok_or_else(|| Error::Config("`data` has no shards".to_owned()))?;
        let builder = self.config.order.apply(self.planner_builder(&data)?).seed(self.config.seed);
        let builder = match state {
            Some(state) => builder.restore(state),
            None => builder,
        };
        Ok(builder.build()?)
    }

    /// Builds the planner of an evaluation: every sample once, in an order that is the same in all runs;
    /// `None` without evaluations.
    ///
    /// # Errors
    /// [`Error::Loader`] if shards cannot be read, or there is no such split.
    pub(super) fn evaluation_planner(&self) -> Result<Option<StepPlanner>> {
        let Some(dataset) = self.evaluation_dataset() else { return Ok(None) };
        let builder = self.planner_builder(&dataset.into())?;
        Ok(Some(builder.epochs(1).tail(Tail::Short).build()?))
    }

    /// Starts a step planner for the layout of the run; indexes the dataset on first use.
    fn planner_builder(&self, data: &MixtureSettings) -> Result<StepPlannerBuilder> {
        let config = &self.config;
        let data = data.open(&Self::shard_access()?, &self.index_options()?)?;
        // The LLM is the last module; a step is planned for the LLM's DP ranks.
        let llm = self.job.modules().last().map_or(1, |llm| llm.dp_size);
        let builder = StepPlanner::builder(data, self.cost_model()?)
            .global_batch(config.data.global_batch_size)
            .dp_size(llm)
            .microbatches(config.parallel.microbatches)
            .strategy(config.parallel.strategy)
            .schedule(planned(config.schedule()?))
            .work(config.parallel.search_effort);
        Ok(self.with_stages(builder))
    }

    /// Describes the pipeline stages to the step planner.
    fn with_stages(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let modules = self.job.modules();
        match self.job.placement() {
            Placement::Disaggregated => builder
                .stages(modules.iter().map(|module| module.stages.len()).collect())
                .module_dp_sizes(modules.iter().map(|module| module.dp_size).collect()),
            Placement::Joint => builder.stage_layers(self.job.chain_layers()),
            // Encoders run before and after the LLM's pipelines; the microbatches are cut for the LLM.
            Placement::Colocated => {
                let mut layers = self.job.chain_layers();
                let stages = layers.last().map_or(0, Vec::len);
                let encoders = layers.len() - 1;
                layers[..encoders].iter_mut().for_each(|layers| *layers = vec![0; stages]);
                builder.stage_layers(layers)
            }
        }
    }

    pub(super) fn cost_model(&self) -> Result<CostModel> {
        let config = &self.config;
        let model = match &config.parallel.profile {
            Some(path) => {
                CostModel::from_profile(self.spec.clone(), &read_profile(path)?, ProfileOptions::default())?
            }
            None => CostModel::new(self.spec.clone(), DeviceRate::preset(config.parallel.device_preset())?),
        };
        let recomputed = self.recomputed_layers().into_iter();
        let with = |model: CostModel, (module, every)| model.recomputed_layers(module, Some(every));
        Ok(recomputed.fold(model, with).frozen(self.groups.parts)?)
    }

    /// Lists the modules with recomputed layers.
    pub(super) fn recomputed_layers(&self) -> RecomputedLayers {
        let modules = self.job.modules().iter().map(|module| module.module);
        modules.filter_map(|module| Some((costed(module), self.config.recomputed(module)?))).collect()
    }

    /// Returns the stages and degrees of all modules, as checkpoints and records describe them.
    pub(super) fn layout(&self) -> Value {
        let (modules, chain) = (self.job.modules(), self.job.chain_layers());
        let layout = modules.iter().zip(chain).map(|(module, chain)| {
            let mut layout = json!({"module": format!("{:?}", module.module).to_lowercase(),
                "stages": module.stages, "dp": module.dp_size, "tp": module.tp_size});
            if self.job.placement() != Placement::Disaggregated {
                layout["placement"] = self.job.placement().name().into();
                layout["layers"] = chain.into();
            }
            layout
        });
        layout.collect()
    }

    /// Returns a digest over the model dimensions.
    pub(super) fn model_digest(&self) -> String {
        let mut config = self.directory.documents().config.clone();
        // Equal for any key order in the file.
        config.sort_all_objects();
        digest(config.to_string().as_bytes())
    }

    /// Returns a digest for each file that decides about the run, under the setting that names the file;
    /// weight files count with their headers, since every rank reads only a part.
    pub(super) fn file_digests(&self) -> Vec<(String, String)> {
        let directory = self.model_directory();
        let tokenizer = &self.files.tokenizer;
        let tokenizer = if tokenizer.is_dir() { tokenizer.join("tokenizer.json") } else { tokenizer.clone() };
        let preprocessor = format!("{:?}", self.directory.documents().preprocessor);
        let mut digests = vec![
            ("config.json", self.model_digest()),
            ("preprocessor_config.json", digest(preprocessor.as_bytes())),
            ("tokenizer.json", file_digest(&tokenizer)),
            ("tokenizer_config.json", file_digest(&directory.join("tokenizer_config.json"))),
            ("chat_template.jinja", file_digest(&directory.join("chat_template.jinja"))),
        ];
        if let Some(profile) = &self.config.parallel.profile {
            digests.push(("parallel.profile", file_digest(profile)));
        }
        if let Some(CorrectionSource::Record(record)) = &self.options.corrections {
            digests.push(("--corrections", file_digest(record)));
        }
        if self.config.model.pretrained {
            digests.push(("*.safetensors", weights_digest(directory)));
        }
        digests.into_iter().map(|(name, digest)| (name.to_owned(), digest)).collect()
    }

    /// Builds the pass predictor from the configured profile; `None` without a profile.
    pub(super) fn pass_predictor(&self) -> Result<Option<PassPredictor>> {
        let config = &self.config;
        let Some(path) = &config.parallel.profile else { return Ok(None) };
        let (profile, frozen) = (read_profile(path)?, self.groups.parts);
        Ok(Some(PassPredictor::new(&self.spec, &profile, &self.recomputed_layers(), frozen)?))
    }
}

/// Returns the digest for a file, or for a directory's files in name order; `none` if there is none.
fn file_digest(path: &Path) -> String {
    if path.is_dir() {
        return files_in(path).iter().map(|file| file_digest(file)).collect::<Vec<_>>().join(" ");
    }
    file::read(path).map_or_else(|_| "none".to_owned(), |bytes| digest(&bytes))
}

/// Returns a digest over the names, lengths and headers of the weight files in a directory.
fn weights_digest(directory: &Path) -> String {
    let mut described = Vec::new();
    let is_weights = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    for path in files_in(directory).iter().filter(is_weights) {
        let Ok(file) = file::open(path) else { continue };
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        described.extend_from_slice(path.file_name().unwrap_or_default().as_encoded_bytes());
        described.extend_from_slice(&bytes.to_le_bytes());
        // What cannot be read is reported when the weights are.
        let _ = file.take(HEADER_BYTES).read_to_end(&mut described);
    }
    digest(&described)
}

fn files_in(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    paths.sort();
    paths
}

/// Rejects a model whose weights alone exceed the memory of as many machines as there are ranks.
fn check_size(spec: &ModelSpec, ranks: u64, memory_bytes: Option<u64>) -> Result<()> {
    let encoders = spec.encoder_parameters();
    let encoders = encoders.iter().map(|(_, parameters)| parameters.total());
    let parameters = encoders.fold(spec.llm_parameters().total(), u64::saturating_add);
    let needed = parameters.saturating_mul(WEIGHT_BYTES);
    match memory_bytes.map(|memory| memory.saturating_mul(ranks)) {
        Some(memory) if needed > memory => Err(Error::Config(format!(
            "`config.json`: the weights of {parameters} parameters take {}, but {ranks} machines like this one, one for \
             each rank, have {}",
            format_bytes(needed),
            format_bytes(memory)
        ))),
        _ => Ok(()),
    }
}

/// Returns this machine's memory, swap included, if the system reports it.
pub(super) fn machine_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    bytes("MemTotal:")?.checked_add(bytes("SwapTotal:").unwrap_or(0))
}

/// Converts the cost model's frozen modules to the executor type.
fn frozen(frozen: dflop_costmodel::FrozenParts) -> FrozenModules {
    let encoder = |encoder| FrozenEncoder { encoder, projector: frozen.projector };
    FrozenModules { vision: encoder(frozen.vision), audio: encoder(frozen.audio), is_llm_frozen: frozen.llm }
}

fn job(config: &RunConfig, model: ModelConfig, frozen: FrozenModules) -> Result<Job> {
    let parallel = &config.parallel;
    let placement = Placement::from(parallel.placement);
    let chain = parallel.llm.layers.as_ref().map_or(parallel.llm.stages, Vec::len);
    let layouts = model.modules().into_iter().map(|module| {
        let table = match module {
            ModuleKind::Vision => &parallel.vision,
            ModuleKind::Audio => &parallel.audio,
            ModuleKind::Llm => &parallel.llm,
        };
        table.parallelism(placement, (module, model.layers(module)), chain)
    });
    let layouts = layouts.collect::<Result<Vec<_>>>()?;
    Job::placed(placement, model, frozen, layouts, config.schedule()?)
}

/// Returns the schedule that microbatches are planned for: with split backward passes, stages are as busy and
/// hold as many microbatches as under 1F1B.
fn planned(schedule: ScheduleKind) -> ScheduleKind {
    if schedule == ScheduleKind::ZeroBubble { ScheduleKind::OneForwardOneBackward } else { schedule }
}
