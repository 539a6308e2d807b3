//! Names what to pass to the trainer of a plan.

use std::io::Write;
use std::path::Path;

use dflop_costmodel::FrozenParts;
use dflop_costmodel::memory::Trainer;
use dflop_planner::{PlanProblem, PlanReport};
use serde::Serialize;

use crate::failure::Failure;

/// Plan, and what to pass to `dflop.torch.Pipeline`.
#[derive(Debug, Serialize)]
pub(super) struct TrainerJson {
    name: &'static str,
    /// Whether the replicas of a stage share weights and optimizer state, which then have 32 bits.
    is_sharded: bool,
    /// Frozen parts, as `cost.freeze` names them.
    #[serde(skip_serializing_if = "Option::is_none")]
    frozen: Option<String>,
    /// Factor on the device preset's times; left out for measured times.
    #[serde(skip_serializing_if = "Option::is_none")]
    times_factor: Option<f64>,
    /// Commands that start the ranks, each on some nodes.
    launch: Vec<String>,
    /// Lines of a training script.
    python: Vec<String>,
}

/// Inputs of a plan that a training script reads as well.
pub(super) struct ScriptInputs<'a> {
    pub(super) models: &'a [String],
    pub(super) shards: &'a [String],
    pub(super) frozen: Option<FrozenParts>,
    /// Whether times come from a profile.
    pub(super) is_measured: bool,
    pub(super) global_batch_size: u32,
}

/// Factor on the times of a device preset: its rates are those of eager PyTorch modules.
///
/// # Source
/// Qwen2.5-VL-7B in transformers 5.17 with PyTorch 2.11 on an H200, see `costmodel/src/predict/device.rs`.
const PRESET_FACTOR: f64 = 1.0;

impl TrainerJson {
    /// Describes a plan for PyTorch; `None` for the executor, which reads the plan itself.
    pub(super) fn new(
        problem: &PlanProblem<'_>,
        found: &PlanReport,
        inputs: &ScriptInputs<'_>,
    ) -> Option<Self> {
        let options = &problem.options;
        if options.trainer == Trainer::Dflop {
            return None;
        }
        Some(Self {
            name: options.trainer.name(),
            is_sharded: options.has_sharded_optimizer,
            frozen: inputs.frozen.map(|frozen| frozen.to_string()),
            times_factor: (!inputs.is_measured).then_some(PRESET_FACTOR),
            launch: launch(found.plan.gpus(), problem.cluster.gpus_per_node),
            python: python(inputs),
        })
    }

    /// Prints the assumptions, the commands and the lines.
    pub(super) fn print(&self, out: &mut impl Write) -> Result<(), Failure> {
        let state = if self.is_sharded {
            "weights and AdamW in 32 bits, shared by replicas, passes in 16 bits"
        } else {
            "weights and AdamW in 16 bits on every replica"
        };
        writeln!(out, "trainer: dflop.torch.Pipeline, eager modules, {state}")?;
        if let Some(factor) = self.times_factor {
            writeln!(
                out,
                "times: {factor} times the preset's, whose rates are those of eager PyTorch modules"
            )?;
        }
        writeln!(out, "pass this, with the answer of `--json` in plan.json:")?;
        self.launch.iter().chain(&self.python).try_for_each(|line| writeln!(out, "    {line}"))?;
        Ok(())
    }
}

/// Returns the commands that start the ranks, as evenly as possible on as few nodes as have room.
fn launch(ranks: u32, gpus_per_node: u32) -> Vec<String> {
    let nodes = ranks.div_ceil(gpus_per_node.max(1)).max(1);
    if nodes == 1 {
        return vec![format!("torchrun --nproc-per-node {ranks} train.py")];
    }
    let (share, more) = (ranks / nodes, ranks % nodes);
    let command = |own: u32, count: u32| {
        let place = if count == nodes { String::new() } else { format!("  # on {count} of the nodes") };
        format!("torchrun --nnodes {nodes} --nproc-per-node {own} train.py{place}")
    };
    let commands = [(share + 1, more), (share, nodes - more)].into_iter();
    commands.filter(|(_, count)| *count > 0).map(|(own, count)| command(own, count)).collect()
}

fn python(inputs: &ScriptInputs<'_>) -> Vec<String> {
    let is_directory = |name: &&String| Path::new(name).is_dir();
    let checkpoint = match inputs.models {
        [model] if is_directory(&model) => quoted(model),
        _ => quoted("CHECKPOINT"),
    };
    let shards = match inputs.shards {
        [] => quoted("SHARDS"),
        [shards] => quoted(shards),
        several => format!("[{}]", several.iter().map(|one| quoted(one)).collect::<Vec<_>>().join(", ")),
    };
    let batch = inputs.global_batch_size;
    let mut lines = vec![
        format!("checkpoint, shards, plan = {checkpoint}, {shards}, \"plan.json\""),
        "build = dflop.torch.split(checkpoint, dtype=torch.bfloat16, plan=plan)".to_owned(),
    ];
    if let Some(frozen) = inputs.frozen {
        lines.push(format!("# freeze {frozen} in a function around `build`"));
    }
    lines.extend([
        "def loader(role):".to_owned(),
        format!(
            "    return dflop.BalancedLoader(shards, model=checkpoint, global_batch_size={batch}, role=role)"
        ),
        "pipeline = dflop.torch.Pipeline(build, plan, loader)".to_owned(),
        "optimizer = torch.optim.AdamW(pipeline.module.parameters())".to_owned(),
    ]);
    lines
}

/// Writes a Python string.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_spread_over_as_few_nodes_as_have_room() {
        assert_eq!(launch(8, 8), ["torchrun --nproc-per-node 8 train.py"]);
        assert_eq!(launch(12, 8), ["torchrun --nnodes 2 --nproc-per-node 6 train.py"]);
        let uneven = [
            "torchrun --nnodes 2 --nproc-per-node 7 train.py  # on 1 of the nodes",
            "torchrun --nnodes 2 --nproc-per-node 6 train.py  # on 1 of the nodes",
        ];
        assert_eq!(launch(13, 8), uneven);
    }

    #[test]
    fn shards_and_checkpoints_are_strings_of_python() {
        let models = ["no-such-directory".to_owned()];
        let shards = ["a \"quoted\" name".to_owned(), "b".to_owned()];
        let inputs = ScriptInputs {
            models: &models,
            shards: &shards,
            frozen: None,
            is_measured: true,
            global_batch_size: 96,
        };
        let lines = python(&inputs);
        let first = r#"checkpoint, shards, plan = "CHECKPOINT", ["a \"quoted\" name", "b"], "plan.json""#;
        assert_eq!(lines[0], first);
        assert!(lines.iter().any(|line| line.contains("global_batch_size=96, role=role")), "{lines:?}");
    }
}
