//! Holds the sort and filter values: a number per sample and column.

use dflop_costmodel::{CostModel, SampleShape};
use dflop_loader::Dataset;
use dflop_loader::flow::in_parallel;

use crate::failure::Failure;

/// Number that samples are sorted and filtered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    /// Place in the dataset, from 0.
    Place,
    /// Predicted time over all modules, in ns.
    CostNs,
    /// LLM positions.
    Tokens,
    /// Payload bytes in all fields.
    Bytes,
    /// Number of pixels in all images and frames.
    Pixels,
    /// Length of all audio clips, in ms.
    AudioMs,
}

impl Column {
    pub(super) const ALL: [Self; 6] =
        [Self::Place, Self::CostNs, Self::Tokens, Self::Bytes, Self::Pixels, Self::AudioMs];

    /// Name in queries and answers.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Place => "place",
            Self::CostNs => "cost_ns",
            Self::Tokens => "tokens",
            Self::Bytes => "bytes",
            Self::Pixels => "pixels",
            Self::AudioMs => "audio_ms",
        }
    }
}

/// Dataset sample numbers, by place.
#[derive(Debug, Default)]
pub(super) struct SampleTable {
    cost_ns: Vec<u64>,
    tokens: Vec<u32>,
    bytes: Vec<u64>,
    pixels: Vec<u64>,
    audio_ms: Vec<u32>,
    /// Whether the model does not support the sample, which then has no cost and no tokens.
    is_refused: Vec<bool>,
}

impl SampleTable {
    /// Reads all sample shapes from the index and predicts the costs, on all cores.
    ///
    /// # Errors
    /// [`Failure::Misuse`] if the dataset has more than 2^32 samples.
    pub(super) fn new(dataset: &Dataset, model: &CostModel) -> Result<Self, Failure> {
        let Ok(samples) = u32::try_from(dataset.len()) else {
            let reason = "has more than 2^32 samples, which one page does not show; name some of its shards";
            return Err(Failure::Misuse(format!("the dataset {reason}")));
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from) as u32;
        let part = samples.div_ceil(threads).max(1);
        let starts: Vec<u32> = (0..samples).step_by(part as usize).collect();
        let parts = in_parallel(threads as usize, &starts, |&start| {
            Self::part(dataset, model, start..samples.min(start.saturating_add(part)))
        });
        let mut table = Self::default();
        for part in parts {
            table.append(part);
        }
        Ok(table)
    }

    fn part(dataset: &Dataset, model: &CostModel, places: std::ops::Range<u32>) -> Self {
        let (mut table, mut shape) = (Self::default(), SampleShape::default());
        for place in places {
            let row = dataset.index().sample(dataset.sample_number(place.into()));
            row.read_shape(&mut shape);
            let cost = model.predict(&shape);
            let total = |ns: &[u64]| ns.iter().fold(0_u64, |sum, ns| sum.saturating_add(*ns));
            table.is_refused.push(cost.is_err());
            table.cost_ns.push(cost.as_ref().map_or(0, |cost| total(cost.module_ns.as_slice())));
            table.tokens.push(cost.map_or(0, |cost| cost.tokens));
            table.bytes.push(row.bytes());
            table.pixels.push(pixels(&shape));
            table.audio_ms.push(audio_ms(&shape));
        }
        table
    }

    fn append(&mut self, part: Self) {
        self.cost_ns.extend(part.cost_ns);
        self.tokens.extend(part.tokens);
        self.bytes.extend(part.bytes);
        self.pixels.extend(part.pixels);
        self.audio_ms.extend(part.audio_ms);
        self.is_refused.extend(part.is_refused);
    }

    /// Number of samples.
    pub(super) fn len(&self) -> u32 {
        self.cost_ns.len() as u32
    }

    /// Returns the number of a sample in a column.
    pub(super) fn value(&self, column: Column, place: u32) -> u64 {
        let at = place as usize;
        match column {
            Column::Place => place.into(),
            Column::CostNs => self.cost_ns[at],
            Column::Tokens => self.tokens[at].into(),
            Column::Bytes => self.bytes[at],
            Column::Pixels => self.pixels[at],
            Column::AudioMs => self.audio_ms[at].into(),
        }
    }

    /// Returns whether the model does not support a sample.
    pub(super) fn is_refused(&self, place: u32) -> bool {
        self.is_refused[place as usize]
    }

    /// Number of samples that the model does not support.
    pub(super) fn refused(&self) -> usize {
        self.is_refused.iter().filter(|is_refused| **is_refused).count()
    }
}

fn pixels(shape: &SampleShape) -> u64 {
    let area = |width: u32, height: u32| u64::from(width) * u64::from(height);
    let images = shape.images.iter().map(|image| area(image.width, image.height));
    let frames =
        shape.videos.iter().map(|video| area(video.width, video.height).saturating_mul(video.frames.into()));
    images.chain(frames).fold(0, u64::saturating_add)
}

fn audio_ms(shape: &SampleShape) -> u32 {
    let clip = |clip: &dflop_costmodel::AudioLength| {
        u128::from(clip.frames) * 1_000 / u128::from(clip.sample_rate_hz.max(1))
    };
    u32::try_from(shape.audio.iter().map(clip).sum::<u128>()).unwrap_or(u32::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use dflop_costmodel::{AudioLength, ImageSize, VideoShape};

    /// A table with these costs; tokens are a tenth of the cost, and samples without cost are rejected.
    pub(in super::super) fn with_costs(costs: &[u64]) -> SampleTable {
        SampleTable {
            cost_ns: costs.to_vec(),
            tokens: costs.iter().map(|cost| (cost / 10) as u32).collect(),
            bytes: vec![1; costs.len()],
            pixels: vec![0; costs.len()],
            audio_ms: vec![0; costs.len()],
            is_refused: costs.iter().map(|cost| *cost == 0).collect(),
        }
    }

    #[test]
    fn media_of_a_sample_are_summed() {
        let shape = SampleShape {
            images: vec![ImageSize { width: 10, height: 20 }, ImageSize { width: u32::MAX, height: 1 }],
            videos: vec![VideoShape { frames: 3, width: 2, height: 2 }],
            audio: vec![AudioLength { frames: 24_000, sample_rate_hz: 16_000 }; 2],
            ..SampleShape::default()
        };
        assert_eq!(pixels(&shape), 212 + u64::from(u32::MAX));
        assert_eq!(audio_ms(&shape), 3_000);
        let long = AudioLength { frames: u64::MAX, sample_rate_hz: 0 };
        assert_eq!(audio_ms(&SampleShape { audio: vec![long; 2], ..SampleShape::default() }), u32::MAX);
    }
}
