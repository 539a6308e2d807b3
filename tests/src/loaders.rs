//! Builds planners over a small dataset, and reduces loader output to a form that can be compared.

use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::Index;
use dflop_loader::media::Media;
use dflop_loader::sample::Sample;
use dflop_loader::shard::Shard;
use dflop_loader::{
    BalancedLoader, Loader, LoaderState, Mixture, Step, StepPlanner, StepPlannerBuilder, Tail,
};
use futures::{StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};

use crate::run;

/// Builds a planner with `global_batch` samples over `dp_size` ranks with `microbatches` each, for the model
/// with a vision and an audio encoder.
///
/// # Panics
/// If the settings contradict each other.
#[must_use]
pub fn planner(
    index: &Arc<Index>,
    global_batch: u64,
    dp_size: usize,
    microbatches: usize,
    tail: Tail,
) -> StepPlanner {
    let builder = builder(index.clone(), global_batch, dp_size).microbatches(microbatches);
    builder.tail(tail).work(2_000).build().expect("the settings fit")
}

/// Returns planner settings over any data, for the same model, with a small search.
///
/// # Panics
/// Never: the model is known.
#[must_use]
pub fn builder(data: impl Into<Mixture>, global_batch: u64, dp_size: usize) -> StepPlannerBuilder {
    let spec = ModelSpec::preset("omni-7b").expect("a known model");
    let model = CostModel::new(spec, DeviceRate::preset("h100").expect("a known device"));
    StepPlanner::builder(data, model).global_batch(global_batch).dp_size(dp_size).seed(7).work(200)
}

/// Sample key, with extension, length and SHA-256 per field.
pub type DeliveredSample = (String, Vec<(String, usize, Vec<u8>)>);

/// Delivered samples, and the error that ended the run, causes included.
#[derive(Debug, PartialEq, Eq)]
pub struct LoaderOutput {
    /// Samples, in delivery order.
    pub samples: Vec<DeliveredSample>,
    /// Error that ended the run early.
    pub error: Option<String>,
}

fn delivered(sample: Sample) -> DeliveredSample {
    let bytes = |media: &Media| match media {
        Media::Opaque(bytes) => bytes.clone(),
        other => panic!("nothing is decoded: {other:?}"),
    };
    let fields = sample.fields.iter().map(|field| {
        let bytes = bytes(&field.media);
        let digest = Sha256::digest(&bytes).to_vec();
        (field.extension.to_string(), bytes.len(), digest)
    });
    (sample.key, fields.collect())
}

fn shown(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Reads `epochs` epochs with the plain loader, undecoded; bad samples do not end the run.
///
/// # Panics
/// If the settings are invalid.
#[must_use]
pub fn plain(shards: Vec<Shard>, epochs: u64) -> LoaderOutput {
    let loader = Loader::builder(shards)
        .decode(Decode::Raw)
        .epochs(epochs)
        .batch_size(5)
        .error_budget(ErrorBudget::new(1.0).expect("a share"))
        .build()
        .expect("the settings fit");
    let mut samples = Vec::new();
    let mut error = None;
    run(async {
        let mut batches = loader.stream();
        while let Some(batch) = batches.next().await {
            match batch {
                Ok(batch) => samples.extend(batch.samples.into_iter().map(delivered)),
                Err(failed) => error = Some(shown(&failed)),
            }
        }
    });
    LoaderOutput { samples, error }
}

/// Reads `steps` global batches of 8 with the balanced loader, undecoded.
///
/// # Panics
/// If the settings are invalid.
#[must_use]
pub fn balanced(index: &Arc<Index>, steps: u64) -> LoaderOutput {
    let planner = planner(index, 8, 1, 2, Tail::Carry);
    let loader = BalancedLoader::builder(planner, 0).steps(steps).decode(Decode::Raw);
    let loader = loader.build().expect("the settings fit");
    let mut samples = Vec::new();
    let mut error = None;
    run(async {
        let mut stream = loader.stream();
        while let Some(step) = stream.next().await {
            match step {
                Ok(step) => {
                    let all = step.microbatches.into_iter().flat_map(|microbatch| microbatch.samples);
                    samples.extend(all.map(delivered));
                }
                Err(failed) => error = Some(shown(&failed)),
            }
        }
    });
    LoaderOutput { samples, error }
}

/// Identity of a delivered sample: shard, key and epoch.
pub type DeliveredId = (String, String, u64);

/// Streams every rank for at most `steps` steps.
///
/// Returns the samples in every global batch, sorted, and the common state of all ranks afterwards.
///
/// # Panics
/// If a rank fails, or if ranks differ in the number of steps or in the state.
#[must_use]
pub fn stream_all_ranks(planner: &StepPlanner, steps: usize) -> (Vec<Vec<DeliveredId>>, LoaderState) {
    let mut batches: Vec<Vec<DeliveredId>> = Vec::new();
    let mut states = Vec::new();
    for dp_rank in 0..planner.dp_size() {
        let loader = BalancedLoader::builder(planner.clone(), dp_rank).decode(Decode::Raw).workers(1).build();
        let loader = loader.expect("the settings fit");
        let delivered: Vec<Step> =
            run(loader.stream().take(steps).try_collect()).expect("every step is delivered");
        if dp_rank == 0 {
            batches.resize(delivered.len(), Vec::new());
        }
        assert_eq!(delivered.len(), batches.len(), "rank {dp_rank} has another number of steps");
        for (batch, step) in batches.iter_mut().zip(delivered) {
            let samples = step.microbatches.into_iter().flat_map(|microbatch| microbatch.samples);
            batch.extend(samples.map(|sample| (sample.shard.to_string(), sample.key, sample.epoch)));
        }
        states.push(loader.state().expect("the run has the step"));
    }
    assert!(states.windows(2).all(|pair| pair[0] == pair[1]), "states differ between ranks");
    for batch in &mut batches {
        batch.sort_unstable();
    }
    (batches, states.remove(0))
}
