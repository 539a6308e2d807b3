//! `dflop.Loader`: delivers batches in shard order, shuffled in a buffer, or in a global order.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dflop_loader::index::TokenCounts;
use dflop_loader::settings::OrderSettings;
use dflop_loader::{BatchStream, Dataset, Loader, LoaderBuilder, LoaderState, ShuffleBuffer, StreamState};
use futures::StreamExt;
use pyo3::exceptions::{PyException, PyTypeError, PyUserWarning};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::convert::{Arguments, arguments};
use super::filter::{ReadArguments, ReadSettings};
use super::runtime::{Group, refuse_index, refuse_keywords};
use crate::arrays::framework::Framework;
use crate::convert::{self, Delivery};
use crate::dataset::{PyDataset, Source};
use crate::error::{DflopError, to_python};
use crate::filter::filtered_by_shape;
use crate::image::Image;
use crate::runtime::Threaded;
use crate::transform::FirstException;

/// Warning for ranks that share streams.
const NO_INDEX: &CStr =
    c"pipes and standard input have no index: every rank reads whole shards, so ranks have different numbers \
    of batches; a global shuffle, splits, mixtures, weights, `len` and a resume on another number of ranks \
    need shards in files or in a store";

#[doc = include_str!("loader.md")]
#[pyclass(frozen, name = "Loader", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyLoader {
    arguments: Arguments,
    /// Dataset whose whole shards are read; `None` if samples are drawn through an index.
    dataset: Option<Py<PyDataset>>,
    builder: LoaderBuilder,
    /// Number of samples that the filter excluded.
    filtered_samples: u64,
    delivery: Delivery,
    /// Number of epochs in a pass; `None` for no end.
    epochs: Option<u64>,
    /// Whether a number of samples ends a pass.
    is_limited: bool,
    first_exception: FirstException,
    /// `None` once the loader is closed.
    pass: Mutex<Option<Pass>>,
    /// Iterator streams, which are closed with the loader.
    streams: Mutex<Vec<Weak<Threaded<LiveStream>>>>,
}

/// A stream, which iterators on several threads may wait for.
type LiveStream = tokio::sync::Mutex<BatchStream>;

/// State of the current pass, or of the next pass.
#[derive(Debug)]
struct Pass {
    loader: Arc<Threaded<Loader>>,
    /// Whether iteration over the pass has started.
    is_begun: bool,
    /// Whether the end of the pass was delivered.
    is_ended: Arc<AtomicBool>,
    /// First epoch of the next pass.
    next_epoch: u64,
}

impl Pass {
    fn new(loader: Arc<Threaded<Loader>>, next_epoch: u64) -> Self {
        Self { loader, is_begun: false, is_ended: Arc::default(), next_epoch }
    }
}

#[pymethods]
impl PyLoader {
    #[new]
    #[pyo3(
        signature = (
            dataset, *, batch_size=32, image=None, dp_rank=0, dp_size=1, seed=0, epochs=Some(1),
            samples=None, drop_last=false, order=None, shuffle_buffer=None, shuffle_bytes=268_435_456,
            shuffle_shards=false, read=None, transforms=None, filter=None, array_type="auto", **unknown
        ),
        // The same without the rejected keywords.
        text_signature = "(dataset, *, batch_size=32, image=None, dp_rank=0, dp_size=1, seed=0, epochs=1, \
                          samples=None, drop_last=False, order=None, shuffle_buffer=None, \
                          shuffle_bytes=268435456, shuffle_shards=False, read=None, transforms=None, \
                          filter=None, array_type='auto')"
    )]
    #[expect(clippy::too_many_arguments, reason = "one keyword each")]
    fn new<'py>(
        py: Python<'py>,
        dataset: Source<'py>,
        batch_size: usize,
        image: Option<Bound<'py, Image>>,
        dp_rank: usize,
        dp_size: usize,
        seed: u64,
        epochs: Option<u64>,
        samples: Option<u64>,
        drop_last: bool,
        order: Option<Bound<'py, PyAny>>,
        shuffle_buffer: Option<usize>,
        shuffle_bytes: u64,
        shuffle_shards: bool,
        read: Option<Bound<'py, PyAny>>,
        transforms: Option<Bound<'py, PyAny>>,
        filter: Option<Bound<'py, PyAny>>,
        array_type: &str,
        unknown: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Self> {
        refuse_keywords(py, "Loader", unknown.as_ref())?;
        let source = dataset.resolved(py)?;
        let dataset = source.object();
        let arguments = arguments! {
            py, dataset, batch_size, image, dp_rank, dp_size, seed, epochs, samples, drop_last, order,
            shuffle_buffer, shuffle_bytes, shuffle_shards, read, transforms, filter, array_type,
        };
        let framework = Framework::parse(array_type)?.resolved(py)?;
        let image = image.map(|image| image.get().clone());
        let input = Input::new(py, source, filter.as_ref(), order.as_ref(), (dp_rank, dp_size))?;
        let Input { builder, dataset, filtered_samples } = input;
        let builder = builder.batch_size(batch_size).epochs(epochs.unwrap_or(u64::MAX)).drop_last(drop_last);
        let mut builder = convert_images(builder, image.as_ref(), framework)?;
        if let Some(samples) = samples {
            builder = builder.samples_max(samples);
        }
        if let Some(samples) = shuffle_buffer {
            let buffer = ShuffleBuffer::new(samples);
            builder = builder.shuffle(ShuffleBuffer { bytes_max: shuffle_bytes, ..buffer });
        }
        if shuffle_shards {
            builder = builder.shuffle_shards();
        }
        let of_read = ReadArguments {
            seed,
            framework,
            transforms: transforms.as_ref(),
            image: image.as_ref(),
            is_prepared: false,
        };
        let read = ReadSettings::new(&Group::new(py, "read", read.as_ref(), "Read")?, &of_read)?;
        let builder = read.apply_to_stream(builder)?;
        let pass = Mutex::new(Some(Pass::new(start(&builder)?, 0)));
        let ReadSettings { first_exception, delivery, .. } = read;
        let (is_limited, streams) = (samples.is_some(), Mutex::default());
        Ok(Self {
            arguments,
            dataset,
            builder,
            filtered_samples,
            delivery,
            epochs,
            is_limited,
            first_exception,
            pass,
            streams,
        })
    }

    /// Starts a pass: the epochs after the last pass, or the rest of a restored pass.
    fn __iter__(&self) -> PyResult<BatchIterator> {
        let mut pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = pass.as_mut().ok_or_else(DflopError::closed)?;
        if pass.is_begun {
            *pass = Pass::new(start(&self.builder.clone().first_epoch(pass.next_epoch))?, pass.next_epoch);
        }
        pass.is_begun = true;
        // Counted when the pass starts: a pass that is left early still uses up the epochs.
        pass.next_epoch = pass.next_epoch.saturating_add(self.epochs.unwrap_or(1));
        let stream = pass.loader.get()?.stream();
        // An async lock, because it is held across the wait for a batch.
        let stream = Arc::new(Threaded::new(tokio::sync::Mutex::new(stream)));
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        let is_ended = pass.is_ended.clone();
        self.first_exception.forget();
        let first_exception = self.first_exception.clone();
        Ok(BatchIterator { stream, is_ended, delivery: self.delivery, first_exception })
    }

    /// Number of batches in a pass; opens the index.
    ///
    /// Where whole shards are read, batches in which all samples are bad are counted, and not delivered.
    ///
    /// Raises:
    ///     TypeError: the shards cannot be indexed, so that the number is unknown, or a pass has no end.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let loader = self.loader()?;
        if let Some(batches) = loader.batches() {
            return Ok(batches as usize);
        }
        let Some(dataset) = self.dataset.as_ref().filter(|_| self.epochs.is_some() || self.is_limited) else {
            return Err(PyTypeError::new_err("the pass has no end: set `epochs` or `samples`"));
        };
        // `list(loader)` asks for the length first and interprets a `TypeError` as no length.
        let unknown = |error: PyErr| {
            if !error.is_instance_of::<PyException>(py) {
                return error;
            }
            let unknown =
                PyTypeError::new_err("the number of batches is unknown: the shards cannot be indexed");
            unknown.set_cause(py, Some(error));
            unknown
        };
        let dataset = dataset.get().open(py).map_err(unknown)?;
        Ok(loader.stream_batches(dataset.len()) as usize)
    }

    /// Rejects an index, which PyTorch's ``DataLoader`` asks for without the wrapper.
    #[expect(clippy::unused_self, reason = "a method of the class")]
    fn __getitem__(&self, _index: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(refuse_index("Loader"))
    }

    /// Returns true; does not open the index.
    fn __bool__(_slf: PyRef<'_, Self>) -> bool {
        true
    }

    /// Sets the first epoch of the next pass, counted from 0.
    ///
    /// Examples:
    ///     >>> loader = dflop.Loader("shards/", shuffle_buffer=64)
    ///     >>> loader.set_epoch(5)
    ///     >>> next(iter(loader)).samples[0].epoch
    ///     5
    fn set_epoch(&self, epoch: u64) -> PyResult<()> {
        self.restart(start(&self.builder.clone().first_epoch(epoch))?, epoch)
    }

    /// Returns the pass state: after the last delivered batch, regardless of read-ahead; after the end of the
    /// pass, the start of the next pass.
    ///
    /// Returns:
    ///     dict: a small mapping, which JSON can hold.
    ///
    /// Examples:
    ///     >>> loader = dflop.Loader("shards/", batch_size=100)
    ///     >>> batches = iter(loader)
    ///     >>> first, state = next(batches), loader.state_dict()
    ///     >>> resumed = dflop.Loader("shards/", batch_size=100)
    ///     >>> resumed.load_state_dict(state)
    ///     >>> next(iter(resumed)).sample_keys == next(batches).sample_keys
    ///     True
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (mut loader, is_ended, next_epoch) = {
            let pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
            let pass = pass.as_ref().ok_or_else(DflopError::closed)?;
            (pass.loader.clone(), pass.is_ended.load(Ordering::Acquire), pass.next_epoch)
        };
        if is_ended {
            loader = start(&self.builder.clone().first_epoch(next_epoch))?;
        }
        let loader = loader.get()?;
        if loader.is_drawn() {
            return convert::json(py, &loader.run_state().map_err(DflopError::from)?);
        }
        convert::json(py, &loader.state().map_err(DflopError::from)?)
    }

    /// Resumes exactly from a state, with the next ``iter``; workers, decoding and batch size may differ, as
    /// may the number of ranks where samples are drawn through an index.
    ///
    /// Args:
    ///     state_dict (Mapping): state that ``state_dict`` returned.
    ///     accept_changed_data (bool): resumes even if a dataset has changed; that dataset continues with its
    ///         next epoch. Needs samples that are drawn through an index. Default: ``False``.
    ///
    /// Raises:
    ///     StateError: the state has different shards or samples, a different seed or shuffle, or a different
    ///         ``drop_last``.
    #[pyo3(signature = (state_dict, *, accept_changed_data=false))]
    fn load_state_dict(&self, state_dict: &Bound<'_, PyAny>, accept_changed_data: bool) -> PyResult<()> {
        let text = convert::json_text(state_dict)?;
        // A loader state has datasets, a stream state has not.
        let is_of_draws = state_dict.contains("data_sets")?;
        if is_of_draws != self.loader()?.is_drawn() {
            let (drawn, whole) = ("samples that are drawn through an index", "whole shards");
            let (saved, now) = if is_of_draws { (drawn, whole) } else { (whole, drawn) };
            let reason = format!("it is of {saved}, and this loader reads {now}");
            return Err(DflopError::from(dflop_loader::Error::State { reason }).into());
        }
        if is_of_draws {
            let state = LoaderState::from_json(&text).map_err(DflopError::from)?;
            let first_epoch = state.first_epoch();
            let builder = self.builder.clone().restore_run(state);
            let builder = if accept_changed_data { builder.accept_changed_data() } else { builder };
            return self.restart(start(&builder)?, first_epoch);
        }
        if accept_changed_data {
            let reason = "whole shards are read: a changed shard is found when it is reached";
            return Err(DflopError::config("accept_changed_data", reason).into());
        }
        let state: StreamState = serde_json::from_str(&text).map_err(|error| {
            DflopError::from(dflop_loader::Error::State {
                reason: format!("expected the state of a stream: {error}"),
            })
        })?;
        let first_epoch = state.first_epoch();
        let loader = start(&self.builder.clone().restore(state))?;
        self.restart(loader, first_epoch)
    }

    /// Ends the threads of the loader and the iterators; neither can be used afterwards.
    fn close(&self, py: Python<'_>) {
        let pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner).take();
        let streams = std::mem::take(&mut *self.streams.lock().unwrap_or_else(PoisonError::into_inner));
        streams.iter().filter_map(Weak::upgrade).for_each(|stream| stream.close(py));
        if let Some(pass) = pass {
            pass.loader.close(py);
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    /// Pickles the arguments and the state.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (), Bound<'py, PyAny>)> {
        let (py, this) = (slf.py(), slf.get());
        Ok((this.arguments.constructor(&slf.get_type())?, (), this.state_dict(py)?))
    }

    fn __setstate__(&self, state: &Bound<'_, PyAny>) -> PyResult<()> {
        self.load_state_dict(state, false)
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments.repr(&slf.get_type())
    }

    /// The first 1,000 samples that this pass skipped: dictionaries with ``shard``, ``offset``, ``key``,
    /// ``field``, ``reason``. ``skipped_samples`` is the total number.
    ///
    /// Examples:
    ///     >>> import tarfile
    ///     >>> with tarfile.open("bad.tar", "w") as shard:
    ///     ...     for name in ("kite.jpg", "lake.jpg"):
    ///     ...         shard.addfile(tarfile.TarInfo(name))
    ///     >>> loader = dflop.Loader(["shards/", "bad.tar"])
    ///     >>> sum(len(batch.samples) for batch in loader), loader.skipped_samples
    ///     (256, 2)
    ///     >>> loader.skipped[0]["key"], loader.skipped[0]["reason"]
    ///     ('kite', 'truncated image: it ends too early, at byte 0')
    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        convert::skipped(py, &self.loader()?.skipped())
    }

    /// Number of samples that this pass skipped.
    #[getter]
    fn skipped_samples(&self) -> PyResult<u64> {
        Ok(self.loader()?.skip_log().skipped_samples())
    }

    /// Number of samples that ``filter`` excluded.
    #[getter]
    fn filtered_samples(&self) -> u64 {
        self.filtered_samples
    }

    /// Returns the stage metrics for this pass.
    ///
    /// Returns:
    ///     dict: ``stages``, each with ``stage``, ``items``, ``bytes``, ``busy_seconds``, waiting seconds, …;
    ///     the ``bottleneck``, the stage that limits the throughput; ``seconds`` and
    ///     ``consumer_wait_seconds`` for the pass; waiting bytes.
    ///
    /// Examples:
    ///     >>> loader = dflop.Loader("shards/", batch_size=100)
    ///     >>> batches = list(loader)
    ///     >>> metrics = loader.metrics()
    ///     >>> [stage["stage"] for stage in metrics["stages"]]
    ///     ['plan', 'read', 'decode_queue', 'decode', 'transform', 'collate', 'deliver']
    ///     >>> metrics["stages"][-1]["items"]
    ///     256
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.loader()?.metrics())
    }

    /// CPU seconds for decoding, resizing and normalizing in this pass, over all threads.
    #[getter]
    fn kernel_cpu_seconds(&self) -> PyResult<f64> {
        Ok(self.loader()?.kernel_cpu().as_secs_f64())
    }
}

impl PyLoader {
    /// Returns the pass's loader.
    fn loader(&self) -> PyResult<Arc<Loader>> {
        let pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        pass.as_ref().ok_or_else(DflopError::closed)?.loader.get()
    }

    /// Installs a loader for the next pass.
    fn restart(&self, loader: Arc<Threaded<Loader>>, first_epoch: u64) -> PyResult<()> {
        let mut pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        *pass.as_mut().ok_or_else(DflopError::closed)? = Pass::new(loader, first_epoch);
        Ok(())
    }
}

/// Samples that a loader reads.
struct Input {
    builder: LoaderBuilder,
    /// Dataset whose whole shards are read.
    dataset: Option<Py<PyDataset>>,
    /// Number of samples that the filter excluded.
    filtered_samples: u64,
}

impl Input {
    /// Reads whole shards where that is enough; otherwise draws a DP rank's samples through an index.
    fn new<'py>(
        py: Python<'py>,
        source: Source<'py>,
        filter: Option<&Bound<'py, PyAny>>,
        order: Option<&Bound<'py, PyAny>>,
        (dp_rank, dp_size): (usize, usize),
    ) -> PyResult<Self> {
        if let (Source::Dataset(dataset), None, None) = (&source, filter, order) {
            let of = dataset.get();
            let is_alone = (dp_rank, dp_size) == (0, 1);
            if !of.has_split() && (is_alone || of.is_streamed()) {
                let mut builder = Loader::builder(of.shard_list().to_vec());
                if !is_alone {
                    PyErr::warn(py, &py.get_type::<PyUserWarning>(), NO_INDEX, 1)?;
                    builder = builder.shards_of_rank(dp_rank, dp_size);
                }
                return Ok(Self { builder, dataset: Some(dataset.clone().unbind()), filtered_samples: 0 });
            }
        }
        let mut mixture = source.mixture(py, &TokenCounts::Estimated)?;
        if let Some(filter) = filter {
            mixture = filtered_by_shape(mixture, filter)?;
        }
        let filtered_samples = mixture.datasets().iter().map(Dataset::filtered).sum();
        let mut builder = Loader::builder(Vec::new()).samples_of_rank(mixture, dp_rank, dp_size);
        if let Some(order) = order {
            let order: OrderSettings = Group::new(py, "order", Some(order), "Order")?.settings()?;
            builder = order.apply_to_draws(builder);
        }
        Ok(Self { builder, dataset: None, filtered_samples })
    }
}

/// Sets the image conversion to an array.
fn convert_images(
    builder: LoaderBuilder,
    image: Option<&Image>,
    framework: Framework,
) -> Result<LoaderBuilder, DflopError> {
    let Some(image) = image else { return Ok(builder) };
    let builder = builder.pixel_statistics(image.statistics()).pixel_format(image.format(framework)?);
    Ok(builder.scaled_decode(image.is_scaled))
}

fn start(builder: &LoaderBuilder) -> PyResult<Arc<Threaded<Loader>>> {
    let loader = builder.clone().build().map_err(DflopError::from)?;
    Ok(Arc::new(Threaded::new(loader)))
}

/// Iterator over the batches in a pass, returned by ``iter`` on a `Loader`.
///
/// Examples:
///     >>> with iter(dflop.Loader("shards/", batch_size=8)) as batches:
///     ...     first, second = next(batches), next(batches)
///     >>> first.sample_keys[0], second.sample_keys[0]
///     ('000000', '000008')
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct BatchIterator {
    stream: Arc<Threaded<LiveStream>>,
    is_ended: Arc<AtomicBool>,
    delivery: Delivery,
    first_exception: FirstException,
}

#[pymethods]
impl BatchIterator {
    /// Ends the iterator's stream, and waits for the end.
    fn close(&self, py: Python<'_>) {
        self.stream.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Returns the next batch; other Python threads run meanwhile.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let next = self.stream.wait(py, async |stream| stream.lock().await.next().await)?;
        let Some(batch) = next else {
            self.is_ended.store(true, Ordering::Release);
            return Ok(None);
        };
        let batch = batch.map_err(|error| self.first_exception.explain(py, error))?;
        convert::batch(py, batch, self.delivery).map(Some)
    }
}
