//! Checks random augmentation end to end: it depends on the sample and the epoch only.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use dflop_loader::decode::{Batch, Decode};
use dflop_loader::media::augment::{Augment, ColorJitter};
use dflop_loader::media::{Media, RgbImage};
use dflop_loader::sample::Sample;
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, Loader, LoaderBuilder, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::{expand_with_pipes, run};
use futures::TryStreamExt;

/// Images, by epoch and key.
type Images = BTreeMap<(u64, String), RgbImage>;

fn augment() -> Augment {
    let jitter = ColorJitter { brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1 };
    let builder = Augment::builder().random_crop(0.2..=0.9, 0.75..=4.0 / 3.0).flip(0.5).color_jitter(jitter);
    builder.seed(5).build().unwrap()
}

fn images<'a>(samples: impl Iterator<Item = &'a Sample>) -> Images {
    let image = |sample: &Sample| match sample.field("jpg")? {
        Media::Image(image) => Some(((sample.epoch, sample.key.clone()), image.clone())),
        _ => None,
    };
    samples.filter_map(image).collect()
}

fn loader(data: &TempDataset) -> LoaderBuilder {
    Loader::builder(expand_shards(&[data.pattern()]).unwrap()).epochs(2)
}

fn batches(builder: LoaderBuilder) -> Vec<Batch> {
    run(builder.build().unwrap().stream().try_collect()).unwrap()
}

fn loaded_media(builder: LoaderBuilder) -> Images {
    images(batches(builder).iter().flat_map(|batch| &batch.samples))
}

/// Delivers the steps from `from` on, for both ranks.
fn balanced_media(data: &TempDataset, from: u64, steps: u64) -> Images {
    let planner = planner(&data.index(), 8, 2, 2, Tail::Carry);
    let of_rank = |dp_rank| {
        let builder = BalancedLoader::builder(planner.clone(), dp_rank).from_step(from).steps(steps);
        let loader = builder.augment(augment()).build().unwrap();
        let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
        let microbatches = steps.iter().flat_map(|step| &step.microbatches);
        images(microbatches.flat_map(|microbatch| &microbatch.samples))
    };
    of_rank(0).into_iter().chain(of_rank(1)).collect()
}

#[test]
fn workers_storage_ranks_loaders_and_resume_do_not_change_a_draw() {
    let data = TempDataset::new(2, 12, Compression::Plain);
    let reference = loaded_media(loader(&data).augment(augment()).workers(1));
    assert_eq!(reference.len(), 32, "two of three samples have an image, in both epochs");
    assert_eq!(loaded_media(loader(&data).augment(augment()).workers(4).batch_size(5)), reference);
    // The same entries at the same offsets, read as a stream.
    let pipes: Vec<String> = (0..2).map(|at| format!("pipe:cat {}", data.shard(at).display())).collect();
    let piped = Loader::builder(expand_with_pipes(&pipes)).epochs(2).augment(augment());
    assert_eq!(loaded_media(piped), reference);

    let whole = balanced_media(&data, 0, 6);
    assert_eq!(whole, reference);
    let resumed = balanced_media(&data, 4, 2);
    assert!(!resumed.is_empty() && resumed.iter().all(|(name, image)| reference[name] == *image));
}

#[test]
fn other_epochs_and_seeds_draw_anew_and_sizes_stay() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let plain = loaded_media(loader(&data));
    let changed = loaded_media(loader(&data).augment(augment()));
    for ((epoch, key), image) in &changed {
        assert_ne!(*image, changed[&(1 - epoch, key.clone())], "{key}");
        let stored = &plain[&(*epoch, key.clone())];
        assert_ne!(image, stored, "{key}");
        assert_eq!((image.width, image.height), (stored.width, stored.height));
    }
}

#[test]
fn pixel_tensors_show_the_augmented_images_whatever_the_workers() {
    let data = TempDataset::new(2, 9, Compression::Gzip);
    let decode = Decode::Pixels { side: NonZeroU32::new(24).unwrap() };
    let values = |workers, augment| {
        let mut builder = loader(&data).decode(decode).workers(workers);
        if let Some(augment) = augment {
            builder = builder.augment(augment);
        }
        let batches = batches(builder).into_iter().filter_map(|batch| batch.pixels);
        batches.flat_map(|pixels| pixels.tensor.values().to_vec()).collect::<Vec<f32>>()
    };
    let reference = values(1, Some(augment()));
    assert_eq!(values(4, Some(augment())), reference);
    assert_ne!(values(1, None), reference);
    assert!(reference.iter().all(|value| value.is_finite() && value.abs() < 3.0));
}

#[test]
fn what_cannot_be_changed_or_scaled_is_refused() {
    let data = TempDataset::new(1, 1, Compression::Plain);
    let message = |builder: LoaderBuilder| builder.build().unwrap_err().to_string();
    assert!(message(loader(&data).decode(Decode::Raw).augment(augment())).contains("augment"));
    assert!(message(loader(&data).scaled_decode(true)).contains("scaled_decode"));
    let pixels = Decode::Pixels { side: NonZeroU32::new(24).unwrap() };
    let built = loader(&data).decode(pixels).scaled_decode(true).build();
    if cfg!(feature = "turbojpeg") {
        built.unwrap();
    } else {
        assert!(built.unwrap_err().to_string().contains("turbojpeg"));
    }
}
