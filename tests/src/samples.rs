//! Reduces loader output to a form that can be compared: keys, and field digests.

use std::sync::Arc;

use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::Index;
use dflop_loader::media::Media;
use dflop_loader::sample::Sample;
use dflop_loader::shard::Shard;
use dflop_loader::{BalancedLoader, Loader, Tail};
use futures::StreamExt;
use sha2::{Digest, Sha256};

use crate::planning::planner;
use crate::run;

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
