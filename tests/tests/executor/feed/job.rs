//! Runs a job whose ranks are threads, each with a separate loader, and compares runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dflop_balancer::Strategy;
use dflop_balancer::schedule::ScheduleKind;
use dflop_executor::Result;
use dflop_executor::comm::{Comm, Settings, threads};
use dflop_executor::device::Cpu;
use dflop_executor::inputs::{InputReader, SkippedSample};
use dflop_executor::models::weights::Seed;
use dflop_executor::models::{Activations, FrozenModules, ModuleKind};
use dflop_executor::pipeline::{Job, ModuleParallelism, Placement, RankRole};
use dflop_executor::train::join_job;
use dflop_loader::StepPlanner;
use dflop_loader::error::Skipped;
use dflop_loader::flow::{ErrorBudget, MetricsSnapshot};
use dflop_loader::processors::PreparerBuilder;

use super::corpus::Corpus;

/// Parallelism and inputs of a run.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) placement: Placement,
    pub(crate) strategy: Strategy,
    pub(crate) global_batch: u64,
    pub(crate) microbatches: usize,
    /// Encoder DP size and stages.
    pub(crate) encoder: [usize; 2],
    /// LLM DP size and stages.
    pub(crate) llm: [usize; 2],
    pub(crate) steps: u64,
    /// Maximum number of tokens per sample.
    pub(crate) tokens_max: Option<u64>,
}

impl Setting {
    /// Places every module on one rank.
    pub(crate) const fn new(global_batch: u64, steps: u64) -> Self {
        let strategy = Strategy::SEARCH;
        let (encoder, llm) = ([1, 1], [1, 1]);
        let placement = Placement::Disaggregated;
        Self { placement, strategy, global_batch, microbatches: 2, encoder, llm, steps, tokens_max: None }
    }

    pub(crate) fn job(&self, corpus: &Corpus) -> Job {
        let layout = |module: ModuleKind| {
            let layers = corpus.model.layers(module);
            if self.placement == Placement::Joint && module != ModuleKind::Llm {
                // The encoder is in the first stage of the chain.
                let stages =
                    (0..self.llm[1]).map(|stage| if stage == 0 { 0..layers } else { layers..layers });
                return ModuleParallelism::new(module, stages.collect());
            }
            let [dp_size, stages] = if module == ModuleKind::Llm { self.llm } else { self.encoder };
            ModuleParallelism::even(module, layers, stages).dp_size(dp_size)
        };
        let modules = corpus.model.modules().into_iter().map(layout).collect();
        let (model, schedule) = (corpus.model.clone(), ScheduleKind::OneForwardOneBackward);
        Job::placed(self.placement, model, FrozenModules::default(), modules, schedule)
            .expect("the layout fits")
    }
}

/// Step result, equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepSeen {
    pub(crate) loss: f64,
    pub(crate) tokens: u64,
    pub(crate) target_tokens: u64,
    pub(crate) skipped: Vec<SkippedSample>,
    /// Sample numbers in the index, by position.
    pub(crate) samples: Vec<u64>,
    /// Samples by DP rank and microbatch, as positions.
    pub(crate) ranks: Vec<Vec<Vec<u32>>>,
}

/// Result on a rank.
pub(crate) struct RankSeen {
    pub(crate) place: RankRole,
    pub(crate) steps: Vec<StepSeen>,
    /// Gradients in the rank's stages, by step.
    gradients: Vec<BTreeMap<String, Vec<f32>>>,
    pub(crate) metrics: MetricsSnapshot,
    pub(crate) skipped: Vec<Skipped>,
}

/// Run result, on which all ranks agree.
pub(crate) struct Ran {
    pub(crate) steps: Vec<StepSeen>,
    /// Gradients in all stages, by step.
    pub(crate) gradients: Vec<BTreeMap<String, Vec<f32>>>,
    pub(crate) ranks: Vec<RankSeen>,
}

/// Runs all ranks to the end; ranks must agree on every step, and replicas on every gradient, to the bit.
#[track_caller]
pub(crate) fn run(corpus: &Corpus, setting: &Setting) -> Ran {
    let ranks = try_run(corpus, setting);
    let ranks: Vec<RankSeen> =
        ranks.into_iter().map(|rank| rank.unwrap_or_else(|error| panic!("{error}"))).collect();
    let steps = ranks[0].steps.clone();
    assert_eq!(steps.len() as u64, setting.steps);
    let mut gradients = vec![BTreeMap::new(); steps.len()];
    for rank in &ranks {
        assert_eq!(rank.steps, steps, "{:?}", rank.place);
        for (all, own) in gradients.iter_mut().zip(&rank.gradients) {
            for (name, gradient) in own {
                let known = all.entry(name.clone()).or_insert_with(|| gradient.clone());
                assert_eq!(known, gradient, "replicas of {name} differ");
            }
        }
    }
    Ran { steps, gradients, ranks }
}

/// Runs all ranks; returns how each ended.
pub(crate) fn try_run(corpus: &Corpus, setting: &Setting) -> Vec<Result<RankSeen>> {
    let job = Arc::new(setting.job(corpus));
    // A rank that hangs ends with an error instead of blocking the test.
    let settings = Settings::default().wait(Duration::from_secs(20));
    let world = threads::world(job.world_size(), settings).expect("a world");
    std::thread::scope(|scope| {
        let rank = |comm| scope.spawn(|| run_rank(corpus, setting, &job, comm));
        let ranks: Vec<_> = world.into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

fn run_rank(
    corpus: &Corpus,
    setting: &Setting,
    job: &Arc<Job>,
    comm: threads::ThreadComm,
) -> Result<RankSeen> {
    let device = Cpu::new(1)?;
    let places = job.roles(comm.rank())?;
    let planner = planner(corpus, setting, job)?;
    let budget = ErrorBudget::new(1.0)?;
    let preparer = corpus.preparer();
    let preparer = &setting.tokens_max.into_iter().fold(preparer, PreparerBuilder::tokens_max);
    let mut feed =
        InputReader::new(device.clone(), job.clone(), places.clone(), planner, preparer, |loader| {
            loader.workers(1).steps(setting.steps).error_budget(budget)
        })?;
    let frozen = FrozenModules::default();
    let mut pipeline =
        join_job(Box::new(comm), job, &device, frozen, Activations::Stored, &Seed(1))?.check_plans(true);
    let (mut steps, mut gradients) = (Vec::new(), Vec::new());
    while let Some(fed) = feed.next(pipeline.comm())? {
        let outcome = pipeline.step(&fed.rank_step)?;
        let mut own = BTreeMap::new();
        for (_, stage) in pipeline.stages() {
            own.extend(stage.parameters().gradients(&device)?);
        }
        gradients.push(own);
        steps.push(StepSeen {
            loss: outcome.loss,
            tokens: fed.tokens,
            target_tokens: fed.rank_step.plan.target_tokens(),
            skipped: fed.skipped,
            samples: fed.plan.samples.iter().map(|sample| sample.sample).collect(),
            ranks: fed.plan.ranks.clone(),
        });
    }
    let loader = feed.loaders().next().expect("a loader of every rank");
    let (metrics, skipped) = (loader.metrics(), loader.skipped());
    Ok(RankSeen { place: places[0].clone(), steps, gradients, metrics, skipped })
}

/// Returns the planner for a run.
pub(crate) fn planner(corpus: &Corpus, setting: &Setting, job: &Job) -> Result<StepPlanner> {
    let planner = corpus
        .planner(setting.global_batch)
        .dp_size(setting.llm[0])
        .microbatches(setting.microbatches)
        .strategy(setting.strategy);
    let planner = match setting.placement {
        Placement::Disaggregated => planner
            .stages(job.modules().iter().map(|module| module.stages.len()).collect())
            .module_dp_sizes(job.modules().iter().map(|module| module.dp_size).collect()),
        _ => planner.stage_layers(stage_layers(job)),
    };
    Ok(planner.build()?)
}

/// Returns the layers of every module in the pipeline stages; a colocated encoder has none.
fn stage_layers(job: &Job) -> Vec<Vec<usize>> {
    let mut layers = job.chain_layers();
    let stages = layers.last().map_or(0, Vec::len);
    let encoders = layers.len() - 1;
    let colocated = layers[..encoders].iter_mut().filter(|_| job.placement() == Placement::Colocated);
    colocated.for_each(|layers| *layers = vec![0; stages]);
    layers
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

impl Ran {
    /// Compares with a second run over the same batches, up to `f32` rounding.
    #[track_caller]
    pub(crate) fn assert_close(&self, other: &Self) {
        assert_eq!(self.steps.len(), other.steps.len());
        for (step, (this, that)) in self.steps.iter().zip(&other.steps).enumerate() {
            let figures = |seen: &StepSeen| (seen.tokens, seen.target_tokens);
            assert_eq!(figures(this), figures(that), "step {step}");
            assert!(
                (this.loss - that.loss).abs() <= 1e-6 * this.loss,
                "step {step}: {} {}",
                this.loss,
                that.loss
            );
            assert_same_gradients(step, &self.gradients[step], &other.gradients[step]);
        }
    }
}

#[track_caller]
fn assert_same_gradients(
    step: usize,
    these: &BTreeMap<String, Vec<f32>>,
    those: &BTreeMap<String, Vec<f32>>,
) {
    assert!(these.keys().eq(those.keys()));
    let least = 1e-4 * these.values().map(|values| norm(values)).fold(0.0, f64::max);
    for (name, this) in these {
        let difference: Vec<f32> = this.iter().zip(&those[name]).map(|(a, b)| a - b).collect();
        let relative = norm(&difference) / norm(this).max(least);
        assert!(relative < 2e-5, "step {step}: gradient of {name} is off by {relative}");
    }
}
