//! Turns patches into first-layer rows: a linear layer, a class row per image, positions, an optional norm.
//!
//! Selects or averages last-layer rows, with an optional norm before and after.

use super::INIT;
use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows};
use crate::error::Result;
use crate::layers::{Linear, Norm, NormKind};
use crate::parameters::Declaration;
use crate::parameters::weights::{Init, ParameterId};
use dflop_device::ops::bias::Columns;
use dflop_device::{Device, Tensor};

/// Stem sizes and names.
#[derive(Debug, Clone, PartialEq)]
pub struct PatchStemSpec {
    /// Convolution name.
    pub name: String,
    /// Kernel shape; the product is the number of elements in a patch.
    pub kernel: Vec<usize>,
    /// Whether the convolution has a bias.
    pub has_bias: bool,
    /// Name and shape of the learned class row before every image.
    pub class: Option<(String, Vec<usize>)>,
    /// Position table name and shape.
    pub positions: Option<(String, Vec<usize>)>,
    /// Name and epsilon for a final layer norm.
    pub norm: Option<(String, f64)>,
}

impl PatchStemSpec {
    /// Returns the number of elements in a patch.
    #[must_use]
    pub fn patch_inputs(&self) -> usize {
        self.kernel.iter().product()
    }
}

/// Image encoder stem.
#[derive(Debug)]
pub(super) struct PatchStem {
    patches: Linear,
    class: Option<ParameterId>,
    positions: Option<ParameterId>,
    norm: Option<Norm>,
    hidden: usize,
    patch_inputs: usize,
}

impl PatchStem {
    pub(super) fn declare(declaration: &mut Declaration, spec: &PatchStemSpec, hidden: usize) -> Self {
        let shape = [&[hidden][..], &spec.kernel].concat();
        let weight = declaration.add(format!("{}.weight", spec.name), &shape, INIT);
        let bias =
            spec.has_bias.then(|| declaration.add(format!("{}.bias", spec.name), &[hidden], Init::Zeros));
        let patch_inputs = spec.patch_inputs();
        let mut table = |table: &Option<(String, Vec<usize>)>| {
            table.as_ref().map(|(name, shape)| declaration.add(name, shape, INIT))
        };
        let (class, positions) = (table(&spec.class), table(&spec.positions));
        let norm = spec
            .norm
            .as_ref()
            .map(|(name, epsilon)| Norm::declare(declaration, name, NormKind::Layer, hidden, *epsilon));
        let patches = Linear::from_parameters(weight, bias, [hidden, patch_inputs]);
        Self { patches, class, positions, norm, hidden, patch_inputs }
    }
}

impl<D: Device> Block<D> for PatchStem {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        _: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let (device, parameters) = (pass.device, &pass.parameters);
        let inputs = pass.context.inputs.encoder()?;
        debug_assert_eq!(inputs.medium.len(), inputs.medium_rows * self.patch_inputs);
        let mut rows = self.patches.forward(pass, &inputs.medium, inputs.medium_rows)?;
        // only encoders with a class row or windows rearrange their rows
        if let Some(stem) = inputs.stem.first() {
            let mut arranged = device.zeros(pass.context.layers.rows * self.hidden)?;
            device.gather_scatter(&stem.forward, self.hidden, &rows, &mut arranged)?;
            rows = arranged;
        }
        let tables = [(self.class, &inputs.class), (self.positions, &inputs.positions)];
        for (table, mix) in tables {
            if let (Some(table), Some(mix)) = (table, mix) {
                device.gather_scatter(&mix.forward, self.hidden, parameters.value(table), &mut rows)?;
            }
        }
        let Some(norm) = self.norm else { return Ok(BlockOutput::Rows(rows)) };
        let (y, statistics) = norm.forward(pass, &rows)?;
        saved.keep(rows);
        saved.keep(statistics);
        Ok(BlockOutput::Rows(y))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let (device, inputs) = (pass.device, pass.context.inputs.encoder()?);
        let mut d = expect_rows::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        if let Some(norm) = self.norm {
            let (statistics, rows) = (saved.take(), saved.take());
            let mut d_rows = device.zeros(rows.len())?;
            norm.backward(pass, &d, &rows, &statistics, Some(&mut d_rows))?;
            d = d_rows;
        }
        let tables = [(self.class, &inputs.class), (self.positions, &inputs.positions)];
        for (table, mix) in tables {
            let gradient = table.and_then(|table| pass.parameters.gradient_mut(table));
            if let (Some(gradient), Some(mix)) = (gradient, mix) {
                device.gather_scatter(&mix.backward, self.hidden, &d, gradient)?;
            }
        }
        if let Some(stem) = inputs.stem.first() {
            let mut d_patches = device.zeros(inputs.medium_rows * self.hidden)?;
            device.gather_scatter(&stem.backward, self.hidden, &d, &mut d_patches)?;
            d = d_patches;
        }
        let columns = Columns::all(self.hidden);
        let rows = inputs.medium_rows;
        self.patches.weights(columns).accumulate(device, pass.parameters, (&inputs.medium, &d), 0..rows)?;
        // pixels have no gradient
        Ok(None)
    }
}

/// Layer norm names and epsilons for a tail.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TailSpec {
    /// Norm before rows are selected.
    pub before: Option<(String, f64)>,
    /// Norm after rows are selected.
    pub after: Option<(String, f64)>,
}

/// Encoder tail.
#[derive(Debug)]
pub(super) struct Tail {
    before: Option<Norm>,
    after: Option<Norm>,
    hidden: usize,
}

impl Tail {
    pub(super) fn declare(declaration: &mut Declaration, spec: &TailSpec, hidden: usize) -> Self {
        let mut norm = |spec: &Option<(String, f64)>| {
            let (name, epsilon) = spec.as_ref()?;
            Some(Norm::declare(declaration, name, NormKind::Layer, hidden, *epsilon))
        };
        Self { before: norm(&spec.before), after: norm(&spec.after), hidden }
    }
}

fn normalize<D: Device>(
    norm: Option<Norm>,
    pass: &ForwardPass<'_, D>,
    x: Tensor<D>,
    saved: &mut SavedActivations<D>,
) -> Result<Tensor<D>> {
    let Some(norm) = norm else { return Ok(x) };
    let (y, statistics) = norm.forward(pass, &x)?;
    saved.keep(x);
    saved.keep(statistics);
    Ok(y)
}

fn normalize_backward<D: Device>(
    norm: Option<Norm>,
    pass: &mut BackwardPass<'_, D>,
    d: Tensor<D>,
    saved: &mut SavedActivations<D>,
) -> Result<Tensor<D>> {
    let Some(norm) = norm else { return Ok(d) };
    let (statistics, x) = (saved.take(), saved.take());
    let mut dx = pass.device.zeros(x.len())?;
    norm.backward(pass, &d, &x, &statistics, Some(&mut dx))?;
    Ok(dx)
}

impl<D: Device> Block<D> for Tail {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let inputs = pass.context.inputs.encoder()?;
        let x = expect_rows::<D>(input, pass.context.layers.rows, self.hidden)?;
        let mut rows = normalize(self.before, pass, x, saved)?;
        if let Some(taken) = &inputs.taken {
            let mut y = pass.device.zeros(taken.rows * self.hidden)?;
            pass.device.gather_scatter(&taken.forward, self.hidden, &rows, &mut y)?;
            rows = y;
        }
        Ok(BlockOutput::Rows(normalize(self.after, pass, rows, saved)?))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let inputs = pass.context.inputs.encoder()?;
        let rows = pass.context.layers.rows;
        let out_rows = inputs.taken.as_ref().map_or(rows, |taken| taken.rows);
        let d = expect_rows::<D>(gradient, out_rows, self.hidden)?;
        let mut d = normalize_backward(self.after, pass, d, saved)?;
        if let Some(taken) = &inputs.taken {
            let mut dx = pass.device.zeros(rows * self.hidden)?;
            pass.device.gather_scatter(&taken.backward, self.hidden, &d, &mut dx)?;
            d = dx;
        }
        normalize_backward(self.before, pass, d, saved).map(Some)
    }
}
