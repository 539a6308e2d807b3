//! Predicts a pipeline stage's peak device memory in bytes.
//!
//! Collects a profile's memory points, from reference files or from the `bytes` column.
//!
//! A stage holds *state* (parameters, gradients, optimizer), *activations* for every microbatch in flight,
//! the *working set* for the layer being computed, and buffers. [`StateBytes`] and [`ActivationBytes`] follow
//! from a model's sizes, for any TP degree; [`Peak`] adds them up. [`MeasuredMemory`] fits the same
//! quantities to measured points, which replace the formulas if there are any. [`PipelineMemory`] covers all
//! stages in a pipeline.
//!
//! [`ModuleMemory`] computes stage memory as a function of tokens, for a planner. [`ReplicaMemory`] is for
//! ranks without a pipeline.
//!
//! Bytes are whole and saturate; a stage counts with its fullest rank. Formulas are for 16-bit or 32-bit
//! activations ([`Precision`]) and fused attention and count what PyTorch saves for the backward pass;
//! allocator overhead is a buffer.
//!
//! In reference files, state is the peak over a whole training step, because allocations after the
//! optimizer's update may lack gradients. In this project's rows, activations are what a forward pass through
//! `whole` layers saves, or through `linear` layers and through `attention` per layer; state is what the
//! `optimizer` row for the same layers holds.

mod activation;
mod pipeline;
mod rank_layout;
mod replica;
mod stage;
mod state;
mod trainer;

use super::error::{Error, Result};
use super::model::ModelSpec;
use super::profile::{ModuleWidths, Part, Phase, Point, Profile};
use crate::Module;
use std::collections::BTreeMap;

pub use activation::{ActivationBytes, Execution, Precision, SavedActivations};
pub use pipeline::{ModuleStages, PipelineMemory, StageMemory};
pub use rank_layout::{RankLayout, Sharding};
pub use replica::{LargestMicrobatch, ModuleParameters, RankMemory, ReplicaMemory};
pub use stage::{FitError, MeasuredMemory, MemoryPoint, ModuleMemory, StageByTokens};
pub use state::{StageLayers, StateBytes, encoder_parameters};
pub use trainer::{Kernels, Trainer};

/// Formats a number of bytes with a decimal unit, such as `1.5 kB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// Stage memory by kind, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Peak {
    /// Parameters, gradients and optimizer state.
    pub state: u64,
    /// Activations saved for the backward passes, over all microbatches in flight.
    pub activations: u64,
    /// Memory for the layer, or the LM head, being computed.
    pub working_set: u64,
    /// All other allocations: communication, workspaces, fragmentation.
    pub buffers: u64,
}

impl Peak {
    /// Returns the sum, saturating.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.state
            .saturating_add(self.activations)
            .saturating_add(self.working_set)
            .saturating_add(self.buffers)
    }
}

/// Returns the number of microbatches whose activations a 1F1B pipeline stage holds at once.
///
/// - `stage`: 0 is the first of `stages`, which count encoder and LLM stages together
/// - `microbatches`: number of microbatches in a step
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, arXiv:2104.04473,
/// section 2.2.1: a stage has warmed up by as many microbatches as stages follow it. In the DFLOP paper
/// (section 3.2.1), `E_pp + L_pp` for an encoder and `L_pp` for an LLM are the first stages' values.
#[must_use]
pub const fn microbatches_in_flight(stage: u32, stages: u32, microbatches: u32) -> u32 {
    let following = stages.saturating_sub(stage);
    if following < microbatches { following } else { microbatches }
}

/// Splits layers over stages as equally as possible, the larger shares first.
///
/// # Panics
/// If `stages` is 0.
#[must_use]
pub fn split_layers(layers: u32, stages: u32) -> Vec<u32> {
    assert!(stages > 0, "a pipeline has at least one stage");
    let (share, rest) = (layers / stages, layers % stages);
    (0..stages).map(|stage| share + u32::from(stage < rest)).collect()
}

/// TP degree, layers, batch and tokens in a run.
type Run = [u32; 4];

impl MeasuredMemory {
    /// Fits a module's memory to the profile's points; `None` if the profile has no bytes for the module.
    ///
    /// # Errors
    /// [`Error::Memory`] for points that cannot be fitted; [`Error::ProfileLacks`] if the module was only
    /// measured with other widths.
    pub fn from_profile(profile: &Profile, spec: &ModelSpec, module: Module) -> Result<Option<Self>> {
        let Some(widths) = ModuleWidths::from_spec(spec, module) else { return Ok(None) };
        let mut points = reference_points(profile, module);
        if points.is_empty() && profile.has_module(module) {
            let rows = profile.select(module, &widths)?.points;
            points = row_points(&rows);
        }
        if points.is_empty() {
            return Ok(None);
        }
        let in_module = |error: FitError| Error::Memory { module, reason: error.to_string() };
        Self::fit(&points).map(Some).map_err(in_module)
    }
}

fn reference_points(profile: &Profile, module: Module) -> Vec<MemoryPoint> {
    let rows = profile.files().iter().flat_map(|file| &file.step_memory);
    rows.filter(|row| row.module == module)
        .map(|row| MemoryPoint {
            layers: row.layers,
            tp: row.tp,
            batch: row.batch,
            sequence: row.tokens,
            state_bytes: row.step_peak_bytes.max(row.state_bytes) as f64,
            activation_bytes: row.activation_bytes as f64,
        })
        .collect()
}

fn row_points(rows: &[Point]) -> Vec<MemoryPoint> {
    let (mut states, mut whole, mut linear, mut attention) =
        (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for row in rows {
        let Some(bytes) = row.bytes else { continue };
        let setting = row.setting;
        let run: Run = [setting.tp, setting.layers, setting.batch, setting.tokens];
        match (setting.phase, setting.part) {
            (Phase::Optimizer, Part::Linear | Part::Whole) => {
                states.insert((setting.tp, setting.layers), bytes);
            }
            (Phase::Forward, Part::Whole) => {
                whole.insert(run, bytes);
            }
            (Phase::Forward, Part::Linear) => {
                linear.insert(run, bytes);
            }
            (Phase::Forward, Part::Attention) => {
                let per_layer = bytes as f64 / f64::from(setting.layers.max(1));
                attention.insert([setting.tp, setting.batch, setting.tokens], per_layer);
            }
            _ => {}
        }
    }
    let separate = linear.iter().filter_map(|(run, bytes)| {
        let of_attention = attention.get(&[run[0], run[2], run[3]])?;
        Some((*run, *bytes as f64 + of_attention * f64::from(run[1])))
    });
    let mut activations: BTreeMap<Run, f64> = separate.collect();
    // A measurement over whole layers replaces the sum of separate measurements in the same run.
    activations.extend(whole.iter().map(|(run, bytes)| (*run, *bytes as f64)));
    let point = |([tp, layers, batch, sequence], activation_bytes): (Run, f64)| {
        let state_bytes = *states.get(&(tp, layers))? as f64;
        Some(MemoryPoint { layers, tp, batch, sequence, state_bytes, activation_bytes })
    };
    activations.into_iter().filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_their_unit() {
        let shown = [0, 999, 1_500, 75_000_000].map(format_bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.5 kB", "75.0 MB"]);
    }

    #[test]
    fn the_first_stage_holds_the_most_microbatches() {
        let held = |stages, microbatches| {
            (0..stages).map(|stage| microbatches_in_flight(stage, stages, microbatches)).collect::<Vec<_>>()
        };
        assert_eq!(held(4, 8), [4, 3, 2, 1]);
        assert_eq!(held(4, 2), [2, 2, 2, 1]);
        assert_eq!(held(1, 8), [1]);
    }

    #[test]
    fn layers_are_split_without_loss() {
        assert_eq!(split_layers(28, 4), [7, 7, 7, 7]);
        assert_eq!(split_layers(30, 4), [8, 8, 7, 7]);
        assert_eq!(split_layers(2, 3), [1, 1, 0]);
    }

    #[test]
    fn a_peak_is_the_sum_of_its_kinds() {
        let peak = Peak { state: 1, activations: 20, working_set: 300, buffers: 4000 };
        assert_eq!(peak.total(), 4321);
        assert_eq!(Peak { state: u64::MAX, ..peak }.total(), u64::MAX);
    }

    const HEAD: &str = "# dflop-profile: 1\n# llm: hidden=3584 heads=28 kv_heads=4 ffn=18944\n\
                        module,part,phase,tp,layers,batch,tokens,microseconds,bytes\n";

    fn fitted(text: &str, name: &str) -> Result<Option<MeasuredMemory>> {
        let profile = Profile::parse([(name, text)])?;
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b")?;
        MeasuredMemory::from_profile(&profile, &spec, Module::Llm)
    }

    /// A layer's linear work saves 20,000 bytes per token, its attention 4,000; a layer's state takes 3 GB.
    fn rows(layer_counts: &[u64]) -> String {
        let mut lines = vec![HEAD.to_owned()];
        for tokens in [512, 1024] {
            lines.push(format!("llm,attention,forward,1,1,1,{tokens},5,{}\n", 4000 * tokens));
            for layers in layer_counts {
                let bytes = 20_000 * layers * tokens;
                lines.push(format!("llm,linear,forward,1,{layers},1,{tokens},5,{bytes}\n"));
            }
        }
        let state = |layers| format!("llm,linear,optimizer,1,{layers},0,0,5,{}\n", 3_000_000_000 * layers);
        lines.extend(layer_counts.iter().map(state));
        lines.concat()
    }

    #[test]
    fn rows_with_bytes_are_points() {
        let fitted = fitted(&rows(&[1, 3]), "p.csv").unwrap().unwrap();
        assert_eq!(fitted.state_bytes(28, 1).unwrap(), 84_000_000_000);
        let bytes = fitted.activation_bytes(7, 1, 1, 4096).unwrap();
        assert!(bytes.abs_diff(7 * 24_000 * 4096) <= 7 * 24, "{bytes}");
    }

    #[test]
    fn files_of_the_reference_are_points() {
        let text = "batch_size,seq_len,model_mem,fwd_peak,model_state_peak,num_layers,tp_size\n\
                    1,1024,6.0,0.5,7.0,3,1\n1,1024,8.0,0.6,9.0,4,1\n";
        let fitted = fitted(text, "mem_llavaov_qwen2.5_7b.csv").unwrap().unwrap();
        assert_eq!(fitted.state_bytes(5, 1).unwrap(), 11 << 30);
    }

    #[test]
    fn a_profile_without_bytes_has_no_memory_and_one_layer_count_is_an_error() {
        assert_eq!(fitted(&format!("{HEAD}llm,linear,forward,1,1,1,512,5,\n"), "p.csv"), Ok(None));
        let error = fitted(&rows(&[1]), "p.csv").unwrap_err().to_string();
        assert!(error.starts_with("memory of llm: TP 1 was measured with 1 layers only"), "{error}");
    }
}
