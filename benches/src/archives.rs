//! Writes shards to memory and to disk, and encodes images that cost about as much to decode as photos.

use std::path::Path;

use dflop_loader::write::ShardWriter;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

use crate::Random;
use crate::planning::image_size;

/// Maximum shard size on disk, in bytes.
const SHARD_BYTES: u64 = 10 << 20;
/// Period of samples without an image: every fifth sample.
const TEXT_ONLY_PERIOD: usize = 5;

/// JPEG quality, out of 100, at which the texture needs about as many bytes per pixel as photos.
const QUALITY: u8 = 80;
/// Pixels between the random texture values, and the amplitude of the values.
const OCTAVES: [(usize, f64); 3] = [(48, 60.0), (12, 24.0), (3, 12.0)];

/// Creates a tar archive with `samples` samples, each a `.jpg` with `image_bytes` zeros, a `.txt` and a
/// `.json`.
///
/// # Panics
/// Never: writes to memory succeed.
#[must_use]
pub fn archive(samples: usize, image_bytes: usize) -> Vec<u8> {
    let image = vec![0; image_bytes];
    let mut archive = tar::Builder::new(Vec::new());
    for sample in 0..samples {
        let fields: [(&str, &[u8]); 3] =
            [("jpg", &image), ("txt", b"a red kite over the sea"), ("json", b"{}")];
        for (extension, payload) in fields {
            let mut header = tar::Header::new_ustar();
            header.set_size(payload.len() as u64);
            header.set_mode(0o644);
            let name = format!("{sample:06}.{extension}");
            archive.append_data(&mut header, name, payload).expect("memory can be written");
        }
    }
    archive.into_inner().expect("memory can be written")
}

/// Writes shards with small samples: a short text and, in four out of five samples, an image header without
/// pixels, which is all that an index reads.
///
/// # Panics
/// If the directory cannot be written or already contains shards.
pub fn write_headers_only(directory: &Path, samples: usize) {
    let mut random = Random::new(41);
    let mut writer = ShardWriter::builder(directory)
        .shard_bytes(SHARD_BYTES)
        .index(false)
        .build()
        .expect("an empty directory");
    for sample in 0..samples {
        let text = "a kite over the sea ".repeat(1 + random.log_normal(4.0, 0.6).min(24.0) as usize);
        let image = png_header(&mut random);
        let mut fields = vec![("txt", text.as_bytes())];
        if sample % TEXT_ONLY_PERIOD != 0 {
            fields.push(("png", &image));
        }
        writer.write(&format!("{sample:06}"), &fields).expect("the directory can be written");
    }
    writer.finish().expect("the directory can be written");
}

/// Creates a PNG signature and IHDR chunk, with a zero checksum.
fn png_header(random: &mut Random) -> Vec<u8> {
    let size = image_size(random);
    let mut header = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    header.extend(size.width.to_be_bytes());
    header.extend(size.height.to_be_bytes());
    header.extend([8, 2, 0, 0, 0, 0, 0, 0, 0]);
    header
}

/// Encodes a textured color gradient as a baseline JPEG, color at half the resolution.
///
/// # Panics
/// If a side is zero.
#[must_use]
pub fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let light = texture(width.into(), height.into());
    let shade = |position: usize, length: u16| 60.0 + 120.0 * position as f64 / f64::from(length);
    let mut pixels = Vec::with_capacity(3 * light.len());
    for (row, y) in light.chunks_exact(width.into()).zip(0..) {
        for (light, x) in row.iter().zip(0..) {
            let color = [shade(x, width), shade(y, height), 110.0];
            pixels.extend(color.map(|channel| (channel + light) as u8));
        }
    }
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, QUALITY);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    encoder.encode(&pixels, width, height, ColorType::Rgb).expect("the image has pixels");
    file
}

/// Sums octaves of random values, interpolated linearly along a row.
fn texture(width: usize, height: usize) -> Vec<f64> {
    let mut random = Random::new(31);
    let mut light = vec![0.0; width * height];
    for (cell, amplitude) in OCTAVES {
        let columns = width / cell + 2;
        let mut knots = Vec::new();
        for (y, row) in light.chunks_exact_mut(width).enumerate() {
            if y % cell == 0 {
                knots = (0..columns).map(|_| amplitude * (2.0 * random.fraction() - 1.0)).collect();
            }
            for (x, light) in row.iter_mut().enumerate() {
                let (knot, part) = (x / cell, (x % cell) as f64 / cell as f64);
                *light += knots[knot] * (1.0 - part) + knots[knot + 1] * part;
            }
        }
    }
    light
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::index::{Index, IndexOptions};
    use dflop_loader::media::{ImageLimits, decode_rgb};
    use dflop_loader::shard::expand_shards;
    use dflop_loader::shard::tar::SliceEntries;

    #[test]
    fn archives_hold_three_entries_a_sample() {
        let entries = SliceEntries::new(archive(7, 1_000).into());
        assert_eq!(entries.filter_map(Result::ok).count(), 21);
    }

    #[test]
    fn headers_are_enough_for_the_index() {
        let directory = tempfile::tempdir().unwrap();
        write_headers_only(directory.path(), 50);
        let shards = expand_shards(&[directory.path().to_str().unwrap()]).unwrap();
        let index = Index::open_or_build(shards, &IndexOptions::default()).unwrap();
        assert_eq!((index.len(), index.skipped().len()), (50, 0));
        assert_eq!(index.sample(1).fields().count(), 2);
    }

    #[test]
    fn images_decode_and_compress_as_photos_do() {
        let file = jpeg(587, 520);
        let image = decode_rgb(&file, &ImageLimits::default()).unwrap();
        assert_eq!((image.width, image.height), (587, 520));
        let bits_per_pixel = file.len() as f64 * 8.0 / (587.0 * 520.0);
        assert!((1.0..2.5).contains(&bits_per_pixel), "{bits_per_pixel} bits a pixel");
    }
}
