//! Draws random microbatches from a seed, with mixed sample lengths as in real datasets.
//!
//! Builds synthetic microbatches with given lengths; times do not depend on the contents.

use crate::error::Result;
use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_costmodel::tokens::{EncoderWork, MediaRule, VisionRule};
use dflop_costmodel::{AudioLength, ImageSize, ModelSpec, Module, SampleShape};
use dflop_device::Device;
use dflop_models::encoder::{EncoderConfig, EncoderInput, EncoderInputKind, TiledMedium};
use dflop_models::{IGNORED, LlmConfig, MicrobatchContext, TextBatch};

/// Median text token count, and the logarithm's standard deviation.
const TEXT_MEDIAN: f64 = 120.0;
const TEXT_DEVIATION: f64 = 0.9;
/// Fraction of samples with an image; half that fraction has audio.
const MEDIA_SHARE: f64 = 0.4;
/// Image side range, in pixels.
const PIXELS: [f64; 2] = [96.0, 900.0];
/// Maximum number of times that the image sides are reduced by a quarter to make the image fit.
const SHRINKS_MAX: usize = 6;
/// Audio window length in seconds.
const WINDOW_SECONDS: u64 = 30;

/// Encoder, token rule, and encoder work for media.
type Work = (Module, MediaRule, EncoderWork);

/// Microbatch: shapes to predict from, samples and media to run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RandomMicrobatch {
    pub(super) shapes: Vec<SampleShape>,
    pub(super) samples: Vec<SampleTokens>,
    /// Media for each encoder that has any.
    pub(super) media: Vec<(Module, Media)>,
}

/// Random microbatch source.
#[derive(Debug)]
pub(super) struct RandomMicrobatches<'a> {
    spec: &'a ModelSpec,
    rng: SplitMix64,
}

impl<'a> RandomMicrobatches<'a> {
    pub(super) const fn new(spec: &'a ModelSpec, seed: u64) -> Self {
        Self { spec, rng: SplitMix64::new(seed) }
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.rng.fraction())
    }

    fn normal(&mut self) -> f64 {
        // Box-Muller; 1 - u is above 0, so its logarithm is finite.
        let (first, second) = (1.0 - self.rng.fraction(), self.rng.fraction());
        (-2.0 * libm::log(first)).sqrt() * libm::cos(2.0 * std::f64::consts::PI * second)
    }

    /// Draws samples until the next sample would exceed the number of tokens drawn for the microbatch.
    pub(super) fn microbatch(&mut self, tokens_max: u32) -> Result<RandomMicrobatch> {
        // Log-uniform sizes: small microbatches, where fixed costs show, are as frequent as large ones.
        let budget = self.between(f64::from(tokens_max) / 6.0, f64::from(tokens_max)) as u64;
        let mut drawn = RandomMicrobatch { shapes: Vec::new(), samples: Vec::new(), media: Vec::new() };
        let (mut tokens, mut encoder_tokens) = (0, 0);
        loop {
            let (shape, work) = self.fitting(budget, tokens_max)?;
            let sample = sample_tokens(&shape, &work);
            tokens += sample.tokens() as u64;
            encoder_tokens += work.iter().map(|(_, _, work)| work.encoder_tokens).max().unwrap_or(0);
            // A single sample may be larger than the budget; a microbatch has at least one.
            let is_full = tokens > budget || encoder_tokens > u64::from(tokens_max);
            if is_full && !drawn.shapes.is_empty() {
                return Ok(drawn);
            }
            add_media(&shape, &work, &mut drawn.media)?;
            let target_tokens = sample.targets() as u32;
            drawn.shapes.push(SampleShape { target_tokens, ..shape });
            drawn.samples.push(sample);
        }
    }

    /// Draws a sample whose media fit into a microbatch; drops the media if they do not.
    fn fitting(&mut self, budget: u64, tokens_max: u32) -> Result<(SampleShape, Vec<Work>)> {
        let mut shape = self.sample(budget);
        for _ in 0..SHRINKS_MAX {
            let work = self.work(&shape)?;
            if work.iter().all(|(_, _, work)| work.encoder_tokens <= u64::from(tokens_max)) {
                return Ok((shape, work));
            }
            for image in &mut shape.images {
                (image.width, image.height) = (image.width * 3 / 4, image.height * 3 / 4);
            }
        }
        shape = SampleShape { text_tokens: shape.text_tokens, ..SampleShape::default() };
        let work = self.work(&shape)?;
        Ok((shape, work))
    }

    fn sample(&mut self, budget: u64) -> SampleShape {
        let text = (TEXT_MEDIAN * libm::exp(TEXT_DEVIATION * self.normal())).clamp(4.0, budget.max(4) as f64);
        let mut shape = SampleShape { text_tokens: text as u32, ..SampleShape::default() };
        if self.spec.vision.is_some() && self.rng.fraction() < MEDIA_SHARE {
            let mut side = || self.between(PIXELS[0], PIXELS[1]) as u32;
            let (width, height) = (side(), side());
            shape.images.push(ImageSize { width, height });
        }
        if self.spec.audio.is_some() && self.rng.fraction() < MEDIA_SHARE / 2.0 {
            let sample_rate_hz = 16_000;
            shape
                .audio
                .push(AudioLength { frames: WINDOW_SECONDS * u64::from(sample_rate_hz), sample_rate_hz });
        }
        shape
    }

    fn work(&self, shape: &SampleShape) -> Result<Vec<Work>> {
        let of = |(module, _, rule): (Module, _, MediaRule)| Ok((module, rule, rule.work(shape)?));
        self.spec.encoders().map(of).collect()
    }
}

/// Returns a sample's LLM token count.
fn sample_tokens(shape: &SampleShape, work: &[Work]) -> SampleTokens {
    let mut sample = SampleTokens::text(shape.text_tokens as usize);
    for (_, rule, work) in work {
        let markers = match rule {
            MediaRule::Vision(rule) => rule.total_marker_tokens(shape.images.len() as u64, work) as usize,
            MediaRule::Audio(rule) => shape.audio.len() * usize::from(rule.marker_tokens()),
        };
        sample.markers += markers;
        sample.media += (work.tokens as usize).saturating_sub(markers);
    }
    sample
}

/// Adds a sample's media to the microbatch media.
fn add_media(shape: &SampleShape, work: &[Work], media: &mut Vec<(Module, Media)>) -> Result<()> {
    for (module, rule, work) in work {
        if work.items == 0 {
            continue;
        }
        let own = match rule {
            // A counted table has no blocks, so nothing is measured with it.
            MediaRule::Audio(AudioRule::Windows(_) | AudioRule::Table(_)) => {
                Media::Windows(work.items as usize)
            }
            MediaRule::Audio(AudioRule::Chunks(rule)) => {
                let frames = |&clip| Ok(u32::try_from(rule.frames(clip)?).unwrap_or(u32::MAX));
                Media::Clips(shape.audio.iter().map(frames).collect::<Result<_>>()?)
            }
            MediaRule::Vision(VisionRule::Native(rule)) => {
                let grid = |&image: &ImageSize| {
                    let [columns, rows] = rule.grid(image)?;
                    Ok([1, rows as u32, columns as u32])
                };
                Media::Grids(shape.images.iter().map(grid).collect::<Result<_>>()?)
            }
            MediaRule::Vision(VisionRule::LongestEdge(rule)) => {
                let merge = u64::from(rule.merge.get());
                let grid = |&image: &ImageSize| {
                    let [columns, rows] = rule.grid(image)?.map(|features| features * merge);
                    Ok([1, rows as u32, columns as u32])
                };
                Media::Grids(shape.images.iter().map(grid).collect::<Result<_>>()?)
            }
            MediaRule::Vision(_) => {
                let ImageSize { width, height } = shape.images[0];
                Media::Tiles(vec![TiledMedium::Image { height, width, tiles: work.items as u32 }])
            }
        };
        match media.iter_mut().find(|(of, _)| of == module) {
            Some((_, known)) => known.append(own),
            None => media.push((*module, own)),
        }
    }
    Ok(())
}

/// Sample tokens in the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SampleTokens {
    /// Number of media tokens, which come first and are not targets.
    pub(super) media: usize,
    /// Number of marker tokens around the media, which are not targets.
    pub(super) markers: usize,
    /// Number of text tokens, which are targets, except a token with no token before it.
    pub(super) text: usize,
}

impl SampleTokens {
    pub(super) const fn text(text: usize) -> Self {
        Self { media: 0, markers: 0, text }
    }

    pub(super) const fn tokens(self) -> usize {
        self.media + self.markers + self.text
    }

    /// Returns the target token count.
    pub(super) const fn targets(self) -> usize {
        if self.media + self.markers == 0 { self.text.saturating_sub(1) } else { self.text }
    }
}

/// Returns numbers in `-1..1`, without special values.
pub(super) fn numbers(len: usize) -> Vec<f32> {
    (0..len as u64)
        // Multiplicative hash: cheap, and the same in every run.
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8)
        .map(|byte| f32::from(byte) / 128.0 - 1.0)
        .collect()
}

/// Returns an LLM context for packed samples.
pub(super) fn text_context<D: Device>(
    device: &D,
    config: &LlmConfig,
    samples: &[SampleTokens],
) -> Result<MicrobatchContext<D>> {
    let vocabulary = i64::from(config.spec.vocab.max(1));
    let (mut labels, mut positions, mut places, mut ends) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for sample in samples {
        let first = labels.len();
        places.extend((first..first + sample.media).map(|place| place as u32));
        labels.resize(first + sample.media + sample.markers, IGNORED);
        // A prime stride spreads tokens over the vocabulary, so that lookups touch many rows.
        labels.extend((0..sample.text as i64).map(|token| (token * 7919 + first as i64) % vocabulary));
        positions.extend(0..sample.tokens() as i64);
        ends.push(labels.len() as i32);
    }
    let input_ids: Vec<i64> = labels.iter().map(|&label| label.max(0)).collect();
    let targets: usize = samples.iter().map(|sample| sample.targets()).sum();
    let batch = TextBatch {
        input_ids: &input_ids,
        labels: &labels,
        positions: &positions.repeat(config.rope.axes()),
        cu_seqlens: &ends,
        media_places: &places,
        loss_scale: 1.0 / targets.max(1) as f64,
    };
    Ok(config.context(device, &batch)?)
}

/// Microbatch media.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Media {
    /// Tile runs.
    Tiles(Vec<TiledMedium>),
    /// Number of frames, patch rows and patch columns.
    Grids(Vec<[u32; 3]>),
    /// Full window count.
    Windows(usize),
    /// Number of mel frames in each audio clip.
    Clips(Vec<u32>),
}

impl Media {
    /// Returns an encoder context for these media.
    pub(super) fn context<D: Device>(
        &self,
        device: &D,
        config: &EncoderConfig,
    ) -> dflop_models::Result<MicrobatchContext<D>> {
        let elements = match config.input_kind() {
            EncoderInputKind::Tiles { elements }
            | EncoderInputKind::Patches { elements }
            | EncoderInputKind::Windows { elements, .. }
            | EncoderInputKind::Clips { elements } => elements,
        };
        let values = numbers(self.items() * elements);
        match self {
            Self::Tiles(shown) => config.context(device, &EncoderInput::Tiles { pixels: &values, shown }),
            Self::Grids(grids) => config.context(device, &EncoderInput::Patches { values: &values, grids }),
            Self::Clips(frames) => config.context(device, &EncoderInput::Clips { features: &values, frames }),
            Self::Windows(windows) => {
                let EncoderInputKind::Windows { frames, .. } = config.input_kind() else {
                    return config.context(device, &EncoderInput::Windows { features: &values, frames: &[] });
                };
                let frames = vec![frames as u32; *windows];
                config.context(device, &EncoderInput::Windows { features: &values, frames: &frames })
            }
        }
    }

    /// Appends media with the same kind.
    pub(super) fn append(&mut self, other: Self) {
        match (self, other) {
            (Self::Tiles(known), Self::Tiles(more)) => known.extend(more),
            (Self::Grids(known), Self::Grids(more)) => known.extend(more),
            (Self::Windows(known), Self::Windows(more)) => *known += more,
            (Self::Clips(known), Self::Clips(more)) => known.extend(more),
            (known, other) => {
                unreachable!("an encoder takes one kind of media, found {known:?} and {other:?}")
            }
        }
    }

    /// Returns the tile, patch, window or mel frame count.
    pub(super) fn items(&self) -> usize {
        match self {
            Self::Tiles(shown) => shown.iter().map(TiledMedium::tiles).sum(),
            Self::Grids(grids) => grids.iter().map(|grid| grid.iter().product::<u32>() as usize).sum(),
            Self::Windows(windows) => *windows,
            Self::Clips(frames) => frames.iter().map(|&frames| frames as usize).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microbatches_are_those_of_the_seed_and_within_their_tokens() {
        for name in ["tiny", "llava-ov-qwen2.5-7b", "qwen2.5-vl-7b"] {
            let spec = ModelSpec::preset(name).unwrap();
            let draw = |seed| {
                let mut microbatches = RandomMicrobatches::new(&spec, seed);
                (0..20).map(|_| microbatches.microbatch(8192).unwrap()).collect::<Vec<_>>()
            };
            assert_eq!(draw(1), draw(1));
            assert_ne!(draw(1), draw(2));
            for drawn in draw(3) {
                let tokens: usize = drawn.samples.iter().map(|sample| sample.tokens()).sum();
                assert!(drawn.shapes.len() == 1 || tokens <= 8192);
                let targets: u32 = drawn.shapes.iter().map(|shape| shape.target_tokens).sum();
                assert_eq!(
                    targets as usize,
                    drawn.samples.iter().map(|sample| sample.targets()).sum::<usize>()
                );
            }
            let has_media =
                draw(4).iter().any(|drawn| drawn.media.iter().any(|(_, media)| media.items() > 0));
            assert!(has_media, "{name}");
        }
    }
}
