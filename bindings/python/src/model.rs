//! `dflop.CostModel`: predicts sample tokens and seconds for a model, a device and a training setup.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_costmodel::flops::{SliceFlops, ZigzagSlices};
use dflop_costmodel::tokens::EncoderWork;
use dflop_costmodel::{
    AudioLength, CostModel, DeviceRate, ImageSize, ModelSpec, Module, Profile, SampleCost, SampleShape,
    VideoShape,
};
use dflop_loader::cost_table;
use dflop_loader::model::spec_from_names;
use dflop_loader::settings::{CostSettings, machine_device, set};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::convert::{Arguments, Names, arguments};
use crate::dataset::PyDataset;
use crate::error::DflopError;
use crate::runtime::refuse_keywords;
use crate::table::Table;

/// Model names, the device or profile that the model runs on, and the training setup.
#[derive(Debug)]
pub(crate) struct ModelSettings {
    pub(crate) names: Vec<String>,
    device: String,
    profile: Option<PathBuf>,
    settings: CostSettings,
}

/// A model as the user names it.
pub(crate) enum ModelArgument<'py> {
    /// Presets, directories or hub names.
    Names(Vec<String>),
    /// A `dflop.CostModel`.
    Costs(Bound<'py, PyCostModel>),
    /// A `dflop.Custom`: token costs, and a token function.
    Custom { costs: TokenCosts, tokens: Bound<'py, PyAny> },
}

/// Costs for tokens that a function counts.
#[derive(Debug)]
pub(crate) enum TokenCosts {
    /// Number of parameters in every module, and the device that they run on.
    Parameters(Vec<(Module, f64)>, String),
    /// A cost model, whose sizes or profile determine the times.
    Model(Arc<CostModel>),
}

impl<'py> ModelArgument<'py> {
    pub(crate) fn new(model: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(costs) = model.cast::<PyCostModel>() {
            return Ok(Self::Costs(costs.clone()));
        }
        let class = model.py().import("dflop.custom")?.getattr("Custom")?;
        if !model.is_instance(&class)? {
            if model.is_instance_of::<PyDict>() {
                let message = "expected a name, a path, or a list of them, found dict; for a model that no file describes, \
                               use dflop.ModelDescription or dflop.Custom";
                return Err(PyTypeError::new_err(message));
            }
            return described(model.py(), model.extract::<Names>()?.0).map(Self::Names);
        }
        let (modules, tokens) = (model.getattr("modules")?, model.getattr("tokens")?);
        if let Ok(costs) = modules.cast::<PyCostModel>() {
            return Ok(Self::Custom { costs: TokenCosts::Model(costs.get().model.clone()), tokens });
        }
        let by_name: BTreeMap<String, f64> = modules.extract()?;
        let of = |module: &Module| by_name.get(module.name()).map(|parameters| (*module, *parameters));
        let parameters = Module::ALL.iter().filter_map(of).collect();
        let device = model.getattr("device")?.extract()?;
        Ok(Self::Custom { costs: TokenCosts::Parameters(parameters, device), tokens })
    }
}

/// Replaces checkpoints of types that no family reads by the descriptions that Python makes of them.
fn described(py: Python<'_>, names: Vec<String>) -> PyResult<Vec<String>> {
    py.import("dflop._description.implicit")?.call_method1("names", (names,))?.extract()
}

impl ModelSettings {
    /// Returns the settings for a model on the default device.
    pub(crate) fn new(names: Vec<String>) -> Self {
        let device = machine_device();
        let profile = is_profile(&device).then(|| PathBuf::from(&device));
        Self { names, device, profile, settings: CostSettings::default() }
    }

    pub(crate) fn cost_model(&self) -> Result<CostModel, DflopError> {
        let spec = spec_from_names(&self.names)?;
        Ok(self.settings.cost_model(spec, &self.device, self.profile.as_deref())?)
    }
}

/// Returns whether a device is the path or the name of a measured profile rather than a preset.
fn is_profile(device: &str) -> bool {
    let has_extension = |path: &Path| path.extension().is_some_and(|extension| extension == "csv");
    let is_path = || {
        let path = Path::new(device);
        device.contains(['/', '\\']) || has_extension(path) || path.exists()
    };
    DeviceRate::preset(device).is_err() && (Profile::shipped_names().contains(&device) || is_path())
}

/// Returns a model with these modules, whose own costs are never used.
pub(crate) fn custom_model(modules: &[Module], rate: DeviceRate) -> Result<CostModel, DflopError> {
    let mut spec = ModelSpec::preset("tiny")?;
    spec.vision = spec.vision.filter(|_| modules.contains(&Module::Vision));
    spec.audio = spec.audio.filter(|_| modules.contains(&Module::Audio));
    Ok(CostModel::new(spec, rate))
}

#[doc = include_str!("cost_model.md")]
#[pyclass(frozen, name = "CostModel", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyCostModel {
    pub(crate) names: Vec<String>,
    pub(crate) model: Arc<CostModel>,
    arguments: Arguments,
}

#[pymethods]
impl PyCostModel {
    #[new]
    #[pyo3(
        signature = (model, *, device=None, profile_tp=None, freeze=None, recompute="none", **unknown),
        // The same without the keywords that are refused.
        text_signature = "(model, *, device='h100', profile_tp=None, freeze=None, recompute='none')"
    )]
    fn new(
        py: Python<'_>,
        model: Names,
        device: Option<Names>,
        profile_tp: Option<[u32; 2]>,
        freeze: Option<String>,
        recompute: &str,
        unknown: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        refuse_keywords(py, "CostModel", unknown.as_ref())?;
        let model = model.0;
        let device = device.map_or_else(machine_device, |Names(names)| names.join(","));
        let arguments = arguments!(py, model, device, profile_tp, freeze, recompute);
        let profile = is_profile(&device).then(|| PathBuf::from(&device));
        if profile.is_none() && profile_tp.is_some() {
            return Err(DflopError::config("profile_tp", "needs a measured profile as `device`").into());
        }
        let freeze = freeze.map(|parts| parts.parse()).transpose().map_err(DflopError::from)?;
        let profile_tp = profile_tp.map(Vec::from);
        let mut settings = CostSettings { profile_tp, freeze, ..CostSettings::default() };
        set(&mut settings, "recompute", recompute.into()).map_err(DflopError::from)?;
        let names = described(py, model)?;
        let settings = ModelSettings { names, device, profile, settings };
        let model = py.detach(|| settings.cost_model())?;
        Ok(Self { names: settings.names, model: Arc::new(model), arguments })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().arguments.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments.repr(&slf.get_type())
    }

    /// HTML for notebooks: the module sizes.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, spec) = (slf.py(), slf.get().model.spec());
        let rows = PyList::empty(py);
        let encoders = spec.encoders().zip(spec.encoder_parameters());
        for ((module, encoder, _), (_, parameters)) in encoders {
            rows.append((module.name(), encoder.layers, encoder.hidden, encoder.heads, parameters.total()))?;
        }
        let (llm, parameters) = (&spec.llm, spec.llm_parameters().total());
        rows.append((Module::Llm.name(), llm.layers, llm.hidden, llm.heads, parameters))?;
        py.import("dflop._html")?.call_method1("cost_model", (&spec.name, slf.repr()?, rows))
    }

    /// Names of the modules with predicted times, out of ``vision``, ``audio`` and ``llm``, the LLM last.
    #[getter]
    fn modules(&self) -> Vec<&'static str> {
        self.model.modules().iter().map(|module| module.name()).collect()
    }

    /// Predicts the cost of a sample.
    ///
    /// Args:
    ///     text_tokens (int): number of text tokens, without media placeholders. Default: 0.
    ///     target_tokens (int): number of tokens that the loss is taken over. Default: 0.
    ///     images (Sequence[tuple[int, int]]): width and height of each image, in pixels.
    ///     audio (Sequence[tuple[int, int]]): number of frames and sample rate in Hz for each audio clip.
    ///     videos (Sequence[tuple[int, int, int]]): number of frames, width and height for each video, after
    ///         frame sampling.
    ///
    /// Returns:
    ///     dict: ``tokens``, ``target_tokens``, ``encoder_items``, ``encoder_tokens``, and ``seconds`` by
    ///     module: forward and backward of the whole module on one device.
    ///
    /// Raises:
    ///     ModelError: the model does not support the sample.
    ///
    /// Examples:
    ///     >>> costs = dflop.CostModel("qwen2.5-vl-7b")
    ///     >>> page, caption = costs.cost(text_tokens=50, images=[(1700, 2200)]), costs.cost(text_tokens=50)
    ///     >>> page["tokens"], caption["tokens"]
    ///     (4871, 50)
    ///     >>> round(page["seconds"]["llm"] / caption["seconds"]["llm"])
    ///     104
    #[pyo3(signature = (*, text_tokens=0, target_tokens=0, images=Vec::new(), audio=Vec::new(), videos=Vec::new()))]
    fn cost<'py>(
        &self,
        py: Python<'py>,
        text_tokens: u32,
        target_tokens: u32,
        images: Vec<(u32, u32)>,
        audio: Vec<(u64, u32)>,
        videos: Vec<(u32, u32, u32)>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let shape = SampleShape {
            text_tokens,
            target_tokens,
            images: images.into_iter().map(|(width, height)| ImageSize { width, height }).collect(),
            audio: audio
                .into_iter()
                .map(|(frames, sample_rate_hz)| AudioLength { frames, sample_rate_hz })
                .collect(),
            videos: videos
                .into_iter()
                .map(|(frames, width, height)| VideoShape { frames, width, height })
                .collect(),
        };
        let cost = self.model.predict(&shape).map_err(DflopError::from)?;
        cost_dict(py, &self.model, &cost)
    }

    /// Predicts the time that each individual sequence adds to a module's microbatch.
    ///
    /// Args:
    ///     module (str): one of ``modules``.
    ///     lengths (Sequence[int]): tokens in each sequence inside the module: in an encoder, a sequence is a
    ///         medium, whose tokens all attend to each other; in the LLM, a sequence is a sample, whose
    ///         tokens all have a target.
    ///
    /// Returns:
    ///     list[int]: nanoseconds for forward and backward of the whole module on one device, for each
    ///     sequence; `microbatch_time` also includes the fixed time per microbatch.
    ///
    /// Raises:
    ///     ConfigError: the model has no such module.
    ///
    /// Examples:
    ///     >>> short, long = dflop.CostModel("qwen2.5-vl-7b").sequence_times("llm", [1024, 16_384])
    ///     >>> round(long / short, 1)  # 16 times the tokens
    ///     19.4
    fn sequence_times(&self, module: &str, lengths: Vec<u32>) -> PyResult<Vec<u64>> {
        let modules = self.model.modules();
        let place = self.place(module)?;
        let mut works = vec![EncoderWork::default(); modules.len() - 1];
        let time = |length: u32| {
            // The LLM is the last module, and not an encoder.
            let tokens = if place == works.len() { length } else { 0 };
            if let Some(work) = works.get_mut(place) {
                *work = EncoderWork::from_sequences(&[length]);
            }
            let cost = self.model.predict_counted(&works, tokens, tokens).map_err(DflopError::from)?;
            Ok(cost.module_ns.as_slice()[place])
        };
        lengths.into_iter().map(time).collect()
    }

    /// Predicts the time for a module's microbatch, whose sequences are packed into one.
    ///
    /// On a profile, the prediction is the larger of two times: the host time, which launches kernels and
    /// does not depend on the sequences, and the device time, which is a constant and ``sequence_times``. At
    /// a stated rate the prediction is the sum of ``sequence_times``.
    ///
    /// Args:
    ///     module (str): one of ``modules``.
    ///     lengths (Sequence[int]): tokens in each sequence inside the module, as in ``sequence_times``.
    ///
    /// Returns:
    ///     int: nanoseconds for forward and backward of the whole module on one device; 0 without sequences.
    ///
    /// Raises:
    ///     ConfigError: the model has no such module.
    ///
    /// Examples:
    ///     >>> dflop.CostModel("qwen2.5-vl-7b").microbatch_time("llm", [])
    ///     0
    fn microbatch_time(&self, module: &str, lengths: Vec<u32>) -> PyResult<u64> {
        let place = self.place(module)?;
        let constants = self.model.microbatch_constants().modules[place];
        let added_ns = self.sequence_times(module, lengths)?.into_iter().fold(0, u64::saturating_add);
        Ok(constants.microbatch_ns(added_ns))
    }

    /// Counts LLM FLOPs for a sample's slices on the ranks in a context-parallel group.
    ///
    /// Args:
    ///     tokens (int): tokens in the sample, media included.
    ///     ranks (int): ranks in the group.
    ///
    /// Returns:
    ///     list[dict]: for each rank ``chunks``, the start and end of the two chunks that the rank holds;
    ///     ``forward_flops`` and ``backward_flops``; and ``attention_flops``, the part of ``forward_flops``
    ///     for attention, by ring step, in layers without windows. Over all ranks they add up to the sample.
    ///
    /// Raises:
    ///     ModelError: ``ranks`` is 0 or above 65,536.
    ///
    /// Examples:
    ///     >>> first, second = dflop.CostModel("qwen2.5-vl-7b").slices(4096, ranks=2)
    ///     >>> first["chunks"], second["chunks"]
    ///     ([(0, 1024), (3072, 4096)], [(1024, 2048), (2048, 3072)])
    ///     >>> first["forward_flops"] == second["forward_flops"]
    ///     True
    fn slices<'py>(&self, py: Python<'py>, tokens: u32, ranks: u32) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let slices = ZigzagSlices::new(tokens, ranks);
        let flops = self.model.slice_flops(tokens, ranks).map_err(DflopError::from)?;
        let slice = |(rank, flops): (u32, &SliceFlops)| {
            let dict = PyDict::new(py);
            let chunks = slices.chunks(rank).map(|chunk| (chunk.start, chunk.end));
            dict.set_item("chunks", chunks.to_vec())?;
            dict.set_item("forward_flops", flops.training.forward)?;
            dict.set_item("backward_flops", flops.training.backward)?;
            dict.set_item("attention_flops", flops.ring[0].steps.clone())?;
            Ok(dict)
        };
        (0..ranks).zip(&flops).map(slice).collect()
    }

    /// Profile errors over the microbatches that were held out during measurement: the number of
    /// ``microbatches``, ``median`` and ``p95`` for the absolute errors, and ``half_width`` for a
    /// microbatch's 90 % interval, as fractions; ``None`` without held-out microbatches.
    ///
    /// Examples:
    ///     >>> dflop.CostModel("qwen2.5-vl-7b", device="h100").held_out_errors is None
    ///     True
    #[getter]
    fn held_out_errors<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(check) = self.model.profile_check() else { return Ok(None) };
        let errors = PyDict::new(py);
        errors.set_item("microbatches", check.errors.count)?;
        errors.set_item("median", check.errors.p50)?;
        errors.set_item("p95", check.errors.p95)?;
        errors.set_item("half_width", check.half_width)?;
        Ok(Some(errors))
    }

    /// Microbatch sizes below which launches limit a module, by a measured profile: tokens inside the module,
    /// and the forward and backward seconds for every smaller microbatch.
    ///
    /// Examples:
    ///     >>> dflop.CostModel("qwen2.5-vl-7b", device="h100").launch_limits  # nothing was measured
    ///     {}
    #[getter]
    fn launch_limits(&self) -> BTreeMap<&'static str, (u64, f64)> {
        let limits = self.model.launch_limits().into_iter();
        limits.map(|limit| (limit.module.name(), (limit.tokens, limit.seconds))).collect()
    }

    /// Predicts the cost of every sample in a dataset, from the index.
    ///
    /// Args:
    ///     dataset (Dataset): the dataset.
    ///
    /// Returns:
    ///     Table: ``sample``, ``key``, ``tokens``, ``target_tokens``, ``encoder_items``, ``encoder_tokens``,
    ///     and ``MODULE_ns`` for each module, empty for samples that the model does not support, with the
    ///     reason in ``refused``.
    ///
    /// Examples:
    ///     >>> import pyarrow
    ///     >>> table = pyarrow.table(dflop.CostModel("model/").annotate(dflop.Dataset("shards/")))
    ///     >>> ranked = table.sort_by([("vision_ns", "descending")])
    ///     >>> ranked.select(["key", "tokens", "encoder_tokens"]).slice(0, 1).to_pylist()
    ///     [{'key': '000107', 'tokens': 155, 'encoder_tokens': 484}]
    fn annotate(&self, py: Python<'_>, dataset: &PyDataset) -> PyResult<Table> {
        let dataset = dataset.open(py)?;
        let model = self.model.clone();
        let (schema, batches) = py.detach(|| cost_table(&dataset, &model));
        Ok(Table::new(schema, batches))
    }
}

/// Converts a cost to a dictionary.
pub(crate) fn cost_dict<'py>(
    py: Python<'py>,
    model: &CostModel,
    cost: &SampleCost,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("tokens", cost.tokens)?;
    dict.set_item("target_tokens", cost.target_tokens)?;
    dict.set_item("encoder_items", cost.encoder_items)?;
    dict.set_item("encoder_tokens", cost.encoder_tokens)?;
    dict.set_item("seconds", module_seconds(py, model, cost.module_ns.as_slice())?)?;
    Ok(dict)
}

impl PyCostModel {
    /// Returns the index of a module in the model.
    fn place(&self, module: &str) -> PyResult<usize> {
        let modules = self.model.modules();
        let place = modules.iter().position(|known| known.name() == module);
        place.ok_or_else(|| {
            let names: Vec<_> = modules.iter().map(|module| format!("`{}`", module.name())).collect();
            DflopError::config("module", format!("expected {}, found `{module}`", names.join(", "))).into()
        })
    }
}

/// Converts times to a dictionary by module, in seconds.
pub(crate) fn module_seconds<'py>(
    py: Python<'py>,
    model: &CostModel,
    module_ns: &[u64],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (module, &ns) in model.modules().iter().zip(module_ns) {
        dict.set_item(module.name(), ns as f64 / 1e9)?;
    }
    Ok(dict)
}
