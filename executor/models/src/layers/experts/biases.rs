//! Expert biases: two parameters with a row per expert.

use super::dispatch::expert_rows;
use crate::error::Result;
use crate::parameters::weights::{AxisPartition, Init, ParameterId};
use crate::parameters::{Declaration, Parameters};
use dflop_device::{Device, Dtype, SparseBuffers, Tensor};

/// Biases for one matrix in all experts.
#[derive(Debug)]
pub(super) struct Biases {
    parameter: ParameterId,
    columns: usize,
    /// Whether another tensor-parallel rank adds the biases.
    is_elsewhere: bool,
}

impl Biases {
    /// Declares `[experts, columns]`; each rank has the columns for some outputs.
    pub(super) fn for_outputs(
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
    pub(super) fn for_sums(declaration: &mut Declaration, name: &str, sizes: [usize; 2]) -> Self {
        let parameter = declaration.add(name, &sizes, Init::Zeros);
        Self { parameter, columns: sizes[1], is_elsewhere: declaration.tp_rank().rank > 0 }
    }

    /// Adds the expert bias to every row.
    pub(super) fn add<D: Device>(
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
