//! Loads the kernels that an update needs before messages are posted, see
//! [`Runtime::prepare`](dflop_device::Runtime::prepare).

use crate::error::{Error, Result};
use dflop_device::ops::adamw::{AdamW, AdamWState, DecayRange};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, Dtype};
use dflop_models::Stage;

use super::bucket_state::Precision;

/// Number of elements in the tensors that operations are tried on.
const ELEMENTS: usize = 8;

/// Runs the update operations on a few elements with the types that stages have.
pub(super) fn prepare<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
    stages: impl IntoIterator<Item = &'a S>,
    precision: Precision,
) -> Result<()> {
    let mut types = Vec::new();
    let mut device = None;
    for stage in stages {
        device.get_or_insert_with(|| stage.device().clone());
        for bucket in stage.parameters().buckets() {
            let parts = bucket.values().parts().iter().zip(bucket.gradients.parts());
            types.extend(parts.map(|(values, gradients)| (values.dtype(), gradients.dtype())));
        }
    }
    let Some(device) = device else { return Ok(()) };
    types.dedup();
    device.prepare(|| types.iter().try_for_each(|&types| update(&device, types, precision)))
}

fn update<D: Device>(
    device: &D,
    (weights, gradients): (Dtype, Dtype),
    precision: Precision,
) -> Result<(), Error> {
    let zeros = |dtype| device.zeros_as(dtype, ELEMENTS);
    let (mut values, mut gradient, mut master) = (zeros(weights)?, zeros(gradients)?, zeros(Dtype::F32)?);
    let (mut mean, mut square, figures) = (zeros(Dtype::F32)?, zeros(Dtype::F32)?, zeros(Dtype::F64)?);
    let (mut squares, mut clip) = (zeros(Dtype::F64)?, device.zeros_as(Dtype::F64, 2)?);
    device.sums_of_squares(&[(&gradient, 0)], &mut squares)?;
    device.clip_factor(&figures, 0..ELEMENTS, None, &mut clip)?;
    let place = CopyRange { from: 0, to: 0, len: 1 };
    let mut copied = zeros(weights)?;
    device.copy_ranges(&[place], &values, &mut copied)?;
    device.copy_ranges(&[place], &mean, &mut master)?;
    device.copy_ranges(&[place], &figures, &mut squares)?;
    device.add(&copied, &mut master)?;
    device.add(&zeros(gradients)?, &mut gradient)?;
    let adamw = AdamW {
        learning_rate: 0.0,
        beta1: 0.9,
        beta2: 0.9,
        epsilon: 1.0,
        weight_decay: 0.0,
        step: 1,
        gradient_scale: 1.0,
    };
    let decays = [DecayRange { elements: 0..ELEMENTS, weight_decay: 0.0 }];
    let master = (precision == Precision::Bf16).then_some(&mut master);
    let state = AdamWState { master, mean: &mut mean, square: &mut square };
    Ok(device.adamw(&adamw, &decays, &clip, &mut values, &gradient, state)?)
}
