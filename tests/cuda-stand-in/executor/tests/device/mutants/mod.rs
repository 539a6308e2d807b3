//! Deliberate kernel faults: the operation tests must find each fault.
//!
//! A fault is found if the device fails, a result differs from the CPU's, or two thread orders give different
//! bits.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use dflop_cuda::Cuda;
use dflop_cuda_tests::cuda;
use dflop_device::ops::attention::AttentionShape;
use dflop_device::{Cpu, Device, Dtype, Result};
use serde::Deserialize;

use crate::attention::Window;
use crate::cases::{self, Cases, Results};

/// Thread orders in which a fault is searched.
const ORDERS: [u64; 3] = [0, 1, 2];
const SEED: u64 = 5;
/// Maximum relative error for a result without a fault, by type.
const BOUNDS: [(Dtype, f64); 2] = [(Dtype::Bf16, 1e-2), (Dtype::F32, 2e-5)];
/// Bound for numbers that are differences between much larger numbers.
const FAR_BOUND: f64 = 0.2;

#[derive(Deserialize)]
struct Mutants {
    mutant: Vec<Mutant>,
}

#[derive(Clone, Deserialize)]
struct Mutant {
    name: String,
    file: String,
    find: String,
    replace: String,
}

impl Mutant {
    /// File text with the fault.
    fn text(&self) -> String {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../executor/cuda/kernels").join(&self.file);
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.matches(&self.find).count(), 1, "{}: `find` occurs once", self.name);
        text.replace(&self.find, &self.replace)
    }
}

fn mutants(list: &str) -> Vec<Mutant> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device/mutants").join(list);
    toml::from_str::<Mutants>(&std::fs::read_to_string(path).unwrap()).unwrap().mutant
}

/// Runs the operations whose kernels are in a file.
fn run<D: Device>(device: &D, file: &str, is_first_half: bool) -> Result<Results> {
    let mut cases = Cases::new(device, SEED);
    match file {
        "elementwise.cu" | "activation.cu" | "activation.cuh" => cases.element_wise()?,
        "copy_ranges.cu" | "gather_scatter.cu" => cases.selections()?,
        "rms_norm.cu" | "layer_norm.cu" | "norm_rows.cuh" | "own_columns.cuh" => cases.norms()?,
        "head_norm.cu" | "head_norm_backward.cu" => cases.head_norms()?,
        "experts.cu" | "clamped_gate.cu" => cases.experts()?,
        "latent_heads.cu" => cases.latent_heads()?,
        "rope.cu" => cases.rotations()?,
        "cross_entropy.cu" | "losses.cu" | "vocab_parallel_cross_entropy.cu" => cases.losses()?,
        "clip.cu" | "adamw.cu" => cases.optimizer()?,
        "device.cuh" => {
            cases.norms()?;
            cases.losses()?;
        }
        "column_sums.cu" => {
            cases.columns()?;
            cases.norms()?;
        }
        "attention_sinks.cu" => cases.sinks()?,
        file if file.starts_with("attention") => {
            let heads = match (file, is_first_half) {
                ("attention_general.cu", true) => [24, 100],
                ("attention_general.cu", false) => [1, 256],
                (_, true) => [72, 64],
                (_, false) => [128, 96],
            };
            for head_dim in heads {
                let windows = [Window::Sliding(70), Window::Chunk(65), Window::Sliding(5)];
                for ((is_causal, scale), window) in
                    [(true, 0.19), (false, -0.3), (true, 0.0)].into_iter().zip(windows)
                {
                    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim, scale, is_causal };
                    cases.attention_around_blocks(&shape, None, 0.0)?;
                    cases.attention_around_blocks(&shape, Some(window), 0.0)?;
                }
                let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim, scale: -2.0, is_causal: false };
                cases.attention_around_blocks(&shape, None, 1.0)?;
            }
            if file == "attention_backward.cu" && is_first_half {
                cases.many_heads()?;
            }
        }
        _ => cases.columns()?,
    }
    Ok(cases.results)
}

/// Returns how a fault shows, if it does.
fn symptom(mutant: &Mutant) -> Option<String> {
    for (dtype, bound) in BOUNDS {
        for is_first_half in [true, false] {
            let is_attention = mutant.file.starts_with("attention") && mutant.file != "attention_sinks.cu";
            // tensor core kernels compute only in bf16; other operations have one half
            let has_work = is_attention && (dtype == Dtype::Bf16 || mutant.file.ends_with("general.cu"));
            if !has_work && (is_attention || !is_first_half) {
                continue;
            }
            let cpu = Cpu::new(1).unwrap().store(dtype).unwrap();
            let expected = run(&cpu, &mutant.file, is_first_half).unwrap();
            let mut first: Option<Results> = None;
            for order in ORDERS {
                cuda::stand_in().reset();
                cuda::stand_in().set_order(order);
                let device: Cuda = cuda::with_source(dtype, &mutant.file, mutant.text());
                let found = match run(&device, &mutant.file, is_first_half) {
                    Ok(found) => found,
                    Err(error) => return Some(error.to_string()),
                };
                for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                    let error = cases::relative_error(found, expected);
                    let bound = if name.starts_with("far ") { FAR_BOUND } else { bound };
                    if error > bound {
                        return Some(format!("{name}: error {error:.1e}"));
                    }
                }
                let first = &*first.get_or_insert_with(|| found.clone());
                let bits = |results: &Results| -> Vec<u32> {
                    results
                        .iter()
                        .flat_map(|(_, values)| values.iter().map(|value| value.to_bits()))
                        .collect()
                };
                if bits(&found) != bits(first) {
                    return Some(format!("other bits in order {order}"));
                }
            }
        }
    }
    None
}

#[test]
fn without_a_fault_nothing_is_found() {
    let _turn = cuda::turn();
    for (file, find) in [
        ("attention_forward.cu", "#include \"attention.cuh\""),
        ("attention_general.cu", "#include \"attention.cuh\""),
        ("device.cuh", "#pragma once"),
        ("bias.cu", "#include \"device.cuh\""),
        ("adamw.cu", "#include \"device.cuh\""),
    ] {
        let [file, find] = [file, find].map(str::to_owned);
        let mutant = Mutant { name: file.clone(), file, replace: find.clone(), find };
        assert_eq!(symptom(&mutant), None, "{}", mutant.file);
    }
}

/// Variable with the fault's list and index, for the process that searches for the fault.
const FAULT: &str = "DFLOP_CUDA_FAULT";

/// Searches for the faults in a list, every `parts`-th fault in this test. Each fault has a separate process,
/// since some faults write anywhere.
fn find_all(list: &str, part: usize, parts: usize) {
    let mut missed = Vec::new();
    for (index, mutant) in mutants(list).iter().enumerate().skip(part).step_by(parts) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "mutants::one_fault", "--nocapture"])
            .env(FAULT, format!("{list}:{index}"));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let symptom = text.lines().find_map(|line| line.strip_prefix("found: ")).map(str::to_owned);
        match symptom.or_else(|| output.status.signal().map(|signal| format!("signal {signal}"))) {
            Some(symptom) => println!("{}: {symptom}", mutant.name),
            None => missed.push(mutant.name.clone()),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

/// Part of the tests below, which run it in separate processes.
#[test]
#[ignore = "runs with an environment of its own"]
fn one_fault() {
    let fault = std::env::var(FAULT).unwrap();
    let (list, index) = fault.split_once(':').unwrap();
    let mutant = mutants(list).swap_remove(index.parse().unwrap());
    if let Some(symptom) = symptom(&mutant) {
        println!("found: {}", symptom.lines().next().unwrap_or_default());
    }
}

#[test]
fn faults_of_operations_are_found() {
    assert!(mutants("operations.toml").len() >= 25);
    find_all("operations.toml", 0, 1);
}

#[test]
fn faults_of_attention_are_found_first_half() {
    find_all("attention.toml", 0, 2);
}

#[test]
fn faults_of_attention_are_found_second_half() {
    find_all("attention.toml", 1, 2);
}
