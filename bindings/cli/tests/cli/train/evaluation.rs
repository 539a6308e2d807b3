//! Tests evaluations during a run: the loss on held-out samples, on any ranks, resumed and shown.

use serde_json::Value;

use super::config::{Job, difference, loss_bits, losses};
use super::data::OnShards;
use crate::command::{dflop, object, text};

const LLM: &str = "llm = { stages = 1, dp = 1 }";

/// Evaluation losses by step.
fn evaluations(lines: &[Value]) -> Vec<(u64, f64)> {
    let own = lines.iter().filter(|line| line["evaluation"].is_object());
    own.map(|line| (line["step"].as_u64().unwrap(), line["evaluation"]["loss"].as_f64().unwrap())).collect()
}

fn bits(evaluations: &[(u64, f64)]) -> Vec<(u64, u64)> {
    evaluations.iter().map(|(step, loss)| (*step, loss.to_bits())).collect()
}

/// Trains on one split and evaluates on another.
fn job(evaluation: &str, replaced: &[(&str, &str)]) -> OnShards {
    let data = OnShards::new();
    rewrite(&data, evaluation, replaced);
    data
}

fn rewrite(data: &OnShards, evaluation: &str, replaced: &[(&str, &str)]) {
    let train = format!("{}\nsplit = \"train\"", data.named());
    data.rewrite(&train, evaluation, replaced);
}

const EVALUATION: &str = "[evaluation]\nevery = 2\nsplit = \"held-out\"\n";

#[test]
fn evaluations_change_no_step_and_are_the_same_on_any_ranks() {
    let data = job("", &[]);
    let plain = data.job.lines(&["--steps", "5"]);
    rewrite(&data, EVALUATION, &[]);
    let alone = data.job.lines(&["--steps", "5", "--stages", "1"]);
    let lines = data.job.lines(&["--steps", "5"]);
    assert_eq!(loss_bits(&lines), loss_bits(&plain));
    let truth = evaluations(&alone);
    assert_eq!(truth.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 3, 4]);
    assert!(
        truth.windows(2).all(|pair| pair[0].1.to_bits() != pair[1].1.to_bits()),
        "the model changes: {truth:?}"
    );
    let counts = |lines: &[Value]| {
        let own = &lines[1]["evaluation"];
        [&own["samples"], &own["target_tokens"]].map(|count| count.as_u64().unwrap())
    };
    // thirteen samples in global batches of eight: the last one is short
    assert_eq!(counts(&alone)[0], 13);
    for layout in [
        LLM,
        "llm = { stages = 3, dp = 2 }",
        "schedule = \"zb-h1\"\nllm = { stages = 2, dp = 2 }",
        "schedule = \"gpipe\"\nvision = { dp = 2 }\nllm = { stages = 2, tp = 2 }",
        "placement = \"joint\"\nllm = { stages = 2, tp = 2 }",
        "placement = \"colocated\"\nvision = { dp = 4 }\nllm = { stages = 2, dp = 2 }",
        "placement = \"colocated\"\nschedule = \"interleaved:3\"\nllm = { stages = 3 }",
    ] {
        rewrite(&data, EVALUATION, &[(LLM, layout), ("learning_rate", "zero_stage = 1\nlearning_rate")]);
        let lines = data.job.lines(&["--steps", "5"]);
        let own = evaluations(&lines);
        let values = |own: &[(u64, f64)]| own.iter().map(|(_, loss)| *loss).collect::<Vec<_>>();
        assert!(difference(&values(&own), &values(&truth)) < 1e-5, "{layout}: {own:?} {truth:?}");
        assert_eq!(counts(&lines), counts(&alone), "{layout}");
    }
}

#[test]
fn an_evaluation_is_the_loss_of_a_step_on_the_same_samples() {
    let data = OnShards::new();
    let train = format!("{}\nsplit = \"eight\"", data.named());
    let fixed = ("learning_rate = 2e-3", "learning_rate = 0.0");
    data.rewrite(&train, "[evaluation]\nevery = 1\nsplit = \"same\"\n", &[fixed]);
    let lines = data.job.lines(&["--steps", "2"]);
    let own: Vec<f64> = evaluations(&lines).into_iter().map(|(_, loss)| loss).collect();
    assert!(difference(&own, &losses(&lines)) < 1e-5, "{own:?} {:?}", losses(&lines));
    assert_eq!(own[0].to_bits(), own[1].to_bits());
    assert_eq!(lines[0]["evaluation"]["samples"], 8);
}

#[test]
fn a_resumed_run_has_the_evaluations_of_a_whole_one() {
    let data = job(EVALUATION, &[(LLM, "llm = { stages = 2, dp = 1 }")]);
    let whole = data.job.lines(&["--steps", "6"]);
    let states = data.job.path("states");
    let mut parts = data.job.lines(&["--steps", "2", "--checkpoints", text(&states)]);
    parts.extend(data.job.lines(&["--steps", "6", "--checkpoints", text(&states), "--resume"]));
    assert_eq!(bits(&evaluations(&parts)), bits(&evaluations(&whole)));
    assert_eq!(loss_bits(&parts), loss_bits(&whole));

    let state = object(&["top", text(&states), "--json"]);
    let last = evaluations(&whole)[2];
    assert_eq!(
        (state["evaluation_step"].as_u64(), state["evaluation_loss"].as_f64()),
        (Some(5), Some(last.1))
    );
    let shown = dflop(&["top", text(&states)]).stdout;
    assert!(shown.contains(&format!("\neval     {:.4}   after step 5", last.1)), "{shown}");
    let report = data.job.path("report.json");
    object(&["report", text(&states), "--out", text(&report), "--json"]);
    let report = std::fs::read_to_string(report).expect("a report");
    let first = evaluations(&whole)[0].1;
    assert!(report.contains(&format!("evaluation loss {first:.3} to {:.3}", last.1)), "{report}");
}

#[test]
fn evaluations_read_other_shards_and_few_global_batches() {
    let data = OnShards::new();
    let table = format!("[evaluation]\n{}\nbatches = 2\n", data.named());
    data.job.rewrite(&[("[parallel]", &format!("{table}\n[parallel]"))]);
    let lines = data.job.lines(&["--steps", "3"]);
    assert_eq!(evaluations(&lines).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2]);
    assert_eq!(lines[2]["evaluation"]["samples"], 16);
    // another seed trains another model, and draws the same samples
    let other = data.job.lines(&["--steps", "3", "--seed", "7"]);
    let targets = |lines: &[Value]| lines[2]["evaluation"]["target_tokens"].clone();
    assert_eq!(targets(&other), targets(&lines));
    assert_ne!(bits(&evaluations(&other)), bits(&evaluations(&lines)));
    let check = data.job.run(&["--check"]);
    assert!(
        check.stdout.contains("\"evaluation\"") && check.stdout.contains("64 samples"),
        "{}",
        check.stdout
    );
}

#[test]
fn evaluations_that_cannot_run_are_refused() {
    let data = OnShards::new();
    for (evaluation, words) in [
        ("every = 0\nsplit = \"held-out\"", "invalid `evaluation.every`: must be at least 1"),
        ("batches = 0\nsplit = \"held-out\"", "invalid `evaluation.batches`: must be at least 1"),
        ("every = 2", "`evaluation` needs `shards`, or a `split` of `data.shards`"),
        ("split = \"train\"", "`evaluation.split` is the split that the run trains on"),
        ("split = \"none\"", "none"),
    ] {
        rewrite(&data, &format!("[evaluation]\n{evaluation}\n"), &[]);
        let run = data.job.run(&[]);
        assert!(run.status != Some(0) && run.stdout.is_empty(), "{evaluation}: {}", run.stdout);
        assert!(run.stderr.contains(words), "{evaluation}: {}", run.stderr);
    }
    let job = Job::with(&[("[parallel]", "[evaluation]\nsplit = \"held-out\"\n\n[parallel]")]);
    assert!(job.run(&[]).stderr.contains("`evaluation` needs `shards`"));
}
