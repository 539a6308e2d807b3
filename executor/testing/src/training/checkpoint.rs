//! Checkpoints: the same bits after an interruption, other layouts, damage.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dflop_comm::{Comm, Communicator, threads};
use dflop_costmodel::Module;
use dflop_costmodel::correction::{CorrectionTable, FACTOR_ONE};
use dflop_device::Device;
use dflop_executor::Error;
use dflop_executor::checkpoint::{CheckpointDirectory, RunState, SavedCheckpoint, open_weights};
use dflop_executor::optimizer::{JobOptimizer, Precision};
use dflop_models::BlockStage;
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::{Checkpoint, Seed, Tensor, WeightSource};
use serde_json::json;

use super::model::{LAYERS, config, document, run_staged, settings, stage, train_whole, weights};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{Transport, patient, run};

claims! {
    a_run_with_a_break_ends_with_the_bits_of_one_without_on_any_stages,
    a_run_goes_on_with_more_replicas_to_rounding,
    a_state_is_a_checkpoint_of_hugging_face_with_others_tensors,
    damaged_states_are_passed_over_and_named_when_asked_for,
    weights_of_a_run_are_those_of_its_manifest_and_other_directories_open_as_ever,
    a_rank_that_cannot_write_is_named_and_the_run_goes_on,
    a_state_of_another_model_is_refused_by_tensor,
    there_is_no_state_in_a_directory_that_is_not_there,
    the_last_states_are_kept_and_a_step_can_be_saved_again,
    a_state_of_step_0_begins_the_run,
}

pub(crate) type Weights = BTreeMap<String, Vec<u32>>;

pub(crate) fn alone() -> Communicator {
    threads::world(1, patient()).unwrap().remove(0)
}

fn run_state() -> RunState {
    let corrections = vec![CorrectionTable::new(2, 9, [(Module::Llm, 100, 3 * FACTOR_ONE / 2)]).unwrap()];
    RunState { seed: 7, layout: json!({"stages": 1}), loader: json!({"position": [1, 2, 3]}), corrections }
}

fn checkpoints(root: &Path) -> CheckpointDirectory {
    CheckpointDirectory::new(root).companion("config.json", document().to_string().into_bytes())
}

/// Builds stage and optimizer on this rank, from a seed or a checkpoint.
pub(crate) fn begin<B: TestBackend>(
    comm: &dyn Comm,
    cuts: &[usize],
    saved: Option<&SavedCheckpoint>,
) -> (BlockStage<B::Device>, JobOptimizer<B::Device>) {
    let device = B::open(1);
    let source: &dyn WeightSource = saved.map_or(&Seed(1), |saved| saved.weights());
    let mut stage = stage(&device, cuts[comm.rank()]..cuts[comm.rank() + 1], source);
    let mut optimizer = JobOptimizer::new(settings(Precision::F32), comm, [&stage]).unwrap();
    if let Some(saved) = saved {
        optimizer.restore([&mut stage], saved).unwrap();
    }
    (stage, optimizer)
}

pub(crate) fn go_on<D: Device>(
    stage: &mut BlockStage<D>,
    optimizer: &mut JobOptimizer<D>,
    comm: &dyn Comm,
    steps: u64,
) {
    while optimizer.steps() < steps {
        let step = optimizer.steps();
        run_staged(stage, comm, step).unwrap();
        optimizer.update([&mut *stage]).unwrap();
    }
}

/// Trains up to a step on several stages, from the newest checkpoint if any, and saves; returns weights from
/// all ranks.
fn train<B: TestBackend>(root: &Path, cuts: &[usize], steps: u64) -> Weights {
    let ranks = run(Transport::Threads, cuts.len() - 1, patient(), |comm| {
        let checkpoints = checkpoints(root);
        let saved = checkpoints.latest(&comm).unwrap();
        let (mut stage, mut optimizer) = begin::<B>(&comm, cuts, saved.as_ref());
        go_on(&mut stage, &mut optimizer, &comm, steps);
        checkpoints.save(&optimizer, [&stage], &run_state()).unwrap();
        weights(&stage)
    });
    ranks.into_iter().flatten().collect()
}

fn a_run_with_a_break_ends_with_the_bits_of_one_without_on_any_stages<B: TestBackend>() {
    let straight = train::<B>(tempfile::tempdir().unwrap().path(), &[0, 4], 6);
    for (before, after) in
        [(&[0, 4][..], &[0, 4][..]), (&[0, 1, 3, 4], &[0, 1, 3, 4]), (&[0, 1, 3, 4], &[0, 2, 4])]
    {
        let directory = tempfile::tempdir().unwrap();
        train::<B>(directory.path(), before, 3);
        assert_eq!(train::<B>(directory.path(), after, 6), straight, "{before:?} {after:?}");
        let saved = CheckpointDirectory::new(directory.path()).latest(&alone()).unwrap().unwrap();
        assert_eq!((saved.step(), saved.run()), (6, &run_state()));
    }
}

fn a_run_goes_on_with_more_replicas_to_rounding<B: TestBackend>() {
    let straight = train::<B>(tempfile::tempdir().unwrap().path(), &[0, 4], 6);
    let directory = tempfile::tempdir().unwrap();
    train::<B>(directory.path(), &[0, 2, 4], 3);
    let ranks = run(Transport::Threads, 2, patient(), |comm| {
        let saved = checkpoints(directory.path()).latest(&comm).unwrap();
        let device = B::open(1);
        let saved = saved.unwrap();
        let mut stage = stage(&device, 0..LAYERS, saved.weights());
        let mut optimizer = JobOptimizer::new(settings(Precision::F32), &comm, [&stage]).unwrap();
        optimizer.restore([&mut stage], &saved).unwrap();
        for step in 3..6 {
            super::model::run_whole(&mut stage, step, &[comm.rank()]);
            super::update::reduce(&mut stage, &comm, step);
            optimizer.update([&mut stage]).unwrap();
        }
        let path = checkpoints(directory.path()).save(&optimizer, [&stage], &run_state()).unwrap();
        assert!(path.join("model.safetensors").exists(), "one replica writes");
        weights(&stage)
    });
    assert_eq!(ranks[0], ranks[1]);
    for (name, values) in &straight {
        for (a, b) in
            values.iter().zip(&ranks[0][name]).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)))
        {
            assert!((a - b).abs() < 1e-3, "{name}: {a} {b}");
        }
    }
}

fn a_state_is_a_checkpoint_of_hugging_face_with_others_tensors<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    let other = Tensor { name: "rotary.inv_freq".to_owned(), shape: vec![2], values: vec![0.5, 0.25] };
    run(Transport::Threads, 3, patient(), |comm| {
        let (mut stage, mut optimizer) = begin::<B>(&comm, &[0, 1, 3, 4], None);
        go_on(&mut stage, &mut optimizer, &comm, 1);
        let checkpoints = checkpoints(directory.path()).others(vec![other.clone()]);
        checkpoints.save(&optimizer, [&stage], &run_state()).unwrap();
    });
    let state = directory.path().join("step-00000001");
    let files: Vec<String> = {
        let mut names: Vec<_> =
            fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names.into_iter().map(|name| name.into_string().unwrap()).collect()
    };
    let piece = |kind: &str, number: usize| format!("{kind}-{number:05}-of-00003.safetensors");
    let mut expected = vec!["config.json".to_owned(), "manifest.json".to_owned()];
    expected.extend((1..=3).map(|number| piece("model", number)));
    expected.push("model.safetensors.index.json".to_owned());
    expected.extend((1..=3).map(|number| piece("optimizer", number)));
    expected.push("state.json".to_owned());
    assert_eq!(files, expected);
    let checkpoint = Checkpoint::open(&state).unwrap();
    config().check::<B::Device>(&checkpoint).unwrap_err();
    let specs = config().parameters::<B::Device>().unwrap();
    checkpoint.check(&specs, &["rotary".to_owned()]).unwrap();
    assert_eq!(checkpoint.others(&specs).unwrap(), [other]);
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(state.join("model.safetensors.index.json")).unwrap()).unwrap();
    let elements: usize =
        specs.iter().filter(|spec| spec.shares.is_none()).map(ParameterSpec::elements).sum();
    assert_eq!(index["metadata"]["total_size"], 4 * (elements + 2));
    assert_eq!(index["weight_map"]["model.norm.weight"], piece("model", 3));
    let state: serde_json::Value =
        serde_json::from_slice(&fs::read(state.join("state.json")).unwrap()).unwrap();
    assert_eq!((&state["step"], &state["learning_rate"]["next"]), (&json!(1), &json!(0.01)));
}

/// Saves two checkpoints, at steps 1 and 2.
fn two_states<B: TestBackend>(root: &Path) {
    train::<B>(root, &[0, 2, 4], 1);
    train::<B>(root, &[0, 2, 4], 2);
}

fn damaged_states_are_passed_over_and_named_when_asked_for<B: TestBackend>() {
    type Damage = fn(&Path);
    let cases: [(Damage, &str); 12] = [
        (|state| fs::remove_file(state.join("manifest.json")).unwrap(), "`manifest.json` cannot be read"),
        (
            |state| fs::write(state.join("manifest.json"), "{\"format\": 1").unwrap(),
            "`manifest.json` is damaged",
        ),
        (|state| fs::write(state.join("manifest.json"), "{}").unwrap(), "`manifest.json` is damaged"),
        (
            |state| fs::remove_file(state.join("optimizer-00002-of-00002.safetensors")).unwrap(),
            "`optimizer-00002-of-00002.safetensors` cannot be read",
        ),
        (|state| fs::write(state.join("config.json"), "{}").unwrap(), "`config.json` has 2 bytes, not"),
        (
            |state| {
                let path = state.join("model-00001-of-00002.safetensors");
                let mut bytes = fs::read(&path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(path, bytes).unwrap();
            },
            "`model-00001-of-00002.safetensors` is damaged: its digest differs from the manifest",
        ),
        (|state| fs::write(state.join("state.json"), "{").unwrap(), "`state.json` has 1 bytes, not"),
        // Weights that are valid, but differ from the manifest.
        (
            |state| {
                let from = state.join("model-00001-of-00002.safetensors");
                fs::copy(from, state.join("model.safetensors")).unwrap();
            },
            "`model.safetensors` is not in its manifest",
        ),
        (
            |state| {
                let from = state.join("optimizer-00001-of-00002.safetensors");
                fs::copy(from, state.join("optimizer-00003-of-00002.safetensors")).unwrap();
            },
            "`optimizer-00003-of-00002.safetensors` is not in its manifest",
        ),
        (
            |state| fs::write(state.join("adapter.safetensors.index.json"), "{}").unwrap(),
            "`adapter.safetensors.index.json` is not in its manifest",
        ),
        (|state| unlist(state, "state.json"), "does not list `state.json`"),
        (
            |state| unlist(state, "model.safetensors.index.json"),
            "`model.safetensors.index.json` is not in its manifest",
        ),
    ];
    let directory = tempfile::tempdir().unwrap();
    two_states::<B>(directory.path());
    for (index, (damage, expected)) in cases.into_iter().enumerate() {
        let copy = tempfile::tempdir().unwrap();
        copy_states(directory.path(), copy.path());
        let newest = copy.path().join("step-00000002");
        damage(&newest);
        let ranks = run(Transport::Threads, 2, patient(), |comm| {
            CheckpointDirectory::new(copy.path()).latest(&comm).unwrap().map(|saved| saved.step())
        });
        assert_eq!(ranks, [Some(1); 2], "case {index}");
        let error = SavedCheckpoint::open(&newest).unwrap_err();
        assert!(matches!(error, Error::Saved { .. }) && error.to_string().contains(expected), "{error}");
    }
}

/// Removes a file from a checkpoint manifest.
fn unlist(state: &Path, name: &str) {
    let path = state.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["files"].as_object_mut().unwrap().remove(name).unwrap();
    fs::write(path, manifest.to_string()).unwrap();
}

fn weights_of_a_run_are_those_of_its_manifest_and_other_directories_open_as_ever<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    two_states::<B>(directory.path());
    let state = directory.path().join("step-00000002");
    let names = |weights: Checkpoint| weights.names().map(str::to_owned).collect::<Vec<_>>();
    let whole = names(open_weights(&state).unwrap());
    assert_eq!(whole, names(Checkpoint::open(&state).unwrap()));
    fs::copy(state.join("model-00001-of-00002.safetensors"), state.join("model.safetensors")).unwrap();
    let error = open_weights(&state).unwrap_err().to_string();
    assert!(error.contains("`model.safetensors` is not in its manifest"), "{error}");
    // The same files as a transformers directory: the single file comes first.
    fs::remove_file(state.join("manifest.json")).unwrap();
    let plain = names(open_weights(&state).unwrap());
    assert!(!plain.is_empty() && plain.len() < whole.len(), "{plain:?}");
    // A file with this name that another tool wrote.
    fs::remove_file(state.join("state.json")).unwrap();
    fs::write(state.join("manifest.json"), "[]").unwrap();
    assert_eq!(names(open_weights(&state).unwrap()), plain);
}

fn copy_states(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let target = to.join(entry.file_name().unwrap());
        if entry.is_dir() {
            fs::create_dir(&target).unwrap();
            copy_states(&entry, &target);
        } else {
            fs::copy(&entry, &target).unwrap();
        }
    }
}

fn a_rank_that_cannot_write_is_named_and_the_run_goes_on<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    let errors = run(Transport::Threads, 2, patient(), |comm| {
        let (mut stage, mut optimizer) = begin::<B>(&comm, &[0, 2, 4], None);
        go_on(&mut stage, &mut optimizer, &comm, 1);
        let good = checkpoints(directory.path());
        good.save(&optimizer, [&stage], &run_state()).unwrap();
        go_on(&mut stage, &mut optimizer, &comm, 2);
        let wrong = Tensor { name: "wrong".to_owned(), shape: vec![3], values: vec![0.0; 2] };
        let error = good.clone().others(vec![wrong]).save(&optimizer, [&stage], &run_state()).unwrap_err();
        assert_eq!(good.latest(&comm).unwrap().unwrap().step(), 1, "what there was is there");
        good.save(&optimizer, [&stage], &run_state()).unwrap();
        assert_eq!(good.latest(&comm).unwrap().unwrap().step(), 2);
        error.to_string()
    });
    assert_eq!(errors[0], "expected tensor `wrong` to have shape [2], found [3]");
    assert_eq!(errors[1], "checkpoint of step 2: rank 0 could not write its part");
}

fn a_state_of_another_model_is_refused_by_tensor<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    train::<B>(directory.path(), &[0, 4], 1);
    let saved = CheckpointDirectory::new(directory.path()).latest(&alone()).unwrap().unwrap();
    let mut wider = document();
    wider["intermediate_size"] = json!(32);
    let config = dflop_models::ModelConfig::from_config(&wider).unwrap();
    let error = config.check::<B::Device>(saved.weights()).unwrap_err().to_string();
    assert!(
        error.contains("`model.layers.0.mlp.gate_proj.weight` to have shape [32, 16], found [24, 16]"),
        "{error}"
    );
}

#[expect(clippy::extra_unused_type_parameters, reason = "claims of a list have a backend")]
fn there_is_no_state_in_a_directory_that_is_not_there<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    assert!(CheckpointDirectory::new(directory.path().join("none")).latest(&alone()).unwrap().is_none());
}

fn the_last_states_are_kept_and_a_step_can_be_saved_again<B: TestBackend>() {
    let directory = tempfile::tempdir().unwrap();
    let comm = alone();
    let (mut stage, mut optimizer) = begin::<B>(&comm, &[0, 4], None);
    let checkpoints = checkpoints(directory.path()).kept(3);
    for steps in 0..5 {
        train_whole(&mut stage, &mut optimizer, &comm, usize::from(steps > 0));
        checkpoints.save(&optimizer, [&stage], &run_state()).unwrap();
    }
    checkpoints.save(&optimizer, [&stage], &run_state()).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step-00000002", "step-00000003", "step-00000004"]);
}

/// Before the first update there is no optimizer state, and none is missed.
fn a_state_of_step_0_begins_the_run<B: TestBackend>() {
    let straight = train::<B>(tempfile::tempdir().unwrap().path(), &[0, 4], 2);
    let directory = tempfile::tempdir().unwrap();
    train::<B>(directory.path(), &[0, 4], 0);
    assert_eq!(train::<B>(directory.path(), &[0, 2, 4], 2), straight);
}
