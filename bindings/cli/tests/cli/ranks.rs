//! Tests `dflop simulate --gpus` on a dataset: FSDP, DDP and HSDP.

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::{Value, json};

use crate::command::{dflop, object, refuse, text};

const SMALL: [&str; 6] = ["--steps", "2", "--global-batch-size", "12", "--set", "plan.search_effort=100"];

fn simulate(data: &TempDataset, more: &[&str]) -> Value {
    object(&[&["simulate", &data.pattern(), "--json"], &SMALL[..], more].concat())
}

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("no number {pointer}: {value}"))
}

#[test]
fn gpus_alone_answer_how_much_faster_fsdp_is() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let report = object(&["simulate", &data.pattern(), "--gpus", "2", "--json"]);
    assert_eq!((&report["layout"], &report["global_batch"]), (&json!("FSDP over 2 GPUs"), &json!(16)));
    assert_eq!((&report["synchronize"], &report["microbatches"]), (&json!("microbatch"), &json!(1)));
    let strategies = report["strategies"].as_array().expect("strategies");
    let names: Vec<&Value> = strategies.iter().map(|strategy| &strategy["name"]).collect();
    assert_eq!(names, ["data-blind", "tokens", "lpt", "dflop"]);
    let seconds: Vec<f64> = strategies.iter().map(|own| number(own, "/step_seconds")).collect();
    let bound = number(&report, "/lower_bound_seconds");
    assert!(0.0 < bound && seconds.iter().all(|own| *own >= bound * 0.999_999), "{bound} {seconds:?}");
    assert!(seconds[3] <= seconds[0] && number(&strategies[3], "/speedup") >= 1.0, "{seconds:?}");
    let exchanged = number(&report, "/exchanged_step_seconds");
    assert!(0.0 < exchanged && exchanged <= seconds[3] * 1.000_001, "{exchanged} {seconds:?}");
    for strategy in strategies {
        assert!((0.0..1.0).contains(&number(strategy, "/bubble_fraction")));
        assert!(number(strategy, "/exposed_communication_seconds") >= 0.0);
        assert!(number(strategy, "/memory_bytes") > 0.0);
    }
    let table = dflop(&["simulate", &data.pattern(), "--gpus", "2"]).stdout;
    assert!(table.starts_with("simulated: FSDP over 2 GPUs, 2 steps of 16 samples"), "{table}");
    for part in [
        "\ntokens ",
        "\nand exchange ",
        "\nlower bound ",
        "exposed s",
        "communication per step",
        "\nDDP over 2 GPUs",
    ] {
        assert!(table.contains(part), "{part:?}: {table}");
    }
}

#[test]
fn layouts_wait_in_layers_as_far_as_they_shard() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let layout = |synchronize: &str| {
        simulate(
            &data,
            &["--gpus", "4", "--microbatches", "2", "--set", &format!("plan.synchronize={synchronize}")],
        )
    };
    let [ddp, hsdp, fsdp] = ["step", "microbatch:2", "microbatch"].map(layout);
    let names = [&ddp, &hsdp, &fsdp].map(|report| report["layout"].as_str().expect("a layout").to_owned());
    assert_eq!(names, ["DDP over 4 GPUs", "HSDP over 4 GPUs in shard groups of 2", "FSDP over 4 GPUs"]);
    let blind = [&ddp, &hsdp, &fsdp].map(|report| number(report, "/strategies/0/step_seconds"));
    assert!(blind.is_sorted(), "{blind:?}");
    let gathered = [&ddp, &hsdp, &fsdp].map(|report| number(report, "/communication/gathered_bytes"));
    assert!(
        gathered[0] < 1.0 && gathered[1] > 0.0 && (gathered[1] - gathered[2]).abs() < 1.0,
        "{gathered:?}"
    );
    let memory = hsdp["memory"].as_array().expect("layouts");
    let totals: Vec<f64> = memory.iter().map(|own| number(own, "/total_bytes")).collect();
    assert_eq!(totals.len(), 3);
    assert!(totals[0] > totals[1] && totals[1] > totals[2], "{totals:?}");
    assert_eq!(memory[0]["fits"], false, "a copy of 7 billion parameters does not fit into 80 GiB");
    let roomy = simulate(&data, &["--gpus", "4", "--memory-gib", "800"]);
    assert!(roomy["memory"].as_array().expect("layouts").iter().all(|own| own["fits"] == true));
    // The option for a pipeline takes the same synchronization.
    let ranks = simulate(&data, &["--dp-size", "4", "--set", "plan.synchronize=microbatch:2"]);
    assert_eq!(ranks["layout"], hsdp["layout"]);
}

#[test]
fn a_pipeline_is_named() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let report = simulate(&data, &["--dp-size", "2", "--set", "plan.stages=1,1,2", "--microbatches", "3"]);
    assert_eq!(report["layout"], "pipeline of 1 vision, 1 audio and 2 llm stages x 2 ranks");
}

#[test]
fn devices_without_links_have_no_communication() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let report = simulate(&data, &["--gpus", "2", "--model", "tiny", "--device", "cpu"]);
    assert_eq!((&report["communication"], report["memory"].is_array()), (&Value::Null, true));
    assert_eq!(report["strategies"][0]["exposed_communication_seconds"], Value::Null);
}

#[test]
fn a_report_on_ranks_has_the_balance_by_tokens_and_bars_that_end_with_the_step() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("ranks.json");
    let more = ["--gpus", "4", "--microbatches", "2", "--report", text(&file)];
    let run = dflop(&[&["simulate", &data.pattern()], &SMALL[..], &more[..]].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let report: Value = serde_json::from_slice(&std::fs::read(file).expect("a document")).expect("JSON");
    let study = &report["studies"][0];
    let strategies = study["strategies"].as_array().expect("strategies");
    let names: Vec<&Value> = strategies.iter().map(|strategy| &strategy["name"]).collect();
    assert_eq!(names, ["data-blind", "tokens", "lpt", "dflop"]);
    for timeline in study["steps"][0]["timelines"].as_array().expect("timelines") {
        assert_ne!(timeline["strategy"], 1, "plans by tokens have no timeline");
        let rows = timeline["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 4);
        let bars = rows.iter().flat_map(|row| row["bars"].as_array().expect("bars"));
        let end =
            bars.map(|bar| bar[0].as_u64().expect("a start") + bar[1].as_u64().expect("a length")).max();
        assert_eq!(end, timeline["makespan_ns"].as_u64());
    }
}

#[test]
fn flags_without_effect_beside_gpus_are_refused() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let refused = |more: &[&str], mentioned: &str| {
        refuse(
            &[&["simulate", &data.pattern(), "--gpus", "2", "--global-batch-size", "4"], more].concat(),
            2,
            mentioned,
        );
    };
    refused(&["--dp-size", "2"], "`--dp-size` has no effect with `--gpus`");
    refused(&["--set", "plan.stages=1,1,1"], "`--set plan.stages=1,1,1` has no effect with `--gpus`");
    refused(&["--set", "plan.schedule=gpipe"], "needs `stages`");
    refused(&["--set", "plan.synchronize=microbatch:3"], "do not divide 2 ranks");
    refused(
        &["--set", "plan.synchronize=never"],
        "expected step, microbatch or microbatch:RANKS, found `never`",
    );
    refused(&["--links", "links.json"], "`--links` belongs to `--shapes`");
    refused(&["--set", "space.kinds=full"], "belongs to `--shapes`");
}
