//! Creates a tiny model for a family, the model files, and a shard with samples for it.

use std::path::Path;
use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_executor::models::ModelConfig;
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::model::ModelDirectory;
use dflop_loader::processors::{Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::shard::expand_shards;
use dflop_loader::{Shuffle, StepPlanner, StepPlannerBuilder};
use dflop_tests::media::{jpeg, png, wav};
use dflop_tests::tar::TarBytes;
use serde_json::{Value, json};

/// Vocabulary size of the recorded tokenizer.
const VOCABULARY: u64 = 1215;

/// Model family, with the accepted media.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    InternVl,
    LlavaOneVision,
    Qwen25Vl,
    Qwen2Audio,
}

impl Family {
    pub(crate) const ALL: [Self; 4] =
        [Self::InternVl, Self::LlavaOneVision, Self::Qwen25Vl, Self::Qwen2Audio];

    const fn directory(self) -> &'static str {
        match self {
            Self::InternVl => "internvl",
            Self::LlavaOneVision => "llava_onevision",
            Self::Qwen25Vl => "qwen2_5_vl",
            Self::Qwen2Audio => "qwen2_audio",
        }
    }

    /// Returns the recorded configuration with two layers, the tokenizer vocabulary, and windows as long as
    /// the processor's.
    fn config(self) -> Value {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/executor").join(self.directory());
        let text =
            std::fs::read_to_string(golden.join("config.json")).expect("the configuration is recorded");
        let mut config: Value = serde_json::from_str(&text).expect("it is JSON");
        config["text_config"]["vocab_size"] = VOCABULARY.into();
        config["text_config"]["max_position_embeddings"] = 512.into();
        config["text_config"]["num_hidden_layers"] = 2.into();
        config["text_config"]["layer_types"] = json!(["full_attention", "full_attention"]);
        if self == Self::Qwen2Audio {
            config["audio_config"]["num_mel_bins"] = 16.into();
            config["audio_config"]["max_source_positions"] = 1500.into();
        }
        config
    }

    fn preprocessor(self) -> Option<Value> {
        match self {
            Self::InternVl => Some(json!({"size": {"height": 16, "width": 16}, "crop_to_patches": true,
                "min_patches": 1, "max_patches": 4})),
            Self::Qwen25Vl => Some(json!({"min_pixels": 64, "max_pixels": 1024, "patch_size": 2,
                "merge_size": 2, "temporal_patch_size": 2})),
            Self::LlavaOneVision | Self::Qwen2Audio => None,
        }
    }

    pub(crate) fn hears(self) -> bool {
        self == Self::Qwen2Audio
    }
}

/// Sample: a text, with zero, one or two media for the model's encoder.
#[derive(Debug, Clone, Default)]
pub(crate) struct Content {
    /// Seed that makes texts and media different.
    pub(crate) number: usize,
    pub(crate) words: usize,
    /// Image widths in pixels, or clip lengths in hundredths of a second.
    pub(crate) media: Vec<u32>,
    /// Whether the coded data of the first medium is overwritten after the header.
    pub(crate) is_damaged: bool,
}

/// Creates samples with different sizes, half of them with media.
pub(crate) fn mixed(samples: usize) -> Vec<Content> {
    let content = |number: usize| {
        let size = (17 + number * 13 % 40) as u32;
        let media = match number % 4 {
            0 => vec![size],
            2 if number.is_multiple_of(3) => vec![size, 60 - size],
            _ => Vec::new(),
        };
        Content { number, words: 2 + number * 7 % 19, media, is_damaged: false }
    };
    (0..samples).map(content).collect()
}

/// Model and dataset in a temporary directory, removed when the value is dropped.
pub(crate) struct Corpus {
    _directory: tempfile::TempDir,
    pub(crate) model: ModelConfig,
    spec: ModelSpec,
    pub(crate) index: Arc<Index>,
}

impl Corpus {
    pub(crate) fn new(family: Family, samples: &[Content]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(directory.path().join(name), bytes).expect("the directory can be written");
        };
        let config = family.config();
        write("config.json", config.to_string().as_bytes());
        if let Some(preprocessor) = family.preprocessor() {
            write("preprocessor_config.json", preprocessor.to_string().as_bytes());
        }
        write("shard-000.tar", &archive(family, samples));
        let spec =
            ModelDirectory::open(directory.path()).and_then(|model| model.spec()).expect("a known model");
        let model = ModelConfig::from_config(&config).expect("the model can be built");
        let counter = preparer(&spec).build().expect("the tokenizer fits").text_counter();
        let options =
            IndexOptions { token_counts: TokenCounts::Of(Arc::new(counter)), ..IndexOptions::default() };
        let shards = expand_shards(&[directory.path().join("shard-000.tar").display().to_string()]);
        let index = Index::open_or_build(shards.expect("one shard"), &options).expect("the index is made");
        assert_eq!((index.len(), index.skipped().len()), (samples.len() as u64, 0));
        Self { _directory: directory, model, spec, index: Arc::new(index) }
    }

    pub(crate) fn preparer(&self) -> PreparerBuilder {
        preparer(&self.spec)
    }

    /// Plans steps with this many samples, in shard order.
    pub(crate) fn planner(&self, global_batch: u64) -> StepPlannerBuilder {
        let model = CostModel::new(self.spec.clone(), DeviceRate::preset("cpu").expect("a known device"));
        StepPlanner::builder(self.index.clone(), model)
            .global_batch(global_batch)
            .shuffle(Shuffle::None)
            .work(500)
    }

    /// Returns the number of bytes in the sample fields with this extension, or in all fields.
    pub(crate) fn bytes(&self, sample: u64, extension: Option<&str>) -> u64 {
        let fields = self.index.sample(sample).fields();
        let wanted = fields.filter(|field| extension.is_none_or(|own| field.extension.ends_with(own)));
        wanted.map(|field| field.bytes).sum()
    }

    /// Returns whether a sample has work for the encoder.
    pub(crate) fn has_media(&self, sample: u64) -> bool {
        self.index.sample(sample).fields().any(|field| field.extension != "txt")
    }
}

fn preparer(spec: &ModelSpec) -> PreparerBuilder {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs/chatml");
    Preparer::builder(spec).tokenizer(Tokenizer::open(tokenizer).expect("the tokenizer is recorded"))
}

fn archive(family: Family, samples: &[Content]) -> Vec<u8> {
    let mut tar = TarBytes::new();
    for content in samples {
        let number = content.number;
        let key = format!("sample-{number:03}");
        let words: Vec<String> = (0..content.words).map(|word| format!("kite {}", number + word)).collect();
        tar = tar.file(&format!("{key}.txt"), words.join(" ").as_bytes());
        for (place, &size) in content.media.iter().enumerate() {
            let (name, mut bytes) = medium(family, (number + place) as u32, size);
            if content.is_damaged && place == 0 {
                let start = bytes.len() / 2;
                bytes[start..].fill(0);
            }
            tar = tar.file(&format!("{key}.{place}.{name}"), &bytes);
        }
    }
    tar.finish()
}

fn medium(family: Family, seed: u32, size: u32) -> (&'static str, Vec<u8>) {
    match family {
        Family::Qwen2Audio => ("wav", wav(160 * size, 16_000)),
        _ if seed.is_multiple_of(3) => ("png", png(size, 8 + seed * 5 % 30, seed)),
        _ => ("jpg", jpeg(size, 8 + seed * 5 % 30, seed)),
    }
}
