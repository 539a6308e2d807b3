//! Checks transforms between decoding and the preparer.

use std::path::Path;
use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_loader::decode::Transforms;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::{DecodeLimits, Media, RgbImage, decode_rgb};
use dflop_loader::processors::{Preparer, Tokenizer};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, Microbatch, Step, Tail};
use dflop_tests::loaders::planner;
use dflop_tests::media::png;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

use super::{decoder, each, one};

fn preparer() -> Arc<Preparer> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs/chatml");
    let model = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
    Arc::new(Preparer::builder(&model).tokenizer(Tokenizer::open(directory).unwrap()).build().unwrap())
}

/// Prepares four-sample microbatches with a text, and an image under an unusual extension.
fn microbatches(extension: &str, transforms: Transforms) -> (Vec<Microbatch>, usize) {
    let directory = tempfile::tempdir().unwrap();
    let mut tar = TarBytes::new();
    for number in 0..4 {
        tar = tar.file(&format!("s{number}.{extension}"), &png(60 + 10 * number, 70, number));
        tar = tar.file(&format!("s{number}.txt"), b"a kite over the sea");
    }
    std::fs::write(directory.path().join("s.tar"), tar.finish()).unwrap();
    let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
    let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
    let builder = BalancedLoader::builder(planner(&index, 4, 1, 1, Tail::Carry), 0).steps(1);
    let builder =
        builder.preparer(preparer()).transforms(transforms).error_budget(ErrorBudget::new(1.0).unwrap());
    let loader = builder.build().unwrap();
    let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
    (steps.into_iter().flat_map(|step| step.microbatches).collect(), loader.skipped().len())
}

/// Formats microbatch keys and inputs, in key order.
fn shown(microbatches: &[Microbatch]) -> Vec<String> {
    let text = |microbatch: &Microbatch| {
        let keys: Vec<_> = microbatch.samples.iter().map(|sample| &sample.key).collect();
        format!("{keys:?} {} {:?}", microbatch.tokens, microbatch.inputs)
    };
    microbatches.iter().map(text).collect()
}

#[test]
fn a_image_of_a_users_decoder_is_prepared_like_one_of_the_built_in_decoder() {
    let (expected, _) = microbatches("png", Transforms::new());
    let decode = decoder(|input| match input.media {
        Media::Opaque(bytes) => Ok(Media::Image(decode_rgb(&bytes, &DecodeLimits::default().image)?)),
        other => Err(format!("{other:?} is not as stored").into()),
    });
    let (decoded, skipped) = microbatches("mine", one("mine", decode));
    assert_eq!(skipped, 0);
    assert_eq!(decoded[0].samples.len(), 4);
    // An unknown field costs nothing, so the order within the microbatch may differ.
    assert_eq!(decoded[0].tokens, expected[0].tokens);
    assert!(decoded[0].tokens > decoded[0].planned_tokens, "the index does not know the images");
    let (unknown, _) = microbatches("mine", Transforms::new());
    assert!(unknown[0].tokens < decoded[0].tokens, "without the decoder they are not images");
}

#[test]
fn a_changed_image_is_what_the_model_gets() {
    let keep = one("png", each(|input| Ok(input.media)));
    let (plain, _) = microbatches("png", Transforms::new());
    let (kept, _) = microbatches("png", keep);
    assert_eq!(shown(&kept), shown(&plain));
    let black = each(|input| match input.media {
        Media::Image(image) => {
            let pixels = vec![0; image.pixels.len()];
            Ok(Media::Image(RgbImage { pixels, ..image }))
        }
        other => Ok(other),
    });
    let (black, _) = microbatches("png", one("png", black));
    assert_eq!(black[0].tokens, plain[0].tokens);
    assert_ne!(shown(&black), shown(&plain));
}

#[test]
fn a_image_that_becomes_something_else_is_no_image_for_the_model() {
    let drop = each(|_| Ok(Media::Text("a swan".into())));
    let (microbatches, skipped) = microbatches("png", one("png", drop));
    assert_eq!(skipped, 0);
    let inputs = microbatches[0].inputs.as_ref().unwrap();
    assert!(microbatches[0].tokens < 100, "{inputs:?}");
}
