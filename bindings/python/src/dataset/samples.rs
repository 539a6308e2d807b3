//! Reads individual dataset samples by index, decoded as `dflop.Loader` delivers them.
//!
//! Lists the shards in a dataset.

use crate::arrays::framework::Framework;
use crate::convert::Delivery;
use crate::error::DflopError;
use crate::{convert, runtime};
use dflop_costmodel::SampleShape;
use dflop_loader::decode::Decode;
use dflop_loader::error::SelectionError;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::settings::{StoreSettings, set};
use dflop_loader::shard::{Shard, expand_shards_in};
use dflop_loader::{Dataset, Loader};
use futures::StreamExt;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySlice};
use std::path::PathBuf;

/// Maximum number of decode threads per read.
const WORKERS_MAX: usize = 2;
/// Maximum number of samples for the distributions in a description, spread evenly over the dataset.
const DESCRIBED_MAX: u64 = 10_000;
/// Maximum number of keys in a description.
const KEYS_MAX: u64 = 5;

/// Returns the sample at an index, or a list with the samples in a slice.
pub(super) fn at<'py>(dataset: Dataset, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let (py, len) = (index.py(), dataset.len());
    if let Ok(slice) = index.cast::<PySlice>() {
        let found = slice.indices(len as isize)?;
        let places = (0..found.slicelength as isize).map(|at| (found.start + at * found.step) as u64);
        let mut places: Vec<u64> = places.collect();
        let is_backward = found.step < 0;
        if is_backward {
            places.reverse();
        }
        let samples = read(py, &dataset, &places)?;
        if is_backward {
            samples.reverse()?;
        }
        return Ok(samples.into_any());
    }
    let index: i64 = index.extract()?;
    let place = if index < 0 { index.checked_add_unsigned(len) } else { Some(index) };
    let place = place.and_then(|place| u64::try_from(place).ok()).filter(|place| *place < len);
    let place = place.ok_or_else(|| PyIndexError::new_err(format!("index {index} of {len} samples")))?;
    read(py, &dataset, &[place])?.get_item(0)
}

/// Reads samples at ascending indices.
///
/// # Errors
/// `ErrorBudgetError` that names the first sample that cannot be read or decoded.
fn read<'py>(py: Python<'py>, dataset: &Dataset, places: &[u64]) -> PyResult<Bound<'py, PyList>> {
    if places.is_empty() {
        return Ok(PyList::empty(py));
    }
    let delivery = Delivery::new(Framework::Auto, "media").resolved(py)?;
    let budget = ErrorBudget::new(0.0).map_err(DflopError::from)?.at_most(0);
    let loader = Loader::builder(Vec::new())
        .samples_of_rank(dataset.clone().at_places(places), 0, 1)
        .batch_size(places.len())
        .decode(Decode::Media)
        .workers(WORKERS_MAX.min(places.len()))
        .error_budget(budget)
        .build()
        .map_err(DflopError::from)?;
    let mut batches = loader.stream();
    let batch = runtime::wait(py, async { batches.next().await })?;
    let ended = || dflop_loader::Error::StageEnded { stage: "read" };
    let batch = batch.ok_or_else(ended).and_then(|batch| batch).map_err(DflopError::from)?;
    // Threads that end may wait for the interpreter.
    py.detach(|| drop((batches, loader)));
    convert::samples(py, batch.samples, delivery)
}

/// Describes a dataset for HTML: counts, the first keys, bytes and text tokens for some samples.
pub(super) fn describe<'py>(py: Python<'py>, dataset: &Dataset) -> PyResult<Bound<'py, PyDict>> {
    let (index, len) = (dataset.index(), dataset.len());
    let row = |place: u64| index.sample(dataset.sample_number(place));
    let keys: Vec<&str> = (0..len.min(KEYS_MAX)).map(|place| row(place).key()).collect();
    let described = len.min(DESCRIBED_MAX);
    let (mut bytes, mut text_tokens, mut media) = (Vec::new(), Vec::new(), [0; 3]);
    let mut shape = SampleShape::default();
    for at in 0..described {
        let row = row((u128::from(at) * u128::from(len) / u128::from(described)) as u64);
        shape.clear();
        row.read_shape(&mut shape);
        bytes.push(row.bytes());
        text_tokens.push(u64::from(shape.text_tokens));
        media = [media[0] + shape.images.len(), media[1] + shape.audio.len(), media[2] + shape.videos.len()];
    }
    let made = PyDict::new(py);
    made.set_item("name", &*dataset.name())?;
    made.set_item("split", dataset.split_name())?;
    made.set_item("shards", index.shards().len())?;
    made.set_item("samples", len)?;
    made.set_item("payload_bytes", index.payload_bytes())?;
    made.set_item("skipped", dataset.skipped().len())?;
    made.set_item("keys", keys)?;
    made.set_item("bytes", bytes)?;
    made.set_item("text_tokens", text_tokens)?;
    made.set_item("media", media)?;
    Ok(made)
}

/// Returns the settings of the shard stores: those of this machine, from environment variables, and those of
/// the dataset.
///
/// - `allow`: reach of shard names: `pipe`, `outside`
///
/// # Errors
/// `ConfigError` for an environment variable with an invalid value and for another name in `allow`.
pub(super) fn store_settings(
    cache: Option<PathBuf>,
    allow: Option<Vec<String>>,
) -> Result<StoreSettings, DflopError> {
    let mut settings = StoreSettings::from_environment()?;
    settings.cache = cache.or(settings.cache);
    settings.ignore_size_without_cache();
    if let Some(names) = allow {
        set(&mut settings, "allow", names.into())?;
    }
    Ok(settings)
}

/// Lists the shards that patterns name.
///
/// # Errors
/// `ConfigError` if a pattern cannot be expanded or a local shard does not exist.
pub(super) fn list(patterns: &[String], store: &StoreSettings) -> Result<Vec<Shard>, DflopError> {
    let shards = expand_shards_in(patterns, &store.access(&store.stores()?))?;
    check_present(&shards)?;
    Ok(shards)
}

/// Checks that local shards exist; remote shards are not checked.
fn check_present(shards: &[Shard]) -> Result<(), DflopError> {
    let is_missing = |shard: &&Shard| shard.path().is_some_and(|path| !path.exists());
    let Some(missing) = shards.iter().find(is_missing) else { return Ok(()) };
    let (pattern, reason) = (missing.url.to_string(), "no such file or directory".to_owned());
    Err(dflop_loader::Error::from(SelectionError::ShardList { pattern, reason }).into())
}
