//! Updates on a single rank and on several.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dflop_comm::{Comm, Communicator};
use dflop_device::{Device, Runtime};
use dflop_executor::Error;
use dflop_executor::optimizer::{
    AdamWSettings, JobOptimizer, JobOptimizerSettings, LearningRate, Ownership, Precision, UpdateReport,
};
use dflop_models::weights::{Checkpoint, Seed};
use dflop_models::{
    Activations, BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, TextBatch,
};

use super::model::{LAYERS, mean_loss, run_staged, run_whole, settings, stage, train_whole, weights};
use crate::claim::{claims, report};
use crate::device::TestBackend;
use crate::support::{Transport, patient, run};

claims! {
    stages_on_ranks_train_to_the_bits_of_one_stage,
    replicas_with_unequal_microbatches_train_as_one_rank_to_rounding,
    every_parameter_has_one_owner_the_lowest_rank_that_has_it,
    a_gradient_that_is_no_number_ends_the_job_by_tensor,
    steps_that_are_not_finite_are_skipped_as_often_as_is_set_and_change_nothing,
    frozen_parameters_have_no_state_and_stay,
    three_steps_with_clipping_are_those_of_torch,
}

type Trained = (BTreeMap<String, Vec<u32>>, Vec<(f64, UpdateReport)>);

fn alone<B: TestBackend>(comm: &Communicator, steps: usize) -> Trained {
    let device = B::open(1);
    let mut stage = stage(&device, 0..LAYERS, &Seed(1));
    let mut optimizer = JobOptimizer::new(settings(Precision::F32), comm, [&stage]).unwrap();
    let reports = train_whole(&mut stage, &mut optimizer, comm, steps);
    (weights(&stage), reports)
}

fn staged<B: TestBackend>(comm: &Communicator, cuts: &[usize], steps: usize) -> Trained {
    let device = B::open(1);
    let mut stage = stage(&device, cuts[comm.rank()]..cuts[comm.rank() + 1], &Seed(1));
    let mut optimizer = JobOptimizer::new(settings(Precision::F32), comm, [&stage]).unwrap();
    let mut reports = Vec::new();
    for _ in 0..steps {
        let step = optimizer.steps();
        let loss = mean_loss(run_staged(&mut stage, comm, step).unwrap(), comm, step);
        reports.push((loss, optimizer.update([&mut stage]).unwrap()));
    }
    (weights(&stage), reports)
}

fn stages_on_ranks_train_to_the_bits_of_one_stage<B: TestBackend>() {
    let (whole, reports) = run(Transport::Threads, 1, patient(), |comm| alone::<B>(&comm, 3)).remove(0);
    let (first, last) = (&reports[0], &reports[2]);
    assert_eq!(
        (first.1.learning_rate, last.1.learning_rate),
        (0.0, settings(Precision::F32).learning_rate.at(2))
    );
    assert!(reports.iter().all(|(_, report)| report.is_clipped), "{reports:?}");
    for cuts in [&[0, 2, 4][..], &[0, 1, 3, 4]] {
        let ranks = run(Transport::Threads, cuts.len() - 1, patient(), |comm| staged::<B>(&comm, cuts, 3));
        let mut seen = 0;
        for (rank, (own, own_reports)) in ranks.iter().enumerate() {
            assert_eq!(own_reports, &reports, "{cuts:?}, rank {rank}");
            for (name, values) in own {
                assert_eq!(values, &whole[name], "{cuts:?}, rank {rank}, {name}");
                seen += 1;
            }
        }
        // The tied embedding is on the first and the last rank.
        assert_eq!(seen, whole.len() + 1);
    }
}

/// Sums gradients over replicas, as a pipeline does.
pub(crate) fn reduce<D: Device>(stage: &mut dyn Stage<D>, comm: &dyn Comm, step: u64) {
    let device = stage.device().clone();
    stage.parameters_mut().fold_shared_gradients(&device).unwrap();
    for (_, _, gradient) in stage.parameters_mut().trained_mut() {
        let mut values = device.download(gradient).unwrap();
        let at = dflop_comm::StepContext::step(step, "gradients");
        comm.all_reduce(at, values.as_mut_slice().into()).unwrap();
        device.write(&values, gradient).unwrap();
    }
}

fn replicas_with_unequal_microbatches_train_as_one_rank_to_rounding<B: TestBackend>() {
    let (whole, reports) = run(Transport::Threads, 1, patient(), |comm| alone::<B>(&comm, 3)).remove(0);
    let ranks = run(Transport::Threads, 2, patient(), |comm| {
        let device = B::open(1);
        let mut stage = stage(&device, 0..LAYERS, &Seed(1));
        let mut optimizer = JobOptimizer::new(settings(Precision::F32), &comm, [&stage]).unwrap();
        let mut own_reports = Vec::new();
        for step in 0..3 {
            let loss = mean_loss(run_whole(&mut stage, step, &[comm.rank()]), &comm, step);
            reduce(&mut stage, &comm, step);
            own_reports.push((loss, optimizer.update([&mut stage]).unwrap()));
        }
        (weights(&stage), own_reports)
    });
    assert_eq!(ranks[0], ranks[1], "replicas have the same bits");
    for ((loss, report), (own_loss, own_report)) in reports.iter().zip(&ranks[0].1) {
        assert!((loss - own_loss).abs() < 1e-5 * loss, "{loss:?} {own_loss:?}");
        let (norm, own) = (report.gradient_norm, own_report.gradient_norm);
        assert!((norm - own).abs() < 1e-5 * norm, "{norm} {own}");
    }
    for (name, values) in &whole {
        let pairs = values.iter().zip(&ranks[0].0[name]);
        for (a, b) in pairs.map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b))) {
            // A step is at most the learning rate, and Adam may flip the sign of a gradient near zero.
            assert!((a - b).abs() < 1e-3, "{name}: {a} {b}");
        }
    }
}

fn every_parameter_has_one_owner_the_lowest_rank_that_has_it<B: TestBackend>() {
    let ranks = run(Transport::Threads, 3, patient(), |comm| {
        let device = B::open(1);
        let cuts = [0..2, 2..4, 2..4];
        let stage = stage(&device, cuts[comm.rank()].clone(), &Seed(1));
        let ownership = Ownership::agree(&comm, [&stage]).unwrap();
        let own = stage.parameters().owned().filter(|(spec, _)| ownership.own(spec).is_some()).count();
        let writer = |name: &str| ownership.writers().find(|(other, _)| *other == name).map(|(_, rank)| rank);
        (writer("model.embed_tokens.weight"), writer("model.norm.weight"), own, ownership.len())
    });
    assert!(ranks.iter().all(|(tied, norm, ..)| (*tied, *norm) == (Some(0), Some(1))), "{ranks:?}");
    assert_eq!(ranks[0].2 + ranks[1].2, ranks[0].3);
    assert_eq!(ranks[2].2, 0, "a replica owns nothing");
}

fn a_gradient_that_is_no_number_ends_the_job_by_tensor<B: TestBackend>() {
    let agreed = std::sync::Barrier::new(2);
    let ranks = run(Transport::Threads, 2, patient(), |comm| {
        let device = B::open(1);
        let mut stage = stage(&device, [0..2, 2..4][comm.rank()].clone(), &Seed(1));
        let mut optimizer = JobOptimizer::new(settings(Precision::F32), &comm, [&stage]).unwrap();
        let before = weights(&stage);
        // Both ranks have agreed on the parameters before one rank ends the job.
        agreed.wait();
        if comm.rank() == 1 {
            let mut all = stage.parameters_mut().trained_mut();
            let (_, _, gradient) =
                all.find(|(spec, ..)| spec.name.ends_with("layers.3.mlp.up_proj.weight")).unwrap();
            let mut values = device.download(gradient).unwrap();
            values[7] = f32::NAN;
            device.write(&values, gradient).unwrap();
        }
        let error = optimizer.update([&mut stage]).unwrap_err();
        assert_eq!(before, weights(&stage), "nothing was updated");
        error
    });
    let expected = "stage Llm 2..4: the norm of the gradient of `model.layers.3.mlp.up_proj.weight` is NaN";
    assert_eq!(ranks[1].to_string(), expected);
    assert!(matches!(&ranks[0], Error::Comm(_)) && ranks[0].to_string().contains(expected), "{}", ranks[0]);
}

/// Produces a step with an infinite gradient.
fn poison<D: Device>(stage: &mut BlockStage<D>, step: u64) {
    let device = stage.device().clone();
    run_whole(stage, step, &[0, 1]);
    let (_, _, gradient) = stage.parameters_mut().trained_mut().next().unwrap();
    let mut values = device.download(gradient).unwrap();
    values[0] = f32::INFINITY;
    device.write(&values, gradient).unwrap();
}

fn steps_that_are_not_finite_are_skipped_as_often_as_is_set_and_change_nothing<B: TestBackend>() {
    run(Transport::Threads, 1, patient(), |comm| {
        let settings = JobOptimizerSettings {
            learning_rate: LearningRate::constant(0.01),
            skip_nonfinite: 2,
            ..settings(Precision::F32)
        };
        let begin = || {
            let stage = stage(&B::open(1), 0..LAYERS, &Seed(1));
            let optimizer = JobOptimizer::new(settings, &comm, [&stage]).unwrap();
            (stage, optimizer)
        };
        let (mut straight, mut expected) = begin();
        for step in [1, 4] {
            run_whole(&mut straight, step, &[0, 1]);
            assert!(!expected.update([&mut straight]).unwrap().is_skipped);
        }
        let (mut stage, mut optimizer) = begin();
        for step in 0..5 {
            let before = weights(&stage);
            let is_finite = [1, 4].contains(&step);
            if is_finite {
                run_whole(&mut stage, step, &[0, 1]);
            } else {
                poison(&mut stage, step);
            }
            let report = optimizer.update([&mut stage]).unwrap();
            assert_eq!((report.step, report.is_skipped), (step, !is_finite));
            assert_eq!(before == weights(&stage), !is_finite, "step {step}");
        }
        assert_eq!((optimizer.steps(), optimizer.adamw().skipped()), (5, 3));
        assert_eq!(weights(&stage), weights(&straight), "two updates, whatever lay between");
        for is_skipped in [true, true, false] {
            poison(&mut stage, optimizer.steps());
            let outcome = optimizer.update([&mut stage]);
            assert_eq!(outcome.is_ok_and(|report| report.is_skipped), is_skipped);
        }
        assert_eq!(weights(&stage), weights(&straight));
    });
}

fn frozen_parameters_have_no_state_and_stay<B: TestBackend>() {
    run(Transport::Threads, 1, patient(), |comm| {
        let device = B::open(1);
        let config = super::model::config();
        let range = StageRange { module: ModuleKind::Llm, layers: 0..LAYERS };
        let frozen = FrozenModules { is_llm_frozen: true, ..FrozenModules::default() };
        let mut stage = config.stage(&device, &range, frozen, Activations::Stored, &Seed(1)).unwrap();
        let before = weights(&stage);
        let mut optimizer = JobOptimizer::new(settings(Precision::F32), &comm, [&stage]).unwrap();
        let report = optimizer.update([&mut stage]).unwrap();
        assert_eq!((report.gradient_norm, optimizer.adamw().bytes()), (0.0, 0));
        assert_eq!(before, weights(&stage));
    });
}

/// Compares with the weights recorded after three steps of `torch.optim.AdamW`
/// (`tests/record/executor_parity.py`).
fn three_steps_with_clipping_are_those_of_torch<B: TestBackend>() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/executor/qwen2");
    let text = std::fs::read(directory.join("config.json")).unwrap();
    let config = ModelConfig::from_config(&serde_json::from_slice(&text).unwrap()).unwrap();
    let inputs = Checkpoint::open(&directory.join("expected.safetensors")).unwrap();
    let truth = Checkpoint::open(&directory.join("trained.safetensors")).unwrap();
    let integers = |name: &str| inputs.integers(name).unwrap().1;
    let (ids, labels, positions) = (integers("input_ids"), integers("labels"), integers("positions"));
    let bounds: Vec<i32> = integers("cu_seqlens").into_iter().map(|bound| bound as i32).collect();
    let targets = labels.iter().filter(|&&label| label != -100).count();
    let device = B::open(1);
    let batch = TextBatch {
        input_ids: &ids,
        labels: &labels,
        positions: &positions,
        cu_seqlens: &bounds,
        media_places: &[],
        loss_scale: 1.0 / targets as f64,
    };
    let context = Arc::new(config.llm.context(&device, &batch).unwrap());
    let range = StageRange { module: ModuleKind::Llm, layers: 0..config.layers(ModuleKind::Llm) };
    let source = Checkpoint::open(&directory).unwrap();
    let mut stage =
        config.stage(&device, &range, FrozenModules::default(), Activations::Stored, &source).unwrap();
    let settings = JobOptimizerSettings {
        learning_rate: LearningRate::cosine(0.01, 2, 6),
        adamw: AdamWSettings::default(),
        gradient_norm_max: Some(0.5),
        skip_nonfinite: 0,
    };
    let [norms, rates] = ["norms", "rates"].map(|name| truth.tensor(name).unwrap().1);

    let comm = dflop_comm::threads::world(1, patient()).unwrap().remove(0);
    let mut optimizer = JobOptimizer::new(settings, &comm, [&stage]).unwrap();
    let mut gradients = Vec::new();
    for step in 0..3 {
        stage.forward(0, Arc::clone(&context), None).unwrap();
        stage.backward(0, None).unwrap();
        gradients.push(stage.parameters().gradients(&device).unwrap());
        let report = optimizer.update([&mut stage]).unwrap();
        let norm = f64::from(norms[step]);
        assert!((report.gradient_norm - norm).abs() < 1e-5 * norm, "{report:?} {norm}");
        assert!((report.learning_rate - f64::from(rates[step])).abs() < 1e-9);
    }
    let mut worst = 0.0_f64;
    for (spec, values) in stage.parameters().owned() {
        let truth = truth.tensor(&format!("weight.{}", spec.name)).unwrap().1;
        let values = device.download(values).unwrap();
        assert_eq!(values.len(), truth.len());
        let of_steps: Vec<&[f32]> = gradients.iter().map(|step| &step[&spec.name][..]).collect();
        for (index, (value, truth)) in values.iter().zip(&truth).enumerate() {
            let difference = f64::from((value - truth).abs());
            let bound = bound(&of_steps, index);
            assert!(difference < bound, "{} [{index}]: {difference:.1e}, bound {bound:.1e}", spec.name);
            worst = worst.max(difference);
        }
    }
    report!("largest difference of a weight: {worst:.1e}");
}

/// Bounds the difference of a weight: 2e-6 after steps of at most 0.01. A weight whose gradient is far below
/// the largest gradient in the tensor is bounded by the rounding of that gradient, about 1e-7 of it: the step
/// of a weight is divided by the size of its own gradient.
fn bound(gradients: &[&[f32]], index: usize) -> f64 {
    let share = |of_step: &&[f32]| {
        let largest = of_step.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        f64::from((of_step[index] / largest.max(f32::MIN_POSITIVE)).abs())
    };
    let least = gradients.iter().map(share).filter(|share| *share > 0.0).fold(1.0, f64::min);
    2e-6_f64.max(0.01 * 1e-7 / least)
}
