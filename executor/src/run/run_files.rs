//! Finds or writes the files that a run reads: model, tokenizer and shards.
//!
//! Written are model files that the configuration contains inline, and a generated mix of texts and tiled
//! images to train a small model on. Sizes vary as in real mixes, and the texts can be learned: a word
//! follows from the previous word nine times in ten, so a model that learns only this has halved the loss.
//! The same table gives the same bytes.

use std::path::{Path, PathBuf};

use dflop_loader::write::ShardWriter;
use dflop_synthetic::{Rng, tiles_jpeg};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::cache_directory::CacheDirectory;
use super::config::{GenerateTable, ModelTable, RunConfig};
use crate::{Error, Result};

/// Name of the model file directory, in the cached directory.
const MODEL: &str = "model";

/// Number of words, and below the linear congruential step from a word to the next, of full period.
const WORDS: usize = 64;
const FACTOR: usize = 5;
const ADDEND: usize = 17;
/// Percentage of words that follow from the previous word.
const FOLLOWING: usize = 90;
/// Samples per shard.
const SHARD_SAMPLES: u64 = 128;

/// Special tokens that model families and chat templates know by name; their ids start after the words.
const SPECIAL: [&str; 16] = [
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<video>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
];

/// Files that a run reads.
#[derive(Debug)]
pub(super) struct RunFiles {
    /// Directory with the model files, including weights if the model is pretrained.
    pub(super) model_directory: PathBuf,
    /// `tokenizer.json` or its directory.
    pub(super) tokenizer: PathBuf,
    /// Shard patterns; none if the shards were not generated yet.
    pub(super) shards: Vec<String>,
    /// Keeps the directory with the written files in use.
    _written: Option<Written>,
}

/// Directory with the files that the configuration describes.
#[expect(dead_code, reason = "held for what happens when they are dropped")]
#[derive(Debug)]
enum Written {
    Dataset(Generated),
    Model(CacheDirectory),
    Scratch(TempDir),
}

impl RunFiles {
    /// Generates the files that the configuration describes, in directories that are kept.
    pub(super) fn prepare(config: &RunConfig) -> Result<Self> {
        if let Some(table) = &config.data.generate {
            // A generated dataset comes with the model files.
            let generated = Generated::make(table, &config.model)?;
            let files = Self::at(config, generated.model(), vec![generated.shards()]);
            return Ok(Self { _written: Some(Written::Dataset(generated)), ..files });
        }
        if config.model.directory.is_some() {
            return Ok(Self::at(config, PathBuf::new(), config.data.shards.clone()));
        }
        let inline = write_inline(&config.model)?;
        let files = Self::at(config, inline.path.join(MODEL), config.data.shards.clone());
        Ok(Self { _written: Some(Written::Model(inline)), ..files })
    }

    /// Writes the files of a model that the configuration contains into a temporary directory, which is
    /// removed with the result; generates no shards.
    pub(super) fn without_dataset(config: &RunConfig) -> Result<Self> {
        let scratch = tempfile::tempdir()?;
        let model = scratch.path().join(MODEL);
        match &config.data.generate {
            Some(table) => write_model(&model, table, &config.model)?,
            None => write_files(&model, &config.model)?,
        }
        let files = Self::at(config, model, config.data.shards.clone());
        Ok(Self { _written: Some(Written::Scratch(scratch)), ..files })
    }

    /// - `written`: directory with the files that the configuration contains
    fn at(config: &RunConfig, written: PathBuf, shards: Vec<String>) -> Self {
        let model_directory = config.model.directory.clone().unwrap_or_else(|| written.clone());
        let is_generated = config.data.generate.is_some();
        let beside = if is_generated { written } else { model_directory.clone() };
        let tokenizer = config.data.tokenizer.clone().unwrap_or(beside);
        Self { model_directory, tokenizer, shards, _written: None }
    }
}

/// Writes the files into a directory that is kept, unless it exists.
fn write_inline(model: &ModelTable) -> Result<CacheDirectory> {
    // Everything that the files depend on.
    let contents = format!("{:?} {:?}", model.config, model.preprocessor);
    CacheDirectory::open_or_make("model", &contents, |directory| write_files(&directory.join(MODEL), model))
}

/// Writes the inline documents into a new directory.
fn write_files(directory: &Path, model: &ModelTable) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let documents = [("config.json", &model.config), ("preprocessor_config.json", &model.preprocessor)];
    for (name, document) in documents {
        if let Some(document) = document {
            std::fs::write(directory.join(name), format!("{document:#}\n"))?;
        }
    }
    Ok(())
}

/// Generated dataset with the model files.
#[derive(Debug)]
struct Generated(CacheDirectory);

impl Generated {
    /// Generates the dataset in a directory that is kept, unless it exists.
    fn make(table: &GenerateTable, model: &ModelTable) -> Result<Self> {
        check(table)?;
        // Everything that the files depend on.
        let contents = format!("{table:?} {:?} {:?}", model.config, model.preprocessor);
        CacheDirectory::open_or_make("mix", &contents, |directory| table.write(directory, model)).map(Self)
    }

    /// Returns the shard pattern.
    fn shards(&self) -> String {
        self.0.path.join("shards").display().to_string()
    }

    /// Returns the model's directory, with a tokenizer and, if the configuration has one, `config.json`.
    fn model(&self) -> PathBuf {
        self.0.path.join(MODEL)
    }
}

fn check(table: &GenerateTable) -> Result<()> {
    let [fewest, most] = table.tiles;
    let is_good = table.samples > 0
        && (0.0..=1.0).contains(&table.image_fraction)
        && (1..=most).contains(&fewest)
        && most <= 256
        && (4..=1024).contains(&table.tile_pixels)
        && table.text_tokens_median >= 1.0
        && table.text_tokens_median.is_finite()
        && (0.0..10.0).contains(&table.text_tokens_sigma)
        && table.text_tokens_max >= 2;
    if is_good { Ok(()) } else { Err(Error::Config(format!("invalid `data.generate`: {table:?}"))) }
}

impl GenerateTable {
    /// Generates the dataset: shards in `shards/` below `directory`; in `model/` the model's files with a
    /// tokenizer for its texts.
    ///
    /// # Errors
    /// [`Error::Config`] for a value out of range; errors from the file system.
    pub fn write(&self, directory: &Path, model: &ModelTable) -> Result<()> {
        check(self)?;
        let shards = ShardWriter::builder(directory.join("shards"));
        let mut shards = shards.shard_samples(SHARD_SAMPLES).build()?;
        for sample in 0..self.samples {
            let mut rng = Rng::new(self.seed, sample);
            let key = format!("sample-{sample:06}");
            let text = text(self, &mut rng);
            if rng.fraction() < self.image_fraction {
                let image = image(self, &mut rng)?;
                shards.write(&key, &[("jpg", &image), ("txt", text.as_bytes())])?;
            } else {
                shards.write(&key, &[("txt", text.as_bytes())])?;
            }
        }
        shards.finish()?;
        write_model_files(&directory.join(MODEL), model)
    }
}

/// Writes only the model files, after a table check.
fn write_model(directory: &Path, table: &GenerateTable, model: &ModelTable) -> Result<()> {
    check(table)?;
    write_model_files(directory, model)
}

/// Writes the model files, and the tokenizer for the generated texts.
fn write_model_files(files: &Path, model: &ModelTable) -> Result<()> {
    write_files(files, model)?;
    let special = json!({"eos_token": SPECIAL[1], "unk_token": SPECIAL[0]});
    for (name, document) in [("tokenizer.json", tokenizer()), ("tokenizer_config.json", special)] {
        std::fs::write(files.join(name), format!("{document:#}\n"))?;
    }
    Ok(())
}

/// Writes one-token words; the end-of-text token counts as well.
fn text(table: &GenerateTable, rng: &mut Rng) -> String {
    let tokens = table.text_tokens_median * (table.text_tokens_sigma * normal(rng)).exp();
    let tokens = (tokens as u32).clamp(2, table.text_tokens_max);
    let mut word = rng.below(WORDS);
    let mut words = Vec::with_capacity(tokens as usize);
    for _ in 1..tokens {
        words.push(format!("w{word}"));
        word = if rng.chance(FOLLOWING) { (FACTOR * word + ADDEND) % WORDS } else { rng.below(WORDS) };
    }
    words.join(" ")
}

/// Draws from the standard normal distribution, by Box and Muller.
fn normal(rng: &mut Rng) -> f64 {
    // 1 - u is above 0, so that the logarithm is finite.
    let radius = (-2.0 * (1.0 - rng.fraction()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.fraction()).cos()
}

/// Generates an image that is cut into a drawn number of tiles: a rectangle of squares, and the thumbnail.
fn image(table: &GenerateTable, rng: &mut Rng) -> Result<Vec<u8>> {
    let [fewest, most] = table.tiles;
    let tiles = fewest + rng.below((most - fewest + 1) as usize) as u32;
    // An image with several tiles includes a thumbnail tile; a single tile is the image itself.
    let squares = if tiles > 1 { tiles - 1 } else { 1 };
    let rows = (1..=squares)
        .filter(|rows| squares.is_multiple_of(*rows) && rows * rows <= squares)
        .max()
        .unwrap_or(1);
    let (width, height) = (squares / rows * table.tile_pixels, rows * table.tile_pixels);
    let file = tiles_jpeg(width as usize, height as usize, rng);
    file.map_err(|error| Error::Start(format!("could not encode an image: {error}")))
}

/// Returns a whole-word tokenizer.
fn tokenizer() -> Value {
    let word = |id: usize| (format!("w{id}"), json!(id));
    let special = |(at, token): (usize, &&str)| ((*token).to_owned(), json!(WORDS + at));
    let vocab: serde_json::Map<String, Value> =
        (0..WORDS).map(word).chain(SPECIAL.iter().enumerate().map(special)).collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(at, token)| {
            json!({"id": WORDS + at, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": SPECIAL[0]},
    })
}
