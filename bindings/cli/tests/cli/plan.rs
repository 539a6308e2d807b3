//! Tests `dflop plan` from input files to output fields.

use std::path::{Path, PathBuf};

use dflop_tests::plan_cases::{CASES, files};
use serde_json::Value;

use crate::command::{dflop, object};

/// Directory with a profile in the reference's files, shapes and links.
struct Inputs {
    _directory: tempfile::TempDir,
    profile: String,
    shapes: String,
    links: String,
}

fn inputs() -> Inputs {
    let directory = tempfile::tempdir().unwrap();
    let write = |path: PathBuf, text: &str| {
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let profile = directory.path().join("profile");
    std::fs::create_dir(&profile).unwrap();
    for (name, text) in files(&CASES[0]) {
        write(profile.join(name), &text);
    }
    let row = |at: u32| format!("{},{}\n", at % 9, 300 + at % 9 * 729 + at * 37 % 400);
    let shapes = format!("tiles,seq_len\n{}", (0..500).map(row).collect::<String>());
    let links = "link,gigabytes_per_second,latency_microseconds\nnvlink,300,3\ninfiniband,25,10\n";
    Inputs {
        shapes: write(directory.path().join("shapes.csv"), &shapes),
        links: write(directory.path().join("links.csv"), links),
        profile: profile.display().to_string(),
        _directory: directory,
    }
}

impl Inputs {
    fn args<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let fixed = ["plan", "--profile", &self.profile, "--shapes", &self.shapes];
        let sizes = ["--gpus", "16", "--gpus-per-node", "8", "--global-batch-size", "64", "--batches", "8"];
        [&fixed[..], &sizes[..], more].concat()
    }
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} in {value}"))
}

fn whole(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} in {value}"))
}

fn gpus(plan: &Value, module: &str) -> u64 {
    ["tp", "pp", "dp"].iter().map(|degree| whole(plan, &format!("/{module}/{degree}"))).product()
}

#[test]
fn the_fields_of_a_plan_are_there_and_agree() {
    let inputs = inputs();
    let separate = ["--memory-gib", "80", "--set", "space.placement=disaggregated", "--json"];
    let plan = object(&inputs.args(&separate));
    assert!(gpus(&plan, "encoder") + gpus(&plan, "llm") <= 16);
    assert_eq!(whole(&plan, "/gpus_used"), gpus(&plan, "encoder") + gpus(&plan, "llm"));
    assert!(whole(&plan, "/microbatches") * whole(&plan, "/llm/dp") <= 64);
    assert!(number(&plan, "/step_seconds") >= number(&plan, "/lower_bound_seconds"));
    assert!(number(&plan, "/step_seconds_p95") >= number(&plan, "/step_seconds"));
    assert!(number(&plan, "/search_seconds") >= 0.0);
    assert!(number(&plan, "/plans_bounded") > number(&plan, "/plans_simulated"));
    assert_eq!(plan["placement"], "disaggregated");
    assert_eq!(plan["encoder_share"], "medium");
    assert_eq!(plan["model"], "llavaov-siglip-400m-qwen2.5-7b");
    for (module, layers) in [("encoder", 27), ("llm", 28)] {
        let stages = plan["layers"][module].as_array().unwrap();
        assert_eq!(stages.len() as u64, whole(&plan, &format!("/{module}/pp")));
        assert_eq!(stages.iter().filter_map(Value::as_u64).sum::<u64>(), layers);
        let memory = &plan["memory"][module];
        assert!((number(memory, "/gib") + number(memory, "/headroom_gib") - 80.0).abs() < 1e-6);
    }
    assert!(["encoder", "llm"].contains(&plan["bottleneck"]["module"].as_str().unwrap()));
    let next = &plan["runner_up"];
    assert!(number(next, "/step_seconds") >= number(&plan, "/step_seconds"));
    assert!(next["reason"].as_str().unwrap().contains("slower"));
    let mut again = object(&inputs.args(&separate));
    again["search_seconds"] = plan["search_seconds"].clone();
    assert_eq!(plan, again, "the same every time");
}

/// Without flags every placement is searched, each as if it were alone.
#[test]
fn the_default_plan_is_the_best_of_all_placements() {
    let inputs = inputs();
    let best = object(&inputs.args(&["--json"]));
    let of = |placement: &'static str| {
        let setting = format!("space.placement={placement}");
        object(&inputs.args(&["--set", &setting, "--json"]))
    };
    let alone = ["disaggregated", "colocated", "joint"].map(of);
    let seconds = |plan: &Value| number(plan, "/step_seconds");
    let least = alone.iter().map(seconds).fold(f64::INFINITY, f64::min);
    assert!((seconds(&best) - least).abs() < 1e-12, "{} {least}", seconds(&best));
    // The runner-up is at most as slow as the second best of the placements.
    let own = best["placement"].as_str().expect("a name");
    let others = alone.iter().filter(|plan| plan["placement"] != own);
    let second = others.map(seconds).fold(f64::INFINITY, f64::min);
    assert!(number(&best, "/runner_up/step_seconds") <= second + 1e-12, "{best}");
}

#[test]
fn flags_switch_freedoms_on() {
    let inputs = inputs();
    let plain = number(&object(&inputs.args(&["--json"])), "/step_seconds");
    let linked = object(&inputs.args(&["--links", &inputs.links, "--json"]));
    assert!(number(&linked, "/step_seconds") > plain);
    let colocated = object(&inputs.args(&[
        "--set",
        "space.placement=colocated",
        "--set",
        "space.recompute=true",
        "--json",
    ]));
    assert_eq!(colocated["placement"], "colocated");
    assert_eq!(gpus(&colocated, "encoder"), gpus(&colocated, "llm"));
    let any = object(&inputs.args(&[
        "--set",
        "space.placement=any",
        "--set",
        "space.uneven_layers=true",
        "--json",
    ]));
    assert!(number(&any, "/step_seconds") <= plain * 1.01);
    let by_sample = object(&inputs.args(&["--set", "space.encoder_share=sample", "--json"]));
    assert_eq!(by_sample["encoder_share"], "sample");
    assert_eq!(
        any["searched"],
        "1F1B, even or uneven layers, encoder on separate GPUs or on the GPUs of the LLM or in the LLM's stages, \
         sharded optimizer state"
    );
    let joint =
        object(&inputs.args(&["--set", "space.placement=joint", "--set", "space.zero1=true", "--json"]));
    assert_eq!((&joint["placement"], &joint["is_run"]), (&"joint".into(), &true.into()));
    assert_eq!(joint["schedule"], "1f1b");
    assert_eq!(joint["modules"][1]["dp"], joint["llm"]["dp"]);
    let full = object(&inputs.args(&["--set", "space.kinds=full", "--json"]));
    assert!(number(&full, "/step_seconds") <= plain * 1.01);
    let searched = full["searched"].as_str().expect("a text");
    assert!(searched.contains("with or without running ahead, the fastest also under other schedules"));
    let plain = object(&inputs.args(&["--set", "space.kinds=full", "--set", "plan.schedule=1f1b", "--json"]));
    let searched = plain["searched"].as_str().expect("a text");
    assert!(!searched.contains("other schedules") && !searched.contains("running ahead"), "{plain}");
    assert_eq!(plain["schedule"], "1f1b");
    assert!(number(&full, "/step_seconds") <= 1.005 * number(&plain, "/step_seconds"));
    let table = dflop(&inputs.args(&[]));
    assert_eq!(table.status, Some(0), "{}", table.stderr);
    let searched = "s, of the plans searched: 1F1B, even layers, encoder on separate GPUs or on the GPUs";
    assert!(table.stdout.contains(searched), "{}", table.stdout);
    for part in ["headroom", "bottleneck: ", "runner-up: ", "plans bounded"] {
        assert!(table.stdout.contains(part), "{}", table.stdout);
    }
}

#[test]
fn a_preset_is_planned_without_a_profile() {
    let inputs = inputs();
    let args = |model: &'static str| {
        [
            "plan",
            "--model",
            model,
            "--shapes",
            &inputs.shapes,
            "--gpus",
            "16",
            "--global-batch-size",
            "64",
            "--json",
        ]
        .map(str::to_owned)
    };
    let words = args("llava-ov-qwen2.5-7b");
    let plan = object(&words.each_ref().map(String::as_str));
    assert_eq!(plan["times_from"], "h100 (a stated rate)");
    let limit = |more: &[&str]| {
        let basic = ["--batches", "1", "--set", "space.kinds=basic"];
        let words = words.iter().map(String::as_str).chain(basic).chain(more.iter().copied());
        object(&words.collect::<Vec<_>>())["memory"]["limit_gib"].clone()
    };
    let limits = [&["--device", "h200"][..], &["--device", "h200", "--memory-gib", "80"], &[]].map(limit);
    assert_eq!(limits, [141.0, 80.0, 80.0]);
    let refused = dflop(&args("omni-7b").each_ref().map(String::as_str));
    assert_eq!(refused.status, Some(1));
    let needs =
        "has no column `vision_tiles`; `omni-7b` has several encoders: columns `vision_tiles,audio_tiles";
    assert!(refused.stderr.contains(needs), "{}", refused.stderr);
}

#[test]
fn simulate_takes_the_model_from_the_names_in_a_profile_too() {
    let inputs = inputs();
    let plan = object(&inputs.args(&["--json"]));
    let fixed = ["simulate", "--profile", &inputs.profile, "--shapes", &inputs.shapes, "--json"];
    let sizes = ["--gpus", "16", "--global-batch-size", "64", "--steps", "8"];
    let compared = object(&[&fixed[..], &sizes[..]].concat());
    assert_eq!(compared["model"], plan["model"]);
    let methods = compared["strategies"].as_array().expect("a list");
    assert_eq!(methods.last().expect("dflop")["step_seconds"], plan["step_seconds"]);
}

#[test]
fn what_cannot_be_planned_says_why() {
    let inputs = inputs();
    let fails = |args: &[&str], status: i32, parts: &[&str]| {
        let run = dflop(args);
        assert_eq!(run.status, Some(status), "{}", run.stderr);
        assert_eq!(run.stdout, "");
        for part in parts {
            assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
        }
    };
    let full = inputs.args(&["--set", "space.kinds=full", "--set", "space.recompute=true"]);
    fails(&full, 2, &["`--set space.recompute=true` has no effect in the full space"]);
    let sizes = ["--gpus", "8", "--global-batch-size", "64", "--set", "cost.profile_check=false"];
    let unmeasured =
        [&["plan", "--model", "llava-ov-qwen2.5-7b", "--shapes", &inputs.shapes], &sizes[..]].concat();
    fails(&unmeasured, 2, &["`cost.profile_check` needs `--profile`"]);
    let small = inputs.args(&["--memory-gib", "2"]);
    fails(&small, 1, &["no plan fits", "GiB more memory per GPU", "is 4 of 8"]);
    fails(&inputs.args(&["--memory-gib", "0"]), 2, &["memory-gib"]);
    fails(&inputs.args(&["--set", "space.memory_margin=0.5"]), 2, &["memory_margin"]);
    let mut missing = inputs.args(&[]);
    missing[4] = "no-such-file.csv";
    fails(&missing, 1, &["no-such-file.csv"]);
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../costmodel/profiles");
    let own = own.display().to_string();
    let mut unnamed = inputs.args(&[]);
    unnamed[2] = &own;
    fails(&unnamed, 2, &["--model"]);
    // A profile that was measured twice is rejected, not averaged.
    let doubled = Path::new(&inputs.profile).join("mem_llavaov_siglip_400m.csv");
    let text = std::fs::read_to_string(&doubled).unwrap();
    std::fs::write(&doubled, format!("{text}{}", text.split_once('\n').unwrap().1)).unwrap();
    fails(&inputs.args(&[]), 1, &["mem_llavaov_siglip_400m.csv", "appended"]);
}

/// 30 billion parameters, mostly in experts, on 32 GPUs.
#[test]
fn a_mixture_of_experts_is_planned_with_expert_parallelism() {
    let inputs = inputs();
    let args = |more: &[&'static str]| {
        let model =
            ["plan", "--model", "internvl3.5-30b-a3b", "--device", "h100", "--shapes", &inputs.shapes];
        let sizes = ["--gpus", "32", "--global-batch-size", "64", "--batches", "2"];
        [&model[..], &sizes[..], more].concat()
    };
    let found = object(&args(&["--set", "space.expert_parallel=8", "--json"]));
    assert_eq!(whole(&found, "/llm/ep"), 8);
    assert_eq!(whole(&found, "/modules/1/ep"), 8);
    assert_eq!((whole(&found, "/llm/dp") % 8, &found["is_run"]), (0, &false.into()));
    let [planned, expected, worst] =
        ["planned", "expected", "worst"].map(|key| number(&found, &format!("/expert_imbalance/{key}")));
    assert!((planned - expected).abs() < 1e-12 && 1.0 < expected && expected < 1.2);
    assert!((worst - 8.0).abs() < 1e-12, "16 of 128 experts of a rank are all 8 of a token");
    let slower =
        object(&args(&["--set", "space.expert_parallel=8", "--set", "space.expert_imbalance=3", "--json"]));
    assert!(number(&slower, "/step_seconds") > number(&found, "/step_seconds"));
    assert!((number(&slower, "/expert_imbalance/planned") - 3.0).abs() < 1e-12);
    let printed = dflop(&args(&["--set", "space.expert_parallel=8"])).stdout;
    assert!(printed.contains("expert parallelism: 8 ranks, load imbalance 1.0"), "{printed}");
    assert!(printed.contains("the executor does not run it yet"), "{printed}");
    let any = object(&args(&["--json"]));
    assert!(number(&any, "/step_seconds") <= number(&found, "/step_seconds"));
    assert!(
        dflop(&args(&["--set", "space.expert_parallel=3"]))
            .stderr
            .contains("= 3 must divide the 128 experts of a layer")
    );
    assert!(dflop(&args(&["--set", "space.expert_imbalance=0.5"])).stderr.contains("a number of at least 1"));
}
