//! Tests the training run report: measured and simulated passes, with samples.

use std::collections::BTreeSet;

use serde_json::Value;

use super::config::Job;
use crate::command::{object, text};

fn document(job: &Job, args: &[&str]) -> Value {
    let file = job.path("run.json");
    job.lines(&[&["--report", text(&file)], args].concat());
    serde_json::from_slice(&std::fs::read(&file).expect("a document")).expect("JSON")
}

#[test]
fn a_run_has_its_steps_its_passes_and_their_samples() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 1 }")]);
    for args in [&[][..], &["--stages", "1"]] {
        let report = document(&job, args);
        assert_eq!(report["training"]["taken"], 6);
        let verdicts = report["verdict"].as_array().expect("verdicts").iter();
        let texts: Vec<&str> = verdicts.filter_map(|verdict| verdict["text"].as_str()).collect();
        let start = texts.iter().find(|text| text.starts_with("The start with the first step takes "));
        assert!(start.is_some_and(|text| text.contains(" s: ") && text.contains(", other ")), "{texts:?}");
        let study = &report["studies"][0];
        let strategies = study["strategies"].as_array().expect("strategies");
        let bases: BTreeSet<&str> =
            strategies.iter().map(|own| own["basis"].as_str().expect("a basis")).collect();
        assert_eq!(bases, BTreeSet::from(["measured", "simulated"]));
        let steps = study["steps"].as_array().expect("steps");
        assert_eq!(steps.last().expect("a step")["step"], 5);
        for step in steps {
            let is_measured = |timeline: &&Value| {
                let strategy = timeline["strategy"].as_u64().expect("an index") as usize;
                strategies[strategy]["basis"] == "measured"
            };
            let timelines = step["timelines"].as_array().expect("timelines");
            let measured = timelines.iter().find(is_measured).expect("a measured timeline");
            let samples: BTreeSet<u64> = measured["groups"]
                .as_array()
                .expect("groups")
                .iter()
                .flat_map(|group| group.as_array().expect("a group"))
                .map(|sample| sample.as_u64().expect("an index"))
                .collect();
            assert_eq!(samples.len(), 8, "every sample of the global batch");
        }
        let points = report["accuracy"]["points"].as_array().expect("points");
        assert!(points.iter().all(|point| point["measured_ns"].as_u64() > Some(0)));
        assert!(report["accuracy"]["within_interval"].as_f64().expect("a part") >= 0.85);
        assert_eq!(leftovers(&job), 0, "files of ranks are removed");
    }
}

#[test]
fn trace_and_step_lines_become_a_report_of_their_own() {
    let job = Job::with(&[("steps = 6", "steps = 2")]);
    let trace = job.path("left/trace.json");
    std::fs::create_dir(job.path("left")).expect("the directory can be written");
    let lines = job.lines(&["--trace", text(&trace)]);
    let text_of = |line: &Value| line.to_string();
    let steps = lines.iter().map(text_of).collect::<Vec<_>>().join("\n");
    std::fs::write(job.path("left/steps.jsonl"), steps).expect("it can be written");
    let page = job.path("page.html");
    let written = object(&["report", text(&job.path("left")), "-o", text(&page), "--json"]);
    assert_eq!(written["reports"], 1);
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("\"taken\":2") && page.contains("\"basis\":\"measured\""));
}

/// Hidden files next to the report.
fn leftovers(job: &Job) -> usize {
    let hidden = std::fs::read_dir(job.path("")).expect("the directory is there").filter(|entry| {
        entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with(".run"))
    });
    hidden.count()
}
