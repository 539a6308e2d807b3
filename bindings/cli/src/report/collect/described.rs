//! Describes dataset samples: key, shard, media, tokens, predicted times, and previews for the most expensive
//! samples.

use std::collections::HashMap;

use dflop_costmodel::{SampleCost, SampleShape};
use dflop_loader::Dataset;
use dflop_loader::store::redact;

use super::previews::read_previews;
use crate::report::document::Sample;

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
}
