//! Checks user code that fails: on a field, on a call, always.

use dflop_loader::Error;
use dflop_loader::decode::{Batch, TransformFault, TransformInput, Transforms};
use dflop_loader::error::BoxError;
use dflop_loader::error::{BudgetError, UserCodeError};
use dflop_loader::flow::{ErrorBudget, LoaderStage};
use dflop_loader::media::Media;
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

use super::{balanced, calls, each, loader, of, one};

const BAD: &str = "sample-00005";

/// Fails on the text of one sample.
fn failing() -> Transforms {
    let fail = |input: TransformInput| {
        if input.key == BAD { Err("no such word".into()) } else { Ok(input.media) }
    };
    let unseen = |input: TransformInput| {
        assert_ne!(input.key, BAD, "a bad sample reaches no later transform");
        Ok(input.media)
    };
    one("txt", each(fail)).add(of("*"), each(unseen))
}

#[test]
fn an_error_of_one_field_makes_its_sample_bad_and_no_other() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let budget = ErrorBudget::new(0.1).unwrap();
    let loader = loader(&data).transforms(failing()).error_budget(budget).build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
    let keys: Vec<_> = batches.iter().flat_map(|batch| &batch.samples).map(|sample| &sample.key).collect();
    assert!(keys.into_iter().eq(data.keys.iter().filter(|key| *key != BAD)));
    let skipped = loader.skipped();
    assert_eq!(skipped.len(), 1);
    let first = &skipped[0];
    assert_eq!((first.key.as_deref(), first.field.as_deref()), (Some(BAD), Some("txt")));
    assert_eq!(first.reason, "no such word");
    assert_eq!((loader.state().unwrap().delivered(), loader.state().unwrap().skipped()), (15, 1));
    let metrics = loader.metrics();
    let errors = |stage| metrics.stage(stage).errors;
    assert_eq!((errors(LoaderStage::Transform), errors(LoaderStage::Decode)), (1, 0));
    assert!(
        metrics.stage(LoaderStage::Transform).items >= 31 && metrics.stage(LoaderStage::Transform).depth == 0
    );
}

#[test]
fn bad_answers_count_against_the_error_budget_of_both_loaders() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let budget = ErrorBudget::new(0.0).unwrap();
    let plain = loader(&data).transforms(failing()).error_budget(budget).build().unwrap();
    let items: Vec<_> = run(plain.stream().collect());
    let error = items.last().unwrap().as_ref().unwrap_err().to_string();
    assert!(error.contains(BAD) && error.contains("no such word"), "{error}");

    let all = one("txt", each(|_| Err("no word is good".into())));
    let planned = balanced(&data).steps(1).transforms(all).error_budget(budget).build().unwrap();
    let items: Vec<_> = run(planned.stream().collect());
    assert!(matches!(items.last().unwrap(), Err(Error::ErrorBudget(BudgetError::Share { .. }))));
    assert!((1..=8).contains(&planned.skipped().len()), "the rank's samples, up to a whole microbatch");
    assert!(planned.skipped().iter().all(|skipped| skipped.field.as_deref() == Some("txt")));
}

#[test]
fn a_panic_makes_the_samples_of_its_call_bad_and_the_thread_lives_on() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let panic = |input: TransformInput| {
        assert_ne!(input.key, BAD, "an unlucky sample");
        Ok(input.media)
    };
    for items_max in [1, 64] {
        let transforms = one("txt", each(panic)).items_max(items_max);
        let budget = ErrorBudget::new(1.0).unwrap();
        let loader = loader(&data).transforms(transforms).error_budget(budget).build().unwrap();
        let batches: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
        let delivered: usize = batches.iter().map(|batch| batch.samples.len()).sum();
        // A batch has seven samples, and the first batch contains the unlucky sample.
        assert_eq!(loader.skipped().len(), items_max.min(7));
        assert_eq!(delivered + loader.skipped().len(), 16);
        let reason = &loader.skipped()[0].reason;
        assert!(reason.contains("the transform panicked") && reason.contains("unlucky"), "{reason}");
    }
}

fn transform_errors(transforms: &Transforms) -> [Error; 2] {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let plain = loader(&data).transforms(transforms.clone()).build().unwrap();
    let mut items: Vec<_> = run(plain.stream().collect());
    let first = items.pop().unwrap().unwrap_err();
    let planned = balanced(&data).transforms(transforms.clone()).build().unwrap();
    let mut items: Vec<_> = run(planned.stream().collect());
    [first, items.pop().unwrap().unwrap_err()]
}

#[test]
fn answers_for_another_number_of_fields_end_the_stream_with_their_numbers() {
    let lost = calls(|mut fields| {
        fields.pop();
        Ok(fields.into_iter().map(|input| Ok::<Media, BoxError>(input.media)).collect())
    });
    for error in transform_errors(&one("TXT", lost).items_max(3)) {
        let Error::UserCode(UserCodeError::Transform { fields, source }) = error else { panic!("{error}") };
        assert_eq!(fields, "txt");
        let fault = source.downcast_ref::<TransformFault>();
        assert_eq!(fault, Some(&TransformFault::Answers { expected: 3, given: 2 }));
    }
}

#[test]
fn a_call_that_fails_as_a_whole_ends_the_stream_with_its_words() {
    let stop = calls(|_| Err("interrupted".into()));
    for error in transform_errors(&one("txt", stop)) {
        let Error::UserCode(UserCodeError::Transform { source, .. }) = error else { panic!("{error}") };
        assert_eq!(source.to_string(), "interrupted");
    }
}
