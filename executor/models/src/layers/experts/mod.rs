//! Mixture of experts in place of an MLP: a router sends every token through a few gated MLPs.
//!
//! Mixture-of-experts sizes and names.
//!
//! Gate between expert matrices.
//!
//! Expert biases: two parameters with a row per expert.
//!
//! Rows are ordered by expert, each expert multiplies its rows, and weighted outputs are added up by token.
//! Experts without tokens cost nothing. The router decision is read on the host once per pass. Each
//! tensor-parallel rank holds a column range between the matrices in every expert.
//!
//! # Source
//! Shazeer et al.: "Outrageously Large Neural Networks", 2017, arXiv:1701.06538.

mod matrices;
mod router;

use super::linear::Linear;
use super::mlp::MlpSpec;
use crate::block::{BackwardPass, ForwardPass, SavedActivations, tensor_parallel};
use crate::error::Result;
use crate::parameters::weights::{AxisPartition, Init, ParameterId};
use crate::parameters::{Declaration, Parameters, PendingWeights};
use dflop_device::ops::activation::Activation;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::clamped_gate::GateBounds;
use dflop_device::{Device, Dtype, SparseBuffers, Tensor};
use matrices::{Divided, Matrices, SharedExperts};
use router::{Dispatch, RowOrder, expert_rows};

pub use router::{ExpertGroups, RouterRule};

/// Mixture of experts.
#[derive(Debug)]
pub struct Experts {
    router: Linear,
    /// Correction that is added to expert scores only for the choice.
    correction: Option<ParameterId>,
    rule: RouterRule,
    /// Gate and up matrices, or both in one.
    inner: Vec<Matrices>,
    down: Matrices,
    shared: Option<SharedExperts>,
    hidden: usize,
    /// Width between the matrices in an expert on this rank.
    middle: usize,
    is_input_weighted: bool,
    gate: ExpertGate,
    /// Gate and up biases, and down biases.
    biases: Option<[Biases; 2]>,
}

impl Experts {
    /// Declares the parameters.
    pub fn declare(declaration: &mut Declaration, spec: &ExpertsSpec) -> Self {
        let ExpertsSpec { hidden, middle, rule, init, .. } = *spec;
        let (experts, tp_rank) = (rule.weights.experts, declaration.tp_rank());
        let sizes = [experts, hidden];
        let router = Linear::declare(declaration, &spec.router, sizes, spec.has_router_bias, init);
        let correction =
            spec.correction.as_ref().map(|name| declaration.add_frozen(name, &[experts], Init::Zeros));
        let parts = AxisPartition::even(middle, tp_rank.size);
        let held = parts.len(tp_rank.rank);
        let mut biases = None;
        let (inner, down) = match &spec.names {
            ExpertNames::Separate { prefix, matrices: [gate, up, down] } => {
                let names = |matrix: &String| {
                    let name = |expert| format!("{prefix}{expert}.{matrix}.weight");
                    (0..experts).map(name).collect()
                };
                // gate and up are adjacent in one row, so that the gate is one operation
                let columns = |index: usize| Columns { first: index * held, stride: 2 * held };
                let (sizes, divided) = ([middle, hidden], Divided::Outputs(&parts));
                let gate = Matrices::separate(declaration, names(gate), sizes, init, divided, columns(0));
                let up = Matrices::separate(declaration, names(up), sizes, init, divided, columns(1));
                let (sizes, divided) = ([hidden, middle], Divided::Inputs(&parts));
                let all = Columns::all(hidden);
                let down = Matrices::separate(declaration, names(down), sizes, init, divided, all);
                (vec![gate, up], down)
            }
            ExpertNames::Fused { gate_up, down, biases: names } => {
                let both = match spec.gate {
                    ExpertGate::Halves(_) => AxisPartition::joined(&[(&parts, middle), (&parts, middle)]),
                    ExpertGate::Clamped(_) => parts.scaled(2),
                };
                let (sizes, divided) = ([experts, hidden, 2 * middle], Divided::Outputs(&both));
                let gate_up = Matrices::fused(declaration, gate_up, sizes, init, divided);
                let (sizes, divided) = ([experts, middle, hidden], Divided::Inputs(&parts));
                let down = Matrices::fused(declaration, down, sizes, init, divided);
                biases = names.as_ref().map(|[gate_up, down]| {
                    [
                        Biases::for_outputs(declaration, gate_up, [experts, 2 * middle], &both),
                        Biases::for_sums(declaration, down, [experts, hidden]),
                    ]
                });
                (vec![gate_up], down)
            }
        };
        let shared = spec.shared.as_ref().map(|shared| SharedExperts::declare(declaration, shared));
        let ExpertsSpec { is_input_weighted, gate, .. } = *spec;
        Self {
            router,
            correction,
            rule,
            inner,
            down,
            shared,
            hidden,
            middle: held,
            is_input_weighted,
            gate,
            biases,
        }
    }

    /// Computes the experts for rows, which are saved.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, hidden) = (pass.device, self.hidden);
        let (logits, chosen, order) = self.route(pass, &x, rows)?;
        let mut weights = device.alloc_as(Dtype::F32, chosen.len())?;
        device.expert_weights(&self.rule.weights, &logits, &chosen, &mut weights)?;
        let mut dispatch = Dispatch::new(device, &order, self.rule.weights.chosen, weights)?;
        let inputs = dispatch.spread(device, hidden, &x, self.is_input_weighted)?;
        let slots = chosen.len();
        let mut before = device.alloc(slots * 2 * self.middle)?;
        for (expert, rows) in expert_rows(&order.starts) {
            for matrices in &self.inner {
                matrices.forward(pass, (expert, &rows), &inputs, &mut before)?;
            }
        }
        drop(inputs);
        if let Some([inner, _]) = &self.biases {
            inner.add(device, &pass.parameters, &order.starts, &mut before)?;
        }
        let mut after = device.alloc(slots * self.middle)?;
        self.gate.forward(device, &before, self.middle, &mut after)?;
        let mut outputs = device.alloc(slots * hidden)?;
        for (expert, rows) in expert_rows(&order.starts) {
            self.down.forward(pass, (expert, &rows), &after, &mut outputs)?;
        }
        if let Some([_, down]) = &self.biases {
            down.add(device, &pass.parameters, &order.starts, &mut outputs)?;
        }
        let mut y = dispatch.collect(device, hidden, &outputs, !self.is_input_weighted)?;
        tensor_parallel::all_reduce(pass.tensor, &mut y)?;
        if let Some(shared) = &self.shared {
            shared.forward(pass, &x, rows, &mut y, saved)?;
        }
        dispatch.keep(saved);
        for buffer in [x, logits, chosen, before, after, outputs] {
            saved.keep(buffer);
        }
        saved.keep_numbers(order.starts);
        Ok(y)
    }

    /// Computes logits for all experts in `f32`, and chooses an expert for every slot, with the row order.
    fn route<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        rows: usize,
    ) -> Result<(Tensor<D>, Tensor<D>, RowOrder)> {
        let (device, experts) = (pass.device, self.rule.weights.experts);
        let mut logits = device.alloc_as(Dtype::F32, rows * experts)?;
        self.router.forward_into(pass, x, rows, &mut logits, Columns::all(experts))?;
        let correction = match self.correction {
            Some(correction) => device.download_in_pass(pass.parameters.value(correction))?,
            None => Vec::new(),
        };
        let chosen = self.rule.choose(&device.download_in_pass(&logits)?, &correction);
        let order = RowOrder::new(&chosen, experts);
        Ok((logits, device.upload_indices(&chosen)?, order))
    }

    /// Accumulates parameter gradients and returns the row gradient.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        rows: usize,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, hidden) = (pass.device, self.hidden);
        let starts = saved.take_numbers();
        let (outputs, after, before) = (saved.take(), saved.take(), saved.take());
        let (chosen, logits, x) = (saved.take(), saved.take(), saved.take());
        let mut dispatch = Dispatch::take(saved);
        let d_outputs = dispatch.spread(device, hidden, dy, !self.is_input_weighted)?;
        let mut d_weights = device.alloc_as(Dtype::F32, chosen.len())?;
        if !self.is_input_weighted {
            device.row_products(hidden, dy, &outputs, dispatch.places(), &mut d_weights)?;
        }
        drop(outputs);
        if let Some([_, down]) = &self.biases {
            down.backward(device, pass.parameters, &starts, &d_outputs)?;
        }
        let d_before = self.backward_down(pass, &starts, (&before, after), d_outputs)?;
        if let Some([inner, _]) = &self.biases {
            inner.backward(device, pass.parameters, &starts, &d_before)?;
        }
        let mut d_inputs = device.alloc(chosen.len() * hidden)?;
        for (expert, rows) in expert_rows(&starts) {
            for (index, matrices) in self.inner.iter().enumerate() {
                matrices.backward(pass, (expert, &rows), &d_before, index > 0, &mut d_inputs)?;
            }
        }
        // rows are copied again instead of saved
        let inputs = dispatch.spread(device, hidden, &x, self.is_input_weighted)?;
        let weights = expert_rows(&starts)
            .flat_map(|(expert, rows)| self.inner.iter().map(move |all| (all.weights(expert), rows.clone())));
        pass.add_weights(PendingWeights::from_rows(weights.collect(), inputs, d_before))?;
        if self.is_input_weighted {
            device.row_products(hidden, &x, &d_inputs, dispatch.places(), &mut d_weights)?;
        }
        // each rank has a part of every output
        tensor_parallel::all_reduce(pass.tensor, &mut d_weights)?;
        let mut dx = dispatch.collect(device, hidden, &d_inputs, self.is_input_weighted)?;
        drop(d_inputs);
        tensor_parallel::all_reduce(pass.tensor, &mut dx)?;
        if let Some(shared) = &self.shared {
            shared.backward(pass, dy, rows, &mut dx, saved)?;
        }
        // only now, because every rank has the complete router gradient
        let experts = self.rule.weights.experts;
        let mut d_logits = device.alloc(rows * experts)?;
        device.expert_weights_backward(&self.rule.weights, &logits, &chosen, &d_weights, &mut d_logits)?;
        self.router.backward_into(pass, &d_logits, rows, Columns::all(experts), true, &mut dx)?;
        self.router.backward_weight(pass, x, &d_logits, rows)?;
        Ok(dx)
    }

    /// Returns the gradient before the gates, and accumulates down matrix gradients.
    fn backward_down<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        starts: &[usize],
        (before, after): (&Tensor<D>, Tensor<D>),
        d_outputs: Tensor<D>,
    ) -> Result<Tensor<D>> {
        let device = pass.device;
        let mut d_after = device.alloc(after.len())?;
        for (expert, rows) in expert_rows(starts) {
            self.down.backward(pass, (expert, &rows), &d_outputs, false, &mut d_after)?;
        }
        let weights = expert_rows(starts).map(|(expert, rows)| (self.down.weights(expert), rows)).collect();
        pass.add_weights(PendingWeights::from_rows(weights, after, d_outputs))?;
        let mut d_before = device.alloc(before.len())?;
        self.gate.backward(device, &d_after, before, self.middle, &mut d_before)?;
        Ok(d_before)
    }
}

/// Sizes, names and routing for a mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsSpec {
    /// Model width.
    pub hidden: usize,
    /// Width between the matrices in an expert.
    pub middle: usize,
    /// Expert choice and weights.
    pub rule: RouterRule,
    /// Router name.
    pub router: String,
    /// Whether the router has a bias.
    pub has_router_bias: bool,
    /// Name of the choice correction, which receives no gradient, if any.
    pub correction: Option<String>,
    /// Matrix names.
    pub names: ExpertNames,
    /// Gate between the matrices.
    pub gate: ExpertGate,
    /// Whether weights scale expert inputs instead of outputs.
    pub is_input_weighted: bool,
    /// MLP that every token also goes through, if any.
    pub shared: Option<SharedExpertsSpec>,
    /// Matrix initialization.
    pub init: Init,
}

/// Names and storage of expert matrices.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpertNames {
    /// A tensor per expert and matrix, `[outputs, inputs]`, named by prefix, expert number, and gate, up or
    /// down.
    Separate {
        /// Name before the expert number.
        prefix: String,
        /// Gate, up and down names, without `.weight`.
        matrices: [String; 3],
    },
    /// Two tensors for all experts, `[experts, inputs, outputs]`.
    Fused {
        /// Gate and up tensor name; the gate determines the column order.
        gate_up: String,
        /// Down tensor name.
        down: String,
        /// Bias names for both tensors, `[experts, outputs]`, if any.
        biases: Option<[String; 2]>,
    },
}

/// MLP that every token goes through.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpertsSpec {
    /// Sizes and names.
    pub mlp: MlpSpec,
    /// Name of the width-1 matrix whose logistic function scales the output, if any.
    pub gate: Option<String>,
}

/// Gate between the matrices in an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGate {
    /// Activation for gates, which come before all ups.
    Halves(Activation),
    /// Clamped gates and ups, interleaved.
    Clamped(GateBounds),
}

impl ExpertGate {
    /// Writes the gated rows.
    fn forward<D: Device>(
        self,
        device: &D,
        gate_up: &Tensor<D>,
        columns: usize,
        y: &mut Tensor<D>,
    ) -> Result<()> {
        match self {
            Self::Halves(activation) => Ok(device.gate(activation, gate_up, columns, y)?),
            Self::Clamped(bounds) => Ok(device.clamped_gate(bounds, gate_up, y)?),
        }
    }

    /// Writes gate and up gradients.
    pub(super) fn backward<D: Device>(
        self,
        device: &D,
        dy: &Tensor<D>,
        gate_up: &Tensor<D>,
        columns: usize,
        d_gate_up: &mut Tensor<D>,
    ) -> Result<()> {
        match self {
            Self::Halves(activation) => {
                Ok(device.gate_backward(activation, dy, gate_up, columns, d_gate_up)?)
            }
            Self::Clamped(bounds) => Ok(device.clamped_gate_backward(bounds, dy, gate_up, d_gate_up)?),
        }
    }
}

/// Biases for one matrix in all experts.
#[derive(Debug)]
struct Biases {
    parameter: ParameterId,
    columns: usize,
    /// Whether another tensor-parallel rank adds the biases.
    is_elsewhere: bool,
}

impl Biases {
    /// Declares `[experts, columns]`; each rank has the columns for some outputs.
    fn for_outputs(
        declaration: &mut Declaration,
        name: &str,
        sizes: [usize; 2],
        parts: &AxisPartition,
    ) -> Self {
        let parameter = declaration.add_cut(name, &sizes, Init::Zeros, (1, parts));
        let columns = parts.len(declaration.tp_rank().rank);
        Self { parameter, columns, is_elsewhere: false }
    }

    /// Declares `[experts, columns]` for outputs that are sums over ranks.
    fn for_sums(declaration: &mut Declaration, name: &str, sizes: [usize; 2]) -> Self {
        let parameter = declaration.add(name, &sizes, Init::Zeros);
        Self { parameter, columns: sizes[1], is_elsewhere: declaration.tp_rank().rank > 0 }
    }

    /// Adds the expert bias to every row.
    fn add<D: Device>(
        &self,
        device: &D,
        parameters: &Parameters<D>,
        starts: &[usize],
        y: &mut Tensor<D>,
    ) -> Result<()> {
        if self.is_elsewhere {
            return Ok(());
        }
        let experts: Vec<u32> =
            expert_rows(starts).flat_map(|(expert, rows)| rows.map(move |_| expert as u32)).collect();
        let matrix = SparseBuffers {
            targets: counted(device, experts.len())?,
            starts: counted(device, experts.len() + 1)?,
            sources: device.upload_indices(&experts)?,
            weights: device.upload_as(Dtype::F32, &[])?,
        };
        Ok(device.gather_scatter(&matrix, self.columns, parameters.value(self.parameter), y)?)
    }

    /// Accumulates the gradient: the row sum for every expert.
    pub(super) fn backward<D: Device>(
        &self,
        device: &D,
        parameters: &mut Parameters<D>,
        starts: &[usize],
        dy: &Tensor<D>,
    ) -> Result<()> {
        let Some(gradient) = parameters.gradient_mut(self.parameter) else { return Ok(()) };
        let (mut experts, mut firsts) = (Vec::new(), vec![0]);
        for (expert, rows) in expert_rows(starts) {
            experts.push(expert as u32);
            firsts.push(rows.end as u32);
        }
        let matrix = SparseBuffers {
            targets: device.upload_indices(&experts)?,
            starts: device.upload_indices(&firsts)?,
            sources: counted(device, starts.last().copied().unwrap_or(0))?,
            weights: device.upload_as(Dtype::F32, &[])?,
        };
        Ok(device.gather_scatter(&matrix, self.columns, dy, gradient)?)
    }
}

fn counted<D: Device>(device: &D, count: usize) -> Result<Tensor<D>> {
    Ok(device.upload_indices(&(0..count as u32).collect::<Vec<_>>())?)
}
