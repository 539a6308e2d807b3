//! Checks image and audio clip tensors in the balanced loader's microbatches, family by family.

use std::collections::BTreeMap;
use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::inputs::{AudioFeatures, ModelInputs, PixelValues, TensorValues};
use dflop_loader::media::augment::Augment;
use dflop_loader::media::{Media, RgbImage};
use dflop_loader::processors::audio::AudioProcessor;
use dflop_loader::processors::image::ImageProcessor;
use dflop_loader::processors::{Preparer, Tokenizer};
use dflop_loader::sample::document::SampleMedia;
use dflop_loader::sample::{BatchLayout, PaddingSide, Sample};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, BalancedLoaderBuilder, Microbatch, StepPlanner};
use dflop_tests::media::{jpeg, png, wav};
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

const SEEING: [&str; 4] = ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-ov-qwen2.5-7b", "internvl3-8b"];
const HEARING: &str = "qwen2-audio-7b";
const LAYOUTS: [BatchLayout; 2] = [BatchLayout::Packed, BatchLayout::Padded { side: PaddingSide::Right }];
/// Settings that prepare only media, so that no text is estimated.
const WORDLESS: [&str; 2] = ["bare", "noise"];

/// Writes text only, images with different sizes, multiple images in a named order, and images without text.
fn images() -> TarBytes {
    let asked = |value: &str, more: &str| {
        let turns =
            format!(r#"[{{"from": "human", "value": "{value}"}}, {{"from": "gpt", "value": "a kite"}}]"#);
        format!(r#"{{"conversations": {turns}{more}}}"#).into_bytes()
    };
    let named = asked("<image>\\nor <image>?", r#", "images": ["1.png", "0.jpg"]"#);
    let tar = TarBytes::new().file("text.json", &asked("what flies?", ""));
    let tar = tar.file("tall.jpg", &jpeg(60, 200, 1)).file("tall.json", &asked("<image>\\nwhat?", ""));
    let tar = tar.file("wide.png", &png(500, 90, 2)).file("wide.txt", b"a kite over the sea");
    let tar = tar.file("two.0.jpg", &jpeg(120, 80, 3)).file("two.1.png", &png(64, 64, 4));
    let tar = tar.file("two.json", &named);
    let tar = tar.file("more.jpg", &jpeg(448, 448, 5)).file("more.txt", b"a square");
    tar.file("bare.png", &png(230, 110, 6))
}

/// Writes text only, a clip after words, two clips, and a clip without words.
fn clips() -> TarBytes {
    let two = br#"{"messages": [{"role": "user", "content": [{"type": "audio"}, {"type": "audio"},
        {"type": "text", "text": "who?"}]}, {"role": "assistant", "content": "a gull"}]}"#;
    let tar = TarBytes::new().file("text.txt", b"only words");
    let tar = tar.file("one.wav", &wav(24_000, 16_000)).file("one.txt", b"waves");
    let tar = tar.file("two.0.wav", &wav(8_000, 16_000)).file("two.1.wav", &wav(11_025, 22_050));
    tar.file("two.json", two).file("noise.wav", &wav(48_000, 16_000))
}

struct Data {
    _directory: tempfile::TempDir,
    index: Arc<Index>,
    model: ModelSpec,
}

impl Data {
    fn new(family: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let shard = directory.path().join("media.tar");
        let tar = if family == HEARING { clips() } else { images() };
        std::fs::write(&shard, tar.finish()).unwrap();
        let shards = expand_shards(&[shard.to_str().unwrap()]).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        Self { _directory: directory, index, model: ModelSpec::preset(family).unwrap() }
    }

    fn preparer(&self, layout: BatchLayout) -> Preparer {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
        let tokenizer = Tokenizer::open(directory).unwrap();
        Preparer::builder(&self.model).tokenizer(tokenizer).layout(layout).build().unwrap()
    }

    /// Delivers all samples as one step over `dp_size` ranks with two microbatches.
    fn loader(&self, dp_rank: usize, dp_size: usize) -> BalancedLoaderBuilder {
        let costs = CostModel::new(self.model.clone(), DeviceRate::preset("h100").unwrap());
        let planner = StepPlanner::builder(self.index.clone(), costs).global_batch(self.index.len());
        let planner = planner.dp_size(dp_size).microbatches(2).work(500).build().unwrap();
        BalancedLoader::builder(planner, dp_rank).steps(1)
    }

    /// Returns the number of tokens in the sample texts by the estimate that plans use.
    fn text_tokens(&self, key: &str) -> u32 {
        let row = (0..self.index.len()).map(|at| self.index.sample(at)).find(|row| row.key() == key).unwrap();
        let mut shape = dflop_costmodel::SampleShape::default();
        row.read_shape(&mut shape);
        shape.text_tokens
    }
}

/// Returns every sample with decoded media, by key.
fn decoded(builder: BalancedLoaderBuilder) -> BTreeMap<String, Sample> {
    let samples = microbatches(builder).into_iter().flat_map(|microbatch| microbatch.samples);
    samples.map(|sample| (sample.key.clone(), sample)).collect()
}

fn microbatches(builder: BalancedLoaderBuilder) -> Vec<Microbatch> {
    let loader = builder.build().unwrap();
    let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
    assert!(loader.skipped().is_empty(), "{:?}", loader.skipped());
    steps.into_iter().flat_map(|step| step.microbatches).collect()
}

fn ints(inputs: &ModelInputs, name: &str) -> Vec<i64> {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::I64(values)) => values.clone(),
        Some(_) => panic!("`{name}` is not an integer tensor"),
        None => Vec::new(),
    }
}

/// Returns shape and values; `None` if there is no such tensor.
fn floats(inputs: &ModelInputs, name: &str) -> (Vec<usize>, Vec<f32>) {
    let Some(tensor) = inputs.tensor(name) else { return (Vec::new(), Vec::new()) };
    assert_eq!(tensor.shape.iter().product::<usize>(), tensor.values.len());
    match &tensor.values {
        TensorValues::F32(values) => (tensor.shape.clone(), values.clone()),
        _ => panic!("`{name}` is not in single precision"),
    }
}

/// Runs the processors on the microbatch media, sample by sample.
struct Direct {
    images: Vec<Vec<PixelValues>>,
    clips: Vec<AudioFeatures>,
}

impl Direct {
    fn of(model: &ModelSpec, microbatch: &Microbatch, decoded: &BTreeMap<String, Sample>) -> Self {
        let (mut images, mut clips) = (Vec::new(), Vec::new());
        for sample in &microbatch.samples {
            let media = SampleMedia::from_sample(&decoded[&sample.key]).unwrap();
            let decoded_images: Vec<&RgbImage> = media.images().collect();
            if let (Some(processor), false) = (ImageProcessor::for_model(model), decoded_images.is_empty()) {
                images.push(processor.images(&decoded_images).unwrap());
            }
            for field in &media.audio {
                let Media::Audio(clip) = &field.media else { panic!("a clip is decoded") };
                clips.push(AudioProcessor::for_model(model).unwrap().clip(clip).unwrap());
            }
        }
        Self { images, clips }
    }

    fn all(&self) -> impl Iterator<Item = &PixelValues> {
        self.images.iter().flatten()
    }
}

/// Checks that the microbatch pixels are the processor's, and that the shapes yield as many tokens as there
/// are placeholders.
fn check_pixels(family: &str, inputs: &ModelInputs, direct: &Direct, placeholders: usize) {
    let (shape, values) = floats(inputs, "pixel_values");
    let all: Vec<f32> = direct.all().flat_map(|image| image.values.f32().to_vec()).collect();
    let grids = ints(inputs, "image_grid_thw");
    match family {
        _ if direct.images.is_empty() => assert!(shape.is_empty() && grids.is_empty()),
        "internvl3-8b" => {
            assert_eq!((&shape[1..], placeholders), (&[3, 448, 448][..], 256 * shape[0]));
            assert_eq!(values, all);
        }
        "llava-ov-qwen2.5-7b" => check_llava(inputs, direct),
        _ => {
            let patches: Vec<i64> = grids.chunks(3).map(|grid| grid.iter().product()).collect();
            assert_eq!(shape, [patches.iter().sum::<i64>() as usize, 1_176]);
            assert_eq!(placeholders, patches.iter().map(|patches| *patches as usize / 4).sum::<usize>());
            let made = direct.all().flat_map(|image| image.grid_thw.unwrap()).map(i64::from);
            assert_eq!(grids, made.collect::<Vec<_>>());
            assert_eq!(values, all);
        }
    }
}

/// Checks that every image has as many tiles as the largest, padded with zeros.
fn check_llava(inputs: &ModelInputs, direct: &Direct) {
    let (shape, values) = floats(inputs, "pixel_values");
    let tiles = direct.all().map(|image| image.shape[0]).max().unwrap();
    assert_eq!(shape, [direct.all().count(), tiles, 3, 384, 384]);
    for (row, image) in values.chunks(tiles * 3 * 384 * 384).zip(direct.all()) {
        let (made, padding) = row.split_at(image.values.len());
        assert!(made == image.values.f32() && padding.iter().all(|value| *value == 0.0));
    }
    let sizes = direct.all().flat_map(|image| image.image_size.unwrap()).map(i64::from);
    assert_eq!(ints(inputs, "image_sizes"), sizes.collect::<Vec<_>>());
    let counts: Vec<i64> = direct.images.iter().map(|images| images.len() as i64).collect();
    assert_eq!(ints(inputs, "batch_num_images"), counts);
}

fn check_features(inputs: &ModelInputs, direct: &Direct, placeholders: usize) {
    let (shape, values) = floats(inputs, "input_features");
    let mask = ints(inputs, "feature_attention_mask");
    let windows: usize = direct.clips.iter().map(|clip| clip.shape[0]).sum();
    assert_eq!(shape, if windows == 0 { Vec::new() } else { vec![windows, 128, 3_000] });
    assert_eq!(mask.len(), windows * 3_000);
    assert_eq!(values, direct.clips.iter().flat_map(|clip| clip.values.clone()).collect::<Vec<_>>());
    let made = direct.clips.iter().flat_map(|clip| &clip.attention_mask).map(|&is_sound| i64::from(is_sound));
    assert_eq!(mask, made.collect::<Vec<_>>());
    // The Qwen2-Audio tower halves the frames twice.
    let pooled = |window: &[i64]| ((window.iter().sum::<i64>() - 1) / 2 + 1) / 2;
    assert_eq!(placeholders as i64, mask.chunks(3_000).map(pooled).sum::<i64>());
}

/// Prepares a dataset and compares every microbatch; returns the keys.
fn check(family: &str, layout: BatchLayout) -> Vec<String> {
    let data = Data::new(family);
    let preparer = data.preparer(layout);
    let id = |token: &str| i64::from(preparer.tokenizer().id(token).unwrap());
    let [placeholder, open, close] = match family {
        "internvl3-8b" => ["<IMG_CONTEXT>", "<img>", "</img>"].map(id),
        "llava-ov-qwen2.5-7b" => [id("<image>"), -1, -1],
        HEARING => ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"].map(id),
        _ => ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"].map(id),
    };
    let decoded = decoded(data.loader(0, 1));
    let mut keys = Vec::new();
    for microbatch in microbatches(data.loader(0, 1).preparer(Arc::new(preparer.clone()))) {
        let inputs = microbatch.inputs.as_ref().unwrap();
        let direct = Direct::of(&data.model, &microbatch, &decoded);
        let ids = ints(inputs, "input_ids");
        let placeholders = ids.iter().filter(|&&id| id == placeholder).count();
        let made = direct.all().map(|image| image.tokens).chain(direct.clips.iter().map(|clip| clip.tokens));
        assert_eq!(placeholders, made.sum::<u32>() as usize, "{family}");
        check_pixels(family, inputs, &direct, placeholders);
        check_features(inputs, &direct, if family == HEARING { placeholders } else { 0 });

        let markers = ids.iter().filter(|&&id| id == open || id == close).count();
        let texts: u32 = microbatch.samples.iter().map(|sample| data.text_tokens(&sample.key)).sum();
        assert_eq!(microbatch.planned_tokens, (placeholders + markers) as u64 + u64::from(texts), "{family}");
        keys.extend(microbatch.samples.into_iter().map(|sample| sample.key));
    }
    keys.sort_unstable();
    keys
}

#[test]
fn tensors_of_images_are_those_of_the_processor_and_fill_their_placeholders() {
    for family in SEEING {
        for layout in LAYOUTS {
            assert_eq!(check(family, layout), ["bare", "more", "tall", "text", "two", "wide"], "{family}");
        }
    }
}

#[test]
fn tensors_of_clips_are_those_of_the_processor_and_fill_their_placeholders() {
    for layout in LAYOUTS {
        assert_eq!(check(HEARING, layout), ["noise", "one", "text", "two"]);
    }
}

/// Checks that images, clips and the markers around them count as planned.
#[test]
fn a_sample_without_words_weighs_what_was_planned() {
    for family in SEEING.into_iter().chain([HEARING]) {
        let data = Data::new(family);
        let preparer = data.preparer(BatchLayout::Packed);
        let decoded = decoded(data.loader(0, 1));
        let key = WORDLESS.into_iter().find(|key| decoded.contains_key(*key)).unwrap();
        let microbatches = microbatches(data.loader(0, 1));
        let with = microbatches.iter().find_map(|microbatch| {
            let at = microbatch.samples.iter().position(|sample| sample.key == key)?;
            Some(microbatch.costs[at].tokens as usize)
        });
        assert_eq!(preparer.prepare(&decoded[key]).unwrap().tokens(), with.unwrap(), "{family}");
    }
}

#[test]
fn counted_media_give_the_same_ids_without_tensors() {
    for family in [SEEING[0], SEEING[2], SEEING[3], HEARING] {
        let data = Data::new(family);
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
        let builder = Preparer::builder(&data.model).tokenizer(Tokenizer::open(directory).unwrap());
        let counted = builder.counted_media().build().unwrap();
        let made = microbatches(data.loader(0, 1).preparer(Arc::new(data.preparer(BatchLayout::Packed))));
        let counted = microbatches(data.loader(0, 1).preparer(Arc::new(counted)));
        for (made, counted) in made.iter().zip(&counted) {
            let (made, counted) = (made.inputs.as_ref().unwrap(), counted.inputs.as_ref().unwrap());
            let is_made =
                |name: &str| ["pixel_values", "input_features", "feature_attention_mask"].contains(&name);
            let kept = made.tensors.iter().filter(|tensor| !is_made(tensor.name));
            assert_eq!(counted.tensors, kept.cloned().collect::<Vec<_>>(), "{family}");
        }
    }
}

/// Returns the pixels for every sample, from any rank and microbatch.
fn pixels_by_key(data: &Data, dp_size: usize, augment: Option<&Augment>) -> BTreeMap<String, Vec<f32>> {
    let mut found = BTreeMap::new();
    for dp_rank in 0..dp_size {
        let mut builder =
            data.loader(dp_rank, dp_size).preparer(Arc::new(data.preparer(BatchLayout::Packed)));
        if let Some(augment) = augment {
            builder = builder.augment(*augment);
        }
        for microbatch in microbatches(builder) {
            let inputs = microbatch.inputs.as_ref().unwrap();
            let pad = i64::from(data.preparer(BatchLayout::Packed).tokenizer().id("<|image_pad|>").unwrap());
            let (shape, mut values) = floats(inputs, "pixel_values");
            let ids = ints(inputs, "input_ids");
            for (bounds, sample) in inputs.cu_seqlens.windows(2).zip(&microbatch.samples) {
                let ids = &ids[bounds[0] as usize..bounds[1] as usize];
                let tokens = ids.iter().filter(|&&id| id == pad).count();
                let rest = values.split_off(4 * tokens * shape.get(1).copied().unwrap_or(0));
                found.insert(sample.key.clone(), std::mem::replace(&mut values, rest));
            }
            assert!(values.is_empty());
        }
    }
    found
}

#[test]
fn images_are_changed_before_the_processor_and_on_any_rank_alike() {
    let data = Data::new("qwen2-vl-7b");
    let augment =
        Augment::builder().random_crop(0.2..=0.9, 0.75..=4.0 / 3.0).flip(0.5).seed(5).build().unwrap();
    let plain = pixels_by_key(&data, 1, None);
    let changed = pixels_by_key(&data, 1, Some(&augment));
    assert_eq!(pixels_by_key(&data, 1, Some(&augment)), changed);
    assert_eq!(pixels_by_key(&data, 2, Some(&augment)), changed);
    let decoded = decoded(data.loader(0, 1).augment(augment));
    let processor = ImageProcessor::for_model(&data.model).unwrap();
    for (key, values) in &changed {
        let media = SampleMedia::from_sample(&decoded[key]).unwrap();
        let made = processor.images(&media.images().collect::<Vec<_>>()).unwrap();
        assert_eq!(
            *values,
            made.into_iter().flat_map(|image| image.values.f32().to_vec()).collect::<Vec<_>>(),
            "{key}"
        );
        assert_eq!(*values == plain[key], values.is_empty(), "{key}");
    }
    assert_eq!(changed.values().filter(|values| !values.is_empty()).count(), 5);
}
