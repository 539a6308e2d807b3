//! Tests pipeline stage memory and the training setup flags.

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::Value;

use crate::command::{dflop, object};

const MODEL: [&str; 7] =
    ["memory", "--model", "llava-ov-qwen2.5-7b", "--tokens", "7290,8192", "--microbatches", "8"];

fn memory(more: &[&str]) -> Value {
    object(&[&MODEL[..], more, &["--json"]].concat())
}

fn sum(report: &Value, field: &str) -> u64 {
    let stages = report["stages"].as_array().expect("stages");
    stages.iter().map(|stage| stage[field].as_u64().expect("a number")).sum()
}

#[test]
fn stages_of_a_pipeline_add_up_and_say_whether_they_fit() {
    let report = memory(&["--stages", "1,4", "--memory-gib", "80"]);
    assert_eq!(sum(&report, "parameters"), report["parameters"].as_u64().expect("a number"));
    assert_eq!(sum(&report, "state_bytes"), 16 * sum(&report, "parameters"));
    assert_eq!(report["fits"], true, "{report}");
    for stage in report["stages"].as_array().expect("stages") {
        let number = |field: &str| stage[field].as_i64().expect("a number");
        let parts = ["state_bytes", "activation_bytes", "working_set_bytes", "buffer_bytes"].map(number);
        assert_eq!(number("total_bytes"), parts.iter().sum::<i64>());
        assert_eq!(number("headroom_bytes"), (80 << 30) - number("total_bytes"));
    }
    assert_eq!(memory(&["--stages", "1,4", "--memory-gib", "30"])["fits"], false);
    assert_eq!(memory(&[])["fits"], Value::Null);
}

#[test]
fn what_is_frozen_recomputed_or_shared_takes_less() {
    let all = memory(&[]);
    for (more, field) in [
        (&["--set", "cost.freeze=vision,projector"][..], "state_bytes"),
        (&["--set", "cost.freeze=vision,projector"], "activation_bytes"),
        (&["--set", "cost.recompute=layers"], "activation_bytes"),
        (&["--optimizer-ranks", "8"], "state_bytes"),
        (&["--tp", "1,4"], "state_bytes"),
        (&["--tp", "1,4", "--set", "space.sequence_parallel=true"], "activation_bytes"),
    ] {
        assert!(sum(&memory(more), field) < sum(&all, field), "{more:?}");
    }
    for (more, field) in [
        (&["--precision", "bf16-f32-gradients"][..], "state_bytes"),
        (&["--trainer", "torch"], "activation_bytes"),
    ] {
        assert!(sum(&memory(more), field) > sum(&all, field), "{more:?}");
    }
}

/// In 32 bits, activations need twice the bytes except for the attention sums, and Adam needs no copy.
#[test]
fn training_in_32_bits_is_counted() {
    let (half, full) = (memory(&[]), memory(&["--precision", "f32"]));
    assert_eq!(sum(&half, "state_bytes"), sum(&full, "state_bytes"), "2 + 2 + 12 bytes, or 4 + 4 + 8");
    let ratio = sum(&full, "activation_bytes") as f64 / sum(&half, "activation_bytes") as f64;
    assert!((1.99..2.0).contains(&ratio), "{ratio}");
    let frozen =
        |precision| sum(&memory(&["--set", "cost.freeze=llm", "--precision", precision]), "state_bytes");
    assert!(frozen("f32") > frozen("bf16"), "frozen weights have 4 bytes");
}

#[test]
fn layers_are_split_as_given_and_measured_memory_is_taken() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("mem_llavaov_qwen2.5_7b.csv");
    let rows = "batch_size,seq_len,model_mem,fwd_peak,model_state_peak,num_layers,tp_size\n\
                1,1024,6.0,0.5,7.0,3,1\n1,1024,8.0,0.6,9.0,4,1\n";
    std::fs::write(&path, rows).expect("a file");
    let run = dflop(&[&MODEL[..], &["--profile", path.to_str().expect("a path"), "--json"]].concat());
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "times are not needed");
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!(report["stages"][1]["state_bytes"].as_u64(), Some(57 << 30), "2 GiB a layer, one beside");
    assert_eq!(
        [&report["stages"][0]["is_measured"], &report["stages"][1]["is_measured"]],
        [&Value::Bool(false), &Value::Bool(true)]
    );
    let split = memory(&["--layers", "27", "--layers", "10,18"]);
    let layers: Vec<u64> = split["stages"]
        .as_array()
        .expect("stages")
        .iter()
        .map(|stage| stage["layers"].as_u64().expect("a number"))
        .collect();
    assert_eq!(layers, [27, 10, 18]);
}

#[test]
fn arguments_that_do_not_fit_the_model_are_misuse() {
    for (more, message) in [
        (&["--tp", "1"][..], "`--tp` names 1 modules, the model has 2: vision,llm"),
        (&["--layers", "27"], "`--layers` names 1 modules"),
        (&["--layers", "27", "--layers", "x"], "`x` is not a list such as `10,9,9`"),
        (&["--layers", "27", "--layers", "27"], "stages of llm have 27 layers in all, it has 28"),
        (&["--set", "cost.freeze=audio"], "has no audio encoder to freeze"),
        (&["--set", "cost.freeze=vision,projector,llm"], "nothing is trained"),
        (&["--set", "cost.freeze=head"], "unknown part `head`, known are vision, audio, projector, llm"),
        (&["--set", "cost.recompute=all"], "expected none, scores or layers, found `all`"),
        (&["--memory-gib", "nan"], "`--memory-gib`"),
    ] {
        let run = dflop(&[&MODEL[..], more].concat());
        assert_eq!(run.status, Some(2), "{more:?}");
        assert!(run.stderr.contains(message), "{more:?}: {}", run.stderr);
    }
}

#[test]
fn a_frozen_part_costs_less_wherever_costs_are_predicted() {
    let data = TempDataset::new(1, 20, Compression::Plain);
    let pattern = data.pattern();
    let mean = |more: &[&str]| {
        let report = object(&[&["stats", &pattern, "--json", "--model", "tiny"], more].concat());
        report["quantiles"].clone()
    };
    assert_ne!(mean(&[]), mean(&["--set", "cost.freeze=llm"]));
    assert_ne!(mean(&[]), mean(&["--set", "cost.recompute=layers"]));
}
