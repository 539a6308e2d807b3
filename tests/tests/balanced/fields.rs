//! Checks samples with different fields, and stages that read only some fields.

use std::path::PathBuf;

use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::media::{Media, Modality};
use dflop_loader::sample::Sample;
use dflop_loader::sample::document::{ContentPart, MediaFault, SampleMedia};
use dflop_loader::shard::{FieldSelection, expand_shards};
use dflop_loader::{BalancedLoader, Loader, LoaderBuilder, Tail};
use dflop_tests::dataset::{Compression, compress};
use dflop_tests::loaders::planner;
use dflop_tests::media::{jpeg, png, wav};
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

/// Writes text only, one image, five images, an audio clip with words, two image lists, one of them invalid,
/// and texts between images.
fn mixed() -> Vec<u8> {
    let mut tar = TarBytes::new().file("text.txt", b"only words");
    tar = tar.file("one.jpg", &jpeg(40, 30, 1)).file("one.txt", b"a kite");
    for number in [0, 1, 10, 2, 3] {
        tar = tar.file(&format!("five.img_{number}.png"), &png(20 + number, 20, number));
    }
    tar = tar.file(
        "five.json",
        br#"{"messages": [{"role": "user", "content": "<image> and <image><image><image><image>"}]}"#,
    );
    tar = tar.file("clip.wav", &wav(1_600, 16_000)).file("clip.txt", b"hello");
    let list =
        br#"{"images": ["1.jpg", "0.jpg"], "conversations": [{"from": "human", "value": "<image><image>"}]}"#;
    tar =
        tar.file("list.0.jpg", &jpeg(30, 20, 0)).file("list.1.jpg", &jpeg(31, 20, 1)).file("list.json", list);
    tar = tar.file("gone.0.jpg", &jpeg(30, 20, 0)).file("gone.json", br#"{"images": ["0.jpg", "1.jpg"]}"#);
    tar = tar.file("page.0.txt", b"see").file("page.1.jpg", &jpeg(20, 20, 2)).file("page.2.txt", b"there");
    tar.finish()
}

const KEYS: [&str; 7] = ["text", "one", "five", "clip", "list", "gone", "page"];

struct Mixed {
    _directory: tempfile::TempDir,
    shard: PathBuf,
}

impl Mixed {
    fn new(stored: Compression) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let shard = directory.path().join("mixed.tar");
        std::fs::write(&shard, compress(&mixed(), stored)).unwrap();
        Self { _directory: directory, shard }
    }

    fn loader(&self) -> LoaderBuilder {
        Loader::builder(expand_shards(&[self.shard.to_str().unwrap()]).unwrap()).batch_size(3)
    }

    fn plain(&self) -> Vec<Sample> {
        samples(self.loader())
    }

    fn balanced(&self, fields: Option<&[&str]>) -> Vec<Sample> {
        let shards = expand_shards(&[self.shard.to_str().unwrap()]).unwrap();
        let index = std::sync::Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        let planner = planner(&index, 7, 1, 2, Tail::Carry);
        let mut builder = BalancedLoader::builder(planner, 0).steps(1);
        if let Some(fields) = fields {
            builder = builder.fields(FieldSelection::new(fields).unwrap());
        }
        let steps: Vec<_> = run(builder.build().unwrap().stream().try_collect()).unwrap();
        let microbatches = steps.into_iter().flat_map(|step| step.microbatches);
        let mut samples: Vec<Sample> = microbatches.flat_map(|microbatch| microbatch.samples).collect();
        samples.sort_by_key(|sample| sample.offset);
        samples
    }
}

fn samples(builder: LoaderBuilder) -> Vec<Sample> {
    let batches: Vec<_> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    batches.into_iter().flat_map(|batch| batch.samples).collect()
}

fn sample<'a>(samples: &'a [Sample], key: &str) -> &'a Sample {
    samples.iter().find(|sample| sample.key == key).unwrap()
}

fn image_names<'a>(sample: &'a Sample) -> Result<Vec<&'a str>, MediaFault> {
    let names = |media: SampleMedia<'a>| media.images.iter().map(|field| &*field.extension).collect();
    SampleMedia::from_sample(sample).map(names)
}

#[test]
fn both_loaders_deliver_samples_that_differ_whole_and_alike() {
    for stored in [Compression::Plain, Compression::Gzip] {
        let mixed = Mixed::new(stored);
        let plain = mixed.plain();
        let keys: Vec<&str> = plain.iter().map(|sample| sample.key.as_str()).collect();
        assert_eq!(keys, KEYS);
        let fields: Vec<usize> = plain.iter().map(|sample| sample.fields.len()).collect();
        assert_eq!(fields, [1, 2, 6, 2, 3, 2, 3]);
        assert_eq!(mixed.balanced(None), plain, "{stored:?}");
    }
}

/// Content that is the image at this place.
fn image(at: usize) -> ContentPart<'static> {
    ContentPart::Medium(Modality::Image, at)
}

#[test]
fn every_sample_says_what_media_it_has_and_in_which_order() {
    let samples = Mixed::new(Compression::Plain).plain();
    let media = |key| SampleMedia::from_sample(sample(&samples, key)).unwrap();
    assert!(media("text").images.is_empty() && media("text").audio.is_empty());
    assert_eq!(media("text").parts().unwrap(), [ContentPart::Text("only words")]);
    assert_eq!(media("one").parts().unwrap(), [image(0), ContentPart::Text("a kite")]);
    let numbered = ["img_0.png", "img_1.png", "img_2.png", "img_3.png", "img_10.png"];
    assert_eq!(image_names(sample(&samples, "five")).unwrap(), numbered);
    let widths: Vec<u32> = media("five").images().map(|image| image.width).collect();
    assert_eq!(widths, [20, 21, 22, 23, 30]);
    let five = media("five");
    let turns = five.turns().unwrap().unwrap();
    assert_eq!(turns[0].parts[..3], [image(0), ContentPart::Text(" and "), image(1)]);
    assert_eq!(turns[0].parts[3..], [image(2), image(3), image(4)]);
    assert_eq!(
        media("clip").parts().unwrap(),
        [ContentPart::Medium(Modality::Audio, 0), ContentPart::Text("hello")]
    );
    assert_eq!(image_names(sample(&samples, "list")).unwrap(), ["1.jpg", "0.jpg"]);
    let page = [ContentPart::Text("see"), image(0), ContentPart::Text("there")];
    assert_eq!(media("page").parts().unwrap(), page);
}

#[test]
fn a_list_that_names_a_missing_image_is_a_fault_of_that_sample() {
    let samples = Mixed::new(Compression::Plain).plain();
    let fault = image_names(sample(&samples, "gone")).unwrap_err();
    assert_eq!((fault.key.as_str(), fault.field.as_str()), ("gone", "1.jpg"));
    assert!(
        fault.shard.ends_with("mixed.tar") && fault.to_string().contains("no field of this name"),
        "{fault}"
    );
}

#[test]
fn a_stage_reads_its_fields_and_no_byte_more() {
    let bytes_of = |samples: &[Sample]| samples.iter().map(|sample| sample.bytes).sum::<u64>();
    let extensions = |samples: &[Sample]| {
        let fields = samples.iter().flat_map(|sample| &sample.fields);
        fields.map(|field| field.extension.to_string()).collect::<Vec<_>>()
    };
    for stored in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let mixed = Mixed::new(stored);
        let whole = mixed.plain();
        for (names, expected) in
            [(&["txt", "json"][..], 8), (&["images"], 10), (&["audio"], 1), (&["img_*.png", "0.jpg"], 7)]
        {
            let selected = samples(mixed.loader().fields(FieldSelection::new(names).unwrap()));
            assert_eq!(selected.len(), KEYS.len(), "samples without such a field are delivered too");
            assert_eq!(extensions(&selected).len(), expected, "{names:?}");
            let kept = whole.iter().flat_map(|sample| &sample.fields);
            let wanted = FieldSelection::new(names).unwrap();
            let kept =
                kept.filter(|field| wanted.wants(&field.extension)).map(|field| field.extension.to_string());
            assert_eq!(extensions(&selected), kept.collect::<Vec<_>>());
            assert!(bytes_of(&selected) < bytes_of(&whole));
            assert_eq!(mixed.balanced(Some(names)), selected, "{stored:?} {names:?}");
        }
    }
}

#[test]
fn a_field_that_no_sample_has_is_an_error() {
    let mixed = Mixed::new(Compression::Plain);
    let wrong = FieldSelection::new(["nothing", "jpge"]).unwrap();
    let loader = mixed.loader().fields(wrong).build().unwrap();
    let error = run(loader.stream().try_collect::<Vec<_>>()).unwrap_err().to_string();
    assert!(error.contains("has a field `nothing, jpge`; they have: 0.jpg, "), "{error}");
    let shards = expand_shards(&[mixed.shard.to_str().unwrap()]).unwrap();
    let index = std::sync::Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
    let builder = BalancedLoader::builder(planner(&index, 7, 1, 2, Tail::Carry), 0);
    let refused =
        builder.fields(FieldSelection::new(["nothing", "jpge"]).unwrap()).build().unwrap_err().to_string();
    assert_eq!(refused, error);
}

#[test]
fn a_field_that_is_not_read_may_be_damaged_or_too_long_but_not_there_twice() {
    let directory = tempfile::tempdir().unwrap();
    for (stored, name) in [(Compression::Plain, "s.tar"), (Compression::Gzip, "s.tar.gz")] {
        let tar = TarBytes::new()
            .file("a.jpg", &[0; 3_000])
            .file("a.txt", b"one")
            .file("b.jpg", b"no image")
            .file("b.jpg", b"nor this")
            .file("b.txt", b"two");
        let path = directory.path().join(name);
        std::fs::write(&path, compress(&tar.finish(), stored)).unwrap();
        let shards = expand_shards(&[path.to_str().unwrap()]).unwrap();
        let fields = FieldSelection::new(["txt"]).unwrap();
        let builder = Loader::builder(shards).fields(fields).field_bytes_max(1_000).decode(Decode::Media);
        let loader = builder.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
        let batches: Vec<_> = run(loader.stream().try_collect()).unwrap();
        let keys: Vec<_> =
            batches.iter().flat_map(|batch| &batch.samples).map(|sample| &sample.key).collect();
        let skipped = loader.skipped();
        assert_eq!((keys, skipped.len()), (vec![&"a".to_owned()], 1), "{skipped:?}");
        assert!(skipped[0].reason.contains("duplicate"), "{skipped:?}");
    }
}

#[test]
fn fields_beside_images_of_one_tensor_are_decoded() {
    let mixed = Mixed::new(Compression::Plain);
    let batch = |names: &[&str]| {
        let decode = Decode::Pixels { side: 8.try_into().unwrap() };
        let builder = mixed.loader().batch_size(7).decode(decode).fields(FieldSelection::new(names).unwrap());
        let mut batches: Vec<_> = run(builder.build().unwrap().stream().try_collect()).unwrap();
        assert_eq!(batches.len(), 1);
        batches.remove(0)
    };
    let both = batch(&["images", "txt"]);
    let pixels = both.pixels.as_ref().unwrap();
    let place = both.samples.iter().position(|sample| sample.key == "one").unwrap();
    let one = &both.samples[place];
    assert_eq!(pixels.rows[place].len(), 1);
    assert_eq!(pixels.tensor.rows(), pixels.rows.iter().map(ExactSizeIterator::len).sum::<usize>());
    assert_eq!(one.field("txt"), Some(&Media::Text("a kite".to_owned())));
    assert!(one.field("jpg").is_none());
    assert_eq!(one.bytes, jpeg(40, 30, 1).len() as u64 + 6);
    let alone = batch(&["images"]);
    assert!(alone.samples.iter().all(|sample| sample.fields.is_empty()));
    assert_eq!(alone.pixels.unwrap().tensor.values(), pixels.tensor.values());
}
