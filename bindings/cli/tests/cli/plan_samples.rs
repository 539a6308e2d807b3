//! Tests the samples that `dflop plan` takes: shapes from an index, and tables with columns per module.

use std::fmt::Write;
use std::path::Path;

use dflop_costmodel::{ModelSpec, SampleShape};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::media::png;
use dflop_tests::tar::TarBytes;
use serde_json::Value;

use crate::command::{dflop, object, text};

const CLUSTER: [&str; 6] = ["--gpus", "8", "--global-batch", "16", "--batches", "4"];

fn plan(model: &str, samples: &[&str]) -> Value {
    let mut plan = object(&[&["plan", "--model", model, "--json"], samples, &CLUSTER[..]].concat());
    plan.as_object_mut().expect("an object").remove("search_seconds");
    plan
}

/// Writes the shapes of a dataset as a table, by the token rules of a model with one encoder.
fn table(data: &TempDataset, model: &str) -> String {
    let spec = ModelSpec::preset(model).expect("a preset");
    let (.., rule) = spec.encoders().next().expect("an encoder");
    let is_native = model.starts_with("qwen");
    let columns = if is_native { "patches,seq_len,patch_squares,window_squares" } else { "tiles,seq_len" };
    let mut table = format!("{columns}\n");
    let (index, mut shape) = (data.index(), SampleShape::default());
    for sample in 0..index.len() {
        index.sample(sample).read_shape(&mut shape);
        let work = rule.work(&shape).expect("the model takes it");
        let tokens = u64::from(shape.text_tokens) + work.tokens;
        if is_native {
            let (squares, windows) = (work.attention_pairs, work.window_pairs);
            writeln!(table, "{},{tokens},{squares},{windows}", work.encoder_tokens).expect("a string");
        } else {
            writeln!(table, "{},{tokens}", work.items).expect("a string");
        }
    }
    table
}

fn write(directory: &Path, name: &str, contents: impl AsRef<[u8]>) -> std::path::PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, contents).expect("the directory can be written");
    path
}

#[test]
fn a_dataset_is_planned_as_the_table_of_its_shapes() {
    let data = TempDataset::new(2, 20, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    for model in ["qwen2.5-vl-7b", "qwen2-vl-7b", "llava-ov-qwen2.5-7b"] {
        let shapes = write(directory.path(), "shapes.csv", table(&data, model));
        let of_dataset = plan(model, &[&data.pattern()]);
        assert_eq!(of_dataset, plan(model, &["--shapes", text(&shapes)]), "{model}");
        let share = if model.starts_with("qwen") { "sample" } else { "tile" };
        assert_eq!(of_dataset["encoder_share"], share, "{model}");
        let samples = &of_dataset["samples"];
        assert_eq!((&samples["samples"], &samples["refused"]), (&40.into(), &0.into()), "{model}");
    }
}

/// 16 images of 1024 patches attend to fewer pairs than one of as many patches.
#[test]
fn attention_is_per_medium() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let seconds = |name: &str, squares: u64| {
        let rows = format!("16384,4200,{squares}\n").repeat(20);
        let shapes =
            write(directory.path(), name, format!("patches,seq_len,patch_squares\n{rows}64,200,4096\n"));
        plan("qwen2-vl-7b", &["--shapes", text(&shapes)])["step_seconds"].as_f64().expect("seconds")
    };
    let [one, many] =
        [("one.csv", 16_384 * 16_384), ("many.csv", 1024 * 16_384)].map(|(name, all)| seconds(name, all));
    assert!(one > many * 1.05, "{one} {many}");
}

#[test]
fn simulate_compares_methods_on_patches() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let row = |at: u32| format!("{},{}\n", at * 7919 % 40 * 64, 100 + at * 7919 % 40 * 16);
    let rows: String = (0..60).map(row).collect();
    let shapes = write(directory.path(), "native.csv", format!("patches,seq_len\n{rows}"));
    let fixed = ["simulate", "--model", "qwen2.5-vl-7b", "--device", "a100", "--shapes", text(&shapes)];
    let report =
        object(&[&fixed[..], &["--gpus", "8", "--global-batch", "24", "--steps", "3", "--json"]].concat());
    let methods = report["strategies"].as_array().expect("strategies");
    let seconds = |method: &Value| method["step_seconds"].as_f64().expect("seconds");
    let ours = seconds(methods.last().expect("ours"));
    assert!(methods.iter().all(|method| ours <= seconds(method)), "{report}");
    assert!(report["ideal_seconds"].as_f64().expect("seconds") <= ours, "{report}");
}

#[test]
fn samples_that_the_model_refuses_are_counted() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut tar = TarBytes::new();
    for number in 0..20 {
        let width = if number == 7 { 402 } else { 60 + number * 9 };
        let height = if number == 7 { 2 } else { 60 };
        let key = format!("sample-{number:02}");
        tar = tar.file(&format!("{key}.txt"), b"a kite over the sea");
        tar = tar.file(&format!("{key}.png"), &png(width, height, number));
    }
    let shard = write(directory.path(), "shard-000.tar", tar.finish());
    let samples = &plan("qwen2-vl-7b", &[text(&shard)])["samples"];
    assert_eq!((&samples["samples"], &samples["read"]), (&20.into(), &20.into()));
    assert_eq!(samples["refused"], 1);
    assert_eq!(samples["first_refused"]["key"], "sample-07");
    let run = dflop(&[&["plan", "--model", "qwen2-vl-7b", text(&shard)], &CLUSTER[..]].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let line = "left out: 1 samples that the model refuses, the first: sample-07: ";
    assert!(run.stdout.contains(line), "{}", run.stdout);
}

#[test]
fn what_gives_no_samples_says_why() {
    let data = TempDataset::new(1, 3, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let tiles = write(directory.path(), "tiles.csv", "tiles,seq_len\n1,300\n");
    let patches = write(directory.path(), "patches.csv", "patches,seq_len\n64,300\n");
    let empty = write(directory.path(), "empty.tar", TarBytes::new().finish());
    let refuse = |model: &str, samples: &[&str], status: i32, part: &str| {
        let run = dflop(&[&["plan", "--model", model], samples, &CLUSTER[..]].concat());
        assert_eq!((run.status, run.stdout.as_str()), (Some(status), ""), "{samples:?}: {}", run.stderr);
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    };
    let native = "qwen2.5-vl-7b";
    refuse(native, &[], 2, "<DATASET>");
    refuse(native, &[&data.pattern(), "--shapes", text(&patches)], 2, "cannot be used with");
    refuse(native, &["--shapes", text(&patches), "--split", "train"], 2, "cannot be used with");
    refuse(native, &["--shapes", text(&patches), "--tokenizer", "tokenizer.json"], 2, "cannot be used with");
    refuse(native, &["--shapes", text(&patches), "--encoder-share", "tile"], 2, "without tiles");
    let needs = "sees images in their own resolution: columns `patches,seq_len[,patch_squares";
    refuse(native, &["--shapes", text(&tiles)], 1, needs);
    refuse("internvl3-8b", &["--shapes", text(&patches)], 1, "columns `tiles,seq_len`");
    refuse(native, &[text(&empty)], 1, "has no samples");
    refuse("omni-7b", &[&data.pattern()], 2, "two encoders");
}
