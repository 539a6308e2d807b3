//! Tests reports: every command writes one, documents render as pages, and nothing in data escapes.

use std::path::Path;

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::Value;

use crate::command::{dflop, object, text};

const PLAN: [&str; 8] =
    ["--global-batch-size", "6", "--dp-size", "2", "--microbatches", "3", "--set", "plan.strategy=search:50"];

/// Runs a command that writes a document, and returns it.
fn document(args: &[&str], directory: &Path) -> Value {
    let file = directory.join(format!("{}.json", args[0]));
    let run = dflop(&[args, &["--report", text(&file)]].concat());
    assert_eq!(run.status, Some(0), "{args:?}: {}", run.stderr);
    let document: Value = serde_json::from_slice(&std::fs::read(file).expect("a document")).expect("JSON");
    assert_eq!((&document["format"], &document["version"]), (&"dflop-report".into(), &1.into()));
    assert_eq!(document["command"], args[0]);
    assert!(!document["verdict"].as_array().expect("a verdict").is_empty(), "{args:?}");
    document
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn a_simulation_has_timelines_whose_bars_lead_to_all_samples() {
    let (data, directory) =
        (TempDataset::new(2, 12, Compression::Plain), tempfile::tempdir().expect("a temporary directory"));
    let report =
        document(&[&["simulate", &data.pattern(), "--steps", "2"], &PLAN[..]].concat(), directory.path());
    let study = &report["studies"][0];
    let names: Vec<&str> =
        list(study, "strategies").iter().map(|own| own["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["data-blind", "lpt", "dflop"]);
    assert_eq!(list(study, "steps").len(), 2);
    for step in list(study, "steps") {
        for timeline in list(step, "timelines") {
            let mut samples: Vec<u64> = list(timeline, "groups")
                .iter()
                .flat_map(|group| group.as_array().expect("a group"))
                .map(|sample| sample.as_u64().expect("an index"))
                .collect();
            samples.sort_unstable();
            samples.dedup();
            assert_eq!(samples.len(), 6, "every sample of the global batch, once");
            let makespan = timeline["makespan_ns"].as_u64().expect("a time");
            let bars = list(timeline, "rows").iter().flat_map(|row| list(row, "bars"));
            let ends = bars.map(|bar| bar[0].as_u64().expect("a start") + bar[1].as_u64().expect("a length"));
            assert_eq!(ends.max(), Some(makespan));
            assert_eq!(list(timeline, "loads_ns").len(), 2);
        }
    }
    let samples = list(study, "samples");
    assert!(
        samples.iter().all(|sample| data.keys.contains(&sample["key"].as_str().expect("a key").to_owned()))
    );
    assert!(samples.iter().any(|sample| sample["previews"].is_array()), "samples have previews");
}

#[test]
fn order_stats_plans_and_methods_have_reports_and_one_page_holds_all() {
    let (data, directory) =
        (TempDataset::new(1, 12, Compression::Zstd), tempfile::tempdir().expect("a temporary directory"));
    let (pattern, run) = (data.pattern(), directory.path());
    let order = document(&[&["order", &pattern, "--steps", "1"], &PLAN[..]].concat(), run);
    assert_eq!(list(&order["studies"][0], "strategies").len(), 2);
    let stats = document(&["stats", &pattern], run);
    assert!(list(&stats["profile"], "quantities").len() > 5);
    assert_eq!(list(&stats["profile"], "dearest").len(), 12, "the most expensive samples, outliers or not");
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/shapes.csv");
    let cluster = [
        "--model",
        "llava-ov-qwen2.5-7b",
        "--gpus",
        "8",
        "--global-batch-size",
        "16",
        "--batches",
        "2",
        "--set",
        "space.kinds=basic",
    ];
    let plan = document(&[&["plan", "--shapes", shapes], &cluster[..]].concat(), run);
    assert!(plan["plan"]["runner_up"].is_object() && plan["plan"]["reason"].is_string());
    let methods = [
        "--model",
        "llava-ov-qwen2.5-7b",
        "--gpus",
        "4",
        "--global-batch-size",
        "16",
        "--steps",
        "2",
        "--set",
        "space.kinds=basic",
    ];
    let methods = document(&[&["simulate", "--shapes", shapes], &methods[..]].concat(), run);
    let study = &methods["studies"][0];
    assert!(list(study, "strategies").iter().all(|method| method["plan"].is_string()));
    let timelines = list(&study["steps"][0], "timelines");
    assert_eq!(timelines.len(), list(study, "strategies").len());
    for timeline in timelines {
        let bars = list(timeline, "rows").iter().flat_map(|row| list(row, "bars"));
        let ends = bars.map(|bar| bar[0].as_u64().expect("a start") + bar[1].as_u64().expect("a length"));
        let (end, makespan) = (ends.max(), timeline["makespan_ns"].as_u64());
        assert!(end.is_some() && end <= makespan, "{timeline}");
    }
    let written = object(&["report", text(run), "--json"]);
    assert_eq!(written["reports"], 4);
    let page = std::fs::read_to_string(run.join("report.html")).expect("a page");
    assert_eq!(written["bytes"].as_u64(), Some(page.len() as u64));
    assert!(page.len() < 2_000_000 && page.contains("Content-Security-Policy"));
    // A page is read as well.
    let again =
        object(&["report", text(&run.join("report.html")), "-o", text(&run.join("b.html")), "--json"]);
    assert_eq!(again["reports"], 4);
}

#[test]
fn a_report_that_cannot_be_written_or_has_no_effect_is_refused() {
    let (data, directory) =
        (TempDataset::new(1, 12, Compression::Plain), tempfile::tempdir().expect("a temporary directory"));
    let page = directory.path().join("none/page.html");
    let run = dflop(&["stats", &data.pattern(), "--report", text(&page)]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("none/page.html"), "{}", run.stderr);
    let refused = [
        vec!["stats", "shards", "--report", "a.html", "--set", "order.tail=drop"],
        [&["order", "shards", "--shuffle-quality", "--report", "a.html"], &PLAN[..]].concat(),
    ];
    for args in refused {
        assert_eq!(dflop(&args).status, Some(2), "{args:?}");
    }
    let run = dflop(&["report", text(directory.path())]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("expected a report"), "{}", run.stderr);
}
