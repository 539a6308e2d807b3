//! Tests `dflop simulate --gpus` on a dataset: FSDP, DDP and HSDP.

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::{Value, json};

use crate::command::{dflop, object, refuse, text};

const SMALL: [&str; 6] = ["--steps", "2", "--global-batch-size", "12", "--set", "plan.strategy=search:100"];

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
    let parts = [
        "\ntokens ",
        "\nand exchange ",
        "\nlower bound ",
        "\nCP 2, all ",
        "\ndflop, split ",
        "\nbound, split ",
        "exposed s",
        "communication per step",
        "\nlayouts, balanced by dflop ",
        "\nDDP over 2 GPUs",
        "\nZeRO-2 over 2 GPUs",
    ];
    for part in parts {
        assert!(table.contains(part), "{part:?}: {table}");
    }
}

#[test]
fn samples_on_several_gpus_are_compared_with_whole_ones() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let report = object(&["simulate", &data.pattern(), "--gpus", "8", "--global-batch-size", "8", "--json"]);
    let context = &report["context"];
    assert_eq!(context["group_gpus"], 8);
    let rows = context["strategies"].as_array().expect("rows");
    let names: Vec<&Value> = rows.iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["CP 2, all", "CP 4, all", "CP 8, all", "dflop, split"]);
    let whole = number(&report, "/strategies/3/step_seconds");
    let [split, bound] = [number(&rows[3], "/step_seconds"), number(context, "/lower_bound_seconds")];
    assert!(bound <= split * 1.000_001 && split < whole, "{bound} {split} {whole}");
    assert!(number(&rows[3], "/speedup") > number(&report, "/strategies/3/speedup"));
    assert!(number(&rows[0], "/split_fraction") > 0.999 && number(&rows[3], "/split_fraction") > 0.0);
    // Groups stay inside nodes and shard groups.
    let group = |more: &[&str]| simulate(&data, more)["context"]["group_gpus"].clone();
    assert_eq!(group(&["--gpus", "4", "--gpus-per-node", "2"]), 2);
    assert_eq!(group(&["--gpus", "4", "--set", "plan.schedule=microbatch:2"]), 2);
    assert_eq!(group(&["--gpus", "4", "--set", "plan.schedule=step"]), 4);
    // Without links, or with a single GPU, there are no such rows.
    for more in [&["--gpus", "3"][..], &["--gpus", "2", "--device", "cpu", "--memory-gib", "800"]] {
        assert_eq!(simulate(&data, more)["context"], Value::Null, "{more:?}");
    }
}

#[test]
fn layouts_wait_in_layers_as_far_as_they_shard() {
    let data = TempDataset::new(2, 16, Compression::Plain);
    let layout = |synchronize: &str| {
        simulate(
            &data,
            &["--gpus", "4", "--microbatches", "2", "--set", &format!("plan.schedule={synchronize}")],
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
    let names: Vec<&str> = memory.iter().map(|own| own["layout"].as_str().expect("a layout")).collect();
    let expected = [
        "DDP over 4 GPUs",
        "ZeRO-1 over 4 GPUs",
        "ZeRO-2 over 4 GPUs in shard groups of 2",
        "ZeRO-2 over 4 GPUs",
        "HSDP over 4 GPUs in shard groups of 2",
        "FSDP over 4 GPUs",
    ];
    assert_eq!(names, expected);
    let [ddp_bytes, first, _, second, grouped, third] = totals[..] else { panic!("{totals:?}") };
    assert!(ddp_bytes > first && first > second && second > third && grouped > third, "{totals:?}");
    // A layout has the step time that it has when it is selected.
    for (selected, at) in [(&ddp, 0), (&hsdp, 4), (&fsdp, 5)] {
        let row = &hsdp["layouts"][at];
        let seconds = [number(row, "/step_seconds"), number(selected, "/strategies/3/step_seconds")];
        assert!((seconds[0] / seconds[1] - 1.0).abs() < 1e-9, "{row} {seconds:?}");
        assert_eq!(row["memory_bytes"], memory[at]["total_bytes"], "{row}");
    }
    assert_eq!(memory[0]["fits"], false, "a copy of 7 billion parameters does not fit into 80 GiB");
    let roomy = simulate(&data, &["--gpus", "4", "--memory-gib", "800"]);
    assert!(roomy["memory"].as_array().expect("layouts").iter().all(|own| own["fits"] == true));
    // The option for a pipeline takes the same synchronization.
    let ranks = simulate(&data, &["--dp-size", "4", "--set", "plan.schedule=microbatch:2"]);
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
    refused(&["--set", "plan.schedule=microbatch:3"], "do not divide 2 ranks");
    refused(
        &["--set", "plan.schedule=never"],
        "or without stages step, microbatch or microbatch:RANKS, found `never`",
    );
    refused(&["--links", "links.json"], "`--links` belongs to `--shapes`");
    refused(&["--set", "space.kinds=full"], "belongs to `--shapes`");
}

/// A sample per GPU leaves nothing to balance, so both commands have one time and one memory.
#[test]
fn plan_and_simulate_agree_on_data_parallel_layouts() {
    let data = TempDataset::new(2, 4, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let links = directory.path().join("links.csv");
    let lines = "link,gigabytes_per_second,latency_microseconds\nnvlink,360,3.4\ninfiniband,40,14\n";
    std::fs::write(&links, lines).expect("a file");
    let cluster = ["--gpus", "8", "--memory-gib", "800", "--model", "omni-7b", "--device", "h100"];
    let batch = ["--global-batch-size", "8", "--json"];
    let basic = ["--set", "space.kinds=basic", "--batches", "1", "--links", text(&links)];
    let plan = object(&[&["plan", &data.pattern()], &cluster[..], &batch, &basic].concat());
    let steps = ["--steps", "1"];
    let simulated = object(&[&["simulate", &data.pattern()], &cluster[..], &batch, &steps].concat());
    let planned = plan["data_parallel"].as_array().expect("layouts");
    let rows = simulated["layouts"].as_array().expect("layouts");
    assert_eq!(planned.len(), rows.len());
    for (layout, row) in planned.iter().zip(rows) {
        assert_eq!((&layout["layout"], &layout["trainer"]), (&row["layout"], &row["trainer"]));
        let exposed = number(row, "/exposed_communication_seconds");
        let ratio = number(layout, "/step_seconds") / (number(row, "/step_seconds") + exposed);
        assert!((ratio - 1.0).abs() < 2e-3, "{layout} {row}");
        let bytes = number(layout, "/gib") * f64::from(1 << 30);
        assert!((bytes - number(row, "/memory_bytes")).abs() < 1.0, "{layout} {row}");
    }
}

#[test]
fn plan_names_the_fastest_layout() {
    let data = TempDataset::new(2, 20, Compression::Plain);
    let pattern = data.pattern();
    let args = ["plan", &pattern, "--model", "qwen2.5-vl-7b", "--device", "h100", "--gpus", "8"];
    let args = [&args[..], &["--global-batch-size", "32", "--batches", "4"]].concat();
    let plan = object(&[&args[..], &["--json"]].concat());
    let layouts = plan["data_parallel"].as_array().expect("layouts");
    let names: Vec<&Value> = layouts.iter().map(|layout| &layout["layout"]).collect();
    assert_eq!(names, ["DDP over 8 GPUs", "ZeRO-1 over 8 GPUs", "ZeRO-2 over 8 GPUs", "FSDP over 8 GPUs"]);
    let plan_seconds = number(&plan, "/step_seconds");
    let mut fastest = (1.0, "pipeline");
    for layout in layouts {
        let ratio = number(layout, "/ratio");
        assert!((ratio - number(layout, "/step_seconds") / plan_seconds).abs() < 1e-9, "{layout}");
        assert!(number(layout, "/microbatches") * 8.0 <= 32.0, "{layout}");
        assert_eq!(layout["fits"], number(layout, "/gib") <= 80.0 / 1.1, "{layout}");
        if layout["fits"] == true && ratio < fastest.0 {
            fastest = (ratio, layout["layout"].as_str().expect("a name"));
        }
    }
    assert_eq!(layouts[3]["fits"], true, "parameters divided by 8 fit");
    assert_eq!(layouts[0]["fits"], false, "a copy with optimizer state does not");
    assert_eq!(plan["fastest"], fastest.1);
    let printed = dflop(&args).stdout;
    assert_eq!(printed.contains(" is fastest: "), fastest.1 != "pipeline", "{printed}");
    assert!(printed.contains("\nFSDP over 8 GPUs ") && printed.contains("exposed s"), "{printed}");
    assert!(printed.contains("Plan(schedule=\"microbatch\")"), "{printed}");
    // A GPU without a sample computes nothing.
    let few = ["plan", &pattern, "--model", "qwen2.5-vl-7b", "--gpus", "8", "--batches", "1"];
    let few = object(&[&few[..], &["--global-batch-size", "4", "--json"]].concat());
    assert_eq!((&few["fastest"], &few["data_parallel"]), (&json!("pipeline"), &json!([])));
    let missing = few["data_parallel_missing"].as_str().expect("a reason");
    assert!(missing.contains("4 samples are fewer than the 8 data-parallel GPUs"), "{missing}");
}
