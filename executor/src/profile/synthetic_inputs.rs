//! Builds synthetic microbatches with given lengths; times do not depend on the contents.

use crate::error::Result;
use dflop_device::Device;
use dflop_models::encoder::{EncoderConfig, EncoderInput, EncoderInputKind, TiledMedium};
use dflop_models::{IGNORED, LlmConfig, MicrobatchContext, TextBatch};

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
