//! Reads and writes checkpoints: every tensor by name and shape, in one file or several; mismatches are
//! named.

use std::path::{Path, PathBuf};

use dflop_device::Cpu;
use dflop_device::prelude::*;
use dflop_models::weights::{Checkpoint, INDEX_FILE, Seed, Tensor, WEIGHTS_FILE, write};
use dflop_models::{Activations, Error, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange};

const MODELS: [&str; 8] =
    ["llama", "qwen2", "llava_onevision", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio"];

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor").join(name)
}

fn model(name: &str) -> (ModelConfig, Checkpoint) {
    let text = std::fs::read(directory(name).join("config.json")).unwrap();
    let config = ModelConfig::from_config(&serde_json::from_slice(&text).unwrap()).unwrap();
    (config, Checkpoint::open(&directory(name)).unwrap())
}

/// Returns all model tensors, from all stages.
fn tensors(config: &ModelConfig, checkpoint: &Checkpoint) -> Vec<Tensor> {
    let device = Cpu::new(1).unwrap();
    let mut tensors = Vec::new();
    for module in config.modules() {
        let range = StageRange { module, layers: 0..config.layers(module) };
        let frozen = FrozenModules::default();
        let stage = config.stage(&device, &range, frozen, Activations::Stored, checkpoint).unwrap();
        for (spec, values) in stage.parameters().owned() {
            let values = device.download(values).unwrap();
            tensors.push(Tensor { name: spec.name.clone(), shape: spec.shape.clone(), values });
        }
    }
    tensors
}

#[test]
fn saved_weights_equal_the_loaded_ones_in_one_file_or_several() {
    for name in MODELS {
        let (config, checkpoint) = model(name);
        config.check::<Cpu>(&checkpoint).unwrap();
        let mut tensors = tensors(&config, &checkpoint);
        tensors.extend(checkpoint.others(&config.parameters::<Cpu>().unwrap()).unwrap());
        assert_eq!(tensors.len(), checkpoint.names().count());
        let directory = tempfile::tempdir().unwrap();
        // the second form replaces the first, the third the second
        for (piece_bytes_max, is_whole) in [(u64::MAX, true), (5000, false), (u64::MAX, true)] {
            write(directory.path(), tensors.clone(), piece_bytes_max).unwrap();
            assert_eq!(directory.path().join(WEIGHTS_FILE).exists(), is_whole);
            assert_eq!(directory.path().join(INDEX_FILE).exists(), !is_whole);
            let written = Checkpoint::open(directory.path()).unwrap();
            config.check::<Cpu>(&written).unwrap();
            for file_name in written.names() {
                assert_eq!(written.tensor(file_name).unwrap(), checkpoint.tensor(file_name).unwrap());
            }
            assert_eq!(written.names().count(), tensors.len());
        }
    }
}

#[test]
fn missing_unexpected_and_misshaped_tensors_are_named() {
    let (config, checkpoint) = model("qwen2_5_vl");
    let whole = tensors(&config, &checkpoint);
    let name = "visual.blocks.1.attn.qkv.bias";
    let place = whole.iter().position(|tensor| tensor.name == name).unwrap();
    let checked = |tensors: Vec<Tensor>| {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), tensors, u64::MAX).unwrap();
        config.check::<Cpu>(&Checkpoint::open(directory.path()).unwrap()).unwrap_err()
    };
    let mut missing = whole.clone();
    missing.remove(place);
    assert!(matches!(checked(missing), Error::MissingTensor { tensor } if tensor == name));
    let mut bent = whole.clone();
    bent[place].shape = vec![2, 24];
    let error = checked(bent).to_string();
    assert_eq!(error, format!("expected tensor `{name}` to have shape [48], found [2, 24]"));
    let mut surplus = whole;
    surplus.push(Tensor { name: "visual.extra".to_owned(), shape: vec![1], values: vec![0.0] });
    assert!(matches!(checked(surplus), Error::SurplusTensor { tensor } if tensor == "visual.extra"));
}

/// Some checkpoints for the same model were saved with other prefixes.
#[test]
fn other_prefixes_of_the_same_model_are_read() {
    for (name, renamed) in [
        (
            "internvl",
            [("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")],
        ),
        ("qwen2_5_vl", [("visual.", "model.visual."), ("model.layers.", "model.language_model.layers.")]),
        (
            "llava_onevision",
            [("vision_tower.", "vision_tower.vision_model."), ("image_newline", "model.image_newline")],
        ),
    ] {
        let (config, checkpoint) = model(name);
        let mut tensors = tensors(&config, &checkpoint);
        let before = tensors.clone();
        for tensor in &mut tensors {
            for (prefix, other) in renamed {
                if let Some(rest) = tensor.name.strip_prefix(prefix) {
                    tensor.name = format!("{other}{rest}");
                }
            }
        }
        assert_ne!(tensors, before);
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), tensors, u64::MAX).unwrap();
        let other = Checkpoint::open(directory.path()).unwrap();
        config.check::<Cpu>(&other).unwrap();
        assert_eq!(self::tensors(&config, &other), before);
    }
}

#[test]
fn damaged_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(WEIGHTS_FILE);
    let good = std::fs::read(self::directory("llama").join(WEIGHTS_FILE)).unwrap();
    let open = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        Checkpoint::open(directory.path())
    };
    assert!(open(&good).is_ok());
    assert!(
        matches!(open(&good[..good.len() - 1]), Err(Error::Format { problem, .. }) if problem.contains("exceeds the file"))
    );
    assert!(matches!(open(&good[..4]), Err(Error::File { action: "read", .. })));
    assert!(matches!(open(&[0xff; 64]), Err(Error::Format { problem, .. }) if problem.contains("header")));
    let mut bad = good;
    bad[9] = b'x';
    assert!(matches!(open(&bad), Err(Error::Format { .. })));
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(Checkpoint::open(directory.path()), Err(Error::File { .. })));
    let index = directory.path().join(INDEX_FILE);
    std::fs::write(&index, r#"{"weight_map": {"a": "../elsewhere.safetensors"}}"#).unwrap();
    assert!(
        matches!(Checkpoint::open(directory.path()), Err(Error::Format { problem, .. }) if problem.contains("`a`"))
    );
}

#[test]
fn a_seed_gives_stages_the_values_of_the_whole_model() {
    let (config, _) = model("qwen2");
    let device = Cpu::new(1).unwrap();
    let stage = |layers: std::ops::Range<usize>, seed| {
        let range = StageRange { module: ModuleKind::Llm, layers };
        config.stage(&device, &range, FrozenModules::default(), Activations::Stored, &Seed(seed)).unwrap()
    };
    let values = |layers: std::ops::Range<usize>, seed| {
        let stage = stage(layers, seed);
        let all = stage.parameters().owned();
        all.map(|(spec, values)| (spec.name.clone(), device.download(values).unwrap()))
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let whole = values(0..2, 7);
    let mut cut = values(0..1, 7);
    let last = values(1..2, 7);
    assert_eq!(last["model.embed_tokens.weight"], cut["model.embed_tokens.weight"], "a tied head is a copy");
    cut.extend(last);
    assert_eq!(whole, cut);
    assert_ne!(whole, values(0..2, 8));
}
