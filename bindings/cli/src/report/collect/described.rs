//! Describes dataset samples: key, shard, media, tokens, predicted times, and previews for the most expensive
//! samples.
//!
//! Renders small sample previews: an image in 112 pixels, audio peaks, the beginning of a text.

use crate::failure::Failure;
use crate::output::runtime;
use crate::report::document::{Preview, Sample};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dflop_costmodel::{ImageSize, SampleCost, SampleShape};
use dflop_loader::media::{
    AudioLimits, Content, ImageLimits, Modality, RgbImage, decode_audio, decode_rgb, extension_content,
};
use dflop_loader::shard::RawSample;
use dflop_loader::store::redact;
use dflop_loader::{Dataset, read_samples};
use jpeg_encoder::{ColorType, Encoder};
use serde_json::Value;
use std::collections::HashMap;

/// Study samples, each described once.
#[derive(Debug, Default)]
pub(crate) struct SampleTable {
    samples: Vec<Sample>,
    /// Dataset and number of each sample.
    places: Vec<(usize, u64)>,
    by_place: HashMap<(usize, u64), u32>,
}

impl SampleTable {
    /// Returns a sample index; the first use describes the sample.
    ///
    /// - `sample`: sample number in the dataset index
    pub(crate) fn sample_index(
        &mut self,
        datasets: &[Dataset],
        dataset: usize,
        sample: u64,
        cost: &SampleCost,
    ) -> u32 {
        if let Some(&known) = self.by_place.get(&(dataset, sample)) {
            return known;
        }
        let index = u32::try_from(self.samples.len()).unwrap_or(u32::MAX);
        self.samples.push(describe(&datasets[dataset], sample, cost));
        self.places.push((dataset, sample));
        self.by_place.insert((dataset, sample), index);
        index
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.samples.len()
    }

    /// Reads previews of the most expensive samples and returns all samples, with a note if the previews
    /// could not be read.
    ///
    /// - `previews`: largest number of samples with a preview
    pub(crate) fn finish(mut self, datasets: &[Dataset], previews: usize) -> (Vec<Sample>, Option<String>) {
        let mut dearest: Vec<usize> = (0..self.samples.len()).collect();
        dearest.sort_by_key(|&index| (std::cmp::Reverse(self.samples[index].total_ns()), index));
        dearest.truncate(previews);
        let mut note = None;
        for (number, dataset) in datasets.iter().enumerate() {
            let own: Vec<usize> =
                dearest.iter().copied().filter(|&index| self.places[index].0 == number).collect();
            let wanted: Vec<u64> = own.iter().map(|&index| self.places[index].1).collect();
            match read_previews(dataset, &wanted) {
                Ok(found) => {
                    for (index, previews) in own.into_iter().zip(found) {
                        self.samples[index].previews = previews;
                    }
                }
                Err(failure) => {
                    let reason = failure.into_refusal().message;
                    note = Some(format!("Samples have no previews: {reason}"));
                }
            }
        }
        (self.samples, note)
    }
}

fn describe(dataset: &Dataset, sample: u64, cost: &SampleCost) -> Sample {
    let row = dataset.index().sample(sample);
    let mut shape = SampleShape::default();
    row.read_shape(&mut shape);
    let url = dataset.index().shards()[row.shard].url.to_string();
    let shard = redact(&url).rsplit('/').next().unwrap_or_default().to_owned();
    Sample {
        key: row.key().to_owned(),
        shard,
        media: media(&shape),
        tokens: cost.tokens,
        module_ns: cost.module_ns.as_slice().to_vec(),
        previews: Vec::new(),
    }
}

/// Describes the media and the text of a sample, such as `image 1024 × 768, 120 text tokens`.
fn media(shape: &SampleShape) -> String {
    let mut parts = Vec::new();
    let area = |[width, height]: [u32; 2]| u64::from(width) * u64::from(height);
    let sizes = shape.images.iter().map(|image| [image.width, image.height]);
    if let Some([width, height]) = sizes.max_by_key(|&size| area(size)) {
        parts.push(match shape.images.len() {
            1 => format!("image {width} × {height}"),
            images => format!("{images} images up to {width} × {height}"),
        });
    }
    let seconds: f64 =
        shape.audio.iter().map(|clip| clip.frames as f64 / f64::from(clip.sample_rate_hz.max(1))).sum();
    if !shape.audio.is_empty() {
        parts.push(format!("audio {seconds:.1} s"));
    }
    for video in &shape.videos {
        parts.push(format!("video of {} frames {} × {}", video.frames, video.width, video.height));
    }
    if shape.text_tokens > 0 {
        parts.push(format!("{} text tokens", shape.text_tokens));
    }
    parts.join(", ")
}

/// Maximum length of a field that is read for a preview.
const FIELD_BYTES_MAX: u64 = 32 << 20;
/// Longer image side in pixels, and the JPEG quality; the next pair if the JPEG is larger than
/// [`JPEG_BYTES_MAX`].
const SIZES: [(u32, u8); 3] = [(112, 60), (112, 30), (64, 25)];
const JPEG_BYTES_MAX: usize = 6 << 10;
/// Number of peaks for an audio clip.
const PEAKS: usize = 48;
/// Number of text characters.
const TEXT_CHARACTERS: usize = 180;
/// Maximum number of images shown per sample.
const IMAGES_MAX: usize = 2;

/// Reads samples and renders the previews of each. What cannot be decoded has none.
///
/// - `samples`: sample numbers in the dataset index
pub(super) fn read_previews(dataset: &Dataset, samples: &[u64]) -> Result<Vec<Vec<Preview>>, Failure> {
    if samples.is_empty() {
        return Ok(Vec::new());
    }
    let read = runtime()?.block_on(read_samples(dataset.index(), samples, FIELD_BYTES_MAX))?;
    Ok(read.iter().map(previews).collect())
}

fn previews(sample: &RawSample) -> Vec<Preview> {
    let (mut images, mut others) = (Vec::new(), Vec::new());
    for field in &sample.fields {
        let Some(payload) = &field.payload else { continue };
        match extension_content(&field.extension) {
            Some(Content::Medium(Modality::Image)) if images.len() < IMAGES_MAX => {
                images.extend(image(payload));
            }
            Some(Content::Medium(Modality::Audio)) => others.extend(audio(payload)),
            Some(Content::Text) => others.extend(text(payload)),
            Some(Content::Document) => others.extend(document(payload)),
            _ => {}
        }
    }
    images.append(&mut others);
    images
}

fn image(payload: &[u8]) -> Option<Preview> {
    let decoded = decode_rgb(payload, &ImageLimits::default()).ok()?;
    let jpegs = SIZES.into_iter().filter_map(|(side, quality)| jpeg(&decoded, side, quality));
    let mut smallest: Option<Vec<u8>> = None;
    for jpeg in jpegs {
        let is_small = jpeg.len() <= JPEG_BYTES_MAX;
        smallest = Some(jpeg);
        if is_small {
            break;
        }
    }
    let jpeg = smallest.filter(|jpeg| jpeg.len() <= JPEG_BYTES_MAX)?;
    Some(Preview::Image(format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(jpeg))))
}

/// Scales an image down to a longer side of `side` pixels and encodes it.
pub(crate) fn jpeg(image: &RgbImage, side: u32, quality: u8) -> Option<Vec<u8>> {
    let longer = image.width.max(image.height).max(1);
    let scaled = |length: u32| {
        let scaled = u64::from(length) * u64::from(side.min(longer)) / u64::from(longer);
        (scaled as u32).max(1)
    };
    let small = image.resized(ImageSize { width: scaled(image.width), height: scaled(image.height) }).ok()?;
    let mut jpeg = Vec::new();
    let [width, height] = [small.width, small.height].map(|length| u16::try_from(length).unwrap_or(u16::MAX));
    Encoder::new(&mut jpeg, quality).encode(&small.pixels, width, height, ColorType::Rgb).ok()?;
    Some(jpeg)
}

fn audio(payload: &[u8]) -> Option<Preview> {
    let audio = decode_audio(payload, &AudioLimits::default()).ok()?;
    let loudest = audio.samples.iter().fold(0.0_f32, |loudest, value| loudest.max(value.abs()));
    if audio.samples.is_empty() || loudest <= 0.0 {
        return None;
    }
    let length = audio.samples.len().div_ceil(PEAKS);
    let peak = |part: &[f32]| part.iter().fold(0.0_f32, |peak, value| peak.max(value.abs()));
    let peaks = audio.samples.chunks(length).map(|part| (peak(part) / loudest * 100.0).round() as u8);
    Some(Preview::Audio(peaks.collect()))
}

/// Document fields with text for people.
const TEXT_FIELDS: [&str; 4] = ["value", "content", "text", "caption"];

/// Joins the texts in a document; a document without known fields is shown as it is.
fn document(payload: &[u8]) -> Option<Preview> {
    fn collect(value: &Value, is_text: bool, texts: &mut Vec<String>) {
        match value {
            Value::String(text) if is_text => texts.push(text.clone()),
            Value::Array(items) => items.iter().for_each(|item| collect(item, is_text, texts)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    collect(field, TEXT_FIELDS.contains(&name.as_str()), texts);
                }
            }
            _ => {}
        }
    }
    let mut texts = Vec::new();
    if let Ok(document) = serde_json::from_slice::<Value>(payload) {
        collect(&document, false, &mut texts);
    }
    if texts.is_empty() { text(payload) } else { text(texts.join(" · ").as_bytes()) }
}

fn text(payload: &[u8]) -> Option<Preview> {
    // A character may have four bytes, and the last one may be cut.
    let payload = &payload[..payload.len().min(4 * TEXT_CHARACTERS + 4)];
    let text = String::from_utf8_lossy(payload);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let beginning: String = words.chars().take(TEXT_CHARACTERS).collect();
    (!beginning.is_empty()).then_some(Preview::Text(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::{AudioLength, ImageSize};

    #[test]
    fn media_are_described_by_number_and_size() {
        let image = |width, height| ImageSize { width, height };
        let shape = SampleShape {
            text_tokens: 7,
            images: vec![image(10, 10), image(640, 480)],
            audio: vec![AudioLength { frames: 16_000, sample_rate_hz: 16_000 }],
            ..SampleShape::default()
        };
        assert_eq!(media(&shape), "2 images up to 640 × 480, audio 1.0 s, 7 text tokens");
        assert_eq!(media(&SampleShape::default()), "");
    }

    fn noise(width: u32, height: u32) -> RgbImage {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let pixels = (0..width * height * 3).map(|_| next()).collect();
        RgbImage { width, height, pixels, is_truncated: false }
    }

    #[test]
    fn images_shrink_to_their_longer_side_and_small_ones_are_kept() {
        for (image, expected) in
            [(noise(400, 100), (112, 28)), (noise(3, 900), (1, 112)), (noise(8, 4), (8, 4))]
        {
            let jpeg = jpeg(&image, 112, 60).unwrap();
            let small = decode_rgb(&jpeg, &ImageLimits::default()).unwrap();
            assert_eq!((small.width, small.height), expected);
        }
    }

    #[test]
    fn even_noise_is_a_small_preview() {
        let file = jpeg(&noise(300, 300), 300, 90).unwrap();
        let Some(Preview::Image(url)) = image(&file) else { panic!("an image") };
        assert!(url.starts_with("data:image/jpeg;base64,") && url.len() < JPEG_BYTES_MAX * 4 / 3 + 64);
        assert_eq!(image(b"no image"), None);
    }

    #[test]
    fn texts_are_cut_at_a_character() {
        let long = "ä ".repeat(500);
        let Some(Preview::Text(text)) = text(long.as_bytes()) else { panic!("a text") };
        assert_eq!(text.chars().count(), TEXT_CHARACTERS);
        assert_eq!(super::text(b" \n "), None);
        let document =
            br#"{"id": 7, "conversations": [{"from": "human", "value": "What?"}, {"value": "A kite."}]}"#;
        assert_eq!(super::document(document), Some(Preview::Text("What? · A kite.".to_owned())));
        assert_eq!(super::document(b"{\"a\": 1}"), Some(Preview::Text("{\"a\": 1}".to_owned())));
        assert_eq!(audio(b"no sound"), None);
    }
}
