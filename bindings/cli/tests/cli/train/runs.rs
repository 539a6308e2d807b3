//! Tests the lines from a run, and losses in the same run with other layouts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use serde_json::Value;

use super::config::{Job, difference, loss_bits, losses};
use crate::command::text;

const FIELDS: [&str; 24] = [
    "step",
    "loss",
    "gradient_norm",
    "learning_rate",
    "samples",
    "dropped_samples",
    "tokens",
    "seconds",
    "tokens_per_second",
    "mfu",
    "pass_seconds",
    "bubble_fraction",
    "update_seconds",
    "data_wait_seconds",
    "input_seconds",
    "plan_seconds",
    "result_seconds",
    "report_seconds",
    "checkpoint_seconds",
    "predicted_seconds",
    "replayed_seconds",
    "pipeline_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
];

#[test]
fn recomputed_layers_change_no_bit_in_any_module() {
    // other plans follow the times, which recomputed layers change
    let args = ["--steps", "3", "--strategy", "data-blind"];
    let llm = "llm = { stages = 1, dp = 1 }";
    let plain = loss_bits(&Job::new().lines(&args));
    for tables in [
        "vision = { recompute = 1 }\nllm = { stages = 1 }",
        "llm = { stages = 1, recompute = 2 }",
        "vision = { recompute = 2 }\nllm = { stages = 1, recompute = 1 }",
    ] {
        assert_eq!(loss_bits(&Job::with(&[(llm, tables)]).lines(&args)), plain, "{tables}");
    }
    // a plan that recomputes one module
    let job = Job::new();
    let plan = job.path("plan.json");
    let module = |name: &str, layers: u32, again: bool| {
        let (tp, dp) = (1, 1);
        serde_json::json!({"name": name, "tp": tp, "dp": dp, "layers": [layers], "recompute": again})
    };
    let modules = [module("encoder", 1, false), module("llm", 3, true)];
    let document = serde_json::json!({"modules": modules, "microbatches": 2, "placement": "disaggregated",
        "schedule": "1f1b", "is_run": true});
    std::fs::write(&plan, document.to_string()).expect("the directory can be written");
    assert_eq!(loss_bits(&job.lines(&[&args[..], &["--plan", text(&plan)]].concat())), plain);
}

#[test]
fn a_run_prints_a_line_a_step_and_nothing_else() {
    let lines = Job::new().lines(&[]);
    assert_eq!(lines.len(), 6);
    for (step, line) in lines.iter().enumerate() {
        let number = |name: &str| line[name].as_f64().filter(|number| number.is_finite());
        assert!(FIELDS.iter().all(|name| number(name).is_some()), "{line}");
        assert_eq!((line["step"].as_u64(), line["samples"].as_u64()), (Some(step as u64), Some(8)));
        let [tokens, seconds] = ["tokens", "seconds"].map(|name| number(name).unwrap());
        assert!(
            tokens > 8.0 && (number("tokens_per_second").unwrap() / (tokens / seconds) - 1.0).abs() < 1e-9
        );
        assert!(number("mfu").unwrap() > 0.0 && number("mfu").unwrap() < 1.0, "{line}");
        assert!((0.0..=1.0).contains(&number("bubble_fraction").unwrap()), "{line}");
        assert!(number("predicted_seconds").unwrap() > 0.0 && number("pipeline_seconds").unwrap() > 0.0);
        assert!(number("replayed_seconds").unwrap() > 0.0);
    }
    let losses = losses(&lines);
    assert!((losses[0] - 80_f64.ln()).abs() < 0.5, "a new model knows nothing: {losses:?}");
    assert!(losses[5] < losses[0], "{losses:?}");
}

#[test]
fn one_rank_has_no_bubbles_and_names_what_its_device_waits_for() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "placement = \"joint\"\nllm = { stages = 1 }")]);
    let record = job.path("steps.jsonl");
    let lines = job.lines(&["--record", text(&record)]);
    let mut shares = Vec::new();
    for line in &lines[1..] {
        let parts: f64 = FIELDS[10..FIELDS.len() - 5]
            .iter()
            .filter(|name| **name != "bubble_fraction")
            .map(|name| line[name].as_f64().expect("a number"))
            .sum();
        let share = parts / line["seconds"].as_f64().expect("a number");
        assert!(line["bubble_fraction"].is_null(), "{line}");
        assert!(share < 1.1, "the parts are at most a step: {share} of {line}");
        shares.push(share);
        assert!(line["pass_seconds"].as_f64() > Some(0.0) && line["update_seconds"].as_f64() > Some(0.0));
    }
    // Other load on the machine lengthens some steps, not their parts.
    assert!(shares.iter().any(|share| *share > 0.5), "the parts are a step: {shares:?}");
    let shown = crate::command::object(&["top", text(&record), "--json"]);
    assert_eq!(shown["shares"]["bubbles"], 0.0, "{shown}");
}

#[test]
fn lines_for_people_name_steps_and_end_with_a_summary() {
    let job = Job::new();
    let run =
        crate::command::command(&["train", crate::command::text(&job.path("train.toml")), "--steps", "2"])
            .env("XDG_CACHE_HOME", job.path(""))
            .output();
    let run = crate::command::Run::from(run.expect("the command starts"));
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0].starts_with("start ") && lines[0].contains(" s: "), "{lines:?}");
    assert!(lines[1].starts_with("step     0  loss ") && lines[2].starts_with("step     1  loss "));
    assert!(lines[3].starts_with("2 steps in "), "{lines:?}");
}

/// Parts of a start by name, in seconds, after a check that they are the whole.
fn start_parts(line: &Value) -> BTreeMap<String, f64> {
    let number = |value: &Value| value.as_f64().filter(|number| *number >= 0.0).expect("a number");
    let parts = line["start"]["parts"].as_array().expect("the first line of a run has its start");
    let part = |part: &Value| {
        assert!(part["slowest_rank"].is_u64(), "{part}");
        assert!(number(&part["slowest_seconds"]) >= number(&part["seconds"]), "{part}");
        (part["part"].as_str().expect("a name").to_owned(), number(&part["seconds"]))
    };
    let parts: BTreeMap<String, f64> = parts.iter().map(part).collect();
    let (sum, whole) = (parts.values().sum::<f64>(), number(&line["start"]["seconds"]));
    assert!((sum - whole).abs() < 1e-6, "{sum} is not {whole}: {line}");
    parts
}

#[test]
fn the_first_line_of_a_run_has_all_parts_of_its_start() {
    let job = Job::with(&[("[parallel]\n", "[checkpoint]\nevery = 3\n\n[parallel]\n")]);
    // processes, the same run going on, threads
    for (states, more, first) in
        [("one", &["--steps", "3"][..], 0), ("one", &["--resume"], 3), ("other", &["--stages", "1"], 0)]
    {
        let (record, states) = (job.path(states).with_extension("jsonl"), job.path(states));
        let args = ["--checkpoints", text(&states), "--record", text(&record)];
        let began = Instant::now();
        let lines = job.lines(&[&args[..], more].concat());
        let elapsed = began.elapsed().as_secs_f64();
        let parts = start_parts(&lines[0]);
        let names = [
            "launch",
            "files",
            "index",
            "ranks",
            "device",
            "peak",
            "communicators",
            "kernels",
            "weights",
            "inputs",
            "first_step",
            "other",
        ];
        assert_eq!(parts.keys().map(String::as_str).collect::<BTreeSet<_>>(), BTreeSet::from(names));
        let has_processes = !more.contains(&"--stages");
        assert_eq!(parts["launch"] > 0.0, has_processes, "{parts:?}");
        let missing = ["files", "index", "ranks", "device", "peak", "weights", "inputs", "first_step"];
        let missing: Vec<_> = missing.into_iter().filter(|name| parts[*name] <= 0.0).collect();
        assert!(missing.is_empty(), "{missing:?} of {parts:?}");
        assert_eq!((parts["kernels"], &lines[0]["start"]["kernel_modules"]), (0.0, &0.into()));
        assert!(parts.values().sum::<f64>() <= elapsed + 0.01, "{parts:?} in {elapsed} s");
        let step_seconds = lines[0]["seconds"].as_f64().expect("a number");
        assert!(parts["first_step"] <= step_seconds + 0.01, "{}", lines[0]);
        assert!(lines[1..].iter().all(|line| line["start"].is_null()), "only the first step ends a start");
        let recorded = std::fs::read_to_string(&record).expect("a record");
        let mut steps = recorded.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let step = steps.rfind(|line| line["step"] == first).expect("the first step");
        assert_eq!(start_parts(&step), parts);
    }
}

/// Losses, tokens and norms on the same batches.
fn figures(lines: &[Value], name: &str) -> Vec<f64> {
    lines.iter().map(|line| line[name].as_f64().expect("a number")).collect()
}

#[test]
fn any_number_of_stages_has_the_same_losses() {
    let job = Job::new();
    let whole = job.lines(&["--stages", "2"]);
    assert_eq!(loss_bits(&job.lines(&[])), loss_bits(&whole), "the configuration's stages are two");
    for stages in ["1", "4"] {
        let lines = job.lines(&["--stages", stages]);
        assert!(difference(&losses(&lines), &losses(&whole)) < 1e-6, "{stages} stages");
        let norms = [&lines, &whole].map(|lines| figures(lines, "gradient_norm"));
        assert!(difference(&norms[0], &norms[1]) < 1e-5, "{stages} stages: {norms:?}");
        assert_eq!(figures(&lines, "tokens"), figures(&whole, "tokens"));
    }
}

#[test]
fn tensor_parallel_ranks_have_the_same_losses() {
    let (whole, shared) = (Job::new(), Job::with(&[("llm = {", "vision = { tp = 2 }\nllm = {")]));
    assert!(difference(&losses(&shared.lines(&[])), &losses(&whole.lines(&[]))) < 1e-6);
}

/// Modules on the same ranks: cut from one chain, or the encoder before and after the LLM.
#[test]
fn modules_on_the_same_ranks_have_the_same_losses() {
    let llm = "llm = { stages = 1, dp = 1 }";
    let whole = losses(&Job::new().lines(&[]));
    for (layout, ranks) in [
        ("placement = \"joint\"\nllm = { stages = 2 }", 2),
        ("placement = \"joint\"\nvision = { layers = [1, 0, 0] }\nllm = { layers = [0, 2, 1] }", 3),
        ("placement = \"joint\"\nllm = { tp = 2, dp = 2 }", 4),
        ("placement = \"colocated\"\nvision = { dp = 2 }\nllm = { stages = 2 }", 2),
    ] {
        let job = Job::with(&[(llm, layout)]);
        let trace = job.path("trace.json");
        let lines = job.lines(&["--trace", text(&trace), "--local-ranks", &ranks.to_string()]);
        assert!(difference(&losses(&lines), &whole) < 1e-5, "{layout}");
        assert!(figures(&lines, "predicted_seconds").iter().all(|seconds| *seconds > 0.0));
        let events: Vec<Value> = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
        let passes = |name: &str| events.iter().filter(|event| event["cat"] == name).count();
        assert!(passes("forward") > 0 && passes("backward") > 0, "{layout}");
    }
    let joint = Job::with(&[(llm, "placement = \"joint\"")]);
    let stages = losses(&joint.lines(&["--stages", "2"]));
    assert!(difference(&stages, &losses(&joint.lines(&[]))) < 1e-6);
}

/// The ranks in a joint stage are the encoder replicas, which share the optimizer state for the encoder.
#[test]
fn joint_ranks_share_the_optimizer_state_with_the_same_bits() {
    let layout = ("llm = { stages = 1, dp = 1 }", "placement = \"joint\"\nllm = { stages = 2, dp = 2 }");
    let whole = loss_bits(&Job::with(&[layout]).lines(&["--steps", "3"]));
    let shared = Job::with(&[layout, ("[optimizer]", "[optimizer]\nzero_stage = 1")]);
    assert_eq!(loss_bits(&shared.lines(&["--steps", "3"])), whole);
}

/// A plan that was searched for this model runs unchanged, and a state from a placement continues in a
/// different placement.
#[test]
fn a_plan_runs_as_it_was_printed() {
    let job = Job::new();
    let straight = losses(&job.lines(&["--steps", "4"]));
    let states = job.path("states");
    job.lines(&["--steps", "2", "--checkpoints", text(&states)]);
    let model = job.generated().join("model");
    let shards = job.generated().join("shards");
    for (placement, schedule) in
        [("joint", None), ("colocated", None), ("disaggregated", None), ("disaggregated", Some("zb-h1"))]
    {
        let mut settings = vec![format!("space.placement={placement}")];
        settings.extend(schedule.map(|schedule| format!("plan.schedule={schedule}")));
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let search = [
            "plan",
            text(&shards),
            "--model",
            text(&model),
            "--gpus",
            "2",
            "--global-batch-size",
            "8",
            "--json",
        ];
        let search: Vec<&str> = search.into_iter().chain(settings).collect();
        let found = crate::command::command(&search).output();
        let found = crate::command::Run::from(found.expect("the command starts"));
        assert_eq!((found.status, found.stderr.as_str()), (Some(0), ""), "{placement}");
        if let Some(schedule) = schedule {
            assert!(found.stdout.contains(&format!("\"schedule\":\"{schedule}\"")), "{}", found.stdout);
        }
        let plan = job.path("plan.json");
        std::fs::write(&plan, &found.stdout).expect("the directory can be written");
        let copy = job.path(&format!("{placement}{}", schedule.unwrap_or_default()));
        std::fs::create_dir_all(&copy).expect("the directory can be written");
        let copied = std::process::Command::new("cp").args(["-r", text(&states), text(&copy)]).status();
        assert!(copied.expect("the command starts").success());
        let states = copy.join("states");
        let args = ["--plan", text(&plan), "--steps", "4", "--resume", "--checkpoints", text(&states)];
        let rest = losses(&job.lines(&args));
        assert!(difference(&rest, &straight[2..]) < 1e-5, "{placement}");
    }
}

/// Each of two LLM ranks holds both stages of its replica, and encodes before and after them.
#[test]
fn ranks_with_colocated_encoders_train_with_several_stages() {
    let straight = losses(&Job::new().lines(&["--steps", "4"]));
    let chunks = "placement = \"colocated\"\nschedule = \"interleaved:2\"\nvision = { dp = 2 }\n\
                  llm = { layers = [2, 1], dp = 2 }";
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", chunks)]);
    assert!(difference(&losses(&job.lines(&["--steps", "4"])), &straight) < 1e-5);
}

#[test]
fn the_data_blind_cut_of_the_same_batches_has_the_same_losses() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 1, dp = 2 }")]);
    let (balanced, blind) = (job.lines(&[]), job.lines(&["--strategy", "data-blind"]));
    assert!(difference(&losses(&balanced), &losses(&blind)) < 1e-5);
    assert_eq!(figures(&balanced, "tokens"), figures(&blind, "tokens"));
    assert_ne!(figures(&balanced, "predicted_seconds"), figures(&blind, "predicted_seconds"));
}

#[test]
fn the_same_run_has_the_same_bits_and_another_seed_others() {
    let job = Job::with(&[
        ("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 2 }\nvision = { dp = 2 }"),
        ("steps = 6", "steps = 4"),
    ]);
    let first = loss_bits(&job.lines(&[]));
    assert_eq!(loss_bits(&job.lines(&[])), first);
    let other = loss_bits(&job.lines(&["--seed", "9"]));
    assert!(first.iter().zip(&other).all(|(this, that)| this.1 != that.1));
}
