//! `dflop.Dataset` and `dflop.Mixture`: shards, with an index that is opened on demand.

mod samples;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use dflop_loader::error::SelectionError;
use dflop_loader::index::foreign::ForeignIndexes;
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::shard::{Shard, ShardAccess, expand_shards_in};
use dflop_loader::store::{ReadMode, ShardCache, Stores};
use dflop_loader::{Dataset, Mixture, Splits, Stop};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::arguments::{Arguments, arguments};
use crate::convert::skipped;
use crate::error::DflopError;
use crate::names::Names;
use crate::runtime;
use crate::table::stream;
use crate::tokenizer::{TokenizerSettings, token_counts};

/// A dataset in WebDataset shards.
///
/// Shards are listed by the constructor. The index, with the location and shape of every sample, is opened on
/// demand, and built if it is missing.
///
/// Args: shards: directory, file, pattern such as ``shards/{000..019}.tar``, URL such as
/// ``s3://bucket/directory/`` (also gs, az, abfs, http, https), or a list of these. index: directory of the
/// index. Default: ``.dflop`` next to the shards, or the user's cache directory. split: name of the split
/// whose samples are read, as defined in the file ``splits`` (default: ``splits.json`` next to the shards).
/// repeat: number of epochs that a run draws from the dataset. Default: no limit. cache: directory that keeps
/// whole remote shards for all processes of this machine, up to ``cache_bytes``. requests_max: maximum number
/// of requests to remote stores in flight. read: how local and cached shards are read: ``mmap`` maps them,
/// and a shard that is shortened meanwhile ends the process; ``pread`` copies, and reports such a shard as an
/// error; ``auto`` maps those in images such as SquashFS. allow_pipe: lets names ``pipe:COMMAND`` run shell
/// commands whose output is the shard. allow_outside: lets shard lists name shards outside their own
/// directory, and remote ones. tokenizer: counts text tokens exactly instead of estimating
/// them: ``tokenizer.json``, its directory, a name in the local Hugging Face cache, or a tokenizer of
/// ``tokenizers`` or ``transformers``. The counts are kept in the index. model: counts texts in the chat
/// format of this model. Default: the bare text is counted. chat_template: Jinja source of the chat template.
/// Default: the tokenizer's. caption_prompt: prompt that captions answer. Default: captions are trained on
/// without a chat template. rebuild: rebuilds the index even if one fits the shards. verify: decodes every
/// field while indexing, so that every bad sample is known in advance; rebuilds the index. foreign: use of
/// index files that other tools left next to the shards: ``ignore``, ``check`` or ``follow``.
///
/// Raises:
///     ConfigError: a pattern cannot be expanded, a local shard does not exist, or a setting is invalid.
///     ReadError: a shard cannot be read.
///
/// Example::
///
///     dataset = dflop.Dataset("shards/")
///     print(len(dataset), dataset[0].key, [sample.key for sample in dataset[-3:]])
#[pyclass(frozen, name = "Dataset", module = "dflop._native", mapping)]
#[derive(Debug)]
pub(crate) struct PyDataset {
    shards: Vec<Shard>,
    options: IndexOptions,
    split: Option<String>,
    splits: Option<PathBuf>,
    repeat: Option<u64>,
    opened: Arc<Mutex<Opened>>,
    /// Arguments of the constructor, to create the dataset again in another process.
    arguments: Arguments,
}

/// Opened datasets of a [`PyDataset`].
#[derive(Debug, Default)]
struct Opened {
    /// Datasets by the digest of their token counter.
    datasets: Vec<(Option<String>, Dataset)>,
    /// Whether the index was rebuilt, so that it is not rebuilt once more.
    is_made: bool,
}

#[pymethods]
impl PyDataset {
    #[new]
    #[pyo3(signature = (
        shards, *, index=None, split=None, splits=None, repeat=None, cache=None, cache_bytes=68_719_476_736, requests_max=256, read="auto",
        allow_pipe=false, allow_outside=false, tokenizer=None, model=None, chat_template=None, caption_prompt=None, rebuild=false, verify=false, foreign="check"
    ))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "one keyword each")]
    fn new(
        py: Python<'_>,
        shards: Names,
        index: Option<PathBuf>,
        split: Option<String>,
        splits: Option<PathBuf>,
        repeat: Option<u64>,
        cache: Option<PathBuf>,
        cache_bytes: u64,
        requests_max: usize,
        read: &str,
        allow_pipe: bool,
        allow_outside: bool,
        tokenizer: Option<Bound<'_, PyAny>>,
        model: Option<Names>,
        chat_template: Option<String>,
        caption_prompt: Option<String>,
        rebuild: bool,
        verify: bool,
        foreign: &str,
    ) -> PyResult<Self> {
        let model = model.map(|names| names.0);
        // Kept as given: `__reduce__` creates the dataset from them in another process.
        let arguments = arguments! {
            py, index, split, splits, repeat, cache, cache_bytes, requests_max, read, allow_pipe,
            allow_outside, tokenizer, model, chat_template, caption_prompt, rebuild, verify, foreign,
        };
        let settings = TokenizerSettings::new(tokenizer.as_ref(), chat_template, caption_prompt)?;
        let options = IndexOptions {
            directory: index,
            is_rebuilt: rebuild,
            is_verified: verify,
            foreign: parse_foreign(foreign)?,
            token_counts: token_counts(settings, model.as_deref())?,
            ..IndexOptions::default()
        };
        let (patterns, read) = (shards.0, parse_read(read)?);
        let shards = runtime::run(py, move || {
            let mut stores = Stores::builder().requests_max(requests_max).read(read);
            if let Some(directory) = cache {
                stores = stores.cache(ShardCache { directory, bytes_max: cache_bytes });
            }
            let access =
                ShardAccess::new(&stores.build()?).allow_pipe(allow_pipe).allow_outside(allow_outside);
            let shards = expand_shards_in(&patterns, &access)?;
            check_present(&shards)?;
            Ok::<_, DflopError>(shards)
        })?;
        Ok(Self { shards, options, split, splits, repeat, opened: Arc::default(), arguments })
    }

    /// Pickles the URLs of the shards, with their credentials, and the settings; another process lists the
    /// shards again.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Vec<String>,))> {
        let this = slf.get();
        let addresses = this.shards.iter().map(|shard| shard.address().into_owned()).collect();
        Ok((this.arguments.constructor(&slf.get_type())?, (addresses,)))
    }

    /// Names of the shards, in order: their paths and URLs, without credentials.
    #[getter]
    fn shards(&self) -> Vec<String> {
        self.shards.iter().map(|shard| shard.url.to_string()).collect()
    }

    /// Digest of shard names and sizes, keys, offsets and lengths, 32 hex digits; opens the index.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.open(py)?.index().fingerprint().to_owned())
    }

    /// Path of the index file, ``None`` if the index is only in memory; opens the index.
    #[getter]
    fn index_path(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        Ok(self.open(py)?.index().path().map(ToOwned::to_owned))
    }

    /// Payload bytes of all good samples, including those outside the split; opens the index.
    #[getter]
    fn payload_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.index().payload_bytes())
    }

    /// Samples and shards that are bad according to their headers: dictionaries with ``shard``, ``offset``,
    /// ``key``, ``field``, ``reason``; opens the index.
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        skipped(py, self.open(py)?.skipped())
    }

    /// Oddities that cost no sample, such as repeated keys; opens the index.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.open(py)?.index().warnings().to_vec())
    }

    /// Number of good samples; opens the index.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.open(py)?.len() as usize)
    }

    /// Reads one sample by its place in the index, decoded as `Loader` delivers it, or those of a slice as a
    /// list; for a look at some samples, not for training. Opens the index.
    ///
    /// Raises:
    ///     IndexError: there is no such sample.
    ///     ErrorBudgetError: the sample cannot be decoded; the message names it and the reason.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        samples::at(self.open(index.py())?, index)
    }

    /// HTML for notebooks: counts, a histogram, the first keys; opens the index.
    fn _repr_html_<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let described = samples::describe(py, &self.open(py)?)?;
        py.import("dflop._html")?.call_method1("dataset", (described,))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let this = slf.get();
        let first = this.shards.first().map_or("", |shard| &shard.url);
        let shards = match this.shards.len() {
            1 => format!("{first:?}"),
            shards => format!("{first:?} and {} more shards", shards - 1),
        };
        let mut shown = vec![shards];
        shown.extend(this.arguments.shown(&slf.get_type())?);
        Ok(format!("Dataset({})", shown.join(", ")))
    }

    /// Returns a capsule of the rows of the index, one record batch per shard: ``pyarrow.table(dataset)``.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        drop(requested_schema);
        let dataset = self.open(py)?;
        let batches: Vec<_> = dataset.index().record_batches().cloned().collect();
        let schema = batches
            .first()
            .map_or_else(|| Arc::new(arrow_schema::Schema::empty()), arrow_array::RecordBatch::schema);
        stream(py, schema, batches)
    }
}

impl PyDataset {
    /// Opens the index with the settings of the dataset, or builds it.
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<Dataset> {
        self.open_counted(py, TokenCounts::Estimated)
    }

    /// Opens the index; `counts` applies if the dataset does not name a tokenizer.
    pub(crate) fn open_counted(&self, py: Python<'_>, counts: TokenCounts) -> PyResult<Dataset> {
        let mut options = self.options.clone();
        if matches!(options.token_counts, TokenCounts::Estimated) {
            options.token_counts = counts;
        }
        let digest = match &options.token_counts {
            TokenCounts::Estimated => None,
            TokenCounts::Of(counter) | TokenCounts::IfPresent(counter) => Some(counter.digest()),
        };
        let (shards, split, splits, repeat) =
            (self.shards.clone(), self.split.clone(), self.splits.clone(), self.repeat);
        let opened = self.opened.clone();
        runtime::run(py, move || {
            // Held while the index is built, so that two loaders do not build it twice.
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((_, dataset)) = opened.datasets.iter().find(|(of, _)| *of == digest) {
                return Ok(dataset.clone());
            }
            // A requested rebuild happens once, no matter how often the dataset is opened.
            options.is_rebuilt &= !opened.is_made;
            options.is_verified &= !opened.is_made;
            let dataset = open_dataset(shards, &options, split.as_deref(), splits.as_deref(), repeat)?;
            opened.is_made = true;
            opened.datasets.push((digest, dataset.clone()));
            Ok::<_, DflopError>(dataset)
        })
    }

    /// Returns the shards, for a loader that needs no index.
    pub(crate) fn shard_list(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the options for building the index.
    pub(crate) fn index_options(&self) -> &IndexOptions {
        &self.options
    }

    /// Records that the index was rebuilt.
    pub(crate) fn mark_rebuilt(&self) {
        let made = Opened { is_made: true, ..Opened::default() };
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = made;
    }

    /// Returns whether a split is selected, which only a reader through the index can honor.
    pub(crate) fn has_split(&self) -> bool {
        self.split.is_some()
    }
}

/// Checks that local shards exist; remote ones are not looked at.
fn check_present(shards: &[Shard]) -> Result<(), DflopError> {
    let is_missing = |shard: &&Shard| shard.path().is_some_and(|path| !path.exists());
    let Some(missing) = shards.iter().find(is_missing) else { return Ok(()) };
    let (pattern, reason) = (missing.url.to_string(), "no such file or directory".to_owned());
    Err(dflop_loader::Error::from(SelectionError::ShardList { pattern, reason }).into())
}

fn open_dataset(
    shards: Vec<Shard>,
    options: &IndexOptions,
    split: Option<&str>,
    splits: Option<&std::path::Path>,
    repeat: Option<u64>,
) -> Result<Dataset, DflopError> {
    let index = Arc::new(Index::open_or_build(shards, options)?);
    let mut dataset = Dataset::from(index.clone());
    if let Some(split) = split {
        let splits = splits.map_or_else(|| Splits::beside(&index), Splits::read)?;
        dataset = dataset.split(&splits, split)?;
    }
    Ok(match repeat {
        Some(epochs) => dataset.repeat(epochs),
        None => dataset,
    })
}

fn parse_foreign(name: &str) -> PyResult<ForeignIndexes> {
    Ok(match name {
        "ignore" => ForeignIndexes::Ignore,
        "check" => ForeignIndexes::Check,
        "follow" => ForeignIndexes::Follow,
        _ => {
            let reason = format!("expected ignore, check or follow, found `{name}`");
            return Err(DflopError::config("foreign", reason).into());
        }
    })
}

fn parse_read(name: &str) -> PyResult<ReadMode> {
    Ok(match name {
        "auto" => ReadMode::Auto,
        "mmap" => ReadMode::Mmap,
        "pread" => ReadMode::Pread,
        _ => {
            let reason = format!("expected auto, mmap or pread, found `{name}`");
            return Err(DflopError::config("read", reason).into());
        }
    })
}

/// Dataset argument of a loader: a dataset, a mixture, or the names of shards.
#[derive(FromPyObject)]
pub(crate) enum Source<'py> {
    Dataset(Bound<'py, PyDataset>),
    Mixture(Bound<'py, PyMixture>),
    Shards(Names),
}

impl<'py> Source<'py> {
    /// Makes a dataset of names of shards.
    pub(crate) fn resolved(self, py: Python<'py>) -> PyResult<Self> {
        match self {
            Self::Shards(_) => self.dataset(py).map(Self::Dataset),
            other => Ok(other),
        }
    }

    /// Returns the dataset or mixture; `None` for names of shards.
    pub(crate) fn object(&self) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Dataset(dataset) => Some(dataset.clone().into_any()),
            Self::Mixture(mixture) => Some(mixture.clone().into_any()),
            Self::Shards(_) => None,
        }
    }

    /// Returns the dataset of the source.
    ///
    /// # Errors
    /// `ConfigError` for a mixture, which only the balanced loader supports.
    pub(crate) fn dataset(self, py: Python<'py>) -> PyResult<Bound<'py, PyDataset>> {
        match self {
            Self::Dataset(dataset) => Ok(dataset),
            Self::Shards(names) => {
                let class = py.get_type::<PyDataset>();
                Ok(class.call1((names.0,))?.cast_into::<PyDataset>()?)
            }
            Self::Mixture(_) => {
                let reason =
                    "expected a dataset, found a mixture: use `BalancedLoader`, which reads through indexes";
                Err(DflopError::config("dataset", reason).into())
            }
        }
    }

    /// Opens the source as a mixture.
    pub(crate) fn mixture(self, py: Python<'py>, counts: &TokenCounts) -> PyResult<Mixture> {
        match self {
            Self::Mixture(mixture) => mixture.get().open(py, counts),
            source => Ok(source.dataset(py)?.get().open_counted(py, counts.clone())?.into()),
        }
    }
}

/// Datasets that are drawn from by weights; created by `mix`.
#[pyclass(frozen, name = "Mixture", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyMixture {
    datasets: Vec<(Py<PyDataset>, f64)>,
    weights_from: Vec<(u64, Vec<f64>)>,
    pattern: Option<Vec<u32>>,
    stop: Stop,
    names: Option<Vec<String>>,
}

impl PyMixture {
    /// Returns the arguments of [`mix`].
    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let datasets: Vec<_> = self.datasets.iter().map(|(dataset, weight)| (dataset, weight)).collect();
        let (weights_from, choose, names) = (&self.weights_from, &self.pattern, &self.names);
        let stop = match self.stop {
            Stop::FirstExhausted => "first_exhausted",
            Stop::AllExhausted => "all_exhausted",
        };
        Ok(arguments!(py, datasets, weights_from, choose, stop, names))
    }

    fn open(&self, py: Python<'_>, counts: &TokenCounts) -> PyResult<Mixture> {
        let mut mixture = Mixture::new().stop(self.stop);
        for (number, (dataset, weight)) in self.datasets.iter().enumerate() {
            let mut dataset = dataset.get().open_counted(py, counts.clone())?;
            if let Some(names) = &self.names {
                dataset = dataset.named(names[number].as_str());
            }
            mixture = mixture.dataset(dataset, *weight);
        }
        for (step, weights) in &self.weights_from {
            mixture = mixture.weights_from(*step, weights);
        }
        Ok(match &self.pattern {
            Some(pattern) => mixture.choose(pattern.clone()),
            None => mixture,
        })
    }
}

#[pymethods]
impl PyMixture {
    fn __len__(&self) -> usize {
        self.datasets.len()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        Ok((slf.get().arguments(slf.py())?.constructor(&mix)?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        let shown = slf.get().arguments(slf.py())?.shown(&mix)?;
        Ok(format!("Mixture({})", shown.join(", ")))
    }
}

/// Mixes datasets: every draw of a `BalancedLoader` takes the next sample of one of them.
///
/// Args: datasets: pairs of dataset and weight; weights need not add up to one and are rounded to four
/// decimals. weights_from: weights from a step on: pairs of step and weights, one per dataset. choose:
/// numbers of datasets, a pattern that repeats, in place of weights. stop: end of a mixture of datasets with
/// ``repeat``: ``first_exhausted`` or ``all_exhausted``. names: names of the datasets, in
/// ``Microbatch.sources`` and metrics. Default: the directories of their shards.
///
/// Raises:
///     ConfigError: weights or pattern do not fit the datasets, raised by the loader; or there is not one
///         name, different from the others, for each of them.
///
/// Example::
///
///     mixture = dflop.mix([("photos/", 0.7), ("clips/", 0.3)], names=["photos", "clips"])
#[pyfunction]
#[pyo3(signature = (datasets, *, weights_from=Vec::new(), choose=None, stop="first_exhausted", names=None))]
pub(crate) fn mix<'py>(
    py: Python<'py>,
    datasets: Vec<(Source<'py>, f64)>,
    weights_from: Vec<(u64, Vec<f64>)>,
    choose: Option<Vec<u32>>,
    stop: &str,
    names: Option<Vec<String>>,
) -> PyResult<PyMixture> {
    let stop = match stop {
        "first_exhausted" => Stop::FirstExhausted,
        "all_exhausted" => Stop::AllExhausted,
        _ => {
            let reason = format!("expected first_exhausted or all_exhausted, found `{stop}`");
            return Err(DflopError::config("stop", reason).into());
        }
    };
    if let Some(names) = &names {
        check_names(names, datasets.len())?;
    }
    let open = |(source, weight): (Source<'py>, f64)| Ok((source.dataset(py)?.unbind(), weight));
    let datasets = datasets.into_iter().map(open).collect::<PyResult<_>>()?;
    Ok(PyMixture { datasets, weights_from, pattern: choose, stop, names })
}

/// Checks that each dataset has a name of its own.
fn check_names(names: &[String], datasets: usize) -> Result<(), DflopError> {
    let refused = |reason| Err(DflopError::config("names", reason));
    if names.len() != datasets {
        return refused(format!("expected a name for each of {datasets} datasets, found {}", names.len()));
    }
    let is_repeated = |(at, name): &(usize, &String)| name.is_empty() || names[..*at].contains(name);
    match names.iter().enumerate().find(is_repeated) {
        Some((_, name)) => refused(format!("expected names that are not empty and differ, found `{name}`")),
        None => Ok(()),
    }
}
