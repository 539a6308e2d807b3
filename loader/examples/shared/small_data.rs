//! Shards for the examples: the paths in the arguments, or a small generated shard.

use std::error::Error;
use std::io::Cursor;

use dflop_loader::write::ShardWriter;
use image::{ImageFormat, RgbImage};
use tempfile::TempDir;

/// Returns the shards, and the directory that holds them while it lives, if they were made.
pub(crate) fn shards_or_small_data() -> Result<(Option<TempDir>, Vec<String>), Box<dyn Error>> {
    let shards: Vec<String> = std::env::args().skip(1).collect();
    if !shards.is_empty() {
        return Ok((None, shards));
    }
    let directory = tempfile::tempdir()?;
    let mut writer = ShardWriter::builder(directory.path().join("shards")).build()?;
    for number in 0..32u32 {
        let mut jpeg = Cursor::new(Vec::new());
        RgbImage::new(64 + number * 16, 64).write_to(&mut jpeg, ImageFormat::Jpeg)?;
        let text = "a kite over the sea ".repeat(1 + number as usize % 7);
        writer.write(&format!("{number:04}"), &[("jpg", jpeg.get_ref()), ("txt", text.as_bytes())])?;
    }
    let made = writer.finish()?.shards;
    Ok((Some(directory), made.into_iter().map(|path| path.display().to_string()).collect()))
}
