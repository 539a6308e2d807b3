//! Tests the `batches` output: microbatch tensors, files, accounts.

use std::path::Path;

use dflop_tests::dataset::{Compression, TempDataset};
use safetensors::SafeTensors;

use crate::command::{dflop, object, objects, text};

fn tokenizer() -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/model_inputs/chatml");
    directory.to_str().expect("the path is UTF-8").to_owned()
}

#[test]
fn ranks_print_all_samples_once_and_the_same_tokens_in_both_layouts() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let mut tokens = Vec::new();
    for layout in ["packed", "padded"] {
        let (mut keys, mut sums) = (Vec::new(), [0, 0]);
        for rank in ["0", "1"] {
            let plan =
                ["batches", &pattern, "--global-batch-size", "12", "--dp-size", "2", "--microbatches", "2"];
            let inputs = [
                "--rank",
                rank,
                "--tokenizer",
                &tokenizer,
                "--set",
                &format!("processor.layout={layout}"),
                "--json",
                "--values",
            ];
            let mut lines = objects(&[&plan[..], &inputs].concat());
            let last = lines.pop().expect("a last line");
            assert_eq!((lines.len(), last["skipped"].as_array().map(Vec::len)), (2, Some(0)));
            for line in &lines {
                keys.extend(line["keys"].as_array().into_iter().flatten().cloned());
                sums[0] += line["tokens"].as_u64().expect("a count");
                sums[1] += line["target_tokens"].as_u64().expect("a count");
                let ids = &line["tensors"][0];
                assert_eq!((ids["name"].as_str(), ids["dtype"].as_str()), (Some("input_ids"), Some("int64")));
                let shape: Vec<usize> = serde_json::from_value(ids["shape"].clone()).expect("a shape");
                assert_eq!(ids["values"].as_array().map(Vec::len), Some(shape.iter().product()));
            }
        }
        assert_eq!(keys.len(), data.keys.len());
        tokens.push(sums);
    }
    assert_eq!(tokens[0], tokens[1]);
}

#[test]
fn tensors_of_media_are_printed_unless_they_are_only_counted() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let lines = |model: &str, extra: &[&str]| {
        let plan = ["batches", &pattern, "--model", model, "--global-batch-size", "6", "--dp-size", "1"];
        let inputs = ["--tokenizer", &tokenizer, "--json", "--values"];
        objects(&[&plan[..], &inputs, extra].concat())
    };
    let counted = ["--set", "processor.dtype=none"];
    // A checkpoint has its own image processor.
    let checkpoint = tempfile::tempdir().expect("a temporary directory");
    let config = r#"{"model_type": "qwen2_vl", "hidden_size": 3584}"#;
    std::fs::write(checkpoint.path().join("config.json"), config).expect("a file");
    let (of_checkpoint, counted) = (lines(text(checkpoint.path()), &counted), lines("qwen2-vl-7b", &counted));
    for (one, other) in of_checkpoint.iter().zip(&counted) {
        assert_eq!(one["tensors"], other["tensors"]);
    }
    let made = lines("qwen2-vl-7b", &[]);
    assert_eq!((made.len(), of_checkpoint.len()), (counted.len(), counted.len()));
    let tensor = |line: &serde_json::Value, name: &str| {
        line["tensors"].as_array().into_iter().flatten().find(|tensor| tensor["name"] == name).cloned()
    };
    let mut patches = 0;
    for (made, counted) in made.iter().zip(&counted) {
        assert_eq!(tensor(made, "input_ids"), tensor(counted, "input_ids"));
        assert_eq!(tensor(counted, "pixel_values"), None);
        let Some(grids) = tensor(made, "image_grid_thw") else { continue };
        assert_eq!(tensor(counted, "image_grid_thw"), Some(grids.clone()));
        let grids: Vec<u64> = serde_json::from_value(grids["values"].clone()).expect("grids");
        let rows: u64 = grids.chunks(3).map(|grid| grid.iter().product::<u64>()).sum();
        let pixels = tensor(made, "pixel_values").expect("pixels");
        assert_eq!(
            (&pixels["dtype"], &pixels["shape"]),
            (&"float32".into(), &serde_json::json!([rows, 1176]))
        );
        patches += rows;
    }
    assert!(patches > 0);
}

#[test]
fn a_tokenizer_that_does_not_fit_is_misuse() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let pattern = data.pattern();
    let llama = tokenizer().replace("chatml", "llama3");
    let run =
        dflop(&["batches", &pattern, "--global-batch-size", "4", "--dp-size", "1", "--tokenizer", &llama]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("the vocabulary has no `<image>`"), "{}", run.stderr);
}

#[test]
fn tensors_are_written_as_safetensors() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let out = directory.path().join("batches");
    let plan = ["batches", &pattern, "--model", "qwen2-vl-7b", "--global-batch-size", "6", "--dp-size", "1"];
    let inputs =
        ["--microbatches", "2", "--tokenizer", &tokenizer, "--json", "--values", "--out", text(&out)];
    let lines = objects(&[&plan[..], &inputs].concat());
    let names = |directory: &Path| std::fs::read_dir(directory).expect("the directory is there").count();
    assert_eq!((lines.len(), names(&out)), (3, 2));
    for (number, line) in lines[..2].iter().enumerate() {
        let file = out.join(format!("step-00000000-{number:03}.safetensors"));
        let bytes = std::fs::read(file).expect("the file is there");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
        let metadata = metadata.metadata().as_ref().expect("metadata");
        assert_eq!(metadata["sample_keys"], line["keys"].to_string());
        assert_eq!(metadata["cu_seqlens"], line["cu_seqlens"].to_string());
        let tensors = SafeTensors::deserialize(&bytes).expect("tensors");
        assert_eq!(tensors.len(), line["tensors"].as_array().map_or(0, Vec::len));
        for tensor in line["tensors"].as_array().into_iter().flatten() {
            let written = tensors.tensor(tensor["name"].as_str().expect("a name")).expect("it is there");
            assert_eq!(serde_json::json!(written.shape()), tensor["shape"]);
            let (values, _) = written.data().as_chunks::<8>();
            let values: Vec<i64> = values.iter().map(|value| i64::from_le_bytes(*value)).collect();
            match tensor["dtype"].as_str() {
                Some("int64") => assert_eq!(serde_json::json!(values), tensor["values"]),
                _ => assert_eq!(written.data().len(), 4 * written.shape().iter().product::<usize>()),
            }
        }
    }
}

#[test]
fn files_of_two_runs_have_equal_bytes() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let files = |run: &str| {
        let out = directory.path().join(run);
        let plan =
            ["batches", &pattern, "--model", "qwen2-vl-7b", "--global-batch-size", "3", "--dp-size", "1"];
        objects(
            &[&plan[..], &["--steps", "2", "--tokenizer", &tokenizer, "--json", "--out", text(&out)]]
                .concat(),
        );
        let entries = std::fs::read_dir(&out).expect("the directory is there");
        let file = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.expect("an entry");
            (entry.file_name(), std::fs::read(entry.path()).expect("the file is there"))
        };
        let mut files: Vec<_> = entries.map(file).collect();
        files.sort();
        files
    };
    let first = files("0");
    assert!(first.len() >= 2, "{}", first.len());
    // with names in random order, a third run would still be equal once in many tries
    assert!(["1", "2"].into_iter().all(|run| files(run) == first));
}

#[test]
fn counted_texts_make_the_plan_exact() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let counting = ["--tokenizer", &tokenizer, "--model", "qwen2-vl-7b"];
    let plan = ["--global-batch-size", "12", "--dp-size", "1", "--microbatches", "2"];
    let batches = || {
        let mut lines = objects(&[&["batches", &pattern, "--json"], &counting[..], &plan[..]].concat());
        lines.pop().expect("a last line")["report"].clone()
    };
    let estimated = batches();
    assert_ne!(estimated["tokens"], estimated["planned_tokens"], "estimates miss the chat template");
    let index = object(&[&["index", &pattern, "--json"], &counting[..]].concat());
    let digest = index["text_counts"].as_str().expect("a digest");
    assert_eq!((digest.len(), &index["warnings"]), (16, &serde_json::json!([])));
    let counted = batches();
    assert_eq!(counted["tokens"], counted["planned_tokens"]);
    assert_eq!(counted["tokens"], estimated["tokens"]);
    let stats = |more: &[&str]| {
        let report = object(&[&["stats", &pattern, "--json", "--model", "qwen2-vl-7b"], more].concat());
        report["quantiles"]["tokens"]["mean"].as_f64().expect("a mean")
    };
    let delivered = counted["tokens"].as_f64().expect("a count");
    assert!((stats(&["--tokenizer", &tokenizer]) * 12.0 - delivered).abs() < 1e-6);
    assert!((stats(&[]) * 12.0 - delivered).abs() > 1.0);
    let missing =
        dflop(&["order", &pattern, "--tokenizer", "nowhere", "--global-batch-size", "2", "--dp-size", "1"]);
    assert!(missing.status == Some(1) && missing.stderr.contains("nowhere"), "{}", missing.stderr);
}

#[test]
fn microbatches_are_padded_to_a_length_or_the_step_is_refused_with_one_that_would_do() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let args = |tokens: &'static str| {
        let plan =
            ["batches", &pattern, "--global-batch-size", "12", "--dp-size", "2", "--microbatches", "2"];
        let inputs = [
            "--tokenizer",
            &tokenizer,
            "--json",
            "--set",
            &format!("processor.length_buckets=fixed:{tokens}"),
        ];
        plan.iter().chain(&inputs).map(|arg| (*arg).to_owned()).collect::<Vec<_>>()
    };
    let padded = args("16384");
    let mut lines = objects(&padded.iter().map(String::as_str).collect::<Vec<_>>());
    lines.pop();
    assert_eq!(lines.len(), 2);
    for line in &lines {
        let number = |name: &str| line[name].as_u64().expect("a count");
        assert_eq!(number("tokens") + number("padding_tokens"), 16_384);
        assert_eq!(line["tensors"][0]["shape"], serde_json::json!([1, 16_384]));
    }
    let short = args("40");
    let run = dflop(&short.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("would do for this step"), "{}", run.stderr);
}
