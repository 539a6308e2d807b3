//! Row normalization, with parameters.

use crate::block::{BackwardPass, ForwardPass};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{Init, ParameterId};
use dflop_device::{Device, Dtype, Tensor};

/// Normalization kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Root-mean-square normalization (`RMSNorm`).
    Rms,
    /// `RMSNorm` with weights stored as `w - 1` (Gemma).
    RmsRelative,
    /// Layer norm: mean and standard deviation.
    Layer,
}

/// Norm with a weight and, for [`NormKind::Layer`], a bias.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    weight: ParameterId,
    bias: Option<ParameterId>,
    epsilon: f64,
    /// Offset added to `RMSNorm` weights.
    offset: f64,
    width: usize,
}

impl Norm {
    /// Declares `NAME.weight` and, for a layer norm, `NAME.bias`.
    pub fn declare(
        declaration: &mut Declaration,
        name: &str,
        kind: NormKind,
        width: usize,
        epsilon: f64,
    ) -> Self {
        let (init, offset) =
            if kind == NormKind::RmsRelative { (Init::Zeros, 1.0) } else { (Init::Ones, 0.0) };
        let weight = declaration.add(format!("{name}.weight"), &[width], init);
        let bias =
            (kind == NormKind::Layer).then(|| declaration.add(format!("{name}.bias"), &[width], Init::Zeros));
        Self { weight, bias, epsilon, offset, width }
    }

    /// Returns the normalized rows, and the statistics that backward needs.
    pub fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
    ) -> Result<(Tensor<D>, Tensor<D>)> {
        let rows = x.len() / self.width;
        let mut y = pass.device.alloc(x.len())?;
        let weight = pass.parameters.value(self.weight);
        // mean and inverse deviation for every row, or the inverse root mean square
        let mut statistics =
            pass.device.alloc_as(Dtype::F32, if self.bias.is_some() { 2 * rows } else { rows })?;
        match self.bias.map(|bias| pass.parameters.value(bias)) {
            None => pass.device.rms_norm(x, (weight, self.offset), self.epsilon, &mut y, &mut statistics)?,
            Some(bias) => {
                pass.device.layer_norm(x, (weight, bias), self.epsilon, &mut y, &mut statistics)?;
            }
        }
        Ok((y, statistics))
    }

    /// Accumulates the gradients of the parameters and, if requested, of `x`.
    pub fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        dy: &Tensor<D>,
        x: &Tensor<D>,
        statistics: &Tensor<D>,
        dx: Option<&mut Tensor<D>>,
    ) -> Result<()> {
        match self.bias {
            None => {
                let (weight, gradient) = pass.parameters.both(self.weight);
                let weight = (weight, self.offset);
                pass.device.rms_norm_backward(dy, x, weight, statistics, dx, gradient)?;
            }
            Some(bias) => {
                let (weight, gradients) = pass.parameters.norm(self.weight, bias);
                pass.device.layer_norm_backward(dy, x, weight, statistics, dx, gradients)?;
            }
        }
        Ok(())
    }
}
