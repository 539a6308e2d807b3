//! Calls cost functions in Python, whose times replace the cost model's predictions.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_costmodel::tokens::EncoderWork;
use dflop_costmodel::{CostModel, DeviceRate, Module, ModuleTimes, SampleCost};
use dflop_loader::error::BoxError;
use dflop_loader::{CostFunction, CostInput};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping};

use crate::dataset::describe_shape;
use crate::error::DflopError;
use crate::model::{ModelArgument, ModelSettings, PyCostModel, TokenCosts, custom_model};

/// Forward and backward FLOPs per token and parameter.
///
/// # Source
/// Kaplan et al., "Scaling Laws for Neural Language Models", 2020, arXiv:2001.08361, section 2.1.
const FLOPS_PER_PARAMETER: f64 = 6.0;
/// Key for target tokens in a token function's answer.
const TARGETS: &str = "targets";

/// Upper bound for the seconds per sample, about 290 years: the largest number of nanoseconds in 63 bits.
const SECONDS_MAX: f64 = 9.2e9;

/// Python function that returns sample costs.
#[derive(Debug)]
pub(crate) struct PyCost(Py<PyAny>);

impl PyCost {
    pub(crate) fn new(function: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self(function))
    }
}

impl CostFunction for PyCost {
    fn module_ns(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError> {
        // Fails when the interpreter is shutting down while the planner thread runs.
        let answer = Python::try_attach(|py| {
            let list = PyList::empty(py);
            for sample in samples {
                list.append(describe(py, modules, sample)?)?;
            }
            let rows = self.0.bind(py).call1((list,))?;
            rows.try_iter()?.map(|row| parse_times(&row?, modules)).collect::<PyResult<Vec<_>>>()
        });
        answer.ok_or("the interpreter has ended")?.map_err(Into::into)
    }
}

/// A model with costs, including user functions.
pub(crate) struct CostedModel {
    /// Model names, whose files describe the processor; none for a custom model.
    pub(crate) names: Vec<String>,
    pub(crate) costs: CostModel,
    pub(crate) cost: Option<Arc<dyn CostFunction>>,
}

impl CostedModel {
    /// - `model`: names, a `dflop.ModelDescription`, a `dflop.CostModel` or a `dflop.Custom`
    /// - `times`: replacement for times
    pub(crate) fn new(model: &Bound<'_, PyAny>, times: Option<Arc<PyCost>>) -> PyResult<Self> {
        let of_times = |times: Option<Arc<PyCost>>| times.map(|times| -> Arc<dyn CostFunction> { times });
        match ModelArgument::new(model)? {
            ModelArgument::Names(names) => {
                let settings = ModelSettings::new(names);
                let costs = model.py().detach(|| settings.cost_model())?;
                Ok(Self { names: settings.names, costs, cost: of_times(times) })
            }
            ModelArgument::Costs(model) => {
                let PyCostModel { names, model, .. } = model.get();
                let (names, costs) = (names.clone(), CostModel::clone(model));
                Ok(Self { names, costs, cost: of_times(times) })
            }
            ModelArgument::Custom { costs: TokenCosts::Parameters(parameters, device), tokens } => {
                let rate = DeviceRate::preset(&device).map_err(DflopError::from)?;
                let modules: Vec<Module> = parameters.iter().map(|(module, _)| *module).collect();
                let costs = custom_model(&modules, rate)?;
                let cost =
                    CustomCost::new(tokens.unbind(), TokenTimes::from_parameters(&parameters, &rate), times);
                Ok(Self { names: Vec::new(), costs, cost: Some(cost) })
            }
            ModelArgument::Custom { costs: TokenCosts::Model(model), tokens } => {
                let costs = CostModel::clone(&model);
                let cost = CustomCost::new(tokens.unbind(), TokenTimes::Model(model), times);
                Ok(Self { names: Vec::new(), costs, cost: Some(cost) })
            }
        }
    }

    /// Returns whether no file describes the model.
    pub(crate) fn is_custom(&self) -> bool {
        self.names.is_empty()
    }
}

/// Costs for a model that no file describes: tokens from a function, times from a function and the model
/// sizes.
#[derive(Debug)]
struct CustomCost {
    /// Returns, for a list of samples, the tokens in each: for every module, and ``targets``.
    tokens: Py<PyAny>,
    /// Converts tokens to times.
    token_times: TokenTimes,
    /// Replaces the times.
    times: Option<Arc<PyCost>>,
}

/// Source of times for counted tokens.
#[derive(Debug)]
enum TokenTimes {
    /// Nanoseconds per token in every module.
    PerToken(Vec<(Module, f64)>),
    /// A cost model, including attention.
    Model(Arc<CostModel>),
}

impl TokenTimes {
    /// - `parameters`: number of parameters in every module
    /// - `rate`: device rate
    fn from_parameters(parameters: &[(Module, f64)], rate: &DeviceRate) -> Self {
        let token_ns = parameters.iter().map(|&(module, parameters)| {
            let flops_per_us = match module {
                Module::Vision => rate.vision_flops_per_us,
                Module::Audio => rate.audio_flops_per_us,
                Module::Llm => rate.llm_flops_per_us,
            };
            (module, FLOPS_PER_PARAMETER * parameters / flops_per_us.get() as f64 * 1e3)
        });
        Self::PerToken(token_ns.collect())
    }

    /// Returns the cost of a sample with these tokens.
    fn cost(&self, modules: &[Module], counted: &Counted, sample: &CostInput<'_>) -> PyResult<SampleCost> {
        let target_tokens = counted.targets.unwrap_or(sample.predicted.target_tokens);
        let encoders = modules.iter().filter(|module| **module != Module::Llm);
        let works: Vec<EncoderWork> =
            encoders.map(|module| EncoderWork::from_sequences(counted.of(*module))).collect();
        let tokens = counted.of(Module::Llm).iter().fold(0_u32, |sum, tokens| sum.saturating_add(*tokens));
        let token_ns = match self {
            Self::Model(model) => {
                let cost = model.predict_counted(&works, tokens, target_tokens);
                return Ok(cost.map_err(DflopError::from)?);
            }
            Self::PerToken(token_ns) => token_ns,
        };
        let ns = |module: &Module| {
            let per_token = token_ns.iter().find(|(known, _)| known == module);
            let tokens: f64 = counted.of(*module).iter().map(|tokens| f64::from(*tokens)).sum();
            (per_token.map_or(0.0, |(_, ns)| *ns) * tokens).round() as u64
        };
        let times: Vec<u64> = modules.iter().map(ns).collect();
        let encoder_tokens: u64 = works.iter().map(|work| work.encoder_tokens).sum();
        let encoder_tokens = u32::try_from(encoder_tokens).unwrap_or(u32::MAX);
        Ok(SampleCost {
            tokens,
            target_tokens,
            encoder_items: encoder_tokens,
            encoder_tokens,
            module_ns: ModuleTimes::new(&times).unwrap_or(sample.predicted.module_ns),
        })
    }
}

/// Sample tokens, as counted by the user's function.
struct Counted {
    /// Sequence lengths in each module.
    sequences: BTreeMap<String, Vec<u32>>,
    targets: Option<u32>,
}

impl Counted {
    fn new(row: BTreeMap<String, TokenCount>, modules: &[Module]) -> PyResult<Self> {
        let (mut sequences, mut targets) = (BTreeMap::new(), None);
        for (name, count) in row {
            let is_module = modules.iter().any(|module| module.name() == name);
            match count {
                TokenCount::One(tokens) if name == TARGETS => targets = Some(tokens),
                TokenCount::One(tokens) if is_module => drop(sequences.insert(name, vec![tokens])),
                TokenCount::Sequences(lengths) if is_module => drop(sequences.insert(name, lengths)),
                _ => {
                    let message =
                        format!("expected tokens of the model's modules and `{TARGETS}`, found `{name}`");
                    return Err(PyValueError::new_err(message));
                }
            }
        }
        Ok(Self { sequences, targets })
    }

    /// Returns the sequence lengths in a module.
    fn of(&self, module: Module) -> &[u32] {
        self.sequences.get(module.name()).map_or(&[], Vec::as_slice)
    }
}

/// Tokens in a module: a single sequence, or several sequences that do not attend to each other.
#[derive(FromPyObject)]
enum TokenCount {
    One(u32),
    Sequences(Vec<u32>),
}

impl CustomCost {
    fn new(tokens: Py<PyAny>, token_times: TokenTimes, times: Option<Arc<PyCost>>) -> Arc<Self> {
        Arc::new(Self { tokens, token_times, times })
    }

    fn ask(
        &self,
        py: Python<'_>,
        modules: &[Module],
        samples: &[CostInput<'_>],
    ) -> PyResult<Vec<SampleCost>> {
        let list = PyList::empty(py);
        for sample in samples {
            list.append(describe(py, modules, sample)?)?;
        }
        let answer = self.tokens.bind(py).call1((list,))?;
        let rows: Vec<BTreeMap<String, TokenCount>> = answer.extract()?;
        if rows.len() != samples.len() {
            let message = format!("expected tokens of {} samples, found {}", samples.len(), rows.len());
            return Err(PyValueError::new_err(message));
        }
        let cost = |(row, sample): (_, &CostInput<'_>)| {
            self.token_times.cost(modules, &Counted::new(row, modules)?, sample)
        };
        rows.into_iter().zip(samples).map(cost).collect()
    }
}

impl CostFunction for CustomCost {
    fn counts_tokens(&self) -> bool {
        true
    }

    fn module_ns(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError> {
        Ok(self.costs(modules, samples)?.iter().map(|cost| cost.module_ns).collect())
    }

    fn costs(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<SampleCost>, BoxError> {
        let costs = Python::try_attach(|py| self.ask(py, modules, samples));
        let costs = costs.ok_or("the interpreter has ended")??;
        let Some(times) = &self.times else { return Ok(costs) };
        let mut samples = samples.to_vec();
        for (sample, cost) in samples.iter_mut().zip(&costs) {
            sample.predicted = *cost;
        }
        times.costs(modules, &samples)
    }
}

/// Describes a sample for the function, as a dictionary.
pub(crate) fn describe<'py>(
    py: Python<'py>,
    modules: &[Module],
    sample: &CostInput<'_>,
) -> PyResult<Bound<'py, PyDict>> {
    let (dict, shape) = (PyDict::new(py), sample.shape);
    dict.set_item("key", sample.key)?;
    dict.set_item("dataset", sample.dataset)?;
    dict.set_item("sample", sample.sample)?;
    describe_shape(&dict, shape)?;
    dict.set_item("tokens", sample.predicted.tokens)?;
    let seconds = PyDict::new(py);
    for (module, &ns) in modules.iter().zip(sample.predicted.module_ns.as_slice()) {
        seconds.set_item(module.name(), ns as f64 / 1e9)?;
    }
    dict.set_item("seconds", seconds)?;
    Ok(dict)
}

/// Parses a result row: seconds by module, or in module order.
fn parse_times(row: &Bound<'_, PyAny>, modules: &[Module]) -> PyResult<ModuleTimes> {
    let seconds: Vec<f64> = match row.cast::<PyMapping>() {
        Ok(by_name) => modules
            .iter()
            .map(|module| by_name.get_item(module.name())?.extract())
            .collect::<PyResult<_>>()?,
        Err(_) => row.try_iter()?.map(|value| value?.extract()).collect::<PyResult<_>>()?,
    };
    let ns = |&seconds: &f64| {
        if (0.0..=SECONDS_MAX).contains(&seconds) {
            return Ok((seconds * 1e9).round() as u64);
        }
        let message = format!("expected seconds from 0 to {SECONDS_MAX:e} as a cost, found {seconds}");
        Err(pyo3::exceptions::PyValueError::new_err(message))
    };
    let ns = seconds.iter().map(ns).collect::<PyResult<Vec<_>>>()?;
    let many = || {
        pyo3::exceptions::PyValueError::new_err(format!(
            "expected a row of {} modules, found {}",
            modules.len(),
            ns.len()
        ))
    };
    ModuleTimes::new(&ns).ok_or_else(many)
}
