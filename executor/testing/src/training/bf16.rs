//! Weights and activations in bf16, with master weights in `f32`.

use dflop_comm::{Comm, Communicator, threads};
use dflop_device::{Device, Runtime};
use dflop_executor::checkpoint::{CheckpointDirectory, RunState};
use dflop_executor::optimizer::{AdamWSettings, JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::Seed;
use dflop_models::{BlockStage, Stage};

use super::model::{LAYERS, config, context, mean_loss, run_whole, settings, stage, weights};
use crate::claim::{claims, report};
use crate::device::TestBackend;
use crate::support::patient;

claims! {
    losses_of_bf16_are_within_two_percent_of_f32,
    weights_and_activations_take_half_the_memory,
    masters_add_up_what_bf16_cannot_hold,
    a_run_of_bf16_goes_on_with_the_same_bits_and_its_masters_serve_f32,
}

fn alone() -> Communicator {
    threads::world(1, patient()).unwrap().remove(0)
}

fn optimizer<D: Device>(stage: &BlockStage<D>, precision: Precision, comm: &dyn Comm) -> JobOptimizer<D> {
    JobOptimizer::new(settings(precision), comm, [stage]).unwrap()
}

/// Returns the losses for steps on the same samples.
fn losses<D: Device>(device: &D, precision: Precision, steps: usize) -> Vec<f64> {
    let comm = alone();
    let mut stage = stage(device, 0..LAYERS, &Seed(1));
    let mut optimizer = optimizer(&stage, precision, &comm);
    let mut losses = Vec::new();
    for step in 0..steps as u64 {
        let sum = run_whole(&mut stage, 0, &[0, 1]);
        losses.push(mean_loss(sum, &comm, step));
        optimizer.update([&mut stage]).unwrap();
    }
    losses
}

fn losses_of_bf16_are_within_two_percent_of_f32<B: TestBackend>() {
    let full = losses(&B::open(1), Precision::F32, 12);
    let half = losses(&B::open_half(1), Precision::Bf16, 12);
    assert!(full[11] < 0.97 * full[0], "{full:?}");
    let worst = full.iter().zip(&half).map(|(full, half)| (half / full - 1.0).abs()).fold(0.0, f64::max);
    assert!(worst < 0.02, "{full:?} {half:?}");
    report!("loss {:.4} to {:.4}, largest difference {:.2} %", full[0], full[11], 100.0 * worst);
}

fn weights_and_activations_take_half_the_memory<B: TestBackend>() {
    /// Returns the weight and gradient bytes, the bytes that a forward pass allocates, and the bytes that it
    /// saves.
    fn used<D: Device>(device: &D) -> [u64; 3] {
        let mut stage = stage(device, 0..LAYERS, &Seed(1));
        let weights = device.memory_used_bytes();
        let context = context(device, 0, 1);
        let before = device.memory_used_bytes();
        stage.forward(0, context, None).unwrap();
        [weights, device.memory_used_bytes() - before, stage.kept_bytes()]
    }
    let specs = config().parameters::<B::Device>().unwrap();
    let own: usize = specs.iter().filter(|spec| spec.shares.is_none()).map(ParameterSpec::elements).sum();
    let all: usize = specs.iter().map(ParameterSpec::elements).sum();
    let [full, half] = [used(&B::open(1)), used(&B::open_half(1))];
    // Gradients are f32 in both; a tied parameter has two.
    assert_eq!([full[0], half[0]], [4 * (own + all) as u64, (2 * own + 4 * all) as u64]);
    // Norm and attention statistics stay f32: 6 out of every 272 numbers in a layer row.
    assert!(full[1] >= full[2] && half[1] >= half[2], "{full:?} {half:?}");
    let share = half[2] as f64 / full[2] as f64;
    assert!((0.5..0.53).contains(&share), "{share}");
    report!("activations of a microbatch: {} bytes of f32, {} of bf16", full[1], half[1]);
}

/// Norm scales are 1, near which bf16 has steps of 0.004: updates of 0.0001 are lost without master weights.
fn masters_add_up_what_bf16_cannot_hold<B: TestBackend>() {
    const STEPS: usize = 100;
    const NORM: &str = "model.norm.weight";
    let train = |precision| {
        let (device, comm) = (B::open_half(1), alone());
        let mut stage = stage(&device, 0..LAYERS, &Seed(1));
        let settings = JobOptimizerSettings {
            learning_rate: LearningRate::constant(1e-4),
            adamw: AdamWSettings { precision, ..AdamWSettings::default() },
            gradient_norm_max: None,
            skip_nonfinite: 0,
        };
        let mut optimizer = JobOptimizer::new(settings, &comm, [&stage]).unwrap();
        for _ in 0..STEPS {
            let mut all = stage.parameters_mut().trained_mut();
            let (_, _, gradient) = all.find(|(spec, ..)| spec.name == NORM).unwrap();
            device.write(&vec![1.0; gradient.len()], gradient).unwrap();
            drop(all);
            optimizer.update([&mut stage]).unwrap();
        }
        let mut all = stage.parameters().owned();
        let (_, values) = all.find(|(spec, _)| spec.name == NORM).unwrap();
        device.download(values).unwrap()
    };
    assert!(train(Precision::F32).iter().all(|&value| value == 1.0), "bf16 alone stalls");
    // 100 steps of 0.0001, rounded to 1/256.
    assert!(train(Precision::Bf16).iter().all(|&value| (value - 0.99).abs() <= 0.002), "masters move");
}

fn steps<D: Device>(stage: &mut BlockStage<D>, optimizer: &mut JobOptimizer<D>, until: u64) {
    while optimizer.steps() < until {
        run_whole(stage, optimizer.steps(), &[0, 1]);
        optimizer.update([&mut *stage]).unwrap();
    }
}

fn a_run_of_bf16_goes_on_with_the_same_bits_and_its_masters_serve_f32<B: TestBackend>() {
    let (device, comm) = (B::open_half(1), alone());
    let directory = tempfile::tempdir().unwrap();
    let checkpoints = CheckpointDirectory::new(directory.path());
    let mut straight = stage(&device, 0..LAYERS, &Seed(1));
    let mut first = optimizer(&straight, Precision::Bf16, &comm);
    steps(&mut straight, &mut first, 3);
    checkpoints.save(&first, [&straight], &RunState::default()).unwrap();
    steps(&mut straight, &mut first, 6);

    let saved = checkpoints.latest(&comm).unwrap().unwrap();
    let mut resumed = stage(&device, 0..LAYERS, saved.weights());
    let mut second = optimizer(&resumed, Precision::Bf16, &comm);
    second.restore([&mut resumed], &saved).unwrap();
    steps(&mut resumed, &mut second, 6);
    assert_eq!(weights(&resumed), weights(&straight));
    let file = directory.path().join("step-00000003/model.safetensors");
    let elements: usize = {
        let specs = config().parameters::<B::Device>().unwrap();
        specs.iter().filter(|spec| spec.shares.is_none()).map(ParameterSpec::elements).sum()
    };
    let bytes = std::fs::metadata(file).unwrap().len() as usize;
    assert!((2 * elements..3 * elements).contains(&bytes), "{bytes} bytes of {elements} weights");

    let cpu = B::open(1);
    let mut full = stage(&cpu, 0..LAYERS, saved.weights());
    let rounded = weights(&full);
    let mut third = optimizer(&full, Precision::F32, &comm);
    third.restore([&mut full], &saved).unwrap();
    assert_ne!(weights(&full), rounded, "masters have more digits");
}
