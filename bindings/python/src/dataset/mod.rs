//! `dflop.Dataset`: shards, with an index that is opened on demand; dataset mixtures.
//!
//! Opens a dataset index on demand, once per text counter.
//!
//! Data argument of the loaders: a dataset, a mixture, or shard names.

mod caller;
mod mixture;
mod parts;
mod samples;

use super::convert::{Arguments, Names, arguments, skipped};
use super::error::{DflopError, to_python};
use super::runtime;
use super::runtime::refuse_keywords;
use super::table::stream;
use super::tokenizer::{TokenizerSettings, token_counts};
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::shard::Shard;
use dflop_loader::{Dataset, Mixture, Splits};
use parts::{Parts, Values};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use samples::{list, store_settings};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use caller::{Caller, describe_by_shape, describe_shape};
pub(crate) use mixture::{PyMixture, mix};

#[doc = include_str!("dataset.md")]
#[pyclass(frozen, name = "Dataset", module = "dflop._native", mapping)]
#[derive(Debug)]
pub(crate) struct PyDataset {
    opener: Opener,
    /// Constructor arguments, to create the dataset again in another process.
    arguments: Arguments,
    /// Methods that led from the constructed dataset to this one, with their arguments.
    calls: Vec<(&'static str, Arguments)>,
}

#[pymethods]
impl PyDataset {
    #[new]
    #[pyo3(
        signature = (shards, *, index=None, split=None, cache=None, allow=None, **unknown),
        // The same without the keywords that are refused.
        text_signature = "(shards, *, index=None, split=None, cache=None, allow=None)"
    )]
    fn new(
        py: Python<'_>,
        shards: Names,
        index: Option<PathBuf>,
        split: Option<Bound<'_, PyAny>>,
        cache: Option<PathBuf>,
        allow: Option<Names>,
        unknown: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        refuse_keywords(py, "Dataset", unknown.as_ref())?;
        let allow = allow.map(|names| names.0);
        // Kept as given: `__reduce__` creates the dataset from them in another process.
        let arguments = arguments! { py, index, split, cache, allow };
        let (split, splits) = split.as_ref().map(parse_split).transpose()?.unwrap_or_default();
        let store = store_settings(cache, allow)?;
        let shards = runtime::run(py, move || list(&shards.0, &store))?;
        let options = IndexOptions { directory: index, ..IndexOptions::default() };
        let opener = Opener { shards, options, split, splits, repeat: None, opened: Arc::default() };
        Ok(Self { opener, arguments, calls: Vec::new() })
    }

    /// Returns the dataset with texts counted by a tokenizer instead of estimated, for a cost model or your
    /// own processor; a `BalancedLoader` with a tokenizer counts them itself. The counts are kept in the
    /// index.
    ///
    /// Args:
    ///     tokenizer (str | PathLike | tokenizer): ``tokenizer.json``, its directory, a name in the local
    ///         Hugging Face cache, or a tokenizer from ``tokenizers`` or ``transformers``. Default: the
    ///         tokenizer in the model's directory.
    ///     model (str | PathLike | Sequence): counts texts in this model's chat format. Default: the bare
    ///         text is counted.
    ///     chat_template (str): Jinja source for the chat template. Default: the tokenizer's.
    ///     caption_prompt (str): prompt that captions answer. Default: captions are trained on without a chat
    ///         template.
    ///
    /// Returns:
    ///     Dataset: the same samples with exact token counts.
    ///
    /// Raises:
    ///     ConfigError: there is no tokenizer, or it is invalid.
    ///
    /// Examples:
    ///     >>> dataset = dflop.Dataset("shards/").count_tokens("model/")
    ///     >>> len(dataset)
    ///     256
    #[pyo3(signature = (tokenizer=None, *, model=None, chat_template=None, caption_prompt=None))]
    fn count_tokens(
        &self,
        py: Python<'_>,
        tokenizer: Option<Bound<'_, PyAny>>,
        model: Option<Names>,
        chat_template: Option<String>,
        caption_prompt: Option<String>,
    ) -> PyResult<Self> {
        let model = model.map(|names| names.0);
        if tokenizer.is_none() && model.is_none() {
            return Err(
                DflopError::config("tokenizer", "expected a tokenizer or a model that has one").into()
            );
        }
        let arguments = arguments! { py, tokenizer, model, chat_template, caption_prompt };
        let settings = TokenizerSettings::new(tokenizer.as_ref(), chat_template, caption_prompt)?;
        let counts = token_counts(settings, model.as_deref())?;
        let call = ("count_tokens", arguments.without_none(py)?);
        Ok(self.derived(py, call, |opener| opener.options.token_counts = counts))
    }

    /// Returns the dataset with a limit on the epochs that a run draws from it, for mixtures.
    ///
    /// Args:
    ///     epochs (int): number of epochs.
    ///
    /// Returns:
    ///     Dataset: the same samples, which end after these epochs.
    ///
    /// Examples:
    ///     >>> mixture = dflop.mix([(dflop.Dataset("shards/000.tar").repeat(2), 1), ("shards/001.tar", 1)])
    ///     >>> len(mixture)
    ///     2
    fn repeat(&self, py: Python<'_>, epochs: u64) -> PyResult<Self> {
        let arguments = arguments! { py, epochs };
        Ok(self.derived(py, ("repeat", arguments), |opener| opener.repeat = Some(epochs)))
    }

    /// Returns a mixture of the classes in the dataset: all are drawn equally often, or by weight, exactly in
    /// every period. Within a class, every sample is drawn once per epoch of the class.
    ///
    /// Args:
    ///     by (str | Callable): field whose text is the class, such as ``cls``, or key in the documents,
    ///         such as a column of a packed table; or a function that is called as ``Loader(filter=…)`` and
    ///         returns the class of each sample, a text or a number.
    ///     weights (Mapping[str | int, float]): weight for each class, relative to the other weights; 0
    ///         leaves a class out. Default: equal weights.
    ///
    /// Returns:
    ///     Mixture: the ``dataset`` argument of a loader; the classes are its datasets, named as in
    ///         ``photos/kite``.
    ///
    /// Raises:
    ///     ConfigError: a sample has no class, there are more than 4,096 classes, or the weights do not name
    ///         exactly the classes.
    ///
    /// Examples:
    ///     >>> mixture = dflop.Dataset("shards/").by_class("cls")
    ///     >>> mixture
    ///     Dataset("shards/000.tar" and 3 more shards).by_class('cls')
    ///     >>> loader = dflop.Loader(mixture, batch_size=8, epochs=None, samples=64, order=dflop.Order())
    ///     >>> [sorted(batch["cls"]) for batch in loader][7]
    ///     [0, 1, 2, 3, 4, 5, 6, 7]
    #[pyo3(signature = (by, *, weights=None))]
    fn by_class(
        slf: &Bound<'_, Self>,
        by: Bound<'_, PyAny>,
        weights: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyMixture> {
        let py = slf.py();
        let arguments = arguments!(py, by, weights).without_none(py)?;
        let dataset = slf.get().open(py)?;
        let values = Values::by_class(&dataset, &by, weights.as_ref())?;
        Ok(PyMixture::divided(slf, Parts::new(dataset, values, ("by_class", arguments))?))
    }

    /// Returns a mixture in which each sample is drawn as often as its weight, relative to the other samples:
    /// samples with the same weight are a dataset in the mixture.
    ///
    /// Args:
    ///     by (Callable): function that is called as ``Loader(filter=…)`` and returns the weight of each
    ///         sample; weights are rounded to four decimals, and 0 leaves a sample out.
    ///
    /// Returns:
    ///     Mixture: the ``dataset`` argument of a loader.
    ///
    /// Raises:
    ///     ConfigError: a weight is negative or not finite, all are 0, or there are more than 4,096 different
    ///         weights.
    ///
    /// Examples:
    ///     >>> def weights(samples):
    ///     ...     return [2.0 if sample["images"] else 0.5 for sample in samples]
    ///     >>> len(dflop.Dataset("shards/").by_weight(weights))
    ///     2
    fn by_weight(slf: &Bound<'_, Self>, by: Bound<'_, PyAny>) -> PyResult<PyMixture> {
        let py = slf.py();
        let arguments = arguments!(py, by);
        let dataset = slf.get().open(py)?;
        let values = Values::by_weight(&dataset, &by)?;
        Ok(PyMixture::divided(slf, Parts::new(dataset, values, ("by_weight", arguments))?))
    }

    /// Returns the dataset with an index that is built anew when it is first opened, even if the present one
    /// fits the shards.
    ///
    /// Args:
    ///     verify (bool): decodes every field meanwhile, so that every bad sample is known in advance.
    ///         Default: ``False``.
    ///
    /// Returns:
    ///     Dataset: the dataset whose index is built anew.
    ///
    /// Examples:
    ///     >>> dflop.Dataset("shards/").reindex(verify=True).skipped
    ///     []
    #[pyo3(signature = (*, verify=false))]
    fn reindex(&self, py: Python<'_>, verify: bool) -> PyResult<Self> {
        let arguments = arguments! { py, verify };
        Ok(self.derived(py, ("reindex", arguments), |opener| {
            (opener.options.is_rebuilt, opener.options.is_verified) = (true, verify);
        }))
    }

    /// Pickles the shard URLs, with credentials, and the settings; another process lists the shards again.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Vec<String>,))> {
        let (py, this) = (slf.py(), slf.get());
        let addresses = this.shard_list().iter().map(|shard| shard.address().into_owned()).collect();
        let mut constructor = this.arguments.constructor(&slf.get_type())?;
        if !this.calls.is_empty() {
            let calls: Vec<_> = this.calls.iter().map(|(name, given)| (*name, given.dict(py))).collect();
            let again = py.import("dflop.offline")?.getattr("dataset_again")?;
            constructor = py.import("functools")?.getattr("partial")?.call1((again, constructor, calls))?;
        }
        Ok((constructor, (addresses,)))
    }

    /// Shard names, in order: paths and URLs, without credentials.
    #[getter]
    fn shards(&self) -> Vec<String> {
        self.shard_list().iter().map(|shard| shard.url.to_string()).collect()
    }

    /// Digest over shard names and sizes, keys, offsets and lengths, 32 hex digits; opens the index.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.open(py)?.index().fingerprint().to_owned())
    }

    /// Path of the index file, ``None`` if the index is only in memory; opens the index.
    #[getter]
    fn index_path(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        Ok(self.open(py)?.index().path().map(ToOwned::to_owned))
    }

    /// Number of payload bytes in all good samples, including samples outside the split; opens the index.
    #[getter]
    fn payload_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.index().payload_bytes())
    }

    /// Samples and shards with bad headers: dictionaries with ``shard``, ``offset``, ``key``, ``field``,
    /// ``reason``; opens the index.
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        skipped(py, self.open(py)?.skipped())
    }

    /// Oddities that exclude no sample, such as repeated keys; opens the index.
    #[getter]
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.open(py)?.index().warnings().to_vec())
    }

    /// Number of good samples without target tokens; opens the index.
    #[getter]
    fn samples_without_target(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.index().samples_without_target())
    }

    /// Unused sample parts: dictionaries with ``field``, ``part`` (a key in the field's document, or empty
    /// for the whole field), ``samples``, and the ``key`` and value (``example``) from the first sample;
    /// opens the index.
    #[getter]
    fn unused<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.open(py)?.index().unused())
    }

    /// Number of good samples; opens the index.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.open(py)?.len() as usize)
    }

    /// Reads a single sample, or the samples in a slice as a list; opens the index. Python shows only the
    /// class text.
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
        let first = this.shard_list().first().map_or("", |shard| &shard.url);
        let shards = match this.shard_list().len() {
            1 => format!("{first:?}"),
            shards => format!("{first:?} and {} more shards", shards - 1),
        };
        let mut shown = vec![shards];
        shown.extend(this.arguments.shown(&slf.get_type())?);
        let mut text = format!("Dataset({})", shown.join(", "));
        for (name, given) in &this.calls {
            let shown = given.shown(&slf.getattr(*name)?)?;
            text.extend([".", name, "(", &shown.join(", "), ")"]);
        }
        Ok(text)
    }

    /// Returns a capsule with the index rows, a record batch per shard: ``pyarrow.table(dataset)``.
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
    /// Returns a dataset that a method changed, with an index of its own.
    fn derived(
        &self,
        py: Python<'_>,
        call: (&'static str, Arguments),
        change: impl FnOnce(&mut Opener),
    ) -> Self {
        let mut opener = Opener { opened: Arc::default(), ..self.opener.clone() };
        change(&mut opener);
        let calls = self.calls.iter().map(|(name, given)| (*name, given.clone_ref(py)));
        let calls = calls.chain([call]).collect();
        Self { opener, arguments: self.arguments.clone_ref(py), calls }
    }

    /// Opens the index with the dataset settings, or builds the index.
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<Dataset> {
        self.open_counted(py, TokenCounts::Estimated)
    }

    /// Opens the index; `counts` applies if the dataset does not name a tokenizer.
    pub(crate) fn open_counted(&self, py: Python<'_>, counts: TokenCounts) -> PyResult<Dataset> {
        let opener = self.opener.clone();
        runtime::run(py, move || opener.open(counts))
    }

    /// Returns the shards, for a loader that needs no index.
    pub(crate) fn shard_list(&self) -> &[Shard] {
        &self.opener.shards
    }

    /// Returns the options for building the index.
    pub(crate) fn index_options(&self) -> &IndexOptions {
        &self.opener.options
    }

    /// Records that the index was rebuilt.
    pub(crate) fn mark_rebuilt(&self) {
        self.opener.mark_rebuilt();
    }

    /// Returns whether a shard is a pipe or standard input, which cannot be indexed.
    pub(crate) fn is_streamed(&self) -> bool {
        self.shard_list().iter().any(|shard| shard.path().is_none() && shard.remote().is_none())
    }

    /// Returns whether a split is selected, which only a reader that uses the index can honor.
    pub(crate) fn has_split(&self) -> bool {
        self.opener.split.is_some()
    }
}

/// Parses a split: a name, or a name with the file that defines it.
fn parse_split(split: &Bound<'_, PyAny>) -> PyResult<(Option<String>, Option<PathBuf>)> {
    if let Ok(name) = split.extract::<String>() {
        return Ok((Some(name), None));
    }
    let (name, file) = split.extract::<(String, PathBuf)>().map_err(|_| {
        PyTypeError::new_err(
            "expected `split` to be a name, or a pair of a name and the file that defines it",
        )
    })?;
    Ok((Some(name), Some(file)))
}

/// Shards, and the settings for opening the index. Clones share the opened datasets.
#[derive(Debug, Clone)]
struct Opener {
    shards: Vec<Shard>,
    options: IndexOptions,
    split: Option<String>,
    splits: Option<PathBuf>,
    repeat: Option<u64>,
    opened: Arc<Mutex<Opened>>,
}

/// Opened datasets.
#[derive(Debug, Default)]
struct Opened {
    /// Datasets by token counter digest.
    datasets: Vec<(Option<String>, Dataset)>,
    /// Whether the index was rebuilt, so that it is not rebuilt again.
    is_made: bool,
}

impl Opener {
    /// Opens the index, or builds the index; `counts` applies if the options do not name a tokenizer.
    fn open(mut self, counts: TokenCounts) -> Result<Dataset, DflopError> {
        if matches!(self.options.token_counts, TokenCounts::Estimated) {
            self.options.token_counts = counts;
        }
        let digest = match &self.options.token_counts {
            TokenCounts::Estimated => None,
            TokenCounts::Of(counter) | TokenCounts::IfPresent(counter) => Some(counter.digest()),
        };
        let opened = self.opened.clone();
        // Held while the index is built, so that two loaders do not build it twice.
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, dataset)) = opened.datasets.iter().find(|(of, _)| *of == digest) {
            return Ok(dataset.clone());
        }
        // A requested rebuild happens once, no matter how often the dataset is opened.
        self.options.is_rebuilt &= !opened.is_made;
        self.options.is_verified &= !opened.is_made;
        let dataset = self.dataset()?;
        opened.is_made = true;
        opened.datasets.push((digest, dataset.clone()));
        Ok(dataset)
    }

    /// Records that the index was rebuilt.
    fn mark_rebuilt(&self) {
        let made = Opened { is_made: true, ..Opened::default() };
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = made;
    }

    fn dataset(self) -> Result<Dataset, DflopError> {
        let index = Arc::new(Index::open_or_build(self.shards, &self.options)?);
        let mut dataset = Dataset::from(index.clone());
        if let Some(split) = self.split {
            let splits = self.splits.as_deref().map_or_else(|| Splits::beside(&index), Splits::read)?;
            dataset = dataset.split(&splits, &split)?;
        }
        Ok(match self.repeat {
            Some(epochs) => dataset.repeat(epochs),
            None => dataset,
        })
    }
}

/// Data argument of a loader: a dataset, a mixture, or shard names.
#[derive(FromPyObject)]
pub(crate) enum Source<'py> {
    Dataset(Bound<'py, PyDataset>),
    Mixture(Bound<'py, PyMixture>),
    Shards(Names),
}

impl<'py> Source<'py> {
    /// Creates a dataset from shard names.
    pub(crate) fn resolved(self, py: Python<'py>) -> PyResult<Self> {
        match self {
            Self::Shards(_) => self.dataset(py).map(Self::Dataset),
            other => Ok(other),
        }
    }

    /// Returns the dataset or mixture; `None` for shard names.
    pub(crate) fn object(&self) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Dataset(dataset) => Some(dataset.clone().into_any()),
            Self::Mixture(mixture) => Some(mixture.clone().into_any()),
            Self::Shards(_) => None,
        }
    }

    /// Returns the source dataset.
    ///
    /// # Errors
    /// `ConfigError` for a mixture.
    pub(crate) fn dataset(self, py: Python<'py>) -> PyResult<Bound<'py, PyDataset>> {
        match self {
            Self::Dataset(dataset) => Ok(dataset),
            Self::Shards(names) => {
                let class = py.get_type::<PyDataset>();
                Ok(class.call1((names.0,))?.cast_into::<PyDataset>()?)
            }
            Self::Mixture(_) => {
                let reason = "expected a dataset, found a mixture";
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
