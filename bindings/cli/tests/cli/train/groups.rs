//! Tests parameters with other learning rates, other weight decay, or frozen, by part and by name.

use std::collections::BTreeMap;
use std::path::Path;

use super::config::{Job, difference, loss_bits, losses};
use crate::command::text;

const LLM: &str = "llm = { stages = 1, dp = 1 }";
const RATE: &str = "learning_rate = 2e-3";

/// Bytes of every tensor in the checkpoint of a step.
fn tensors(states: &Path, step: u64) -> BTreeMap<String, Vec<u8>> {
    let state = states.join(format!("step-{step:08}"));
    let mut all = BTreeMap::new();
    for file in std::fs::read_dir(state).expect("a state").map(|file| file.expect("an entry").path()) {
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        if !(name.starts_with("model") && name.ends_with(".safetensors")) {
            continue;
        }
        let bytes = std::fs::read(file).expect("weights");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
        for (name, tensor) in header.as_object().expect("a header") {
            if name == "__metadata__" {
                continue;
            }
            let [from, to] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().expect("a place") as usize);
            all.insert(name.clone(), bytes[8 + length + from..8 + length + to].to_vec());
        }
    }
    all
}

/// Runs two steps under some groups; returns what the first step after the first update has changed.
fn changed(groups: &str) -> Vec<String> {
    let job = Job::with(&[(RATE, &format!("{RATE}\n{groups}"))]);
    let states = job.path("states");
    let every = ["--checkpoints", text(&states)];
    job.lines(&[&every[..], &["--steps", "1"]].concat());
    let before = tensors(&states, 1);
    job.lines(&[&every[..], &["--steps", "2", "--resume"]].concat());
    let after = tensors(&states, 2);
    assert!(before.keys().eq(after.keys()) && !before.is_empty());
    before.into_iter().filter(|(name, bytes)| after[name] != *bytes).map(|(name, _)| name).collect()
}

fn group(parameters: &str, rest: &str) -> String {
    format!("[[optimizer.groups]]\nparameters = \"{parameters}\"\n{rest}\n")
}

#[test]
fn frozen_parameters_keep_their_bits_and_all_others_change() {
    let all = changed("");
    let without = changed(&group("*.q_proj.*", "frozen = true"));
    let expected: Vec<_> = all.iter().filter(|name| !name.contains(".q_proj.")).cloned().collect();
    assert_eq!(without, expected);
    assert!(without.len() < all.len());
    let still = changed(&group("*.layers.0.*", "learning_rate = 0.0"));
    assert!(still.len() < all.len() && still.iter().all(|name| !name.contains(".layers.0.")), "{still:?}");
}

#[test]
fn a_part_is_frozen_by_a_group_as_by_its_module() {
    let module = Job::with(&[("[model.config]\n", "[model]\nfreeze = \"vision\"\n[model.config]\n")]);
    let straight = module.lines(&["--steps", "4"]);
    let part = Job::with(&[(RATE, &format!("{RATE}\n{}", group("vision", "frozen = true")))]);
    assert_eq!(loss_bits(&part.lines(&["--steps", "4"])), loss_bits(&straight));
    // every parameter by its name
    let names = Job::with(&[(RATE, &format!("{RATE}\n{}", group("vision_tower.*", "frozen = true")))]);
    assert_eq!(loss_bits(&names.lines(&["--steps", "4"])), loss_bits(&straight));
}

#[test]
fn groups_are_the_same_on_any_ranks_and_resumed() {
    let groups = group("vision", "learning_rate = 1e-4")
        + &group("*.bias", "weight_decay = 0.0\nlearning_rate = 1e-2")
        + &group("*.layers.1.mlp.*", "frozen = true")
        + &group("*norm*.weight", "frozen = true");
    let plain = Job::new().lines(&["--steps", "5"]);
    let rates = format!("warmup_steps = 2\nlearning_rate_min = 1e-4\n{RATE}");
    let job = Job::with(&[(RATE, &format!("{rates}\n{groups}"))]);
    let straight = job.lines(&["--steps", "5"]);
    assert!(difference(&losses(&straight), &losses(&plain)) > 1e-4);
    let states = job.path("states");
    let mut parts = job.lines(&["--steps", "2", "--checkpoints", text(&states)]);
    parts.extend(job.lines(&["--steps", "5", "--checkpoints", text(&states), "--resume"]));
    assert_eq!(loss_bits(&parts), loss_bits(&straight));
    for layout in [
        "llm = { stages = 3, dp = 2 }",
        "schedule = \"zb-h1\"\nvision = { dp = 2 }\nllm = { stages = 2, tp = 2 }",
        "placement = \"joint\"\nllm = { stages = 2, dp = 2 }",
    ] {
        let rates = format!("zero_stage = 1\n{rates}\n{groups}");
        let job = Job::with(&[(RATE, &rates), (LLM, layout)]);
        let lines = job.lines(&["--steps", "5"]);
        assert!(difference(&losses(&lines), &losses(&straight)) < 1e-5, "{layout}");
    }
}

#[test]
fn groups_that_set_nothing_are_refused() {
    for (groups, words) in [
        (group("*.q_prj.weight", "frozen = true"), "which names none; near names are `"),
        (group("vision", ""), "`optimizer.groups[0]`: expected either `frozen = true`, or `learning_rate`"),
        (group("vision", "frozen = true\nlearning_rate = 1.0"), "expected either `frozen = true`"),
        (group("vision", "weight_decay = -1.0"), "`optimizer.groups[0]`: invalid `weight_decay`"),
        (
            group("vision", "frozen = true") + &group("*", "weight_decay = 0.0"),
            "`optimizer.groups[0]` has no effect",
        ),
        (group("*", "frozen = true"), "nothing is trained"),
    ] {
        let job = Job::with(&[(RATE, &format!("{RATE}\n{groups}"))]);
        let run = job.run(&[]);
        assert!(run.status != Some(0) && run.stdout.is_empty(), "{groups}: {}", run.stdout);
        assert!(run.stderr.contains(words), "{groups}: {}", run.stderr);
        let check = job.run(&["--check"]);
        assert!(check.status == Some(1), "{groups}: {}", check.stdout);
    }
}
