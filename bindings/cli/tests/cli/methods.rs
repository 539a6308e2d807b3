//! Tests `dflop simulate --shapes`, which compares whole methods with a shape table.

use std::fmt::Write;
use std::path::Path;

use crate::command::{dflop, object, text};

/// Samples with 0 to 10 tiles and up to 8,000 tokens.
pub(crate) fn shapes(directory: &Path) -> std::path::PathBuf {
    let mut table = "tiles,seq_len\n".to_owned();
    for at in 0..200_u32 {
        let tiles = at * 7919 % 11;
        writeln!(table, "{tiles},{}", 100 + 600 * tiles + at * 104_729 % 1500).expect("a string");
    }
    let path = directory.join("shapes.csv");
    std::fs::write(&path, table).expect("a file");
    path
}

const CLUSTER: [&str; 10] = [
    "--model",
    "llava-ov-qwen2.5-7b",
    "--device",
    "a100",
    "--gpus",
    "16",
    "--global-batch-size",
    "96",
    "--steps",
    "6",
];

#[test]
fn methods_are_compared_from_data_blind_to_ours() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shapes = shapes(directory.path());
    let args = [&["simulate", "--shapes", text(&shapes)], &CLUSTER[..]].concat();
    let report = object(&[&args[..], &["--json"]].concat());
    let methods = report["strategies"].as_array().expect("strategies");
    let names: Vec<&str> = methods.iter().map(|method| method["name"].as_str().expect("a name")).collect();
    let all = [
        "by hand, joint",
        "lpt, sorted",
        "data-blind, joint",
        "data-blind, uniform",
        "data-blind",
        "lpt",
        "paper",
        "paper, sorted",
        "dflop",
    ];
    assert_eq!(names, all);
    let seconds = |method: &serde_json::Value| method["step_seconds"].as_f64().expect("seconds");
    let ours = &methods[8];
    // Plans with a different placement are not searched, so that they may be faster.
    let is_searched = |method: &&serde_json::Value| method["plan"]["placement"] == "disaggregated";
    for other in methods.iter().filter(is_searched).filter(|method| method["fits"] == true) {
        assert!(seconds(ours) <= 1.005 * seconds(other), "{report}");
    }
    assert!(report["ideal_seconds"].as_f64().expect("seconds") <= seconds(ours));
    for method in methods {
        assert!((0.0..1.0).contains(&method["bubble_fraction"].as_f64().expect("a fraction")));
        assert!(method["step_seconds"].as_f64() <= method["step_seconds_p95"].as_f64());
        assert!(method["plan"]["encoder"]["dp"].as_u64() >= Some(1));
        let waits = method["waits"].as_object().expect("an object").values();
        let waits: Vec<f64> = waits.map(|fraction| fraction.as_f64().expect("a fraction")).collect();
        assert!(waits.len() == 7 && waits.iter().all(|fraction| *fraction >= 0.0), "{method}");
        let idle = method["bubble_fraction"].as_f64().expect("a fraction");
        assert!((waits.iter().sum::<f64>() - idle).abs() < 1e-9, "{method}");
    }
    assert_eq!(methods[4]["plan"], ours["plan"], "ours, without its balancing");
    let table = dflop(&args);
    assert_eq!(table.status, Some(0), "{}", table.stderr);
    assert!(table.stdout.contains("lower bound"), "{}", table.stdout);
    assert_eq!(table.stdout.matches("\n    waits for: ").count(), all.len(), "{}", table.stdout);
}

#[test]
fn the_help_says_what_the_command_does() {
    // Without the description of the argument group.
    let help = dflop(&["simulate", "-h"]).stdout;
    assert!(help.starts_with("Simulate the pipeline on the first steps of the dataset"), "{help}");
}

#[test]
fn shapes_and_a_dataset_exclude_each_other_and_one_is_needed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shapes = shapes(directory.path());
    let misuse = |args: &[&str]| {
        let run = dflop(&[&["simulate"], args].concat());
        assert_eq!(run.status, Some(2), "{args:?}: {}", run.stderr);
        run.stderr
    };
    assert!(misuse(&["--global-batch-size", "8"]).contains("<DATASET>"));
    assert!(misuse(&["--global-batch-size", "8", "data"]).contains("--dp-size"));
    assert!(misuse(&["--shapes", text(&shapes), "--global-batch-size", "8"]).contains("--gpus"));
    assert!(
        misuse(&["data", "--shapes", text(&shapes), "--gpus", "2", "--global-batch-size", "8"])
            .contains("cannot be used")
    );
}

/// Flags for simulating a dataset, each with a value where required.
const OF_A_DATASET: [&[&str]; 20] = [
    &["--set", "cost.recompute=layers"],
    &["--set", "plan.tokens_max=9000"],
    &["--set", "plan.bytes_max=9000"],
    &["--microbatches", "4"],
    &["--dp-size", "2"],
    &["--set", "plan.stages=1,3"],
    &["--set", "plan.strategy=search:10"],
    &["--set", "processor.length_buckets=fixed:4096"],
    &["--set", "order.tail=repeat"],
    &["--epochs", "2"],
    &["--set", "order.shuffle=none"],
    &["--set", "index.directory=indexes"],
    &["--split", "train"],
    &["--set", "store.read=pread"],
    &["--set", "store.allow=outside"],
    &["--set", "store.cache=cache"],
    &["--set", "store.requests_max=3"],
    &["--set", "index.videos=fps:2:4"],
    &["--tokenizer", "tokenizer.json"],
    &["--profile", "times.csv", "--set", "cost.profile_tp=2"],
];

#[test]
fn flags_of_a_dataset_are_refused_with_shapes() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shapes = shapes(directory.path());
    for flag in OF_A_DATASET {
        let cluster = ["--gpus", "16", "--global-batch-size", "96"];
        let run = dflop(&[&["simulate", "--shapes", text(&shapes)], &cluster[..], flag].concat());
        assert_eq!(run.status, Some(2), "{flag:?}: {}", run.stderr);
        let option = flag.iter().rposition(|word| word.starts_with("--")).expect("a flag");
        let named = if flag[option] == "--set" { flag[option..].join(" ") } else { flag[option].to_owned() };
        assert!(
            run.stderr.contains(&format!("`{named}` belongs to the simulation of a dataset")),
            "{flag:?}: {}",
            run.stderr
        );
    }
}

#[test]
fn settings_of_plans_without_effect_are_refused() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shapes = shapes(directory.path());
    for (settings, reason) in [
        (&["space.uneven_layers=false"][..], "has no effect in the full space"),
        (&["space.recompute=true"], "has no effect in the full space"),
        (&["space.encoder_ahead=true"], "has no effect in the full space"),
        (
            &["space.kinds=basic", "plan.schedule=gpipe", "space.encoder_ahead=true"],
            "has no effect with `plan.schedule=gpipe`",
        ),
        (&["cost.profile_check=false"], "`cost.profile_check` needs `--profile`"),
    ] {
        let mut args = [&["simulate", "--shapes", text(&shapes)], &CLUSTER[..]].concat();
        args.extend(settings.iter().flat_map(|pair| ["--set", *pair]));
        let run = dflop(&args);
        assert_eq!(run.status, Some(2), "{settings:?}: {}", run.stderr);
        assert!(run.stderr.contains(reason), "{settings:?}: {}", run.stderr);
    }
}

#[test]
fn plans_are_made_for_the_schedule_that_is_given() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shapes = shapes(directory.path());
    let args = [&["simulate", "--shapes", text(&shapes)], &CLUSTER[..]].concat();
    let run = dflop(&[&args[..], &["--set", "plan.schedule=interleaved:2"]].concat());
    assert_ne!(run.status, Some(0));
    let reason = "interleaved:2 is for encoders that are colocated with the language model";
    assert!(run.stderr.contains(reason), "{}", run.stderr);
    let split = object(&[&args[..], &["--set", "plan.schedule=zb-h1", "--json"]].concat());
    assert!(split["searched"].as_str().expect("a text").starts_with("zb-h1, "), "{split}");
    let gpipe = object(
        &[&args[..], &["--set", "plan.schedule=gpipe", "--set", "cost.freeze=vision", "--json"]].concat(),
    );
    assert!(gpipe["searched"].as_str().expect("a text").starts_with("gpipe, "), "{gpipe}");
}

#[test]
fn flags_of_shapes_are_refused_with_a_dataset() {
    for flag in [
        &["--gpus-per-node", "8"][..],
        &["--memory-gib", "80"],
        &["--links", "links.json"],
        &["--set", "space.recompute=true"],
        &["--set", "space.placement=joint"],
        &["--set", "space.kinds=full"],
        &["--set", "space.zero1=true"],
        &["--set", "space.encoder_ahead=true"],
    ] {
        let run =
            dflop(&[&["simulate", "data", "--global-batch-size", "8", "--dp-size", "2"], flag].concat());
        assert_eq!(run.status, Some(2), "{flag:?}: {}", run.stderr);
        let named = if flag[0] == "--set" { flag.join(" ") } else { flag[0].to_owned() };
        assert!(run.stderr.contains(&format!("`{named}` belongs to `--shapes`")), "{}", run.stderr);
    }
}
