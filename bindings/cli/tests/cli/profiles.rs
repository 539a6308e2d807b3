//! Tests measured profiles: instead of a device, compared with measurements, rejected with the line.

use std::path::{Path, PathBuf};

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::Value;

use crate::command::{dflop, object, text};

/// A profile from the crate that reads profiles: the preset `tiny` on one CPU core.
fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../costmodel/profiles").join(name)
}

fn miniature() -> PathBuf {
    committed("cpu-miniature.csv")
}

#[test]
fn accuracy_gives_errors_by_module_part_and_bin_and_a_page() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let page = directory.path().join("accuracy.html");
    let (profile, observed) = (miniature(), committed("cpu-miniature-held-out.csv"));
    let args = ["accuracy", "--profile", text(&profile), "--observed", text(&observed)];
    let report = object(&[&args[..], &["--json", "--report", text(&page)]].concat());
    let points = report["points"].as_array().expect("points");
    assert_eq!(report["errors"]["count"], points.len());
    for module in report["modules"].as_array().expect("modules") {
        let count = |list: &Value| -> u64 {
            list.as_array()
                .expect("a list")
                .iter()
                .map(|item| item["errors"]["count"].as_u64().expect("a count"))
                .sum()
        };
        assert_eq!(module["errors"]["count"], count(&module["parts"]));
        assert_eq!(module["errors"]["count"], count(&module["bins"]));
        let error = |name: &str| module["errors"][name].as_f64().expect(name);
        assert!(
            error("p50") <= error("p95")
                && error("p95") <= error("max")
                && error("bias").abs() <= error("mape")
        );
    }
    let page = std::fs::read_to_string(page).expect("the page was written");
    assert_eq!(page.matches("\"measured_ns\":").count(), points.len());
    assert!(
        page.contains("within_interval")
            && page.contains("of the measurements are within the stated 90 % intervals")
    );
    let table = dflop(&args);
    assert_eq!(table.status, Some(0), "{}", table.stderr);
    assert!(
        table.stdout.contains("llm attention backward")
            && table.stdout.contains("within the stated 90 % intervals")
    );
}

#[test]
fn a_profile_predicts_itself() {
    let profile = miniature();
    let report = object(&["accuracy", "--profile", text(&profile), "--observed", text(&profile), "--json"]);
    // Noise that falls with work is smoothed away, which is all that is left.
    assert!(report["errors"]["p50"].as_f64().expect("p50") < 0.01, "{}", report["errors"]);
    assert_eq!(report["beyond"], 0);
}

#[test]
fn stats_and_simulate_take_times_from_a_profile() {
    let (data, profile) = (TempDataset::new(2, 10, Compression::Plain), miniature());
    let source = ["--model", "tiny", "--profile", text(&profile)];
    let run = dflop(&[&["stats", &data.pattern(), "--json"], &source[..]].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let measured = &run.objects()[0];
    assert_eq!((&measured["is_measured"], &measured["device"]), (&true.into(), &text(&profile).into()));
    assert!(measured["certainty"]["mean_uncertainty"].as_f64().expect("uncertainty") > 0.0);
    let stated = object(&["stats", &data.pattern(), "--model", "tiny", "--device", "cpu", "--json"]);
    assert_eq!((&stated["is_measured"], &stated["certainty"]), (&false.into(), &Value::Null));
    assert_eq!(measured["quantiles"]["tokens"], stated["quantiles"]["tokens"]);
    assert_ne!(measured["quantiles"]["llm_cost_seconds"], stated["quantiles"]["llm_cost_seconds"]);
    let size = ["--global-batch-size", "8", "--dp-size", "2", "--steps", "1", "--json"];
    let simulated = dflop(&[&["simulate", &data.pattern()], &size[..], &source[..]].concat());
    assert_eq!(simulated.objects()[0]["is_measured"], true);
}

#[test]
fn a_random_sample_states_its_error_and_all_samples_none() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let stats = |args: &[&str]| object(&[&["stats", &data.pattern(), "--json"], args].concat());
    let [all, some, other] =
        [stats(&[]), stats(&["--sample", "20", "--seed", "3"]), stats(&["--sample", "20", "--seed", "4"])];
    assert_eq!((&all["sampling"]["samples"], &all["sampling"]["rank_error"]), (&60.into(), &0.0.into()));
    assert_eq!((&some["samples"], &some["quantiles"]["tokens"]["n"]), (&60.into(), &20.into()));
    let rank_error = some["sampling"]["rank_error"].as_f64().expect("an error");
    assert!((rank_error - 1.358_102 / 20_f64.sqrt()).abs() < 1e-9);
    assert_ne!(some["quantiles"]["text_tokens"]["mean"], other["quantiles"]["text_tokens"]["mean"]);
    assert!(all["quantile_error"].as_f64().expect("an error") < 0.004);
    assert!(all["outliers"].is_array() && all["encoder_to_llm_ratio"].is_f64());
}

#[test]
fn a_bad_profile_is_refused_with_file_line_and_column() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let bad = directory.path().join("bad.csv");
    let good = std::fs::read_to_string(miniature()).expect("the profile");
    let first = good.lines().position(|line| line.starts_with("vision,")).expect("rows");
    let broken: Vec<String> =
        good.lines()
            .enumerate()
            .map(|(at, line)| {
                if at == first { "vision,linear,forward,1,1,1,256,NaN,".to_owned() } else { line.to_owned() }
            })
            .collect();
    std::fs::write(&bad, broken.join("\n")).expect("the directory can be written");
    let run = dflop(&["accuracy", "--profile", text(&bad), "--observed", text(&bad)]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(1), ""));
    let place = format!("{}:{}: column `microseconds`: `NaN`", bad.display(), first + 1);
    assert!(run.stderr.contains(&place), "{}", run.stderr);
}

#[test]
fn what_a_profile_lacks_is_said() {
    let (data, profile) = (TempDataset::new(1, 2, Compression::Plain), miniature());
    let stats =
        |args: &[&str]| dflop(&[&["stats", &data.pattern(), "--profile", text(&profile)], args].concat());
    let other_model = stats(&["--model", "omni-7b"]);
    assert_eq!(other_model.status, Some(1));
    assert!(other_model.stderr.contains("hidden=1152"), "{}", other_model.stderr);
    let other_degree = stats(&["--model", "tiny", "--set", "cost.profile_tp=1,8"]);
    assert!(
        other_degree.stderr.contains("module llm, part linear, phase forward, tp 8"),
        "{}",
        other_degree.stderr
    );
    for (args, mentioned) in [
        (&["--device", "h100"][..], "--device"),
        (&["--set", "cost.profile_tp=0"], "profile_tp"),
        (&["--sample", "0"], "sample"),
    ] {
        let refused = stats(&[&["--model", "tiny"], args].concat());
        assert_eq!(refused.status, Some(2), "{args:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(mentioned), "{args:?}: {}", refused.stderr);
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let none = dflop(&["accuracy", "--profile", text(directory.path()), "--observed", text(&profile)]);
    assert_eq!(none.status, Some(1));
    assert!(none.stderr.contains("there is no .csv file"), "{}", none.stderr);
}
