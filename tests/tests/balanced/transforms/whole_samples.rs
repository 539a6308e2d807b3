//! Checks transforms over complete samples: fields that change, appear and disappear, and samples that are
//! left out.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use dflop_loader::LoaderBuilder;
use dflop_loader::decode::{Batch, Decode, SampleAnswer, SampleInput, SampleTransform, Transforms};
use dflop_loader::error::UserCodeError;
use dflop_loader::error::{BoxError, Error};
use dflop_loader::media::Media;
use dflop_loader::sample::{Field, Sample};
use dflop_loader::shard::FieldSelection;
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::TryStreamExt;

use super::{balanced, balanced_samples, loader, samples};

/// Function as a transform over single samples.
struct Each<F>(F);

impl<F> fmt::Debug for Each<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Each")
    }
}

impl<F: Fn(SampleInput) -> SampleAnswer + Send + Sync> SampleTransform for Each<F> {
    fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError> {
        Ok(samples.into_iter().map(&self.0).collect())
    }
}

fn each(run: impl Fn(SampleInput) -> SampleAnswer + Send + Sync + 'static) -> Transforms {
    Transforms::new().add_samples(Arc::new(Each(run)))
}

fn note(text: String) -> Field {
    Field { extension: "note".into(), media: Media::Text(text) }
}

/// Replaces the sample text by a field that names the remaining fields.
fn renamed(input: SampleInput) -> Vec<Field> {
    let names: Vec<&str> = input.sample.fields.iter().map(|field| &*field.extension).collect();
    let note = note(format!("{} {}", input.sample.key, names.join(" ")));
    let mut fields = input.sample.fields;
    fields.retain(|field| &*field.extension != "txt");
    fields.push(note);
    fields
}

fn check_renamed(plain: &[Sample], changed: &[Sample]) {
    assert!(plain.len() >= 16 && plain.len() == changed.len());
    for (plain, changed) in plain.iter().zip(changed) {
        assert_eq!((&plain.key, plain.offset, plain.bytes), (&changed.key, changed.offset, changed.bytes));
        assert_eq!(changed.field("txt"), None);
        let names: Vec<&str> = plain.fields.iter().map(|field| &*field.extension).collect();
        let expected = Media::Text(format!("{} {}", plain.key, names.join(" ")));
        assert_eq!(changed.field("note"), Some(&expected));
        for field in plain.fields.iter().filter(|field| &*field.extension != "txt") {
            assert_eq!(changed.field(&field.extension), Some(&field.media), "other fields are unchanged");
        }
    }
}

#[test]
fn fields_are_added_and_removed_in_every_loader() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let transforms = || each(|input| Ok(Some(renamed(input)))).threads(2).items_max(3);
    check_renamed(&samples(loader(&data)), &samples(loader(&data).transforms(transforms())));
    let plain = balanced_samples(balanced(&data).steps(3));
    check_renamed(&plain, &balanced_samples(balanced(&data).steps(3).transforms(transforms())));
}

#[test]
fn samples_left_out_are_counted_and_not_bad() {
    let data = TempDataset::new(1, 24, Compression::Plain);
    let all = samples(loader(&data));
    let dropped: BTreeSet<String> = all.iter().step_by(3).map(|sample| sample.key.clone()).collect();
    let expected = dropped.clone();
    let transforms = each(move |input| {
        Ok(Some(input.sample).filter(|sample| !dropped.contains(&sample.key)).map(|sample| sample.fields))
    });
    let builder = loader(&data).transforms(transforms);
    let built = builder.build().unwrap();
    let batches: Vec<Batch> = run(built.stream().try_collect()).unwrap();
    let kept: Vec<_> = batches.iter().flat_map(|batch| &batch.samples).map(|sample| &sample.key).collect();
    let wanted: Vec<_> =
        all.iter().map(|sample| &sample.key).filter(|key| !expected.contains(*key)).collect();
    assert_eq!(kept, wanted);
    let log = built.skip_log();
    assert_eq!((log.dropped(), log.skipped_samples()), (8, 8));
    assert!(built.skipped().iter().all(|skipped| skipped.reason.contains("left it out")));
}

#[test]
fn errors_and_panics_make_single_samples_bad() {
    let data = TempDataset::new(1, 20, Compression::Plain);
    let keys: Vec<String> = samples(loader(&data)).into_iter().map(|sample| sample.key).collect();
    let (bad, worse) = (keys[4].clone(), keys[11].clone());
    let transforms = each(move |input| match input.sample.key {
        key if key == bad => Err("it is bad".into()),
        key if key == worse => panic!("it is worse"),
        _ => Ok(Some(input.sample.fields)),
    });
    let builder = loader(&data).transforms(transforms.items_max(1));
    let built = builder.error_budget(dflop_loader::flow::ErrorBudget::new(1.0).unwrap()).build().unwrap();
    let batches: Vec<Batch> = run(built.stream().try_collect()).unwrap();
    assert_eq!(batches.iter().map(|batch| batch.samples.len()).sum::<usize>(), 18);
    let reasons: Vec<String> = built.skipped().into_iter().map(|skipped| skipped.reason).collect();
    assert_eq!(reasons.len(), 2);
    assert!(reasons[0].contains("it is bad") && reasons[1].contains("it is worse"), "{reasons:?}");
    assert_eq!(built.skip_log().dropped(), 0);
}

#[test]
fn another_number_of_results_ends_the_stream() {
    #[derive(Debug)]
    struct Lost;
    impl SampleTransform for Lost {
        fn apply(&self, samples: Vec<SampleInput>) -> Result<Vec<SampleAnswer>, BoxError> {
            Ok(samples.into_iter().skip(1).map(|input| Ok(Some(input.sample.fields))).collect())
        }
    }
    let data = TempDataset::new(1, 6, Compression::Plain);
    let built = loader(&data).transforms(Transforms::new().add_samples(Arc::new(Lost))).build().unwrap();
    let error = run(built.stream().try_collect::<Vec<Batch>>()).unwrap_err();
    let Error::UserCode(UserCodeError::Transform { fields, source }) = error else { panic!("{error}") };
    assert_eq!(fields, "whole samples");
    assert!(source.to_string().contains("expected 6 results"), "{source}");
}

#[test]
fn seeds_differ_by_sample_and_epoch_and_not_by_threads() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let seeds = |threads, epochs| -> Vec<Media> {
        let transforms = each(|input| Ok(Some(vec![note(input.seed.to_string())]))).seed(3).threads(threads);
        let all = samples(loader(&data).epochs(epochs).transforms(transforms));
        all.iter().filter_map(|sample| sample.field("note").cloned()).collect()
    };
    let one = seeds(1, 2);
    assert_eq!(one, seeds(3, 2));
    let different: BTreeSet<String> = one.iter().map(|seed| format!("{seed:?}")).collect();
    assert_eq!(different.len(), 24);
}

fn pixels(data: &TempDataset) -> LoaderBuilder {
    let side = NonZeroU32::new(8).unwrap();
    loader(data).decode(Decode::Pixels { side }).batch_size(24)
}

#[test]
fn beside_images_of_a_tensor_other_fields_pass_transforms() {
    let data = TempDataset::new(1, 24, Compression::Plain);
    let batches = |builder: LoaderBuilder| -> Vec<Batch> {
        run(builder.build().unwrap().stream().try_collect()).unwrap()
    };
    let plain = batches(pixels(&data));
    let upper = super::each(|input| match input.media {
        Media::Text(text) => Ok(Media::Text(text.to_uppercase())),
        other => Err(format!("{other:?} is not a text").into()),
    });
    let changed = batches(pixels(&data).transforms(super::one("txt", upper)));
    let tensor = |batch: &Batch| batch.pixels.as_ref().map(|pixels| pixels.tensor.values().to_vec());
    assert_eq!(tensor(&plain[0]), tensor(&changed[0]), "images are the same");
    let texts: Vec<_> = changed[0].samples.iter().filter_map(|sample| sample.field("txt")).collect();
    assert!(!texts.is_empty(), "the field of the transform is read");
    assert!(texts.iter().all(|text| matches!(text, Media::Text(text) if *text == text.to_uppercase())));
}

#[test]
fn a_sample_that_is_left_out_leaves_the_tensor_too() {
    let data = TempDataset::new(1, 24, Compression::Plain);
    let plain: Vec<Batch> = run(pixels(&data).build().unwrap().stream().try_collect()).unwrap();
    let first = plain[0].samples[0].key.clone();
    let all = plain[0].pixels.as_ref().unwrap();
    let fields = FieldSelection::new(["images", "txt"]).unwrap();
    let transforms = each(move |input| {
        assert!(input.sample.fields.iter().all(|field| !matches!(field.media, Media::Image(_))));
        Ok((input.sample.key != first).then_some(vec![note("kept".to_owned())]))
    });
    let built = pixels(&data).fields(fields).transforms(transforms).build().unwrap();
    let batches: Vec<Batch> = run(built.stream().try_collect()).unwrap();
    let (batch, rest) = (&batches[0], batches[0].pixels.as_ref().unwrap());
    assert_eq!(batch.samples.len(), 23);
    assert!(batch.samples.iter().all(|sample| sample.field("note").is_some()));
    let removed = all.rows[0].len();
    assert_eq!(rest.tensor.rows(), all.tensor.rows() - removed);
    assert_eq!(rest.tensor.bytes(), &all.tensor.bytes()[removed * 3 * 64 * 4..]);
}
