//! Tests `plan` and `simulate --shapes` on a few problems from the grid that `make planner-grid` covers.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

use crate::command::{Run, dflop, text};

/// Batches that plans are judged on: more than the first rounds of the search look at.
const BATCHES: &str = "16";

/// Model, tile tail exponent, GPUs, global batch samples, plan kinds and costs.
type Cell = (&'static str, f64, &'static str, &'static str, &'static [&'static str]);

const BASIC: &[&str] = &["--set", "space.kinds=basic"];
const LINKS: &[&str] = &["--set", "space.kinds=basic", "--links", "LINKS"];
const FULL: &[&str] = &[];
const JOINT: &[&str] =
    &["--set", "space.placement=any", "--set", "space.zero1=true", "--set", "space.sequence_parallel=true"];

const CELLS: [Cell; 11] = [
    ("llava-ov-qwen2.5-7b", 0.5, "8", "64", BASIC),
    ("llava-ov-qwen2.5-7b", 1.1, "16", "128", LINKS),
    ("llava-ov-llama3-8b", 0.9, "32", "256", LINKS),
    ("internvl3-8b", 0.9, "32", "128", FULL),
    ("internvl3-8b", 0.9, "16", "64", JOINT),
    ("qwen2-audio-7b", 0.7, "16", "64", FULL),
    ("llava-ov-qwen2.5-72b", 0.9, "8", "32", BASIC),
    ("llava-ov-qwen2.5-32b", 0.9, "16", "256", LINKS),
    ("llava-ov-qwen2.5-32b", 0.9, "16", "128", JOINT),
    ("omni-7b", 0.9, "16", "128", LINKS),
    ("omni-7b", 0.9, "16", "64", JOINT),
];

/// Draws samples whose tiles have a heavy tail.
fn shapes(exponent: f64) -> String {
    let mut table = "tiles,vision_tiles,audio_tiles,seq_len\n".to_owned();
    let mut state = 1_u64;
    for _ in 0..500 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let uniform = ((state >> 33) as f64 + 1.0) / f64::from(1_u32 << 31);
        let tiles = (uniform.powf(-exponent) as u32 - 1).min(36);
        let windows = (state >> 20) as u32 % 3;
        let tokens = 40 + 196 * tiles + (state >> 40) as u32 % 700;
        writeln!(table, "{tiles},{tiles},{windows},{tokens}").expect("a string");
    }
    table
}

/// Returns the answer, or nothing if no plan fits; any other end is a panic of the test.
fn answer(args: &[&str]) -> Option<Value> {
    let run: Run = dflop(args);
    if run.status == Some(1) && run.stderr.contains("no plan fits") {
        return None;
    }
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    run.objects().pop()
}

fn judge(directory: &Path, (model, exponent, gpus, samples, space): Cell) -> bool {
    let (table, links) = (directory.join("shapes.csv"), directory.join("links.csv"));
    std::fs::write(&table, shapes(exponent)).expect("a file");
    std::fs::write(
        &links,
        "link,gigabytes_per_second,latency_microseconds\nnvlink,240,3\ninfiniband,12.5,10\n",
    )
    .expect("a file");
    let problem = ["--model", model, "--device", "a100", "--shapes", text(&table), "--json"];
    let cluster = ["--gpus", gpus, "--global-batch-size", samples];
    let space: Vec<&str> =
        space.iter().map(|word| if *word == "LINKS" { text(&links) } else { word }).collect();
    let planned = answer(&[&["plan", "--batches", BATCHES], &problem[..], &cluster, &space].concat());
    let compared = answer(&[&["simulate", "--steps", BATCHES], &problem[..], &cluster, &space].concat());
    assert_eq!(planned.is_some(), compared.is_some(), "{model} on {gpus} GPUs: a plan fits both or none");
    let (Some(planned), Some(compared)) = (planned, compared) else { return false };
    let methods = compared["strategies"].as_array().expect("strategies");
    let seconds = |method: &Value| method["step_seconds"].as_f64().expect("seconds");
    let ours = methods.iter().find(|method| method["name"] == "dflop").expect("our method");
    assert_eq!(ours["plan"]["modules"], planned["modules"]);
    // Both balance batches alike, so that a plan has one step time.
    let ratio = seconds(ours) / seconds(&planned);
    assert!((ratio - 1.0).abs() < 1e-3 && ours["fits"] == true, "{model} on {gpus} GPUs: {ratio}");
    let is_searched = |method: &Value| space == JOINT || method["plan"]["placement"] == "disaggregated";
    for other in methods.iter().filter(|method| method["fits"] == true && is_searched(method)) {
        assert!(seconds(ours) <= 1.005 * seconds(other), "{model} on {gpus} GPUs: {}", other["name"]);
    }
    true
}

#[test]
fn problems_of_the_grid_have_a_plan_or_none_that_fits() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let planned = CELLS.into_iter().filter(|cell| judge(directory.path(), *cell)).count();
    assert!((4..CELLS.len()).contains(&planned), "{planned} of {} have a plan", CELLS.len());
}
