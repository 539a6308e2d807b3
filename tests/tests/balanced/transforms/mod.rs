//! Tests user code in the pipeline: inputs, result order, faults, and bounds.

mod bounds;
mod faults;
mod fields;
mod prepared;
mod whole_samples;

use std::fmt;
use std::sync::Arc;

use dflop_loader::decode::{Batch, Transform, TransformInput, Transforms};
use dflop_loader::error::BoxError;
use dflop_loader::media::Media;
use dflop_loader::sample::Sample;
use dflop_loader::shard::{FieldSelection, expand_shards};
use dflop_loader::{BalancedLoader, BalancedLoaderBuilder, Loader, LoaderBuilder, Step, Tail};
use dflop_tests::dataset::TempDataset;
use dflop_tests::loaders::planner;
use dflop_tests::run;
use futures::TryStreamExt;

/// Result of a call.
type Answers = Result<Vec<Result<Media, BoxError>>, BoxError>;

/// Function as a transform.
struct Code {
    takes_encoded: bool,
    run: Box<dyn Fn(Vec<TransformInput>) -> Answers + Send + Sync>,
}

impl fmt::Debug for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Code")
    }
}

impl Transform for Code {
    fn takes_encoded(&self) -> bool {
        self.takes_encoded
    }

    fn apply(&self, fields: Vec<TransformInput>) -> Answers {
        (self.run)(fields)
    }
}

/// Creates a transform from a function over complete calls.
fn calls(run: impl Fn(Vec<TransformInput>) -> Answers + Send + Sync + 'static) -> Arc<dyn Transform> {
    Arc::new(Code { takes_encoded: false, run: Box::new(run) })
}

/// Creates a transform from a function over single fields.
fn each(
    run: impl Fn(TransformInput) -> Result<Media, BoxError> + Send + Sync + 'static,
) -> Arc<dyn Transform> {
    calls(move |fields| Ok(fields.into_iter().map(&run).collect()))
}

/// Creates a decoder from a function over single fields.
fn decoder(
    run: impl Fn(TransformInput) -> Result<Media, BoxError> + Send + Sync + 'static,
) -> Arc<dyn Transform> {
    let run = move |fields: Vec<TransformInput>| -> Answers { Ok(fields.into_iter().map(&run).collect()) };
    Arc::new(Code { takes_encoded: true, run: Box::new(run) })
}

fn of(name: &str) -> FieldSelection {
    FieldSelection::new([name]).unwrap()
}

fn one(name: &str, transform: Arc<dyn Transform>) -> Transforms {
    Transforms::new().add(of(name), transform)
}

fn loader(data: &TempDataset) -> LoaderBuilder {
    Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(7)
}

fn samples(builder: LoaderBuilder) -> Vec<Sample> {
    let batches: Vec<Batch> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    batches.into_iter().flat_map(|batch| batch.samples).collect()
}

/// Plans for rank 0 out of 2, with 2 microbatches in a global batch of 16.
fn balanced(data: &TempDataset) -> BalancedLoaderBuilder {
    BalancedLoader::builder(planner(&data.index(), 16, 2, 2, Tail::Carry), 0)
}

fn balanced_samples(builder: BalancedLoaderBuilder) -> Vec<Sample> {
    let steps: Vec<Step> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    let microbatches = steps.into_iter().flat_map(|step| step.microbatches);
    microbatches.flat_map(|microbatch| microbatch.samples).collect()
}
