//! Ranks that share stages: the same norm and checkpoint for any tensor-parallel degree.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::{Device, Runtime};
use dflop_executor::checkpoint::{CheckpointDirectory, RunState};
use dflop_executor::optimizer::{JobOptimizer, Precision};
use dflop_models::weights::{Seed, WeightSource};
use dflop_models::{BlockStage, FrozenModules, ModuleKind, Stage, StageRange, StageSettings, TensorParallel};

use super::model::{LAYERS, config, run_whole, settings};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{Transport, patient, run};

claims! {
    a_shared_stage_trains_as_one_rank_to_rounding,
    a_state_of_shared_stages_is_whole_and_goes_on_at_any_degree,
}

type Whole = BTreeMap<String, Vec<f32>>;

fn stage<D: Device>(device: &D, group: &Arc<TensorParallel<D>>, source: &dyn WeightSource) -> BlockStage<D> {
    let range = StageRange { module: ModuleKind::Llm, layers: 0..LAYERS };
    let shared = (group.tp_rank().size > 1).then(|| Arc::clone(group));
    let settings = StageSettings { tensor_parallel: shared, ..StageSettings::default() };
    config().stage_with(device, &range, FrozenModules::default(), settings, source).unwrap()
}

/// Trains up to a step with this tensor-parallel degree, from the newest checkpoint if any, and saves;
/// returns norms and the complete weights on the first rank.
fn train<B: TestBackend>(root: &Path, degree: usize, steps: u64) -> (Vec<f64>, Whole) {
    let mut ranks = run(Transport::Threads, degree, patient(), |comm| {
        let comm: Arc<dyn Comm> = Arc::new(comm);
        let device = B::open(1);
        let group = Arc::new(TensorParallel::new(device.clone(), Arc::clone(&comm)));
        let checkpoints = CheckpointDirectory::new(root);
        let saved = checkpoints.latest(&*comm).unwrap();
        let source: &dyn WeightSource = saved.as_ref().map_or(&Seed(1), |saved| saved.weights());
        let mut stage = stage(&device, &group, source);
        let mut optimizer = JobOptimizer::new(settings(Precision::F32), &*comm, [&stage]).unwrap();
        if let Some(saved) = &saved {
            optimizer.restore([&mut stage], saved).unwrap();
        }
        let mut norms = Vec::new();
        while optimizer.steps() < steps {
            group.start_step(optimizer.steps());
            run_whole(&mut stage, optimizer.steps(), &[0, 1]);
            norms.push(optimizer.update([&mut stage]).unwrap().gradient_norm);
        }
        checkpoints.save(&optimizer, [&stage], &RunState::default()).unwrap();
        let mut whole = Whole::new();
        for (spec, values) in stage.parameters().owned() {
            let values = stage.device().download(values).unwrap();
            whole.extend(group.assemble(spec, &values).unwrap().map(|values| (spec.name.clone(), values)));
        }
        (norms, whole)
    });
    assert!(ranks.iter().all(|(norms, _)| *norms == ranks[0].0), "norms are the same bits on all ranks");
    ranks.swap_remove(0)
}

fn assert_near(a: &Whole, b: &Whole) {
    assert_eq!(a.len(), b.len());
    for (name, values) in a {
        for (a, b) in values.iter().zip(&b[name]) {
            assert!((a - b).abs() < 1e-3, "{name}: {a} {b}");
        }
    }
}

/// With degree 4, two ranks each have the same keys and values.
fn a_shared_stage_trains_as_one_rank_to_rounding<B: TestBackend>() {
    let directory = || tempfile::tempdir().unwrap();
    let (norms, weights) = train::<B>(directory().path(), 1, 3);
    for degree in [2, 4] {
        let (shared_norms, shared) = train::<B>(directory().path(), degree, 3);
        for (norm, shared) in norms.iter().zip(&shared_norms) {
            assert!((norm - shared).abs() < 1e-5 * norm, "{degree}: {norms:?} {shared_norms:?}");
        }
        assert_near(&weights, &shared);
    }
}

fn a_state_of_shared_stages_is_whole_and_goes_on_at_any_degree<B: TestBackend>() {
    let (_, alone) = train::<B>(tempfile::tempdir().unwrap().path(), 1, 6);
    let straight = tempfile::tempdir().unwrap();
    let (_, shared) = train::<B>(straight.path(), 2, 6);
    let directory = tempfile::tempdir().unwrap();
    train::<B>(directory.path(), 2, 3);
    assert!(directory.path().join("step-00000003/model.safetensors").exists(), "the first rank writes all");
    let (_, resumed) = train::<B>(directory.path(), 2, 6);
    assert_eq!(resumed, shared, "the same degree gives the same bits");
    for degree in [1, 4] {
        let other = tempfile::tempdir().unwrap();
        train::<B>(other.path(), 2, 3);
        assert_near(&train::<B>(other.path(), degree, 6).1, &alone);
    }
}
