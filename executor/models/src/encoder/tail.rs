//! Selects or averages last-layer rows, with an optional norm before and after.

use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows};
use crate::error::Result;
use crate::layers::{Norm, NormKind};
use crate::parameters::Declaration;
use dflop_device::{Device, Tensor};

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
