//! Adds a model family from outside of every crate: sizes and token rule, processor, blocks.
//!
//! A *kite* model sees every image as one square with 12 pixels per side. This file is all that the
//! family needs.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::config::{CheckpointFields, ConfigFields, Documents, PartialModelSpec};
use dflop_costmodel::model::{EncoderDetails, EncoderSpec, LlmSpec, Mlp, Projector, VisionSpec};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::fixed_tile::FixedTile;
use dflop_costmodel::{CostModel, DeviceRate, FamilyId, ImageSize, ModelFamilies, ModelFamily, SampleShape};
use dflop_executor::comm::{Comm, Settings, threads};
use dflop_executor::device::Cpu;
use dflop_executor::device::ops::activation::Activation;
use dflop_executor::inputs::InputReader;
use dflop_executor::models::QkvNames;
use dflop_executor::models::encoder::{
    Arrangement, EncoderConfig, PatchStemSpec, ProjectorMap, ProjectorSpec, Stem, TailSpec, TileRule, Tiles,
};
use dflop_executor::models::families::{DecoderDefaults, decoder, full_attention, plain_mlp};
use dflop_executor::models::weights::Seed;
use dflop_executor::models::{
    Activations, BlockFamilies, BlockSource, DimensionFields, FamilyBlocks, FrozenModules, LayerSpec,
    LlmConfig, ModelConfig, ModuleKind, NormKind,
};
use dflop_executor::pipeline::{Job, ModuleParallelism};
use dflop_executor::train::join_job;
use dflop_loader::error::BoxError;
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::inputs::{PixelValues, TextCounter};
use dflop_loader::media::{Media, PixelBuffer, PixelType, RgbImage};
use dflop_loader::processors::family::VisionInputs;
use dflop_loader::processors::image::{
    Filter, ImageProcessor, Normalization, PixelSettings, RgbView, VisionProcessor,
};
use dflop_loader::processors::{
    PixelLayout, Placeholder, Preparer, PreparerBuilder, ProcessorFamilies, ProcessorFamily, Tokenizer,
    VideoText,
};
use dflop_loader::sample::{Field, Sample};
use dflop_loader::shard::expand_shards;
use dflop_loader::{Shuffle, StepPlanner};
use dflop_tests::media::png;
use dflop_tests::tar::TarBytes;
use serde_json::{Value, json};

const KITE: FamilyId = FamilyId::new("kite_vlm");
/// Square side in pixels.
const SIDE: u16 = 12;
/// Patch side in pixels.
const PATCH: u16 = 4;
/// Number of patches in the square, each a token.
const TOKENS: u32 = 9;

#[derive(Debug)]
struct KiteSizes;

impl ModelFamily for KiteSizes {
    fn id(&self) -> FamilyId {
        KITE
    }

    fn model_types(&self) -> &[&str] {
        &["kite_vlm"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> dflop_costmodel::Result<PartialModelSpec> {
        let llm = LlmSpec::from_fields(&files.config.child_or_empty("text_config")?, "qwen2")?;
        let fields = files.config.child_or_empty("kite_config")?;
        let hidden = fields.count("width", 12)?;
        let vision = VisionSpec {
            family: KITE,
            encoder: EncoderSpec {
                layers: fields.count("layers", 2)?,
                windowed_layers: 0,
                hidden,
                heads: 3,
                ffn: 20,
                mlp: Mlp::Plain,
                stem_inputs: 3 * u32::from(PATCH).pow(2),
                projector: Projector {
                    merged_tokens: NonZeroU32::MIN,
                    input: hidden,
                    middle: Some(llm.hidden),
                    further_weights: 0,
                    vector_parameters: 0,
                    deepstack: 0,
                },
                details: EncoderDetails::default(),
                counts: None,
            },
            rule: VisionRule::Fixed(FixedTile {
                tile_pixels: SIDE,
                tile_patches: TOKENS,
                pooled_patches: NonZeroU32::MIN,
                marker_tokens: 0,
                is_cropped: false,
                frames_max: 4,
            }),
        };
        Ok(PartialModelSpec { family: KITE, vision: Some(vision), audio: None, llm: Some(llm) })
    }
}

/// Copies an image pixel for each pixel in the square.
#[derive(Debug, Clone, Copy)]
struct KiteImages;

impl VisionProcessor for KiteImages {
    fn rule(&self) -> Option<VisionRule> {
        None
    }

    fn settings(&self) -> PixelSettings {
        let normalization = Normalization { mean: [0.0; 3], deviation: [1.0; 3], ..Normalization::CLIP };
        PixelSettings { filter: Filter::Bicubic, normalization, square: None }
    }

    fn with_settings(&self, _: &PixelSettings) -> ImageProcessor {
        ImageProcessor::new(*self)
    }

    fn item_bytes(&self) -> u64 {
        3 * 4 * u64::from(SIDE).pow(2)
    }

    fn image(&self, image: RgbView<'_>, _: usize, pixels: PixelType) -> Result<PixelValues, BoxError> {
        if pixels != PixelType::Float32 {
            return Err("kites take single precision".into());
        }
        let side = usize::from(SIDE);
        let at = |place: usize| {
            let (color, y, x) = (place / side.pow(2), place / side % side, place % side);
            let (row, column) = (y * image.height as usize / side, x * image.width as usize / side);
            f32::from(image.pixels[3 * (row * image.width as usize + column) + color]) / 255.0
        };
        Ok(PixelValues {
            values: PixelBuffer::F32((0..3 * side.pow(2)).map(at).collect()),
            shape: vec![1, 3, side, side],
            tokens: TOKENS,
            ..PixelValues::default()
        })
    }

    fn video(&self, _: &[RgbView<'_>], _: PixelType) -> Result<PixelValues, BoxError> {
        Err("kites do not look at videos".into())
    }
}

#[derive(Debug)]
struct KiteProcessor;

impl ProcessorFamily for KiteProcessor {
    fn id(&self) -> FamilyId {
        KITE
    }

    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        assert!(matches!(vision.rule, VisionRule::Fixed(_)));
        let image = Placeholder { token: "<image>", markers: None, has_markers_in_text: false };
        let video = VideoText::Whole(Placeholder { token: "<video>", ..image.clone() });
        let processor = ImageProcessor::new(KiteImages);
        Some(VisionInputs { image, video, layout: PixelLayout::Tiles, processor })
    }

    fn image_processor_types(&self) -> &[&str] {
        &["KiteImageProcessor"]
    }

    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> dflop_costmodel::Result<ImageProcessor> {
        match fields.count("side", 12)? {
            12 => Ok(ImageProcessor::new(KiteImages)),
            side => Err(fields.invalid("side", format!("must be 12, found {side}"))),
        }
    }
}

#[derive(Debug)]
struct KiteBlocks;

const FIELDS: DimensionFields =
    DimensionFields { heads: "kite_config", kv_heads: "kite_config", mlp: "kite_config" };

impl FamilyBlocks for KiteBlocks {
    fn id(&self) -> FamilyId {
        KITE
    }

    fn model_types(&self) -> &[&str] {
        &["kite_vlm"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> dflop_executor::models::Result<EncoderConfig> {
        let (spec, outputs) = (source.vision()?.encoder, source.llm()?.hidden as usize);
        let hidden = spec.hidden as usize;
        let [side, patch] = [SIDE, PATCH].map(usize::from);
        let layer = |layer: u32| {
            let name = |rest: &str| format!("kite.layers.{layer}.{rest}");
            LayerSpec {
                norm: NormKind::Layer,
                epsilon: 1e-6,
                norm_names: ["norm1", "norm2"].map(name),
                post_norm_names: None,
                attention: full_attention(&spec, QkvNames::Fused(name("qkv")), name("out")),
                mlp: plain_mlp(&spec, ["up", "down"].map(name), Activation::GeluExact),
                scales: None,
            }
        };
        Ok(EncoderConfig {
            hidden,
            stem: Stem::Patches(PatchStemSpec {
                name: "kite.stem".to_owned(),
                kernel: vec![3, patch, patch],
                has_bias: true,
                class: None,
                positions: Some(("kite.positions".to_owned(), vec![TOKENS as usize, hidden])),
                norm: None,
            }),
            layers: (0..spec.layers).map(layer).collect(),
            tail: Some(TailSpec::default()),
            projector: Some(ProjectorSpec {
                merged: 1,
                hidden,
                norm: None,
                map: ProjectorMap::Mlp(
                    ["projector.up", "projector.down"].map(str::to_owned),
                    outputs,
                    Activation::GeluExact,
                    true,
                ),
                outputs,
                newline: None,
            }),
            deepstack: Vec::new(),
            arrangement: Arrangement::Tiles(Tiles {
                channels: 3,
                side,
                patch,
                has_class: false,
                rule: TileRule::Shuffled(1),
            }),
            ignored: Vec::new(),
            fields: &FIELDS,
        })
    }

    fn llm(&self, source: &BlockSource<'_>) -> dflop_executor::models::Result<LlmConfig> {
        decoder(source, &DecoderDefaults { prefix: "kite.text.", ..DecoderDefaults::ALONE })
    }
}

fn config() -> Value {
    let text = json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1215});
    json!({"model_type": "kite_vlm", "kite_config": {"width": 12, "layers": 2}, "text_config": text})
}

fn sizes() -> ModelFamilies {
    ModelFamilies::default().with(KiteSizes)
}

fn model() -> CostModel {
    let documents = Documents { config: config(), ..Documents::default() };
    let spec = sizes().model("kite", &documents).expect("the family reads its configuration");
    CostModel::new(spec, DeviceRate::preset("cpu").expect("a known device"))
}

fn preparer(model: &CostModel) -> PreparerBuilder {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs/chatml");
    let families = ProcessorFamilies::default().with(KiteProcessor);
    Preparer::builder_with_families(model.spec(), &families)
        .tokenizer(Tokenizer::open(tokenizer).expect("the tokenizer is recorded"))
}

#[test]
fn an_own_family_is_read_by_its_model_type_and_carried() {
    let model = model();
    assert_eq!((model.spec().family, model.spec().vision.unwrap().family), (KITE, KITE));
    let documents = Documents { config: config(), ..Documents::default() };
    let unknown = ModelFamilies::default().model("kite", &documents).unwrap_err().to_string();
    assert!(unknown.starts_with("`config.json`: `model_type` = \"kite_vlm\" is unknown"), "{unknown}");
    let error = Preparer::builder(model.spec()).build().unwrap_err().to_string();
    assert!(error.contains("`kite_vlm` has no processor, known are llava_onevision"), "{error}");
    let error = ModelConfig::from_spec(model.spec()).unwrap_err().to_string();
    assert!(error.contains("`kite_vlm` has no blocks, known are llama"), "{error}");
}

#[test]
fn an_own_image_processor_is_read_by_its_type() {
    let families = ProcessorFamilies::default().with(KiteProcessor);
    let read = |side: u32| {
        families
            .read_image_processor(&json!({"image_processor_type": "KiteImageProcessorFast", "side": side}))
    };
    assert!(read(12).is_ok());
    let error = read(13).unwrap_err().to_string();
    assert!(error.contains("`preprocessor_config.json`: `side` must be 12, found 13"), "{error}");
}

#[test]
fn samples_of_an_own_family_are_as_long_as_planned() {
    let model = model();
    let preparer = preparer(&model).build().unwrap();
    for sizes in [vec![], vec![[30, 20]], vec![[12, 12], [7, 40]]] {
        let image = |[width, height]: [u32; 2]| {
            let pixels = vec![9; 3 * (width * height) as usize];
            Media::Image(RgbImage { width, height, pixels, is_truncated: false })
        };
        let images = sizes.iter().enumerate();
        let mut fields: Vec<Field> = images
            .map(|(at, &size)| Field { extension: format!("{at}.png").into(), media: image(size) })
            .collect();
        fields.push(Field { extension: "txt".into(), media: Media::Text("a kite over the sea".to_owned()) });
        let sample = Sample::new("key", fields);
        let text_tokens = preparer.text_counter().count(&sample).unwrap().tokens;
        let images = sizes.iter().map(|&[width, height]| ImageSize { width, height }).collect();
        let planned = model.predict(&SampleShape { text_tokens, images, ..SampleShape::default() }).unwrap();
        let delivered = preparer.prepare(&sample).unwrap();
        assert_eq!(planned.tokens as usize, delivered.tokens(), "{sizes:?}");
        assert_eq!(delivered.images.len(), sizes.len());
    }
}

#[test]
fn an_own_family_trains_on_planned_steps() {
    let cost_model = model();
    let directory = tempfile::tempdir().unwrap();
    let mut tar = TarBytes::new();
    for number in 0..8u32 {
        tar = tar.file(&format!("{number}.txt"), format!("kite {number} over the sea").as_bytes());
        if number % 2 == 0 {
            tar = tar.file(&format!("{number}.png"), &png(20 + number, 30, number));
        }
    }
    let shard = directory.path().join("shard-000.tar");
    std::fs::write(&shard, tar.finish()).unwrap();
    let counter = Arc::new(preparer(&cost_model).build().unwrap().text_counter());
    let options = IndexOptions { token_counts: TokenCounts::Of(counter), ..IndexOptions::default() };
    let shards = expand_shards(&[shard.display().to_string()]).unwrap();
    let index = Arc::new(Index::open_or_build(shards, &options).unwrap());

    let families = BlockFamilies::default().sizes(sizes()).with(KiteBlocks);
    let config = families.model(&config()).unwrap();
    assert_eq!(families.model_from_spec(cost_model.spec()).unwrap().vision, config.vision);
    let layout = |module: ModuleKind| ModuleParallelism::even(module, config.layers(module), 1);
    let modules = config.modules().into_iter().map(layout).collect();
    let frozen = FrozenModules::default();
    let job =
        Arc::new(Job::new(config.clone(), frozen, modules, ScheduleKind::OneForwardOneBackward).unwrap());
    let world = threads::world(job.world_size(), Settings::default().wait(Duration::from_secs(20))).unwrap();
    std::thread::scope(|scope| {
        for comm in world {
            scope.spawn(|| {
                let (device, places) = (Cpu::new(1).unwrap(), job.roles(comm.rank()).unwrap());
                let planner = StepPlanner::builder(index.clone(), cost_model.clone())
                    .global_batch(4)
                    .shuffle(Shuffle::None)
                    .work(500)
                    .microbatches(2)
                    .stages(vec![1, 1])
                    .module_dp_sizes(vec![1, 1])
                    .build()
                    .unwrap();
                let mut reader = InputReader::new(
                    device.clone(),
                    job.clone(),
                    places,
                    planner,
                    &preparer(&cost_model),
                    |loader| loader.workers(1).steps(2),
                )
                .unwrap();
                let stored = Activations::Stored;
                let mut pipeline = join_job(Box::new(comm), &job, &device, frozen, stored, &Seed(1)).unwrap();
                while let Some(step) = reader.next(pipeline.comm()).unwrap() {
                    assert!(step.skipped.is_empty(), "{:?}", step.skipped);
                    let outcome = pipeline.step(&step.rank_step).unwrap();
                    assert!(outcome.loss.is_finite() && outcome.loss > 0.0);
                    for (_, stage) in pipeline.stages() {
                        let gradients = stage.parameters().gradients(&device).unwrap();
                        assert!(!gradients.is_empty());
                        let is_some = |values: &Vec<f32>| values.iter().any(|&value| value != 0.0);
                        assert!(gradients.values().any(is_some));
                    }
                }
            });
        }
    });
}
