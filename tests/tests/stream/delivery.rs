//! Checks plain loader output, end to end.

use std::num::NonZeroU32;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::media::Media;
use dflop_loader::{Loader, LoaderBuilder};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::media::{jpeg, png};
use dflop_tests::tar::TarBytes;
use dflop_tests::{expand_with_pipes, run};
use futures::{StreamExt, TryStreamExt};

const SIDE: NonZeroU32 = NonZeroU32::new(32).unwrap();

fn loader(pattern: &str) -> LoaderBuilder {
    Loader::builder(expand_with_pipes(&[pattern])).error_budget(ErrorBudget::new(1.0).unwrap())
}

fn batches(builder: LoaderBuilder) -> Vec<Batch> {
    run(builder.build().unwrap().stream().try_collect()).unwrap()
}

fn keys(batches: &[Batch]) -> Vec<&str> {
    batches.iter().flat_map(|batch| &batch.samples).map(|sample| sample.key.as_str()).collect()
}

#[test]
fn any_storage_and_any_number_of_workers_give_the_same_samples_in_order() {
    for stored in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let data = TempDataset::new(3, 15, stored);
        for (workers, batch_size) in [(1, 7), (4, 16)] {
            for decode in [Decode::Raw, Decode::Media, Decode::Pixels { side: SIDE }] {
                let builder = loader(&data.pattern()).workers(workers).batch_size(batch_size).decode(decode);
                assert_eq!(keys(&batches(builder)), data.keys, "{stored:?} {workers} {decode:?}");
            }
        }
    }
}

#[test]
fn pixel_rows_belong_to_the_samples_with_images() {
    let data = TempDataset::new(1, 9, Compression::Plain);
    let all = batches(loader(&data.pattern()).decode(Decode::Pixels { side: SIDE }));
    let pixels = all[0].pixels.as_ref().unwrap();
    let counts: Vec<usize> = pixels.rows.iter().map(ExactSizeIterator::len).collect();
    assert_eq!(counts, [0, 1, 1, 0, 1, 1, 0, 1, 1]);
    assert_eq!((pixels.tensor.rows(), pixels.side), (6, 32));
    assert_eq!(pixels.tensor.values().len(), 6 * 3 * 32 * 32);
    assert!(pixels.tensor.values().iter().all(|value| value.is_finite() && value.abs() < 3.0));
}

#[test]
fn epochs_repeat_and_samples_max_cuts() {
    let data = TempDataset::new(2, 5, Compression::Plain);
    assert_eq!(keys(&batches(loader(&data.pattern()).epochs(3))).len(), 30);
    assert_eq!(keys(&batches(loader(&data.pattern()).epochs(3).samples_max(12))).len(), 12);
}

#[test]
fn fields_are_decoded_by_what_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let tar = TarBytes::new()
        .file("a.json", br#"{"x": [1, 2]}"#)
        .file("a.txt", "ein Drachen über See".as_bytes())
        .file("a.jpg", &png(9, 5, 1))
        .file("a.cls", b"7");
    let path = directory.path().join("s.tar");
    std::fs::write(&path, tar.finish()).unwrap();
    let all = batches(loader(path.to_str().unwrap()));
    let sample = &all[0].samples[0];
    assert!(matches!(sample.field("json"), Some(Media::Json(json)) if json["x"][1] == 2));
    assert!(matches!(sample.field("txt"), Some(Media::Text(text)) if text.ends_with("See")));
    assert!(
        matches!(sample.field("jpg"), Some(Media::Image(image)) if (image.width, image.height) == (9, 5))
    );
    assert!(matches!(sample.field("cls"), Some(Media::Opaque(bytes)) if &bytes[..] == b"7"));
}

/// Writes ten good images and one that is truncated in the middle.
fn with_a_cut_image() -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let tar = (0..11).fold(TarBytes::new(), |tar, number: u32| {
        let image = jpeg(60, 40, number);
        let bytes = if number == 4 { &image[..image.len() / 2] } else { &image[..] };
        tar.file(&format!("k{number}.jpg"), bytes)
    });
    let path = directory.path().join("s.tar");
    std::fs::write(&path, tar.finish()).unwrap();
    let pattern = path.to_str().unwrap().to_owned();
    (directory, pattern)
}

#[test]
fn a_bad_sample_leaves_its_batch_and_is_named() {
    let (_directory, pattern) = with_a_cut_image();
    for decode in [Decode::Media, Decode::Pixels { side: SIDE }] {
        let loader = loader(&pattern).decode(decode).batch_size(4).build().unwrap();
        let all: Vec<Batch> = run(loader.stream().try_collect()).unwrap();
        assert_eq!(all.iter().map(|batch| batch.samples.len()).collect::<Vec<_>>(), [4, 3, 3]);
        assert!(!keys(&all).contains(&"k4"));
        let skipped = loader.skipped();
        assert_eq!(skipped.len(), 1);
        assert_eq!((skipped[0].key.as_deref(), skipped[0].field.as_deref()), (Some("k4"), Some("jpg")));
        assert!(skipped[0].reason.contains("truncated"), "{}", skipped[0].reason);
    }
}

#[test]
fn the_default_budget_is_judged_at_the_end_of_a_short_stream() {
    let (_directory, pattern) = with_a_cut_image();
    let loader = loader(&pattern).error_budget(ErrorBudget::default()).build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    let error = items.last().unwrap().as_ref().unwrap_err().to_string();
    assert!(error.contains("1 of 11") && error.contains("k4"), "{error}");
}

#[test]
fn a_missing_shard_ends_the_stream_with_its_name() {
    let data = TempDataset::new(1, 5, Compression::Plain);
    let pattern = format!("{}::{}/none.tar", data.shard(0).display(), data.pattern());
    let items: Vec<_> = run(loader(&pattern).batch_size(2).build().unwrap().stream().collect());
    assert!(items.last().unwrap().as_ref().unwrap_err().to_string().contains("none.tar"));
    assert!(items.len() >= 2, "earlier samples are delivered");
}

#[test]
fn a_command_that_fails_is_an_error() {
    let data = TempDataset::new(1, 5, Compression::Plain);
    let pattern = format!("pipe:cat {}; exit 3", data.shard(0).display());
    let items: Vec<_> = run(loader(&pattern).build().unwrap().stream().collect());
    let error = items.last().unwrap().as_ref().unwrap_err();
    assert!(std::error::Error::source(error).unwrap().to_string().contains('3'), "{error}");
}

#[test]
fn a_byte_budget_of_one_delivers_everything() {
    let data = TempDataset::new(1, 400, Compression::Plain);
    run(async {
        let pattern = data.shard(0).to_str().unwrap().to_owned();
        let loader =
            loader(&pattern).buffered_bytes_max(1).decoded_bytes_max(1).batch_size(16).build().unwrap();
        let all: Vec<Batch> = loader.stream().try_collect().await.unwrap();
        assert_eq!(all.len(), 25);
    });
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let data = TempDataset::new(1, 1, Compression::Plain);
    let message = |builder: LoaderBuilder| builder.build().unwrap_err().to_string();
    assert!(message(loader(&data.pattern()).batch_size(0)).contains("batch_size"));
    assert!(message(loader(&data.pattern()).workers(0)).contains("workers"));
    assert!(message(loader(&data.pattern()).epochs(0)).contains("epochs"));
    assert!(message(Loader::builder(Vec::new())).contains("shard"));
}
