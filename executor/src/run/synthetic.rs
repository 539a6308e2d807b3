//! Generates a mix of texts and tiled images to train a small model on.
//!
//! Sizes vary as in real mixes, and the texts can be learned: a word follows from the previous word nine
//! times in ten, so a model that learns only this has halved the loss. The same table gives the same bytes.

use std::path::{Path, PathBuf};

use dflop_loader::write::ShardWriter;
use dflop_synthetic::{Rng, tiles_jpeg};
use serde_json::{Value, json};

use super::cache_directory::CacheDirectory;
use super::config::{GenerateTable, ModelTable};
use super::inline::{MODEL, write_files};
use crate::{Error, Result};

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

/// Generated dataset with the model files.
#[derive(Debug)]
pub(super) struct Generated(CacheDirectory);

impl Generated {
    /// Generates the dataset in a directory that is kept, unless it exists.
    pub(super) fn make(table: &GenerateTable, model: &ModelTable) -> Result<Self> {
        check(table)?;
        // Everything that the files depend on.
        let contents = format!("{table:?} {:?} {:?}", model.config, model.preprocessor);
        CacheDirectory::open_or_make("mix", &contents, |directory| table.write(directory, model)).map(Self)
    }

    /// Returns the shard pattern.
    pub(super) fn shards(&self) -> String {
        self.0.path.join("shards").display().to_string()
    }

    /// Returns the model's directory, with a tokenizer and, if the configuration has one, `config.json`.
    pub(super) fn model(&self) -> PathBuf {
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
pub(super) fn write_model(directory: &Path, table: &GenerateTable, model: &ModelTable) -> Result<()> {
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
