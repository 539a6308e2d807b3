//! Converts the microbatches of a step to `dflop.batches.Microbatch`, with each rank's share of the media.

use super::loader_config::RunningLoader;
use super::steps::{Iteration, Live};
use crate::arrays::framework::Framework;
use crate::arrays::storage::Owner;
use crate::convert::{Delivery, class, samples, tensors};
use crate::error::DflopError;
use crate::model::module_seconds;
use crate::runtime;
use crate::runtime::Threaded;
use dflop_costmodel::Module;
use dflop_loader::error::Skipped;
use dflop_loader::inputs::{ModelInputs, NamedTensor, TensorValues};
use dflop_loader::processors::image::Normalization;
use dflop_loader::{
    Dataset, Error, ExchangedMedium, Microbatch, MicrobatchContext, SampleMedium, SliceGroup, SliceMedium,
    StepPlan, StepPlanner,
};
use pyo3::exceptions::{PyIndexError, PyUserWarning};
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice};
use std::ffi::CString;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Microbatches in a step, in pipeline order: a sequence that decodes ahead and does not keep delivered
/// microbatches. ``Step.microbatches`` has this type.
///
/// Microbatch k + 1 is decoded while k is trained on. A second pass over the microbatches, or a pass after
/// the next step, reads and decodes them again, exactly the same; ``step.hold()`` keeps all of them.
///
/// Examples:
///     >>> loader = dflop.BalancedLoader("shards/", model="model/", global_batch_size=16, microbatches=4)
///     >>> microbatches = next(iter(loader)).microbatches
///     >>> len(microbatches), [microbatch.tokens for microbatch in microbatches]
///     (4, [138, 230, 320, 277])
#[pyclass(frozen, module = "dflop._native", sequence)]
pub(crate) struct StepMicrobatches {
    iteration: Arc<Iteration>,
    plan: Arc<StepPlan>,
    len: usize,
    taken: Arc<Taken>,
}

/// Delivered microbatches that are still in use, so that each microbatch is a single object.
struct Taken {
    /// A `weakref.WeakValueDictionary` by number.
    in_use: Py<PyAny>,
    /// The microbatch that was indexed last.
    indexed: Mutex<Option<Py<PyAny>>>,
}

impl Taken {
    fn get<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.in_use.bind(py).call_method1("get", (number,))?;
        Ok(Some(found).filter(|found| !found.is_none()))
    }

    fn indexed(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.indexed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl StepMicrobatches {
    fn __len__(&self) -> usize {
        self.len
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.numbers(py, 0..self.len)
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Ok(slice) = index.cast::<PySlice>() {
            return self.list(py)?.into_any().get_item(slice);
        }
        let index: isize = index.extract()?;
        let number = if index < 0 { index.saturating_add_unsigned(self.len) } else { index };
        let outside = || PyIndexError::new_err(format!("index {index} of {} microbatches", self.len));
        let number = usize::try_from(number).ok().filter(|number| *number < self.len).ok_or_else(outside)?;
        if let Some(taken) = self.taken.get(py, number)? {
            return Ok(taken);
        }
        let taken = self.numbers(py, number..number + 1)?.try_iter()?.next().ok_or_else(outside)??;
        *self.taken.indexed() = Some(taken.clone().unbind());
        Ok(taken)
    }

    /// Pickles and copies as a list.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyList>,))> {
        Ok((py.import("builtins")?.getattr("list")?, (self.list(py)?,)))
    }

    fn __repr__(&self) -> String {
        format!("StepMicrobatches(step={}, len={})", self.plan.step, self.len)
    }
}

impl StepMicrobatches {
    /// Creates the sequence with the `len` microbatches in a step.
    pub(super) fn new(
        py: Python<'_>,
        iteration: Arc<Iteration>,
        plan: Arc<StepPlan>,
        len: usize,
    ) -> PyResult<Bound<'_, Self>> {
        let in_use = py.import("weakref")?.call_method0("WeakValueDictionary")?.unbind();
        let taken = Arc::new(Taken { in_use, indexed: Mutex::new(None) });
        Bound::new(py, Self { iteration, plan, len, taken })
    }

    /// Returns an iterator over some microbatches; user inputs are created one microbatch ahead.
    fn numbers<'py>(&self, py: Python<'py>, numbers: Range<usize>) -> PyResult<Bound<'py, PyAny>> {
        let (iteration, plan, taken) =
            (Arc::clone(&self.iteration), Arc::clone(&self.plan), Arc::clone(&self.taken));
        let position = Threaded::new(tokio::sync::Mutex::new(Position { numbers, again: None }));
        let plain = Bound::new(py, MicrobatchIterator { iteration, plan, taken, position })?.into_any();
        match &self.iteration.config.inputs {
            Some(inputs) => inputs.bind(py).call_method1("of", (plain,)),
            None => Ok(plain),
        }
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for microbatch in self.__iter__(py)?.try_iter()? {
            list.append(microbatch?)?;
        }
        Ok(list)
    }
}

/// Iterator over the microbatches in a step.
#[pyclass(frozen, module = "dflop._native")]
pub(crate) struct MicrobatchIterator {
    iteration: Arc<Iteration>,
    plan: Arc<StepPlan>,
    taken: Arc<Taken>,
    position: Threaded<tokio::sync::Mutex<Position>>,
}

/// Position of a microbatch iterator.
struct Position {
    /// Numbers of the remaining microbatches.
    numbers: Range<usize>,
    /// The step, read again, if the iteration's stream is at another position.
    again: Option<Again>,
}

/// A stream with a single step, from some microbatch on.
struct Again {
    live: Live,
    /// Keeps the stream threads alive.
    _running: RunningLoader,
}

/// A microbatch with a number, and whether it is the first microbatch that was read again.
type Next = Option<(usize, Microbatch, bool)>;

#[pymethods]
impl MicrobatchIterator {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Returns the next microbatch; other Python threads run meanwhile.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (position, live) = (self.position.get()?, self.iteration.live.get()?);
        let next = runtime::wait(py, async { self.next(&mut *position.lock().await, &live).await })?;
        let next = next.map_err(|error| self.iteration.config.read.first_exception.explain(py, error))?;
        let Some((number, next, is_first_again)) = next else { return Ok(None) };
        if is_first_again {
            warn_of_second_read(py, self.plan.step)?;
        }
        if let Some(taken) = self.taken.get(py, number)? {
            return Ok(Some(taken));
        }
        let delivery = self.iteration.config.read.delivery.resolved(py)?;
        let Iteration { config, running, .. } = &*self.iteration;
        let normalization = config.preparer.as_ref().and_then(|preparer| preparer.pixel_normalization());
        let made = microbatch(py, next, (&running.planner, &self.plan), normalization, delivery)?;
        // A microbatch whose inputs are not created yet is not shown to others.
        if config.inputs.is_none() {
            self.taken.in_use.bind(py).set_item(number, &made)?;
        }
        Ok(Some(made))
    }

    /// Counts a sample as skipped because model inputs cannot be created.
    ///
    /// Raises:
    ///     ErrorBudgetError: too many samples are bad.
    fn skip(&self, sample: &Bound<'_, PyAny>, reason: String) -> PyResult<()> {
        let skipped = Skipped {
            shard: sample.getattr("shard")?.extract()?,
            offset: sample.getattr("offset")?.extract()?,
            key: Some(sample.getattr("key")?.extract()?),
            field: None,
            reason,
        };
        let loader = self.iteration.running.loader.get()?;
        let log = loader.skip_log();
        log.push(skipped);
        Ok(log.check(false).map_err(DflopError::from)?)
    }
}

impl MicrobatchIterator {
    async fn next(&self, position: &mut Position, live: &tokio::sync::Mutex<Live>) -> Result<Next, Error> {
        let Range { start: number, end } = position.numbers;
        if number >= end {
            return Ok(None);
        }
        if position.again.is_none() {
            let mut live = live.lock().await;
            if live.step == Some(self.plan.step) && live.delivered == number {
                let microbatch = live.next_microbatch().await?;
                position.numbers.start += 1;
                return Ok(Some((number, microbatch, false)));
            }
        }
        let is_first = position.again.is_none();
        let again = match &mut position.again {
            Some(again) => again,
            none => none.insert(self.read_again(number..end).await?),
        };
        let microbatch = again.live.next_microbatch().await?;
        position.numbers.start += 1;
        Ok(Some((number, microbatch, is_first)))
    }

    /// Reads microbatches in the step again.
    async fn read_again(&self, numbers: Range<usize>) -> Result<Again, Error> {
        let Iteration { config, running, .. } = &*self.iteration;
        let running = config.read_step(running, self.plan.step, numbers)?;
        let ended = |_| Error::StageEnded { stage: "read" };
        let mut live = Live::new(running.loader.get().map_err(ended)?.events());
        live.next_step().await?;
        Ok(Again { live, _running: running })
    }
}

/// Warns that microbatches are decoded twice, which a training loop should avoid.
fn warn_of_second_read(py: Python<'_>, step: u64) -> PyResult<()> {
    let message = format!(
        "microbatches of step {step} are read and decoded again, because they were asked for out of order, twice, or after \
         the next step; `step.hold()` keeps all of them"
    );
    PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(message)?, 1)
}

/// Pixel scale, mean and standard deviation.
type Statistics = (f64, [f64; 3], [f64; 3]);

/// Returns the pixel normalization, if pixels are bytes.
fn byte_normalization(
    inputs: Option<&ModelInputs>,
    normalization: Option<Normalization>,
) -> Option<Statistics> {
    let is_bytes = |tensor: &NamedTensor| matches!(tensor.values, TensorValues::U8(_));
    let Normalization { scale, mean, deviation } = normalization?;
    inputs?.tensors.iter().any(is_bytes).then_some((scale, mean, deviation))
}

/// Converts a microbatch.
///
/// - `plan`: step plan
/// - `normalization`: model's pixel normalization
pub(super) fn microbatch<'py>(
    py: Python<'py>,
    of: Microbatch,
    (planner, plan): (&StepPlanner, &StepPlan),
    normalization: Option<Normalization>,
    delivery: Delivery,
) -> PyResult<Bound<'py, PyAny>> {
    let Delivery { framework, is_decoded } = delivery;
    let made = class(py, "Microbatch")?.call0()?;
    made.setattr("tokens", of.tokens)?;
    made.setattr("target_tokens", of.target_tokens)?;
    made.setattr("planned_tokens", of.planned_tokens)?;
    made.setattr("padding_tokens", of.padding_tokens)?;
    made.setattr("cost_seconds", of.cost_seconds())?;
    made.setattr("module_seconds", module_seconds(py, planner.model(), &of.module_ns)?)?;
    made.setattr("loss_scale", of.loss_scale)?;
    made.setattr("loss_scale_sum", of.loss_scale_sum)?;
    let names: Vec<Arc<str>> = planner.datasets().iter().map(Dataset::name).collect();
    let dataset = |&place: &u32| &*names[plan.samples[place as usize].dataset];
    made.setattr("sources", of.plan_indices.iter().map(dataset).collect::<Vec<_>>())?;
    let keys: Vec<&str> = of.samples.iter().map(|sample| sample.key.as_str()).collect();
    made.setattr("sample_keys", keys)?;
    made.setattr("samples", samples(py, of.samples, Delivery { framework, is_decoded })?)?;
    made.setattr("pixel_normalization", byte_normalization(of.inputs.as_ref(), normalization))?;
    let context = of.context.map(|own| context(py, own, framework)).transpose()?;
    made.setattr("context", context)?;
    if let Some(inputs) = of.inputs {
        tensors(&made, inputs.tensors, framework)?;
        // Models with a cache, which is the default, attend across packed samples.
        made.set_item("use_cache", false)?;
        let length = [inputs.cu_seqlens.len()];
        made.setattr("cu_seqlens", framework.array(py, Owner::I32(inputs.cu_seqlens), &length)?)?;
        made.setattr("max_seqlen", inputs.max_seqlen)?;
    } else {
        made.setattr("cu_seqlens", py.None())?;
        made.setattr("max_seqlen", 0)?;
    }
    Ok(made)
}

/// Returns a `dflop.batches.Context`.
fn context(py: Python<'_>, context: MicrobatchContext, framework: Framework) -> PyResult<Bound<'_, PyAny>> {
    let groups: Vec<_> =
        context.groups.into_iter().map(|own| group(py, own, framework)).collect::<PyResult<_>>()?;
    class(py, "Context")?.call1((groups,))
}

fn group(py: Python<'_>, own: SliceGroup, framework: Framework) -> PyResult<Bound<'_, PyAny>> {
    let media = own.media.into_iter().map(|own| medium(py, own)).collect::<PyResult<Vec<_>>>()?;
    let array = |owner: Owner, length: usize| framework.array(py, owner, &[length]);
    let lengths = [own.cu_seqlens.len(), own.positions.len(), own.order.len(), own.features.len()];
    class(py, "ContextGroup")?.call1((
        own.ranks.collect::<Vec<_>>(),
        own.samples.collect::<Vec<_>>(),
        (own.rows.start, own.rows.end),
        array(Owner::I32(own.cu_seqlens), lengths[0])?,
        own.lengths,
        array(Owner::I64(own.positions), lengths[1])?,
        array(Owner::I64(own.order), lengths[2])?,
        array(Owner::I64(own.features), lengths[3])?,
        media,
    ))
}

fn medium(py: Python<'_>, own: SliceMedium) -> PyResult<Bound<'_, PyAny>> {
    let SliceMedium { sample, part, tokens } = own;
    let parts = (part.parts.start, part.parts.end);
    let kind = part.modality.name();
    class(py, "ContextMedium")?.call1((
        sample,
        kind,
        part.index,
        part.rank,
        parts,
        part.parts_in_medium,
        tokens,
    ))
}

/// Returns `dflop.batches.Medium` by rank in the group.
pub(super) fn media_shares<'py>(
    py: Python<'py>,
    running: &RunningLoader,
    plan: &StepPlan,
    place: [usize; 2],
    ranks: usize,
) -> PyResult<Vec<Vec<Bound<'py, PyAny>>>> {
    let [rank, microbatch] = place;
    check_microbatch(plan, rank, microbatch)?;
    if ranks == 0 {
        return Err(DflopError::config("ranks", "must be at least 1".to_owned()).into());
    }
    let shares = py.detach(|| running.planner.media_shares(plan, place, ranks));
    let medium = class(py, "Medium")?;
    let convert = |of: SampleMedium| {
        let key = running.planner.row(plan.samples[of.place as usize]).key().to_owned();
        medium.call1((key, of.modality.name(), of.index, of.cost_ns as f64 / 1e9))
    };
    shares.into_iter().map(|share| share.into_iter().map(convert).collect()).collect()
}

/// Returns `dflop.batches.ExchangedMedium` for an encoder's media in a microbatch of all ranks in a group.
///
/// - `group_size`: number of consecutive ranks that exchange media; all ranks by default
pub(super) fn media_exchange<'py>(
    py: Python<'py>,
    running: &RunningLoader,
    plan: &StepPlan,
    [rank, microbatch]: [usize; 2],
    group_size: Option<usize>,
    module: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    check_microbatch(plan, rank, microbatch)?;
    let dp_size = plan.ranks.len();
    let group_size = group_size.unwrap_or(dp_size);
    if group_size == 0 || !dp_size.is_multiple_of(group_size) {
        let reason = format!("expected a divisor of the {dp_size} ranks, found {group_size}");
        return Err(DflopError::config("group_size", reason).into());
    }
    let model = running.planner.model();
    let encoders: Vec<Module> = model.spec().encoders().map(|(module, ..)| module).collect();
    let Some(&module) = encoders.iter().find(|own| own.name() == module) else {
        let known: Vec<&str> = encoders.iter().map(|own| own.name()).collect();
        let reason = format!("expected an encoder of the model ({}), found `{module}`", known.join(", "));
        return Err(DflopError::config("module", reason).into());
    };
    let first = rank / group_size * group_size;
    let ranks = first..first + group_size;
    let media = py.detach(|| running.planner.media_exchange(plan, microbatch, ranks, module));
    let class = class(py, "ExchangedMedium")?;
    let convert = |exchanged: ExchangedMedium| {
        let ExchangedMedium { medium, rank, encoder_rank, items, grid } = exchanged;
        let key = running.planner.row(plan.samples[medium.place as usize]).key().to_owned();
        let grid = grid.map(|[layers, rows, columns]| (layers, rows, columns));
        let (kind, seconds) = (medium.modality.name(), medium.cost_ns as f64 / 1e9);
        class.call1((key, kind, medium.index, medium.place, rank, encoder_rank, items, grid, seconds))
    };
    media.into_iter().map(convert).collect()
}

fn check_microbatch(plan: &StepPlan, rank: usize, microbatch: usize) -> Result<(), DflopError> {
    let planned = plan.ranks.get(rank).map_or(0, Vec::len);
    if microbatch < planned {
        return Ok(());
    }
    let reason = format!("step {} has {planned} microbatches, so there is no {microbatch}", plan.step);
    Err(DflopError::config("microbatch", reason))
}
