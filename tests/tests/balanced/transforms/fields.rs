//! Checks the fields, contents and seeds that a transform receives, and how the results are used.

use std::collections::{BTreeMap, BTreeSet};

use dflop_loader::decode::{Decode, TransformInput, Transforms};
use dflop_loader::media::{CustomMedia, Media};
use dflop_loader::sample::Sample;
use dflop_loader::{LoaderBuilder, StreamState};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

use super::{balanced, balanced_samples, decoder, each, loader, of, one, samples};

fn text(media: &Media) -> String {
    match media {
        Media::Text(text) => text.clone(),
        Media::Opaque(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
        other => panic!("{other:?} is not a text"),
    }
}

/// Appends a word to a text.
fn append(word: &'static str) -> std::sync::Arc<dyn dflop_loader::decode::Transform> {
    each(move |input| Ok(Media::Text(format!("{} {word} {}", text(&input.media), input.key))))
}

#[test]
fn transforms_run_in_the_order_given_and_samples_keep_theirs() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let transforms = || {
        Transforms::new().add(of("text"), append("one")).add(of("txt"), append("two")).threads(3).items_max(2)
    };
    let check = |plain: Vec<Sample>, changed: Vec<Sample>| {
        assert!(plain.len() >= 16 && plain.len() == changed.len());
        for (plain, changed) in plain.iter().zip(&changed) {
            let key = &plain.key;
            assert_eq!((key, plain.bytes, plain.offset), (&changed.key, changed.bytes, changed.offset));
            for (before, after) in plain.fields.iter().zip(&changed.fields) {
                assert_eq!(before.extension, after.extension);
                if &*before.extension == "txt" {
                    assert_eq!(text(&after.media), format!("{} one {key} two {key}", text(&before.media)));
                } else {
                    assert_eq!(before.media, after.media, "other fields are unchanged");
                }
            }
        }
    };
    check(samples(loader(&data)), samples(loader(&data).transforms(transforms())));
    let raw = || loader(&data).decode(Decode::Raw);
    check(samples(raw()), samples(raw().transforms(transforms())));
    let plain = balanced_samples(balanced(&data).steps(3));
    check(plain, balanced_samples(balanced(&data).steps(3).transforms(transforms())));
}

#[test]
fn a_decoder_gets_the_stored_bytes_before_all_others_and_only_the_first_runs() {
    let data = TempDataset::new(1, 24, Compression::Plain);
    let stored: BTreeMap<String, Media> = samples(loader(&data).decode(Decode::Raw))
        .into_iter()
        .filter_map(|sample| Some((sample.key.clone(), sample.field("jpg")?.clone())))
        .collect();
    assert_eq!(data.break_images(2).len(), 2, "the built-in decoder would find them");
    let length = decoder(|input| match input.media {
        Media::Opaque(bytes) => Ok(Media::Custom(CustomMedia::new(bytes.len()))),
        other => Err(format!("{other:?} is not as stored").into()),
    });
    let never = decoder(|_| Err("the first decoder has the field".into()));
    let double = each(|input| match input.media {
        Media::Custom(media) => Ok(Media::Custom(CustomMedia::new(2 * media.value::<usize>().unwrap()))),
        other => Err(format!("{other:?} is not what the decoder made").into()),
    });
    let transforms =
        Transforms::new().add(of("images"), double).add(of("jpg"), length).add(of("images"), never);
    for decode in [Decode::Media, Decode::Raw] {
        let decoded = samples(loader(&data).decode(decode).transforms(transforms.clone()));
        assert_eq!(decoded.len(), 24);
        let mut images = 0;
        for sample in &decoded {
            let Some(field) = sample.field("jpg") else { continue };
            let (Media::Custom(media), Media::Opaque(bytes)) = (field, &stored[&sample.key]) else {
                panic!("{field:?}")
            };
            assert_eq!(media.value::<usize>(), Some(&(2 * bytes.len())));
            images += 1;
        }
        assert_eq!(images, 16);
    }
}

/// Replaces each text and image by the seed that the transform got.
fn seeds() -> Transforms {
    let seed = |input: TransformInput| Ok(Media::Custom(CustomMedia::new(input.seed)));
    one("txt", each(seed)).add(of("jpg"), each(seed)).seed(3)
}

/// Seeds by epoch, key and extension.
type Seeds = BTreeMap<(u64, String, String), u64>;

fn sample_seeds(samples: &[Sample]) -> Seeds {
    let mut seeds = Seeds::new();
    for sample in samples {
        for field in &sample.fields {
            let Media::Custom(media) = &field.media else { continue };
            let name = (sample.epoch, sample.key.clone(), field.extension.to_string());
            let seed = *media.value::<u64>().unwrap();
            assert!(seeds.insert(name, seed).is_none());
        }
    }
    seeds
}

/// Runs in two parts, the second from the state after the first two batches.
fn resumed(builder: &LoaderBuilder) -> Vec<Sample> {
    let loader = builder.clone().build().unwrap();
    let first: Vec<_> = run(loader.stream().take(2).try_collect()).unwrap();
    let state: StreamState =
        serde_json::from_str(&serde_json::to_string(&loader.state().unwrap()).unwrap()).unwrap();
    let rest = samples(builder.clone().restore(state));
    first.into_iter().flat_map(|batch| batch.samples).chain(rest).collect()
}

#[test]
fn seeds_differ_by_sample_epoch_and_field_and_by_nothing_else() {
    let data = TempDataset::new(2, 12, Compression::Plain);
    let whole = || loader(&data).epochs(2).transforms(seeds());
    let reference = sample_seeds(&samples(whole().workers(1)));
    assert_eq!(reference.len(), 2 * (24 + 16));
    assert_eq!(reference.values().collect::<BTreeSet<_>>().len(), reference.len());

    let threads = whole().batch_size(5).workers(3).transforms(seeds().threads(3).items_max(2));
    assert_eq!(sample_seeds(&samples(threads)), reference);
    assert_eq!(sample_seeds(&resumed(&whole())), reference);
    let planned = sample_seeds(&balanced_samples(balanced(&data).steps(3).transforms(seeds())));
    assert!(planned.len() >= 24 && planned.iter().all(|(name, seed)| reference[name] == *seed));

    let other = sample_seeds(&samples(whole().transforms(seeds().seed(4))));
    assert!(other.iter().all(|(name, seed)| reference[name] != *seed));
}

#[test]
fn two_transforms_of_one_field_draw_apart() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let both = each(|input| match input.media {
        Media::Custom(first) => {
            Ok(Media::Custom(CustomMedia::new([*first.value::<u64>().unwrap(), input.seed])))
        }
        _ => Ok(Media::Custom(CustomMedia::new(input.seed))),
    });
    let transforms = one("txt", both.clone()).add(of("txt"), both);
    for sample in samples(loader(&data).transforms(transforms)) {
        let Some(Media::Custom(drawn)) = sample.field("txt") else { panic!("{sample:?}") };
        let [first, second] = drawn.value::<[u64; 2]>().unwrap();
        assert_ne!(first, second);
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let keep = || one("txt", each(|input| Ok(input.media)));
    let refused = |builder: LoaderBuilder| builder.build().unwrap_err().to_string();
    let side = std::num::NonZeroU32::new(8).unwrap();
    let pixels = loader(&data).decode(Decode::Pixels { side });
    let of_images = || one("images", each(|input| Ok(input.media)));
    assert!(refused(pixels.clone().transforms(of_images())).contains("decode to `Media`"));
    assert!(pixels.clone().transforms(keep()).build().is_ok(), "other fields may pass one");
    assert!(pixels.transforms(Transforms::new()).build().is_ok(), "an empty list of transforms is valid");
    assert!(refused(loader(&data).transforms(keep().threads(0))).contains("transforms.threads"));
    assert!(refused(loader(&data).transforms(keep().threads(1 << 20))).contains("transforms.threads"));
    assert!(refused(loader(&data).transforms(keep().items_max(0))).contains("transforms.items_max"));
}
