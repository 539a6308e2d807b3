//! Adds a codec from outside the crate: the images are indexed, planned, decoded and trained on as usual.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use dflop_costmodel::ImageSize;
use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::codec::{Codec, Content, Payload, register};
use dflop_loader::media::{DecodeError, DecodeLimits, Media, MediaShape, Modality, RgbImage};
use dflop_loader::sample::document::{ContentPart, SampleMedia};
use dflop_loader::shard::{FieldSelection, Shard, expand_shards};
use dflop_loader::{BalancedLoader, Loader, LoaderBuilder, Tail};
use dflop_tests::loaders::planner;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

/// Raw pixels: width and height as two bytes each, then RGB.
#[derive(Debug)]
struct RawPixels;

const HEADER_BYTES: usize = 4;

fn size_of_raw(bytes: &[u8]) -> Result<ImageSize, DecodeError> {
    let [w0, w1, h0, h1, ..] = *bytes else {
        return Err(DecodeError::Truncated { format: "rawpixels", offset: bytes.len() as u64 });
    };
    let side = |low, high| u32::from(u16::from_le_bytes([low, high]));
    Ok(ImageSize { width: side(w0, w1), height: side(h0, h1) })
}

impl Codec for RawPixels {
    fn name(&self) -> &'static str {
        "rawpixels"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &["rawpixels"]
    }

    fn content(&self) -> Content {
        Content::Medium(Modality::Image)
    }

    fn payload(&self) -> Payload {
        Payload::Prefix
    }

    fn probe(&self, prefix: &[u8], _: u64, _: &DecodeLimits) -> Result<MediaShape, DecodeError> {
        size_of_raw(prefix).map(MediaShape::Image)
    }

    fn decode(&self, bytes: bytes::Bytes, _: &DecodeLimits) -> Result<Media, DecodeError> {
        let ImageSize { width, height } = size_of_raw(&bytes)?;
        assert!(bytes.len() > HEADER_BYTES, "no pixels, which a codec should not answer by a panic");
        let pixels = bytes[HEADER_BYTES..].to_vec();
        Ok(Media::Image(RgbImage { width, height, pixels, is_truncated: false }))
    }
}

/// Encodes an image for [`RawPixels`].
fn raw_pixels(width: u16, height: u16, color: [u8; 3]) -> Vec<u8> {
    let mut bytes = [width.to_le_bytes(), height.to_le_bytes()].concat();
    bytes.extend(color.repeat(usize::from(width) * usize::from(height)));
    bytes
}

/// Writes samples with an image and a caption; the last image has no pixels.
fn write_shard(directory: &Path) -> Vec<Shard> {
    let mut tar = TarBytes::new();
    for key in 0..8u8 {
        let image = raw_pixels(60 + u16::from(key), 40, [key * 20, 100, 7]);
        tar = tar.file(&format!("{key}.rawpixels"), &image).file(&format!("{key}.txt"), b"a red kite");
    }
    tar = tar.file("8.rawpixels", &raw_pixels(0, 0, [0; 3])).file("8.txt", b"nothing");
    std::fs::write(directory.join("0.tar"), tar.finish()).unwrap();
    expand_shards(&[directory.join("0.tar").to_str().unwrap()]).unwrap()
}

fn batch(builder: LoaderBuilder) -> (dflop_loader::decode::Batch, usize) {
    let loader = builder.batch_size(9).error_budget(ErrorBudget::new(0.5).unwrap()).build().unwrap();
    let mut batches: Vec<_> = run(loader.stream().try_collect()).unwrap();
    (batches.remove(0), loader.skipped().len())
}

#[test]
fn a_codec_of_ones_own_is_indexed_planned_and_decoded_and_an_older_index_is_built_again() {
    let directory = tempfile::tempdir().unwrap();
    let shards = write_shard(directory.path());
    let open = || Arc::new(Index::open_or_build(shards.clone(), &IndexOptions::default()).unwrap());
    let shape = |index: &Index, sample| index.sample(sample).fields().next().unwrap().shape;
    let (before, fingerprint) = (open(), open().fingerprint().to_owned());
    assert_eq!(shape(&before, 3), MediaShape::Opaque, "no codec claims the field yet");

    let options = IndexOptions::default();
    let part = Index::build_part(&shards, &options).unwrap();
    register(&RawPixels).unwrap();
    let refused = Index::merge_parts(shards.clone(), [part], &options).unwrap_err().to_string();
    assert!(refused.contains("other codecs"), "{refused}");
    let index = open();
    assert_eq!(shape(&index, 3), MediaShape::Image(ImageSize { width: 63, height: 40 }));
    assert_eq!(index.fingerprint(), fingerprint, "the same bytes in the same order");
    let again = std::fs::metadata(index.path().unwrap()).unwrap().modified().unwrap();
    assert_eq!(std::fs::metadata(open().path().unwrap()).unwrap().modified().unwrap(), again, "once");

    // It is planned at the cost of an image with that size, and delivered with pixels.
    let planner = planner(&index, 4, 1, 1, Tail::Carry);
    let cost = planner.plan(0).unwrap().costs[0];
    assert!(cost.encoder_items > 0 && cost.tokens > 10, "{cost:?}");
    let loader = BalancedLoader::builder(planner, 0).steps(1).build().unwrap();
    let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
    let sample = &steps[0].microbatches[0].samples[0];
    let media = SampleMedia::from_sample(sample).unwrap();
    assert_eq!(media.parts().unwrap()[0], ContentPart::Medium(Modality::Image, 0));
    assert_eq!(media.images().next().unwrap().height, 40);

    // Pixel batches resize it like any image; a codec panic loses only the affected sample.
    let images = FieldSelection::new(["images"]).unwrap();
    let square = Decode::Pixels { side: NonZeroU32::new(16).unwrap() };
    let (pixels, skipped) = batch(Loader::builder(shards.clone()).decode(square).fields(images));
    assert_eq!((pixels.samples.len(), skipped), (8, 1));
    let tensor = pixels.pixels.unwrap();
    assert_eq!(tensor.rows.len(), 8);
    let (media, skipped) = batch(Loader::builder(shards));
    assert_eq!((media.samples.len(), skipped), (8, 1));
}
