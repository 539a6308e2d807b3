//! Training steps on the CUDA device, on the stand-in: losses compared with the CPU, and step costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dflop_comm::{Buffer, Settings, Slice, threads};
use dflop_cuda_tests::cuda;
use dflop_device::{Cpu, Device, Dtype, HostTask, Lane, Runtime};
use dflop_executor::optimizer::{AdamWSettings, JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use dflop_models::weights::Seed;
use dflop_models::{
    Activations, BlockOutput, BlockStage, FrozenModules, MicrobatchContext, ModelConfig, ModuleKind, Stage,
    StageRange, TextBatch,
};

const STEPS: usize = 20;
const LAYERS: usize = 2;
/// Number of tokens per sample, for each of two microbatches in a step.
const SAMPLES: [&[usize]; 2] = [&[70, 5, 33], &[1, 130]];
const VOCABULARY: usize = 96;

/// A decoder whose heads have tensor core kernels.
fn config() -> ModelConfig {
    ModelConfig::from_config(&serde_json::json!({
        "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-6,
    }))
    .unwrap()
}

fn context<D: Device>(config: &ModelConfig, device: &D, samples: &[usize]) -> Arc<MicrobatchContext<D>> {
    let tokens: usize = samples.iter().sum();
    let input_ids: Vec<i64> =
        (0..tokens).map(|token| ((token * token + 7 * token / 3) % VOCABULARY) as i64).collect();
    let positions: Vec<i64> = samples.iter().flat_map(|&len| 0..len as i64).collect();
    let ends = samples.iter().scan(0, |end, &len| {
        *end += len as i32;
        Some(*end)
    });
    let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).collect();
    let batch = TextBatch {
        input_ids: &input_ids,
        labels: &input_ids,
        positions: &positions,
        cu_seqlens: &cu_seqlens,
        media_places: &[],
        loss_scale: 1.0 / 200.0,
    };
    Arc::new(config.llm.context(device, &batch).unwrap())
}

/// A model with an optimizer.
struct Training<D: Device> {
    device: D,
    config: ModelConfig,
    stage: BlockStage<D>,
    optimizer: JobOptimizer<D>,
}

impl<D: Device> Training<D> {
    fn new(device: D) -> Self {
        let config = config();
        let range = StageRange { module: ModuleKind::Llm, layers: 0..LAYERS };
        let stage =
            config.stage(&device, &range, FrozenModules::default(), Activations::Stored, &Seed(3)).unwrap();
        let settings = JobOptimizerSettings {
            learning_rate: LearningRate::constant(1e-3),
            adamw: AdamWSettings { precision: Precision::Bf16, ..AdamWSettings::default() },
            gradient_norm_max: Some(1.0),
            skip_nonfinite: 0,
        };
        let comm = threads::world(1, Settings::default()).unwrap().remove(0);
        let optimizer = JobOptimizer::new(settings, &comm, [&stage]).unwrap();
        Self { device, config, stage, optimizer }
    }

    /// Runs a step and returns the loss.
    fn step(&mut self) -> f64 {
        let mut losses = Vec::new();
        for (microbatch, samples) in SAMPLES.iter().enumerate() {
            let context = context(&self.config, &self.device, samples);
            let BlockOutput::Loss(loss) = self.stage.forward(microbatch, context, None).unwrap() else {
                panic!("the last stage has the loss")
            };
            self.stage.backward(microbatch, None).unwrap();
            losses.push(loss);
        }
        self.optimizer.update([&mut self.stage]).unwrap();
        losses.iter().enumerate().map(|(index, loss)| self.stage.read_loss(index, loss).unwrap()).sum()
    }
}

#[test]
fn losses_of_twenty_steps_in_bf16_are_those_of_the_cpu() {
    let _turn = cuda::turn();
    let mut on_cuda = Training::new(cuda::with_storage(Dtype::Bf16));
    let mut on_cpu = Training::new(Cpu::new(1).unwrap().store(Dtype::Bf16).unwrap());
    let (mut first, mut last) = (f64::NAN, f64::NAN);
    for step in 0..STEPS {
        let (found, truth) = (on_cuda.step(), on_cpu.step());
        println!("step {step}: {found}, on the CPU {truth}");
        assert!((found - truth).abs() < 1e-2 * truth, "step {step}: {found}, on the CPU {truth}");
        if step == 0 {
            first = found;
        }
        last = found;
    }
    assert!(last < 0.8 * first, "the model learns: {first} to {last}");
}

#[test]
fn a_run_has_the_same_bits_in_every_order_of_threads() {
    let _turn = cuda::turn();
    let losses = |order: u64| -> Vec<u64> {
        cuda::stand_in().set_order(order);
        let mut training = Training::new(cuda::with_storage(Dtype::Bf16));
        (0..3).map(|_| training.step().to_bits()).collect()
    };
    assert_eq!(losses(0), losses(1));
    assert_eq!(losses(0), losses(17));
}

/// What a step may cost, for this model: two layers and two microbatches.
#[test]
fn launches_copies_and_waits_of_a_step_are_bounded() {
    let _turn = cuda::turn();
    let mut training = Training::new(cuda::with_storage(Dtype::Bf16));
    // the first step loads kernels
    training.step();
    let before = (cuda::stand_in().counts(), training.device.reads());
    training.step();
    let counts = cuda::stand_in().counts();
    let waits = |counts: &dflop_cuda_stand_in::Counts| {
        counts.stream_synchronizations + counts.event_synchronizations + counts.context_synchronizations
    };
    let launches = counts.launches - before.0.launches;
    let products = counts.matrix_products - before.0.matrix_products;
    let (up, down) = (counts.copies_up - before.0.copies_up, counts.copies_down - before.0.copies_down);
    let reads = training.device.reads() - before.1;
    println!("{launches} launches, {products} products, {up} copies up, {down} down, {reads} reads");
    assert!(launches <= 180, "{launches} launches");
    assert_eq!(products, 90);
    assert!(up <= 50, "{up} copies to the device");
    // the losses of two microbatches, and the step metrics
    assert_eq!((reads, down), (3, 3));
    assert_eq!(waits(&counts) - waits(&before.0), down, "nothing else waits");
}

#[test]
fn a_device_that_is_dropped_with_work_under_way_leaves_nothing() {
    let _turn = cuda::turn();
    let before = cuda::stand_in().counts().buffers_in_use;
    {
        let mut training = Training::new(cuda::with_storage(Dtype::F32));
        let context = context(&training.config, &training.device, SAMPLES[0]);
        // queued, and never waited for
        training.stage.forward(0, context, None).unwrap();
    }
    let counts = cuda::stand_in().counts();
    assert_eq!((counts.buffers_in_use, counts.leaked_buffers), (before, 0));
    assert_eq!(cuda::stand_in().last_failure(), "");
}

/// Lane task that runs for a while.
struct Slow(Arc<AtomicBool>);

impl HostTask for Slow {
    fn start(&mut self, _: Option<Buffer>) -> dflop_device::Result<()> {
        Ok(())
    }

    fn is_ready(&self) -> bool {
        false
    }

    fn finish(self: Box<Self>) -> dflop_device::Result<Option<Buffer>> {
        std::thread::sleep(Duration::from_millis(200));
        self.0.store(true, Ordering::Relaxed);
        Ok(None)
    }

    fn adds(&self) -> bool {
        false
    }

    fn run(self: Box<Self>, _: Slice<'_>) -> dflop_device::Result<()> {
        Ok(())
    }
}

#[test]
fn a_device_that_is_dropped_waits_for_the_work_of_its_lanes() {
    let _turn = cuda::turn();
    let is_done = Arc::new(AtomicBool::new(false));
    {
        let device = cuda::with_storage(Dtype::F32);
        let now = device.mark(Lane::Compute).unwrap();
        let task = Box::new(Slow(Arc::clone(&is_done)));
        drop(device.host_task(Lane::Communication(1), &now, None, None, task).unwrap());
    }
    assert!(is_done.load(Ordering::Relaxed));
}
