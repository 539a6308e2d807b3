//! Whisper stem: two convolutions over time, each followed by GELU, and fixed positions, stored or computed.
//!
//! Kernels have three taps; the second convolution has stride 2. A convolution multiplies unfolded rows
//! (three neighbors per row) with kernels whose taps come first. Unfolding is a sparse matrix in the context,
//! which accounts for strides and window ends.

use super::INIT;
use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{Init, ParameterId};
use dflop_device::DeviceSparseRows;
use dflop_device::ops::activation::Activation;
use dflop_device::ops::bias::Columns;
use dflop_device::ops::gemm::{Epilogue, GemmShape, MatrixLayout};
use dflop_device::{Device, Tensor};

/// Number of kernel taps.
pub(super) const TAPS: usize = 3;

/// Fixed audio encoder positions, which are sinusoids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AudioPositions {
    /// Checkpoint table with this number of rows.
    Stored(usize),
    /// Computed for this number of rows; the checkpoint has no such tensor.
    Computed(usize),
}

impl AudioPositions {
    /// Returns the number of rows.
    #[must_use]
    pub const fn rows(self) -> usize {
        match self {
            Self::Stored(rows) | Self::Computed(rows) => rows,
        }
    }
}

/// Convolution followed by GELU.
#[derive(Debug)]
struct Convolution {
    weight: ParameterId,
    bias: ParameterId,
    inputs: usize,
    outputs: usize,
}

impl Convolution {
    fn declare(declaration: &mut Declaration, name: &str, [outputs, inputs]: [usize; 2]) -> Self {
        let weight = declaration.add(format!("{name}.weight"), &[outputs, inputs, TAPS], INIT);
        let bias = declaration.add(format!("{name}.bias"), &[outputs], Init::Zeros);
        Self { weight, bias, inputs, outputs }
    }

    /// Returns the kernels with taps before inputs.
    fn kernels<D: Device>(&self, device: &D, weight: &Tensor<D>) -> Result<Tensor<D>> {
        let mut kernels = device.alloc(weight.len())?;
        device.transpose(weight, self.inputs, TAPS, false, &mut kernels)?;
        Ok(kernels)
    }

    /// Computes the convolution; saves unfolded rows and the GELU input.
    fn forward<D: Device>(
        &self,
        pass: &ForwardPass<'_, D>,
        x: &Tensor<D>,
        unfold: &DeviceSparseRows<D>,
        saved: &mut SavedActivations<D>,
    ) -> Result<Tensor<D>> {
        let (device, rows, width) = (pass.device, unfold.rows / TAPS, TAPS * self.inputs);
        let mut unfolded = device.zeros(rows * width)?;
        device.gather_scatter(&unfold.forward, self.inputs, x, &mut unfolded)?;
        let kernels = self.kernels(device, pass.parameters.value(self.weight))?;
        let mut before = device.alloc(rows * self.outputs)?;
        let mut y = device.alloc(before.len())?;
        let bias = pass.parameters.value(self.bias);
        let shape = GemmShape { rows, columns: self.outputs, inner: width };
        let kernels = (&kernels, MatrixLayout::rows(width).transposed());
        let target = (&mut before, MatrixLayout::rows(self.outputs));
        let epilogue = Epilogue::Activation(Some(bias), Activation::GeluExact, &mut y);
        device.gemm(shape, (&unfolded, MatrixLayout::rows(width)), kernels, false, target, epilogue)?;
        saved.keep(unfolded);
        saved.keep(before);
        Ok(y)
    }

    /// Accumulates parameter gradients; returns the gradient of `rows` input rows if requested.
    fn backward<D: Device>(
        &self,
        pass: &mut BackwardPass<'_, D>,
        mut d: Tensor<D>,
        (unfold, rows): (&DeviceSparseRows<D>, Option<usize>),
        saved: &mut SavedActivations<D>,
    ) -> Result<Option<Tensor<D>>> {
        let (device, width) = (pass.device, TAPS * self.inputs);
        let (before, unfolded) = (saved.take(), saved.take());
        device.activate_backward(Activation::GeluExact, &before, &mut d)?;
        let out_rows = unfold.rows / TAPS;
        let (by_output, by_tap) = (MatrixLayout::rows(self.outputs), MatrixLayout::rows(width));
        // frozen parameters have no gradient
        if let Some(gradient) = pass.parameters.gradient_mut(self.bias) {
            device.bias_backward(&d, Columns::all(self.outputs), gradient)?;
        }
        let (weight, gradient) = pass.parameters.both(self.weight);
        if let Some(gradient) = gradient {
            let mut d_kernels = device.alloc(weight.len())?;
            let shape = GemmShape { rows: self.outputs, columns: width, inner: out_rows };
            let target = (&mut d_kernels, by_tap);
            let d = (&d, by_output.transposed());
            device.gemm(shape, d, (&unfolded, by_tap), false, target, Epilogue::None)?;
            device.transpose(&d_kernels, TAPS, self.inputs, true, gradient)?;
        }
        let Some(rows) = rows else { return Ok(None) };
        // transposed again instead of saved: kernels are small next to activations
        let kernels = self.kernels(device, weight)?;
        let mut d_unfolded = unfolded;
        let shape = GemmShape { rows: out_rows, columns: width, inner: self.outputs };
        let target = (&mut d_unfolded, by_tap);
        device.gemm(shape, (&d, by_output), (&kernels, by_tap), false, target, Epilogue::None)?;
        let mut dx = device.zeros(rows * self.inputs)?;
        device.gather_scatter(&unfold.backward, self.inputs, &d_unfolded, &mut dx)?;
        Ok(Some(dx))
    }
}

/// Two convolutions and positions.
#[derive(Debug)]
pub(super) struct AudioStem {
    first: Convolution,
    second: Convolution,
    /// Position table; `None` if the context has the table.
    positions: Option<ParameterId>,
    hidden: usize,
}

impl AudioStem {
    /// Declares the parameters; stored positions are sinusoids that are never trained.
    pub(super) fn declare(
        declaration: &mut Declaration,
        prefix: &str,
        [mels, hidden]: [usize; 2],
        positions: AudioPositions,
    ) -> Self {
        let first = Convolution::declare(declaration, &format!("{prefix}conv1"), [hidden, mels]);
        let second = Convolution::declare(declaration, &format!("{prefix}conv2"), [hidden, hidden]);
        let positions = match positions {
            AudioPositions::Stored(rows) => {
                let name = format!("{prefix}embed_positions.weight");
                Some(declaration.add_frozen(name, &[rows, hidden], Init::Sinusoids))
            }
            AudioPositions::Computed(_) => None,
        };
        Self { first, second, positions, hidden }
    }
}

impl<D: Device> Block<D> for AudioStem {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        _: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let inputs = pass.context.inputs.encoder()?;
        let [first, second] = unfolds(&inputs.stem);
        let x = self.first.forward(pass, &inputs.medium, first, saved)?;
        let mut rows = self.second.forward(pass, &x, second, saved)?;
        let stored = self.positions.map(|table| pass.parameters.value(table));
        if let (Some(table), Some(mix)) = (stored.or(inputs.position_table.as_ref()), &inputs.positions) {
            pass.device.gather_scatter(&mix.forward, self.hidden, table, &mut rows)?;
        }
        Ok(BlockOutput::Rows(rows))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        saved: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let inputs = pass.context.inputs.encoder()?;
        let d = expect_rows::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        let [first, second] = unfolds(&inputs.stem);
        let between = Some(first.rows / TAPS);
        if let Some(d) = self.second.backward(pass, d, (second, between), saved)? {
            self.first.backward(pass, d, (first, None), saved)?;
        }
        Ok(None)
    }
}

fn unfolds<D: Device>(stem: &[DeviceSparseRows<D>]) -> [&DeviceSparseRows<D>; 2] {
    let [first, second] = stem else { unreachable!("the context of audio has two convolutions") };
    [first, second]
}
