//! What `batches` prints of the tensors that a model is given.

use std::path::Path;

use dflop_tests::data_set::{DataSet, Stored};

use crate::command::{dflop, objects};

fn tokenizer() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/model_inputs/chatml");
    folder.to_str().expect("the path is UTF-8").to_owned()
}

#[test]
fn ranks_print_all_samples_once_and_the_same_tokens_in_both_layouts() {
    let data = DataSet::new(1, 12, Stored::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let mut tokens = Vec::new();
    for layout in ["packed", "padded"] {
        let (mut keys, mut sums) = (Vec::new(), [0, 0]);
        for rank in ["0", "1"] {
            let plan = ["batches", &pattern, "--global-batch", "12", "--dp-size", "2", "--microbatches", "2"];
            let inputs =
                ["--rank", rank, "--tokenizer", &tokenizer, "--layout", layout, "--json", "--values"];
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
    let data = DataSet::new(1, 6, Stored::Plain);
    let (pattern, tokenizer) = (data.pattern(), tokenizer());
    let lines = |extra: &[&str]| {
        let plan = ["batches", &pattern, "--model", "qwen2-vl-7b", "--global-batch", "6", "--dp-size", "1"];
        let inputs = ["--tokenizer", &tokenizer, "--json", "--values"];
        objects(&[&plan[..], &inputs, extra].concat())
    };
    let (made, counted) = (lines(&[]), lines(&["--counted-media"]));
    assert_eq!(made.len(), counted.len());
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
    let data = DataSet::new(1, 4, Stored::Plain);
    let pattern = data.pattern();
    let llama = tokenizer().replace("chatml", "llama3");
    let run = dflop(&["batches", &pattern, "--global-batch", "4", "--dp-size", "1", "--tokenizer", &llama]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("the vocabulary has no `<image>`"), "{}", run.stderr);
}
