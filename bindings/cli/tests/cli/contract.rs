//! Tests that every promised field of the output is there, with the right meaning.

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::media::jpeg;
use dflop_tests::tar::TarBytes;
use serde_json::{Value, json};
use std::io::Write as _;

use crate::command::{dflop, object, objects, refuse, text, without_measurements};

/// Two text samples and an image that ends in the header, in the same shard.
fn shard_with_a_bad_image(directory: &tempfile::TempDir) -> std::path::PathBuf {
    let cut = &jpeg(64, 48, 0)[..10];
    let tar = TarBytes::new().file("a.txt", b"one").file("b.jpg", cut).file("c.txt", b"two").finish();
    let shard = directory.path().join("x.tar");
    std::fs::write(&shard, tar).expect("the directory can be written");
    shard
}

fn write_instance(directory: &tempfile::TempDir) -> std::path::PathBuf {
    let instance = json!({
        "name": "six", "n": 6, "m": 4, "c": 2,
        "d": [[9, 1], [1, 9], [5, 5], [3, 7], [7, 3], [6, 2]], "tok": [1, 2, 3, 4, 5, 6],
    });
    let path = directory.path().join("six.json");
    std::fs::write(&path, instance.to_string()).expect("the directory can be written");
    path
}

fn whole_numbers(groups: &Value) -> Vec<u64> {
    let mut items: Vec<u64> = match groups {
        Value::Array(groups) => groups.iter().flat_map(whole_numbers).collect(),
        item => vec![item.as_u64().expect("an item is a whole number")],
    };
    items.sort_unstable();
    items
}

#[test]
fn index_counts_shards_samples_and_payload_bytes() {
    let data = TempDataset::new(2, 5, Compression::Plain);
    let report = object(&["index", &data.pattern(), "--json"]);
    let listed = objects(&["list", &data.pattern(), "--json"]);
    let fields = listed.iter().flat_map(|sample| sample["fields"].as_object().expect("fields").values());
    let bytes: u64 = fields.map(|field| field["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!((&report["shards"], &report["samples"]), (&json!(2), &json!(10)));
    assert_eq!(report["bytes"], bytes);
    assert_eq!((&report["skipped"], &report["warnings"]), (&json!([]), &json!([])));
    assert!(report["seconds"].as_f64().expect("seconds") >= 0.0);
    assert_eq!(report["fingerprint"].as_str().expect("a fingerprint").len(), 32);
    assert!(std::path::Path::new(report["path"].as_str().expect("a path")).is_file());
}

#[test]
fn the_fingerprint_ignores_the_directory() {
    let (one, other) =
        (TempDataset::new(2, 3, Compression::Plain), TempDataset::new(2, 3, Compression::Plain));
    let fingerprint =
        |data: &TempDataset| object(&["index", &data.pattern(), "--json"])["fingerprint"].clone();
    assert_eq!(fingerprint(&one), fingerprint(&other));
}

#[test]
fn index_reports_a_bad_sample_and_ends_well() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shard = shard_with_a_bad_image(&directory);
    let report = object(&["index", text(&shard), "--json"]);
    assert_eq!(report["samples"], 2);
    let skipped = report["skipped"].as_array().expect("a list");
    assert_eq!(skipped.len(), 1);
    assert_eq!(skipped[0]["shard"], text(&shard));
    assert_eq!(skipped[0]["offset"], 1024);
    assert_eq!((&skipped[0]["key"], &skipped[0]["field"]), (&json!("b"), &json!("jpg")));
    assert!(!skipped[0]["reason"].as_str().expect("a reason").is_empty());
}

#[test]
fn verified_index_finds_what_headers_do_not_show() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = jpeg(64, 48, 0);
    let tar = TarBytes::new().file("a.jpg", &image).file("b.jpg", &image[..image.len() - 40]).finish();
    let shard = directory.path().join("x.tar");
    std::fs::write(&shard, tar).expect("the directory can be written");
    assert_eq!(object(&["index", text(&shard), "--json"])["samples"], 2);
    let verified = object(&["index", text(&shard), "--verify", "--json"]);
    assert_eq!(verified["samples"], 1);
    assert_eq!(verified["skipped"][0]["key"], "b");
}

#[test]
fn list_gives_bytes_digest_and_shape_of_every_field() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let tar = TarBytes::new().file("d/a.TXT", b"abc").file("d/a.seg.jpg", &jpeg(64, 48, 0)).finish();
    let shard = directory.path().join("x.tar");
    std::fs::write(&shard, tar).expect("the directory can be written");
    let sample = object(&["list", text(&shard), "--json"]);
    assert_eq!((&sample["key"], &sample["url"]), (&json!("d/a"), &json!(text(&shard))));
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(sample["fields"]["txt"], json!({"bytes": 3, "sha256": digest}));
    assert_eq!(sample["shape"]["images"], json!([{"width": 64, "height": 48}]));
    assert_eq!(sample["fields"].as_object().expect("fields").len(), 2);
}

#[test]
fn list_prints_what_is_readable_then_fails() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shard = shard_with_a_bad_image(&directory);
    let run = dflop(&["list", text(&shard), "--json"]);
    assert_eq!(run.status, Some(1));
    let keys: Vec<Value> = run.objects().iter().map(|sample| sample["key"].clone()).collect();
    assert_eq!(keys, ["a", "b", "c"]);
    assert!(run.objects()[1]["shape"].is_null());
    assert!(run.stderr.contains("offset 1024 key b field jpg"), "{}", run.stderr);
}

#[test]
fn stream_reports_every_measurement() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    for decode in ["raw", "rgb224", "media"] {
        let args = [
            "stream",
            &data.pattern(),
            "--decode",
            decode,
            "--batch",
            "5",
            "--set",
            "read.workers=2",
            "--json",
        ];
        let report = object(&args);
        assert_eq!((&report["samples"], &report["skipped"]), (&json!(12), &json!([])), "{decode}");
        let seconds = |name: &str| report[name].as_f64().expect(name);
        assert!(seconds("first_batch_seconds") <= seconds("seconds"), "{decode}");
        assert!(seconds("cpu_seconds") >= seconds("kernel_cpu_seconds"), "{decode}");
        assert_eq!(seconds("kernel_cpu_seconds") > 0.0, decode != "raw", "{decode}");
        assert!(report["peak_rss_bytes"].is_u64(), "{decode}");
    }
}

#[test]
fn stream_reads_the_named_fields_only() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let bytes = |fields: &[&str]| {
        let report = object(&[&["stream", &data.pattern(), "--decode", "media", "--json"], fields].concat());
        assert_eq!(report["samples"], 12, "{fields:?}");
        report["bytes"].as_u64().expect("bytes")
    };
    let (all, text, rest) =
        (bytes(&[]), bytes(&["--set", "read.fields=txt"]), bytes(&["--set", "read.fields=images,audio"]));
    assert!(text > 0 && rest > 0);
    assert_eq!(text + rest, all);
    let none = dflop(&["stream", &data.pattern(), "--set", "read.fields=none,other"]);
    assert_eq!(none.status, Some(1));
    assert!(
        none.stderr.contains("none of 12 samples has a field `none, other`; they have: "),
        "{}",
        none.stderr
    );
}

#[test]
fn stream_augments_images() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let changes = [
        "--set",
        "augment.crop=0.08,1",
        "--set",
        "augment.flip=0.5",
        "--set",
        "augment.color_jitter=0.4,0.4,0.4,0.1",
        "--seed",
        "3",
    ];
    for decode in ["rgb224", "media"] {
        let report =
            object(&[&["stream", &data.pattern(), "--decode", decode, "--json"], &changes[..]].concat());
        assert_eq!((&report["samples"], &report["skipped"]), (&json!(6), &json!([])), "{decode}");
    }
}

#[test]
fn rgb224_reads_images_only_and_delivers_samples_without_one() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let listed = objects(&["list", &data.pattern(), "--json"]);
    let images: Vec<u64> =
        listed.iter().filter_map(|sample| sample["fields"]["jpg"]["bytes"].as_u64()).collect();
    let report = object(&["stream", &data.pattern(), "--decode", "rgb224", "--json"]);
    assert_eq!(report["samples"], 6);
    assert_eq!(report["bytes"], images.iter().sum::<u64>());
    assert_eq!(report["pictures"], images.len());
}

#[test]
fn epochs_repeat_and_samples_cut_the_stream() {
    let data = TempDataset::new(2, 5, Compression::Plain);
    let samples = |more: &[&str]| {
        let stream = ["stream", &data.pattern(), "--decode", "raw", "--batch", "3", "--json"];
        object(&[&stream[..], more].concat())["samples"].clone()
    };
    assert_eq!(samples(&["--epochs", "2"]), 20);
    assert_eq!(samples(&["--samples", "7"]), 7);
    assert_eq!(samples(&["--epochs", "3", "--samples", "25"]), 25);
}

#[test]
fn delivered_and_skipped_are_all_samples() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shard = shard_with_a_bad_image(&directory);
    let args = ["stream", text(&shard), "--set", "read.error_budget=1", "--json"];
    let report = object(&args);
    assert_eq!(report["samples"], 2);
    let skipped = report["skipped"].as_array().expect("a list");
    assert_eq!(skipped.len(), 1);
    for field in ["shard", "offset", "key", "field", "reason"] {
        assert!(skipped[0].get(field).is_some(), "{field}");
    }
    let over_budget = dflop(&["stream", text(&shard)]);
    assert_eq!(over_budget.status, Some(1));
    assert!(over_budget.stderr.contains("error budget"), "{}", over_budget.stderr);
}

#[test]
fn stats_gives_quantiles_in_order() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let report = object(&["stats", &data.pattern(), "--model", "omni-7b", "--json"]);
    assert_eq!(report["samples"], 20);
    let quantiles = report["quantiles"].as_object().expect("quantiles");
    for name in ["tokens", "text_tokens", "image_width", "audio_seconds", "llm_cost_seconds"] {
        let value = |quantile: &str| quantiles[name][quantile].as_f64().expect(quantile);
        let values = ["min", "p5", "p25", "p50", "p75", "p95", "p99", "max"].map(value);
        assert!(values.is_sorted(), "{name}: {values:?}");
        assert!((value("min")..=value("max")).contains(&value("mean")), "{name}");
        let counts = report["histograms"][name]["counts"].as_array().expect("counts");
        let total: u64 = counts.iter().map(|count| count.as_u64().expect("a count")).sum();
        assert_eq!(quantiles[name]["n"], total, "{name}");
    }
}

#[test]
fn stats_shows_how_long_random_batches_wait() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let report = object(&["stats", &data.pattern(), "--model", "omni-7b", "--json"]);
    let dealt = &report["data_parallel"];
    assert_eq!((&dealt["gpus"], &dealt["microbatch_samples"]), (&8.into(), &8.into()));
    let number = |name: &str| dealt[name].as_f64().expect(name);
    let (slowest, idle) = (number("slowest_over_mean"), number("idle_fraction"));
    assert!(slowest > 1.0 && (idle - (1.0 - 1.0 / slowest)).abs() < 1e-9, "{dealt}");
    let printed = dflop(&["stats", &data.pattern(), "--model", "omni-7b"]).stdout;
    let expected = format!("the slowest GPU takes {slowest:.2} times the mean");
    assert!(printed.contains(&expected) && printed.contains("`--gpus 8`"), "{printed}");
}

#[test]
fn stats_shows_which_samples_gpus_can_share() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let report = object(&["stats", &data.pattern(), "--model", "omni-7b", "--json"]);
    let context = report["context"].as_array().expect("a list");
    let number = |own: &Value, name: &str| own[name].as_f64().expect("a number");
    assert!(!context.is_empty() && context.len() <= 3, "{context:?}");
    for (log, own) in context.iter().enumerate() {
        assert_eq!(own["gpus"], 2 << log);
        assert!((0.0..=1.0).contains(&number(own, "samples_fraction")), "{own}");
        assert!(number(own, "tokens_min") <= number(&report["quantiles"]["tokens"], "max"), "{own}");
    }
    let fractions = context.iter().map(|own| number(own, "samples_fraction"));
    assert!(fractions.rev().is_sorted(), "{context:?}");
    let printed = dflop(&["stats", &data.pattern(), "--model", "omni-7b"]).stdout;
    assert!(printed.contains("samples that GPUs of a node can share: "), "{printed}");
    // Nothing is known about links between CPUs.
    let unknown = object(&["stats", &data.pattern(), "--model", "omni-7b", "--device", "cpu", "--json"]);
    assert_eq!(unknown["context"], json!([]));
}

#[test]
fn balance_puts_every_item_into_one_group_and_proves_its_gap() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let report = object(&["balance", "--instance", text(&write_instance(&directory)), "--json"]);
    assert_eq!(report["groups"].as_array().expect("groups").len(), 4);
    assert_eq!(whole_numbers(&report["groups"]), [0, 1, 2, 3, 4, 5]);
    let number = |name: &str| report[name].as_f64().expect(name);
    assert!((number("gap") - (number("makespan_ns") / number("lower_bound_ns") - 1.0)).abs() < 1e-12);
    assert!(number("gap") >= 0.0 && number("solve_ms") >= 0.0);
    assert!(report["work_spent"].is_u64());
}

#[test]
fn balance_pipeline_gives_each_rank_its_microbatches() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = write_instance(&directory);
    let pipeline = ["--objective", "pipeline", "--dp", "2", "--stages", "1,3"];
    let report = object(&[&["balance", "--instance", text(&path), "--json"], &pipeline[..]].concat());
    let ranks = report["ranks"].as_array().expect("ranks");
    assert!(ranks.iter().all(|rank| rank.as_array().is_some_and(|microbatches| microbatches.len() == 2)));
    assert_eq!((ranks.len(), whole_numbers(&report["ranks"])), (2, vec![0, 1, 2, 3, 4, 5]));
    assert!(report["lower_bound_ns"].as_u64() <= report["makespan_ns"].as_u64());
}

#[test]
fn balance_compares_with_min_max_and_takes_an_encoder_dp_size() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = write_instance(&directory);
    let run = |more: &[&str]| {
        let base = ["balance", "--instance", text(&path), "--json", "--dp", "2", "--stages", "1,3"];
        object(&[&base, more].concat())
    };
    for more in [&["--objective", "min-max"][..], &["--objective", "pipeline", "--encoder-dp", "4"]] {
        let report = run(more);
        assert_eq!(whole_numbers(&report["ranks"]), [0, 1, 2, 3, 4, 5], "{report}");
        assert!(report["lower_bound_ns"].as_u64() <= report["makespan_ns"].as_u64());
    }
    let makespan_ns = |more: &[&str]| run(more)["makespan_ns"].as_u64().expect("a makespan");
    let pipeline = ["--objective", "pipeline", "--deadline-ms", "20"];
    assert!(makespan_ns(&pipeline) <= makespan_ns(&["--objective", "min-max"]));
    let capped = run(&["--objective", "pipeline", "--tokens-max", "7"]);
    let groups =
        capped["ranks"].as_array().expect("ranks").iter().flat_map(|rank| rank.as_array().expect("a rank"));
    // Item `i` has `i + 1` tokens.
    assert!(
        groups.into_iter().all(|group| whole_numbers(group).iter().map(|item| item + 1).sum::<u64>() <= 7)
    );
}

#[test]
fn simulate_compares_three_strategies_with_data_blind() {
    let data = TempDataset::new(2, 8, Compression::Plain);
    let size = [
        "--global-batch-size",
        "8",
        "--dp-size",
        "2",
        "--microbatches",
        "2",
        "--set",
        "plan.strategy=search:100",
    ];
    let report = object(&[&["simulate", &data.pattern(), "--json"], &size[..]].concat());
    let strategies = report["strategies"].as_array().expect("strategies");
    let names: Vec<&Value> = strategies.iter().map(|strategy| &strategy["name"]).collect();
    assert_eq!(names, ["data-blind", "lpt", "dflop"]);
    assert_eq!((&report["steps"], &strategies[0]["speedup"]), (&json!(2), &json!(1.0)));
    for strategy in strategies {
        assert!(strategy["step_seconds"].as_f64().expect("seconds") > 0.0);
        assert!((0.0..1.0).contains(&strategy["bubble_fraction"].as_f64().expect("a fraction")));
    }
}

#[test]
fn simulate_runs_the_plans_by_any_schedule() {
    let data = TempDataset::new(2, 8, Compression::Plain);
    let size = [
        "--global-batch-size",
        "8",
        "--dp-size",
        "1",
        "--microbatches",
        "4",
        "--set",
        "plan.stages=1,1,2",
        "--set",
        "plan.strategy=search:0",
    ];
    let run = |name: &str| {
        let report = object(
            &[&["simulate", &data.pattern(), "--json", "--set", &format!("plan.schedule={name}")], &size[..]]
                .concat(),
        );
        assert_eq!(report["schedule"], name);
        report["strategies"][0]["bubble_fraction"].as_f64().expect("a fraction")
    };
    let [plain, zero, interleaved] = ["1f1b", "zb-h1", "interleaved:2"].map(run);
    assert!(zero < plain && interleaved < plain, "{plain} {zero} {interleaved}");
    let simulate = |name| {
        dflop(
            &[&["simulate", &data.pattern(), "--set", &format!("plan.schedule={name}")], &size[..]].concat(),
        )
    };
    let unknown = simulate("2f2b");
    assert_eq!(unknown.status, Some(2));
    assert!(unknown.stderr.contains("expected gpipe, 1f1b, "), "{}", unknown.stderr);
    let odd = simulate("interleaved:3");
    assert_eq!(odd.status, Some(2));
    assert!(odd.stderr.contains("interleaved:3 needs a multiple of 3 stages, got 4"), "{}", odd.stderr);
}

#[test]
fn packed_directory_lists_what_went_in() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    std::fs::create_dir(&source).expect("the directory can be written");
    for (name, payload) in [("a b.txt", "one"), ("日本.txt", "three"), ("noext", "x")] {
        std::fs::write(source.join(name), payload).expect("the directory can be written");
    }
    let report = object(&["pack", text(&source), text(&out), "--json"]);
    let counts = json!([report["shards"], report["samples"], report["bytes"]]);
    assert_eq!(counts, json!([1, 2, 8]));
    assert_eq!(report["skipped"].as_array().map(Vec::len), Some(1));
    let keys: Vec<Value> =
        objects(&["list", text(&out), "--json"]).iter().map(|sample| sample["key"].clone()).collect();
    assert_eq!(keys, ["a b", "日本"]);
    let again = dflop(&["pack", text(&source), text(&out)]);
    assert_eq!(again.status, Some(1), "shards are never overwritten");
    assert!(again.stderr.contains("shard-000000.tar"), "{}", again.stderr);
}

#[test]
fn reports_differ_in_nothing_but_measurements() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (pattern, instance) = (data.pattern(), write_instance(&directory));
    let size = ["--global-batch-size", "4", "--dp-size", "2", "--set", "plan.strategy=search:50"];
    let commands = [
        vec!["index", &pattern, "--json"],
        vec!["stats", &pattern, "--json"],
        vec!["stream", &pattern, "--json"],
        vec!["balance", "--instance", text(&instance), "--json"],
        [&["simulate", &pattern, "--json"], &size[..]].concat(),
    ];
    for args in commands {
        let [one, other] = [0, 1].map(|_| without_measurements(object(&args)));
        assert_eq!(one, other, "{args:?}");
    }
}

/// Completes the last word in bash, as a user presses the tab key.
fn completed(words: &[&str]) -> Vec<String> {
    let script = r#"source /dev/stdin; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); word="${!#}"; before="${@: -2:1}"
        _dflop dflop "$word" "$before"; printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = std::process::Command::new("bash")
        .args(["-c", script, "bash"])
        .args(words)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("bash starts");
    let completions = dflop(&["completions", "bash"]).stdout;
    bash.stdin.take().expect("a pipe").write_all(completions.as_bytes()).expect("bash reads");
    let output = bash.wait_with_output().expect("bash ends");
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

#[test]
fn shells_complete_commands_options_and_values() {
    assert_eq!(completed(&["dflop", "simu"]), ["simulate"]);
    assert_eq!(completed(&["dflop", "stream", "--shuffle-b"]), ["--shuffle-buffer", "--shuffle-bytes"]);
    assert_eq!(completed(&["dflop", "stream", "--decode", "r"]), ["raw", "rgb224"]);
    assert!(completed(&["dflop", "stats", "--device", "h"]).contains(&"h200".to_owned()));
    for shell in ["zsh", "fish"] {
        assert!(dflop(&["completions", shell]).stdout.contains("shuffle-buffer"), "{shell}");
    }
    refuse(&["completions", "csh"], 2, "possible values: bash, zsh, fish");
    assert!(dflop(&["man", "stream"]).stdout.contains("shuffle\\-buffer"));
    refuse(&["man", "sing"], 2, "found `sing`");
}
