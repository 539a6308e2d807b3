//! Runs the plain loop that a loader is compared with: decode, resize, normalize, and nothing else.
//!
//! All JPEG entries in the shards are read into memory first; then one thread calls `zune-jpeg` and
//! `fast_image_resize` directly on each image in turn and writes normalized f32 planes into the same buffer,
//! over and over. A loader's additional cost is reading, grouping, queues and batches. The loop shares no
//! code with the loader except shard pattern expansion, ignores EXIF orientations, and checks only what the
//! decoder checks. Times are thread CPU times, so that other processes disturb them little.
#![expect(clippy::print_stdout, reason = "the one JSON line is what the program is for")]

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use dflop_loader::shard::expand_shards;
use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

const SIDE: u32 = 224;
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];

type BoxError = Box<dyn Error + Send + Sync>;

#[derive(Debug, Serialize)]
struct Report {
    codec: &'static str,
    is_scaled: bool,
    #[serde(rename = "pictures")]
    images: usize,
    cpu_seconds: f64,
    cpu_ms_per_picture: f64,
    decode_ms: f64,
    resize_ms: f64,
    normalize_ms: f64,
}

fn main() -> ExitCode {
    let mut patterns: Vec<String> = std::env::args().skip(1).collect();
    let arguments = patterns.len();
    patterns.retain(|argument| argument != "--scaled-decode");
    let is_scaled = patterns.len() < arguments;
    if is_scaled && !cfg!(feature = "turbojpeg") {
        eprint("error: --scaled-decode needs a build with `--features turbojpeg`");
        return ExitCode::from(2);
    }
    if patterns.is_empty() || patterns.iter().any(|pattern| pattern.starts_with('-')) {
        eprint(
            "usage: bare_loop [--scaled-decode] DATASET...   (directories of shards, shards, or patterns)",
        );
        return ExitCode::from(2);
    }
    match run(&patterns, is_scaled) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "a program says on stderr why it failed")]
fn eprint(message: &str) {
    eprintln!("{message}");
}

fn run(patterns: &[String], is_scaled: bool) -> Result<(), BoxError> {
    let mut images = Vec::new();
    for shard in expand_shards(patterns)? {
        let path = shard.path().ok_or_else(|| format!("`{}` is not a file", shard.url))?;
        read_images(path, &mut images).map_err(|error| format!("shard `{}`: {error}", shard.url))?;
    }
    if images.is_empty() {
        return Err("expected `.jpg` entries, found none in the shards".into());
    }
    let report = measure(&images, is_scaled)?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Reads all `.jpg` entries from an uncompressed shard.
fn read_images(path: &Path, images: &mut Vec<Vec<u8>>) -> Result<(), BoxError> {
    let mut archive = tar::Archive::new(File::open(path)?);
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.path()?.extension().is_some_and(|extension| extension == "jpg") {
            let mut bytes = Vec::with_capacity(entry.size() as usize);
            entry.read_to_end(&mut bytes)?;
            images.push(bytes);
        }
    }
    Ok(())
}

fn measure(images: &[Vec<u8>], is_scaled: bool) -> Result<Report, BoxError> {
    let mut codec = codec::Codec::new(is_scaled)?;
    let mut pixels = Vec::new();
    let mut square = Image::new(SIDE, SIDE, PixelType::U8x3);
    let mut planes = vec![0.0; 3 * (SIDE * SIDE) as usize];
    let mut resizer = Resizer::new();
    let mut spent_seconds = [0.0; 3];
    let start = thread_cpu_seconds();
    for bytes in images {
        let begun = thread_cpu_seconds();
        let (width, height) = codec.decode(bytes, &mut pixels)?;
        let decoded = thread_cpu_seconds();
        resize(&mut resizer, &pixels, width, height, &mut square)?;
        let resized = thread_cpu_seconds();
        normalize(square.buffer(), &mut planes);
        std::hint::black_box(&planes);
        let normalized = thread_cpu_seconds();
        spent_seconds[0] += decoded - begun;
        spent_seconds[1] += resized - decoded;
        spent_seconds[2] += normalized - resized;
    }
    let cpu_seconds = thread_cpu_seconds() - start;
    let per_image_ms = |seconds: f64| seconds * 1e3 / images.len() as f64;
    let [decode_ms, resize_ms, normalize_ms] = spent_seconds.map(per_image_ms);
    Ok(Report {
        codec: codec::NAME,
        is_scaled,
        images: images.len(),
        cpu_seconds,
        cpu_ms_per_picture: per_image_ms(cpu_seconds),
        decode_ms,
        resize_ms,
        normalize_ms,
    })
}

#[cfg(not(feature = "turbojpeg"))]
mod codec {
    use zune_core::bytestream::ZCursor;
    use zune_core::colorspace::ColorSpace;
    use zune_core::options::DecoderOptions;
    use zune_jpeg::JpegDecoder;

    use super::BoxError;

    pub(super) const NAME: &str = "zune-jpeg";

    pub(super) struct Codec;

    impl Codec {
        #[expect(clippy::unnecessary_wraps, reason = "the other codec can fail here")]
        pub(super) fn new(_is_scaled: bool) -> Result<Self, BoxError> {
            Ok(Self)
        }

        /// Decodes a JPEG to RGB; returns width and height.
        #[expect(clippy::unused_self, reason = "the other codec keeps its tables")]
        pub(super) fn decode(&mut self, bytes: &[u8], pixels: &mut Vec<u8>) -> Result<(u32, u32), BoxError> {
            let options = DecoderOptions::new_fast().jpeg_set_out_colorspace(ColorSpace::RGB);
            let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
            decoder.decode_headers()?;
            let (width, height) = decoder.dimensions().ok_or("the image has no size")?;
            pixels.resize(3 * width * height, 0);
            decoder.decode_into(pixels)?;
            Ok((u32::try_from(width)?, u32::try_from(height)?))
        }
    }
}

#[cfg(feature = "turbojpeg")]
mod codec {
    use turbojpeg::{Decompressor, Image, PixelFormat, ScalingFactor};

    use super::{BoxError, SIDE};

    pub(super) const NAME: &str = "libjpeg-turbo";
    const FACTORS: [ScalingFactor; 4] =
        [ScalingFactor::ONE_EIGHTH, ScalingFactor::ONE_QUARTER, ScalingFactor::ONE_HALF, ScalingFactor::ONE];

    pub(super) struct Codec {
        decoder: Decompressor,
        is_scaled: bool,
    }

    impl Codec {
        pub(super) fn new(is_scaled: bool) -> Result<Self, BoxError> {
            Ok(Self { decoder: Decompressor::new()?, is_scaled })
        }

        /// Decodes a JPEG to RGB; returns width and height.
        pub(super) fn decode(&mut self, bytes: &[u8], pixels: &mut Vec<u8>) -> Result<(u32, u32), BoxError> {
            let header = self.decoder.read_header(bytes)?;
            let shorter = header.width.min(header.height);
            let fills = |factor: &&ScalingFactor| shorter * factor.num() >= SIDE as usize * factor.denom();
            let smallest = FACTORS.iter().find(fills).filter(|_| self.is_scaled);
            let factor = *smallest.unwrap_or(&ScalingFactor::ONE);
            self.decoder.set_scaling_factor(factor)?;
            let (width, height) = (factor.scale(header.width), factor.scale(header.height));
            pixels.resize(3 * width * height, 0);
            let image =
                Image { pixels: &mut pixels[..], width, pitch: 3 * width, height, format: PixelFormat::RGB };
            self.decoder.decompress(bytes, image)?;
            Ok((u32::try_from(width)?, u32::try_from(height)?))
        }
    }
}

/// Scales the center crop, so that the shorter image side fills the square.
fn resize(
    resizer: &mut Resizer,
    pixels: &[u8],
    width: u32,
    height: u32,
    square: &mut Image<'_>,
) -> Result<(), BoxError> {
    let source = ImageRef::new(width, height, pixels, PixelType::U8x3)?;
    let side = f64::from(SIDE);
    let scale = side / f64::from(width.min(height));
    let [(left, box_width), (top, box_height)] = [width, height].map(|length| {
        let length = f64::from(length);
        let resized = (length * scale).round_ties_even().max(side);
        let start = (resized - side) / 2.0 / resized * length;
        (start, (side / resized * length).min(length - start))
    });
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .crop(left, top, box_width, box_height);
    Ok(resizer.resize(&source, square, &options)?)
}

/// Writes red, green and blue planes as `(value / 255 - mean) / deviation`.
fn normalize(square: &[u8], planes: &mut [f32]) {
    let pixels = square.len() / 3;
    for (channel, plane) in planes.chunks_exact_mut(pixels).enumerate() {
        let scale = 1.0 / (255.0 * DEVIATION[channel]);
        let bias = -MEAN[channel] / DEVIATION[channel];
        for (value, pixel) in plane.iter_mut().zip(square.chunks_exact(3)) {
            *value = f32::from(pixel[channel]) * scale + bias;
        }
    }
}

fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
