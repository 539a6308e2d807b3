//! Shows data-parallel layouts: memory per GPU, and how a trainer is set to them.

use std::io::Write;

use dflop_costmodel::memory::RankMemory;
use dflop_costmodel::{RankLayout, Sharding};
use dflop_loader::Synchronization;
use serde::Serialize;

use crate::failure::Failure;

pub(crate) const BYTES_PER_GIB: f64 = 1_073_741_824.0;
/// Columns for the name of a layout.
pub(crate) const NAME_COLUMNS: usize = 43;

/// Memory per GPU under a layout.
#[derive(Debug, Serialize)]
pub(crate) struct LayoutMemory {
    layout: String,
    /// GPUs in a shard group; 1 for DDP.
    shard_ranks: u32,
    parameter_bytes: u64,
    gradient_bytes: u64,
    optimizer_bytes: u64,
    /// Layers that are gathered at once, and gradients before division.
    gathered_bytes: u64,
    /// Activations and working set of the largest microbatch.
    activation_bytes: u64,
    pub(crate) total_bytes: u64,
    fits: bool,
}

impl LayoutMemory {
    /// Lists the memory by kind.
    ///
    /// - `bytes_max`: memory that a rank may use
    pub(crate) fn new(layout: RankLayout, memory: &RankMemory, bytes_max: u64) -> Self {
        let RankMemory { parameters, gradients, optimizer, gathered, activations, working_set } = *memory;
        Self {
            layout: layout.to_string(),
            shard_ranks: layout.shard_ranks,
            parameter_bytes: parameters,
            gradient_bytes: gradients,
            optimizer_bytes: optimizer,
            gathered_bytes: gathered,
            activation_bytes: activations.saturating_add(working_set),
            total_bytes: memory.total(),
            fits: memory.total() <= bytes_max,
        }
    }

    pub(crate) fn layout(&self) -> &str {
        &self.layout
    }
}

/// Prints memory by kind, a line per layout.
pub(crate) fn print_memory(
    out: &mut impl Write,
    memory: &[LayoutMemory],
    memory_gib: f64,
) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<NAME_COLUMNS$} {:>10} {:>9} {:>9} {:>8} {:>11} {:>8}",
        "GiB per GPU", "parameters", "gradients", "optimizer", "gathered", "activations", "total"
    )?;
    for report in memory {
        writeln!(
            out,
            "{:<NAME_COLUMNS$} {:>10} {:>9} {:>9} {:>8} {:>11} {:>8}{}",
            report.layout,
            gib(report.parameter_bytes),
            gib(report.gradient_bytes),
            gib(report.optimizer_bytes),
            gib(report.gathered_bytes),
            gib(report.activation_bytes),
            gib(report.total_bytes),
            excess(report.fits, memory_gib)
        )?;
    }
    Ok(())
}

/// Formats bytes in GiB.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / BYTES_PER_GIB)
}

/// Formats seconds; a dash if they are unknown.
pub(crate) fn seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.5}"))
}

/// Marks what does not fit into the GPU memory.
pub(crate) fn excess(fits: bool, memory_gib: f64) -> String {
    if fits { String::new() } else { format!("  above {memory_gib} GiB") }
}

/// Describes how PyTorch and the loader are set to a layout.
pub(crate) fn trainer_settings(layout: RankLayout) -> String {
    let RankLayout { ranks, shard_ranks, sharding, .. } = layout;
    let mesh = format!("on a mesh of {} x {shard_ranks} ranks", ranks / shard_ranks.max(1));
    let trainer = match (sharding, layout.has_groups()) {
        (Sharding::Nothing, _) => {
            "`DistributedDataParallel`, `no_sync()` in all microbatches but the last".to_owned()
        }
        (Sharding::Optimizer, _) => {
            "`ZeroRedundancyOptimizer` beside `DistributedDataParallel`, or DeepSpeed `stage: 1`".to_owned()
        }
        (Sharding::Gradients, is_grouped) => {
            let mesh = if is_grouped { mesh + ", " } else { String::new() };
            let name = if is_grouped { "_HYBRID_SHARD_ZERO2" } else { "SHARD_GRAD_OP" };
            format!(
                "`fully_shard(reshard_after_forward=False)` {mesh}`set_reshard_after_backward(False)` in all \
                 microbatches but the last; FSDP1 `{name}`"
            )
        }
        (Sharding::Parameters, true) => format!("`fully_shard` {mesh}; FSDP1 `HYBRID_SHARD`"),
        (Sharding::Parameters, false) => "`fully_shard` on every layer; FSDP1 `FULL_SHARD`".to_owned(),
    };
    format!("{trainer}; `Plan(schedule=\"{}\")`", Synchronization::from(layout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_has_settings_of_its_own() {
        let layouts = RankLayout::all(16, 8, 8);
        let mut settings: Vec<String> = layouts.iter().copied().map(trainer_settings).collect();
        let last = settings.last().map(String::as_str);
        let expected = "`fully_shard` on every layer; FSDP1 `FULL_SHARD`; `Plan(schedule=\"microbatch\")`";
        assert_eq!(last, Some(expected));
        assert!(settings[4].contains("on a mesh of 2 x 8 ranks; FSDP1 `HYBRID_SHARD`"), "{}", settings[4]);
        assert!(settings[4].ends_with("`Plan(schedule=\"microbatch:8\")`"), "{}", settings[4]);
        settings.sort_unstable();
        settings.dedup();
        assert_eq!(settings.len(), 6);
    }
}
