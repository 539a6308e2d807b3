//! Tests that the `dflop models` levels match the other commands.

use serde_json::Value;

use crate::command::{dflop, object};

/// Shapes for two samples, in the columns that the planner requires for models with tiles, with patches, and
/// with several encoders of each kind.
const SHAPES: [&str; 4] = [
    "tiles,seq_len\n1,400\n5,1100\n",
    "patches,seq_len\n1200,400\n4000,1100\n",
    "vision_tiles,audio_tiles,seq_len\n1,0,400\n5,1,1100\n",
    "vision_patches,audio_tokens,seq_len\n1200,0,400\n4000,250,1100\n",
];

fn families() -> Vec<Value> {
    let listed = object(&["models", "--json"]);
    listed["families"].as_array().expect("a list").clone()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text")).collect()
}

/// Plans a model on four devices without a memory bound; returns the command's answer for each table.
fn planned(model: &str) -> Vec<(Option<i32>, String)> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("shapes.csv");
    let plan = |shapes: &&str| {
        std::fs::write(&path, shapes).expect("it can be written");
        let shapes = path.display().to_string();
        let fixed = ["--gpus", "4", "--memory-gib", "100000", "--global-batch-size", "4", "--batches", "1"];
        let args = ["plan", "--model", model, "--set", "space.kinds=basic", "--shapes", &shapes];
        let run = dflop(&[&args[..], &fixed].concat());
        (run.status, run.stderr)
    };
    SHAPES.iter().map(plan).collect()
}

#[test]
fn families_of_the_level_plan_are_planned() {
    let mut presets = 0;
    for family in families() {
        let levels = texts(&family["levels"]);
        let Some(&preset) = texts(&family["presets"]).first() else { continue };
        let runs = planned(preset);
        let is_planned = runs.iter().any(|(status, _)| *status == Some(0));
        assert_eq!(is_planned, levels.contains(&"plan"), "{preset}: {levels:?}, {runs:?}");
        presets += 1;
    }
    assert!(presets > 15, "{presets} presets");
}

#[test]
fn families_without_the_level_plan_are_refused_for_its_reason() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut refused = 0;
    for family in families() {
        let lacks = family["lacks"].as_array().expect("a list");
        let Some(lack) = lacks.iter().find(|lack| lack["level"] == "plan") else { continue };
        let model_type = texts(&family["model_types"])[0];
        let model = directory.path().join(model_type);
        std::fs::create_dir(&model).expect("it can be made");
        let config =
            format!(r#"{{"model_type": "{model_type}", "head_dim": 128, "num_experts_per_tok": 2}}"#);
        std::fs::write(model.join("config.json"), config).expect("it can be written");
        let runs = planned(&model.display().to_string());
        let reason = lack["because"].as_str().expect("a text");
        for (status, message) in runs {
            assert_eq!(status, Some(2), "{model_type}: {message}");
            assert!(message.contains(reason), "{model_type}: {message}, not {reason}");
        }
        refused += 1;
    }
    assert!(refused > 20, "{refused} families");
}
