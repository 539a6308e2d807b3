//! Compares sample model inputs with the results from the Hugging Face processors.
//!
//! `tests/record/model_inputs.py` recorded the truth and documents how.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dflop_balancer::Caps;
use dflop_costmodel::{CostModel, DeviceRate, FamilyId, ModelSpec};
use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::inputs::{IGNORED, ModelInputs, PreparedSample, TensorValues};
use dflop_loader::media::{Audio, Media, RgbImage};
use dflop_loader::processors::{LongSample, PlainText, Preparer, Tokenizer};
use dflop_loader::sample::{BatchLayout, Field, PaddingSide, Sample};
use dflop_loader::{BalancedLoader, Step, StepPlanner};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::TryStreamExt;
use serde_json::Value;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs")
}

fn recorded() -> Value {
    serde_json::from_slice(&std::fs::read(golden().join("cases.json")).unwrap()).unwrap()
}

fn model(family: &str) -> ModelSpec {
    if family == "text" {
        let sighted = ModelSpec::preset("llava-ov-llama3-8b").unwrap();
        let (name, family) = (family.to_owned(), FamilyId::new("llama"));
        return ModelSpec { name, family, vision: None, audio: None, ..sighted };
    }
    ModelSpec::preset(family).unwrap()
}

fn tokenizer(family: &str) -> Tokenizer {
    Tokenizer::open(golden().join(if family == "text" { "llama3" } else { "chatml" })).unwrap()
}

/// Expands the run lengths in the record.
fn flat(values: &Value) -> Vec<i64> {
    let run = |value: &Value| match value {
        Value::Array(run) => {
            std::iter::repeat_n(run[0].as_i64().unwrap(), run[1].as_u64().unwrap() as usize).collect()
        }
        value => vec![value.as_i64().unwrap()],
    };
    values.as_array().unwrap().iter().flat_map(run).collect()
}

/// Returns the integers in a list, or in a list of rows.
fn rows(values: &Value) -> Vec<i64> {
    let row = |row: &Value| row.as_array().map_or_else(|| vec![row.clone()], Clone::clone);
    values.as_array().unwrap().iter().flat_map(row).map(|value| value.as_i64().unwrap()).collect()
}

fn field(extension: &str, media: Media) -> Field {
    Field { extension: extension.into(), media }
}

/// Returns the sample for a case, as the decoders deliver it.
fn sample(case: &Value) -> Sample {
    let mut fields = vec![field("json", Media::Json(case["json"].clone()))];
    for (at, size) in case["images"].as_array().into_iter().flatten().enumerate() {
        let [width, height] = [0, 1].map(|axis| size[axis].as_u64().unwrap() as u32);
        let pixels = vec![0; 3 * width as usize * height as usize];
        let image = RgbImage { width, height, pixels, is_truncated: false };
        fields.push(field(&format!("{at}.jpg"), Media::Image(image)));
    }
    for (at, frames) in case["frames"].as_array().into_iter().flatten().enumerate() {
        let samples = vec![0.0; frames.as_u64().unwrap() as usize];
        let clip = Audio { sample_rate_hz: 16_000, channels: 1, samples, is_truncated: false };
        fields.push(field(&format!("{at}.wav"), Media::Audio(clip)));
    }
    Sample::new("key", fields)
}

fn ints(inputs: &ModelInputs, name: &str) -> Vec<i64> {
    match &inputs.tensor(name).unwrap_or_else(|| panic!("no tensor `{name}`")).values {
        TensorValues::I64(values) => values.clone(),
        _ => panic!("`{name}` is not an integer tensor"),
    }
}

fn check(case: &Value, preparer: &Preparer, note: &str) -> PreparedSample {
    let family = case["family"].as_str().unwrap();
    let prepared = preparer.prepare(&sample(case)).unwrap_or_else(|error| panic!("{note}: {error}"));
    let inputs = preparer.pack(vec![prepared.clone()]).unwrap();
    let expected = flat(&case["input_ids"]);
    assert_eq!(ints(&inputs, "input_ids"), expected, "{note}");
    assert_eq!(ints(&inputs, "labels"), flat(&case["labels"]), "{note}");
    for name in ["image_grid_thw", "image_sizes", "batch_num_images"] {
        if case.get(name).is_some() {
            assert_eq!(ints(&inputs, name), rows(&case[name]), "{note}: {name}");
        }
    }
    if family == "qwen2-vl-7b" {
        assert_eq!(ints(&inputs, "mm_token_type_ids"), flat(&case["mm_token_type_ids"]), "{note}");
        check_positions(case, &ints(&inputs, "position_ids"), expected.len(), note);
    } else {
        assert_eq!(ints(&inputs, "position_ids"), (0..expected.len() as i64).collect::<Vec<_>>(), "{note}");
    }
    prepared
}

fn check_positions(case: &Value, positions: &[i64], tokens: usize, note: &str) {
    let axes: Vec<&[i64]> = positions.chunks(tokens).collect();
    assert_eq!(axes.len(), 4, "{note}");
    for (axis, sums) in axes[1..].iter().zip(case["position_sums"].as_array().unwrap()) {
        let found = [axis.iter().sum(), *axis.iter().max().unwrap(), axis[tokens - 1]];
        let expected = [0, 1, 2].map(|at| sums[at].as_i64().unwrap());
        assert_eq!(found, expected, "{note}");
    }
    if let Some(exact) = case["positions"].as_array() {
        for (axis, exact) in axes[1..].iter().zip(exact) {
            assert_eq!(*axis, flat(exact), "{note}");
        }
    }
}

#[test]
fn built_in_templates_give_the_ids_and_labels_of_the_processors() {
    let recorded = recorded();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(cases.len() >= 30);
    for (number, case) in cases.iter().enumerate() {
        let family = case["family"].as_str().unwrap();
        let preparer = Preparer::builder(&model(family)).tokenizer(tokenizer(family)).build().unwrap();
        check(case, &preparer, &format!("case {number} of {family}"));
    }
}

#[test]
fn templates_of_the_model_itself_give_the_same() {
    let recorded = recorded();
    for (number, case) in recorded["cases"].as_array().unwrap().iter().enumerate() {
        let family = case["family"].as_str().unwrap();
        let template = recorded["templates"][family].as_str().unwrap();
        let builder = Preparer::builder(&model(family)).tokenizer(tokenizer(family)).chat_template(template);
        check(case, &builder.build().unwrap(), &format!("case {number} of {family}, its own template"));
    }
}

#[test]
fn what_is_learned_is_what_the_assistant_says() {
    let recorded = recorded();
    for case in recorded["cases"].as_array().unwrap() {
        let family = case["family"].as_str().unwrap();
        let preparer = Preparer::builder(&model(family)).tokenizer(tokenizer(family)).build().unwrap();
        let prepared = preparer.prepare(&sample(case)).unwrap();
        let mut learned = String::new();
        for run in prepared.labels.chunk_by(|a, b| (*a == IGNORED) == (*b == IGNORED)) {
            if run[0] != IGNORED {
                let ids: Vec<u32> = run.iter().map(|&id| id as u32).collect();
                learned += &preparer.decode(&ids).unwrap();
            }
        }
        let end = if family == "text" { "<|eot_id|>" } else { "<|im_end|>" };
        let is_trimmed = family == "text";
        let said = said_by_the_assistant(&case["json"]).into_iter();
        let said: String =
            said.map(|words| if is_trimmed { words.trim().to_owned() } else { words } + end).collect();
        assert_eq!(learned, said, "{family}");
    }
}

fn said_by_the_assistant(json: &Value) -> Vec<String> {
    if let Some(answer) = json["output"].as_str() {
        return vec![answer.to_owned()];
    }
    let turns = json["conversations"].as_array().or(json["messages"].as_array()).unwrap();
    let is_said = |turn: &&Value| turn["from"] == "gpt" || turn["role"] == "assistant";
    let words = |turn: &Value| turn["value"].as_str().or(turn["content"].as_str()).unwrap().to_owned();
    turns.iter().filter(is_said).map(words).collect()
}

#[test]
fn the_tokenizer_gives_the_ids_of_the_original() {
    for (name, encodings) in recorded()["encodings"].as_object().unwrap() {
        let tokenizer = Tokenizer::open(golden().join(name)).unwrap();
        for encoding in encodings.as_array().unwrap() {
            let text = encoding["text"].as_str().unwrap();
            let ids: Vec<i64> =
                tokenizer.encode(text, false).unwrap().ids.into_iter().map(i64::from).collect();
            assert_eq!(ids, flat(&encoding["ids"]), "{name}: {text:?}");
        }
    }
}

#[test]
fn padded_batches_are_those_of_the_processors() {
    let recorded = recorded();
    let cases = recorded["cases"].as_array().unwrap();
    let batches = recorded["batches"].as_array().unwrap();
    assert_eq!(batches.len(), 10);
    for batch in batches {
        let of_batch: Vec<&Value> = batch["cases"]
            .as_array()
            .unwrap()
            .iter()
            .map(|at| &cases[at.as_u64().unwrap() as usize])
            .collect();
        let family = of_batch[0]["family"].as_str().unwrap();
        let side = if batch["side"] == "left" { PaddingSide::Left } else { PaddingSide::Right };
        let builder = Preparer::builder(&model(family)).tokenizer(tokenizer(family));
        let preparer = builder.layout(BatchLayout::Padded { side }).build().unwrap();
        let samples = of_batch.iter().map(|case| preparer.prepare(&sample(case)).unwrap()).collect();
        let inputs = preparer.pack(samples).unwrap();
        for name in ["input_ids", "attention_mask", "mm_token_type_ids"] {
            let Some(expected) = batch.get(name) else { continue };
            assert_eq!(ints(&inputs, name), flat(&expected["values"]), "{family}: {name}");
            let shape: Vec<usize> = inputs.tensor(name).unwrap().shape.clone();
            assert_eq!(serde_json::to_value(shape).unwrap(), expected["shape"], "{family}: {name}");
        }
        for name in ["image_grid_thw", "image_sizes", "batch_num_images"] {
            if batch.get(name).is_some() {
                assert_eq!(ints(&inputs, name), rows(&batch[name]), "{family}: {name}");
            }
        }
    }
}

/// Returns a small dataset and a planner for two ranks.
fn planner(tokens_max: Option<u64>) -> (TempDataset, StepPlanner) {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let spec = ModelSpec::preset("omni-7b").unwrap();
    let costs = CostModel::new(spec, DeviceRate::preset("h100").unwrap());
    let builder = StepPlanner::builder(data.index(), costs).global_batch(16).dp_size(2).microbatches(2);
    let caps = Caps { tokens_max, bytes_max: None };
    let planner = builder.caps(caps).work(2_000).build().unwrap();
    (data, planner)
}

fn omni() -> dflop_loader::processors::PreparerBuilder {
    Preparer::builder(&model("omni-7b")).tokenizer(tokenizer("omni-7b"))
}

fn steps(loader: &BalancedLoader) -> Vec<Step> {
    run(loader.stream().try_collect()).unwrap()
}

#[test]
fn microbatches_come_as_tensors_and_weigh_what_is_learned_in_them() {
    let (data, planner) = planner(None);
    let (mut delivered, mut prepared, mut counted, mut weights) = (0, 0, 0, 0.0);
    for dp_rank in 0..2 {
        let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(2);
        let loader = loader.preparer(Arc::new(omni().build().unwrap())).build().unwrap();
        for step in steps(&loader) {
            for microbatch in &step.microbatches {
                let inputs = microbatch.inputs.as_ref().unwrap();
                delivered += microbatch.samples.len();
                assert_eq!(inputs.cu_seqlens.len(), microbatch.samples.len() + 1);
                assert_eq!(
                    (microbatch.tokens, microbatch.target_tokens),
                    (inputs.tokens, inputs.target_tokens)
                );
                let is_medium = |field: &Field| matches!(field.media, Media::Image(_) | Media::Audio(_));
                assert!(!microbatch.samples.iter().any(|sample| sample.fields.iter().any(is_medium)));
                weights += microbatch.loss_scale / 2.0 * step.target_tokens as f64;
                counted += microbatch.target_tokens;
            }
        }
        let report = loader.prepare_report();
        assert_eq!((report.truncated_samples, report.dropped_samples), (0, 0));
        assert!(report.tokens > report.target_tokens);
        prepared += report.samples as usize;
    }
    assert_eq!((delivered, prepared), (data.keys.len(), data.keys.len()));
    assert!((weights - counted as f64).abs() < 1e-6 * counted as f64, "{weights} {counted}");
}

#[test]
fn long_samples_are_cut_dropped_or_refused_and_always_accounted_for() {
    const TOKENS_MAX: u64 = 4_000;
    for policy in [LongSample::TruncateText, LongSample::Drop, LongSample::Error] {
        let (data, planner) = planner(None);
        let limit = 120;
        let (mut delivered, mut skipped, mut truncated, mut dropped) = (0, Vec::new(), 0, 0);
        for dp_rank in 0..2 {
            let preparer = omni().tokens_max(limit).long_sample(policy).build().unwrap();
            let loader =
                BalancedLoader::builder(planner.clone(), dp_rank).steps(2).preparer(Arc::new(preparer));
            let loader = loader.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
            for microbatch in steps(&loader).iter().flat_map(|step| &step.microbatches) {
                let samples = microbatch.samples.len();
                delivered += samples;
                assert!(microbatch.tokens <= TOKENS_MAX.min(limit * samples as u64));
            }
            skipped.extend(loader.skipped());
            truncated += loader.prepare_report().truncated_samples;
            dropped += loader.prepare_report().dropped_samples;
        }
        assert_eq!(delivered + skipped.len(), data.keys.len(), "{policy:?}");
        assert!(skipped.iter().all(|skipped| skipped.reason.contains("exceed the limit of 120")));
        assert!(skipped.iter().all(|skipped| skipped.key.is_some()));
        // Images have hundreds of tokens, so some samples never fit; texts with 100 words and more can be
        // truncated.
        match policy {
            LongSample::TruncateText => assert!(truncated > 0 && dropped == 0 && !skipped.is_empty()),
            LongSample::Drop => assert!(truncated == 0 && dropped == skipped.len() as u64 && dropped > 0),
            LongSample::Error => assert!(truncated == 0 && dropped == 0 && !skipped.is_empty()),
        }
    }
}

#[test]
fn dropped_samples_cost_no_error_budget_and_refused_ones_do() {
    for (policy, is_fine) in [(LongSample::Drop, true), (LongSample::Error, false)] {
        let (_data, planner) = planner(None);
        let preparer = omni().tokens_max(120).long_sample(policy).build().unwrap();
        let loader = BalancedLoader::builder(planner, 0).steps(2).preparer(Arc::new(preparer));
        let loader = loader.error_budget(ErrorBudget::new(0.0).unwrap()).build().unwrap();
        let all: dflop_loader::Result<Vec<Step>> = run(loader.stream().try_collect());
        assert_eq!(all.is_ok(), is_fine);
    }
}

#[test]
fn the_cap_of_a_plan_limits_samples_and_a_sum_above_it_is_counted() {
    let (_data, planner) = planner(Some(8_000));
    // A template that adds many more tokens than the estimate assumes.
    let template = "{% for m in messages %}{{ 'word ' * 300 }}{{ m.content }}<|im_end|>{% endfor %}";
    let preparer = omni().chat_template(template).plain_text(PlainText::Answer { question: "What?".into() });
    let loader = BalancedLoader::builder(planner, 0).steps(2).preparer(Arc::new(preparer.build().unwrap()));
    let loader = loader.build().unwrap();
    let over =
        steps(&loader).iter().flat_map(|step| &step.microbatches).filter(|mb| mb.tokens > 8_000).count();
    let report = loader.prepare_report();
    assert_eq!((report.microbatches_over_cap, report.truncated_samples), (over as u64, 0));
    assert!(report.tokens > report.planned_tokens && over > 0, "{report:?}");
}

#[test]
fn undecoded_samples_cannot_be_prepared() {
    let (_data, planner) = planner(None);
    let loader = BalancedLoader::builder(planner, 0).decode(Decode::Raw);
    let refused = loader.preparer(Arc::new(omni().build().unwrap())).build();
    assert!(refused.unwrap_err().to_string().contains("preparer"));
}
