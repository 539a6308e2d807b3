//! Tests the samples for `dflop plan`: shapes from an index, and tables with columns per module.

use std::fmt::Write;
use std::path::Path;

use dflop_costmodel::{ModelSpec, Module, SampleShape};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::media::png;
use dflop_tests::tar::TarBytes;
use serde_json::Value;

use crate::command::{dflop, object, text};

const CLUSTER: [&str; 6] = ["--gpus", "8", "--global-batch-size", "16", "--batches", "4"];

fn plan(model: &str, samples: &[&str]) -> Value {
    let mut plan = object(&[&["plan", "--model", model, "--json"], samples, &CLUSTER[..]].concat());
    plan.as_object_mut().expect("an object").remove("search_seconds");
    plan
}

/// Writes dataset shapes as a table, by a model's token rules.
fn table(data: &TempDataset, model: &str) -> String {
    let spec = ModelSpec::preset(model).expect("a preset");
    let encoders: Vec<_> = spec.encoders().collect();
    let prefix = |module| if encoders.len() == 1 { String::new() } else { format!("{module}_") };
    let mut table = "seq_len".to_owned();
    for (module, ..) in &encoders {
        let prefix = prefix(*module);
        let columns = if spec.is_native(*module) {
            format!(",{prefix}patches,{prefix}patch_squares,{prefix}window_squares,{prefix}media")
        } else {
            format!(",{prefix}tiles,{prefix}media")
        };
        table.push_str(&columns);
    }
    let (index, mut shape) = (data.index(), SampleShape::default());
    for sample in 0..index.len() {
        index.sample(sample).read_shape(&mut shape);
        let (mut tokens, mut cells) = (u64::from(shape.text_tokens), String::new());
        for (module, _, rule) in &encoders {
            let work = rule.work(&shape).expect("the model takes it");
            tokens += work.tokens;
            let (patches, squares, windows) = (work.encoder_tokens, work.attention_pairs, work.window_pairs);
            let media = match module {
                Module::Audio => shape.audio.len(),
                _ => shape.images.len() + shape.videos.len(),
            };
            if spec.is_native(*module) {
                write!(cells, ",{patches},{squares},{windows},{media}").expect("a string");
            } else {
                write!(cells, ",{},{media}", work.items).expect("a string");
            }
        }
        write!(table, "\n{tokens}{cells}").expect("a string");
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
    for model in ["qwen2.5-vl-7b", "qwen2-vl-7b", "llava-ov-qwen2.5-7b", "omni-7b"] {
        let shapes = write(directory.path(), "shapes.csv", table(&data, model));
        let of_dataset = plan(model, &[&data.pattern()]);
        assert_eq!(of_dataset, plan(model, &["--shapes", text(&shapes)]), "{model}");
        assert_eq!(of_dataset["encoder_share"], "medium", "{model}");
        let samples = &of_dataset["samples"];
        assert_eq!((&samples["samples"], &samples["refused"]), (&40.into(), &0.into()), "{model}");
    }
}

#[test]
fn encoders_side_by_side_share_the_gpus() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut rows = String::new();
    for at in 0_u32..200 {
        let (tiles, windows) = (at % 7, if at.is_multiple_of(3) { at % 5 } else { 0 });
        writeln!(rows, "{tiles},{windows},{}", 100 + 196 * tiles + 750 * windows).expect("a string");
    }
    let shapes = write(directory.path(), "shapes.csv", format!("vision_tiles,audio_tiles,seq_len\n{rows}"));
    let args = ["--model", "omni-7b", "--device", "a100", "--shapes", text(&shapes), "--gpus", "16"];
    let args = [&args[..], &["--global-batch-size", "64"]].concat();
    for space in [
        &["--set", "space.kinds=basic"][..],
        &[],
        &["--set", "space.placement=any", "--set", "space.zero1=true"],
    ] {
        let plan = object(&[&["plan"], &args[..], space, &["--batches", "8", "--json"]].concat());
        let modules = plan["modules"].as_array().unwrap();
        let names: Vec<&str> = modules.iter().map(|module| module["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["vision", "audio", "llm"]);
        assert_eq!(plan["memory"]["modules"].as_array().unwrap().len(), 3);
        let gpus = |module: &Value| {
            ["tp", "pp", "dp"].iter().map(|name| module[*name].as_u64().unwrap()).product::<u64>()
        };
        if plan["placement"] == "disaggregated" {
            assert_eq!(modules.iter().map(gpus).sum::<u64>(), plan["gpus_used"].as_u64().unwrap());
        }
        let compared = object(&[&["simulate"], &args[..], space, &["--steps", "8", "--json"]].concat());
        let methods = compared["strategies"].as_array().unwrap();
        let ours = methods.last().unwrap();
        assert_eq!(ours["plan"]["modules"], plan["modules"]);
        assert_eq!(ours["step_seconds"], plan["step_seconds"]);
    }
    let printed = dflop(&[&["plan"], &args[..], &["--batches", "4"]].concat());
    assert_eq!(printed.status, Some(0), "{}", printed.stderr);
    assert!(
        printed.stdout.contains("\nvision ") && printed.stdout.contains("\naudio "),
        "{}",
        printed.stdout
    );
}

/// 16 images with 1024 patches attend to fewer pairs than a single image with as many patches.
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
    let report = object(
        &[&fixed[..], &["--gpus", "8", "--global-batch-size", "24", "--steps", "3", "--json"]].concat(),
    );
    let methods = report["strategies"].as_array().expect("strategies");
    let seconds = |method: &Value| method["step_seconds"].as_f64().expect("seconds");
    let ours = seconds(methods.last().expect("ours"));
    assert!(methods.iter().all(|method| ours <= seconds(method)), "{report}");
    assert!(report["ideal_seconds"].as_f64().expect("seconds") <= ours, "{report}");
}

/// The longest of 300 samples is in none of two batches with 16 samples.
#[test]
fn a_plan_fits_the_longest_sample_drawn_or_not() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let row = |at: u32| format!("{},{}\n", at % 5 * 256, 800 + at % 5 * 64 + at * 7919 % 800);
    let rows: String = (0..299).map(row).collect();
    let cluster = ["--gpus", "16", "--global-batch-size", "16", "--device", "a100"];
    for (tokens, memory_gib) in [(16_000, "36"), (24_000, "48")] {
        let table = format!("patches,seq_len\n{rows}0,{tokens}\n");
        let shapes = write(directory.path(), "long.csv", table);
        let model = ["--model", "pixtral-12b", "--memory-gib", memory_gib, "--shapes", text(&shapes)];
        let space = ["--set", "space.placement=disaggregated", "--set", "cost.freeze=vision,projector"];
        let args = [&cluster[..], &model, &space, &["--json"]].concat();
        let gib = |memory: &Value| {
            let modules = memory.as_array().expect("modules").iter();
            modules.map(|module| module["gib"].as_f64().expect("a number")).fold(0.0, f64::max)
        };
        let plan = object(&[&["plan", "--batches", "2"], &args[..]].concat());
        let limit = |name: &str| plan["memory"][name].as_f64().expect("a number");
        let usable_gib = limit("limit_gib") / limit("margin");
        assert!(gib(&plan["memory"]["modules"]) <= usable_gib, "{tokens} tokens: {plan}");
        let compared = object(&[&["simulate", "--steps", "2"], &args[..]].concat());
        let methods = compared["strategies"].as_array().expect("strategies");
        for method in methods {
            assert_eq!(method["fits"], gib(&method["memory"]) <= usable_gib, "{method}");
        }
        assert_eq!(methods.last().expect("dflop")["fits"], true);
    }
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
    refuse(native, &["--shapes", text(&patches), "--set", "space.encoder_share=tile"], 2, "without tiles");
    let needs = "sees images in their own resolution: columns `patches,seq_len[,patch_squares";
    refuse(native, &["--shapes", text(&tiles)], 1, needs);
    refuse("internvl3-8b", &["--shapes", text(&patches)], 1, "columns `tiles,seq_len`");
    refuse(native, &[text(&empty)], 1, "has no samples");
}
