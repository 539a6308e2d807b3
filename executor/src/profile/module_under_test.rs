//! Times a module by profile part: layers, the parts outside them, and separate attention.
//!
//! Lists the shapes that a module can be measured at, by sequence kind.
//!
//! Layers run as a single stage, as they do in training. Attention is timed with the operation that layers
//! call, on the same segments and directly after them; **linear work is the layer time minus the attention
//! time**.

use super::clock::Clock;
use super::random_batches::{Media, SampleTokens, numbers, text_context};
use super::{MeasuredModel, module_kind};
use crate::error::Result;
use crate::optimizer::{AdamWOptimizer, AdamWSettings};
use dflop_costmodel::Module;
use dflop_costmodel::model::ModelSpec;
use dflop_costmodel::profile::{Measurement, Part, Phase, Setting};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_device::ops::attention::AttentionShape;
use dflop_device::{Device, Dtype, Segments, Tensor};
use dflop_models::encoder::TiledMedium;
use dflop_models::weights::Seed;
use dflop_models::{
    Activations, Block, BlockOutput, BlockStage, FrozenModules, Layer, LayerSpec, MicrobatchContext,
    ModuleKind, Stage, StageBlocks, StageOptions, StageRange,
};
use std::sync::Arc;
use std::time::Duration;

/// Minimum fraction of the layer time that is left as linear work after attention is subtracted: a guard
/// against noise.
const LINEAR_SHARE_MIN: f64 = 0.02;

/// Pass durations for a microbatch in a stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PassDurations {
    /// Forward pass duration.
    pub forward: Duration,
    /// Backward pass duration.
    pub backward: Duration,
    /// Number of bytes that the forward pass saves for the backward pass.
    pub kept_bytes: u64,
}

/// Times forward and backward for a microbatch; gradients are added to the stage gradients.
///
/// - `input`: same as for [`Stage::forward`]; output rows serve as their own gradient
///
/// # Errors
/// Errors from the stage.
pub fn time_passes<D: Device>(
    clock: Clock,
    stage: &mut BlockStage<D>,
    context: &Arc<MicrobatchContext<D>>,
    input: Option<Tensor<D>>,
) -> Result<PassDurations> {
    let device = stage.device().clone();
    let context = Arc::clone(context);
    let (output, forward) = clock.time(&device, || stage.forward(0, context, input))?;
    let gradient = match output? {
        BlockOutput::Rows(rows) => Some(rows),
        BlockOutput::Loss(_) => None,
    };
    let kept_bytes = stage.kept_bytes();
    let (gradient, backward) = clock.time(&device, || stage.backward(0, gradient))?;
    gradient?;
    Ok(PassDurations { forward, backward, kept_bytes })
}

/// Times an optimizer step over all stage parameters, after a warm-up step that is not timed.
///
/// # Errors
/// [`crate::Error::Device`].
pub fn time_optimizer<D: Device>(clock: Clock, stage: &mut BlockStage<D>) -> Result<Duration> {
    let device = stage.device().clone();
    let mut optimizer = AdamWOptimizer::new(AdamWSettings::default())?;
    let mut clip = device.zeros_as(Dtype::F64, 2)?;
    device.clip_factor(&device.zeros_as(Dtype::F64, 0)?, 0..0, None, &mut clip)?;
    let mut taken = Duration::ZERO;
    // The first step touches the moment memory for the first time.
    for _ in 0..2 {
        let update = || optimizer.start(&mut [&mut *stage], 1e-3, &clip);
        let done: Result<()>;
        (done, taken) = clock.time(&device, update)?;
        done?;
    }
    Ok(taken)
}

/// Module with a given number of layers, in stages that are timed separately.
pub(super) struct ModuleUnderTest<'a, D: Device> {
    model: &'a MeasuredModel,
    device: D,
    clock: Clock,
    pub(super) module: Module,
    pub(super) sequences: Sequences,
    layers: usize,
    windowed: usize,
    shape: AttentionShape,
    hidden: usize,
    /// Parts before the layers; `body` has the layers, `last` the parts after them.
    first: BlockStage<D>,
    body: BlockStage<D>,
    last: BlockStage<D>,
}

impl<'a, D: Device> ModuleUnderTest<'a, D> {
    /// Builds the first `layers` layers of a module.
    ///
    /// # Errors
    /// Errors from the model; [`crate::Error::Device`].
    pub(super) fn new(
        model: &'a MeasuredModel,
        device: &D,
        module: Module,
        layers: usize,
        seed: u64,
    ) -> Result<Self> {
        let kind = module_kind(module);
        let specs = model.layer_specs(module, layers)?;
        let Some(first) = specs.first() else {
            let problem = format!("leaves no layer of {module} to measure");
            let field = "num_hidden_layers".to_owned();
            return Err(dflop_models::Error::ModelConfig { field, problem }.into());
        };
        let attention = &first.attention;
        let all = model.config.layers(kind);
        // A range without layers has only the parts before the first layer, or after the last layer.
        let end = |at: usize| {
            let range = StageRange { module: kind, layers: at..at };
            model.config.stage(device, &range, FrozenModules::default(), Activations::Stored, &Seed(seed))
        };
        Ok(Self {
            device: device.clone(),
            clock: Clock::of(device),
            module,
            sequences: Sequences::of(&model.spec, module)?,
            layers,
            windowed: specs.iter().filter(|spec| spec.attention.mask.has_windows()).count(),
            shape: AttentionShape {
                heads: attention.heads,
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                scale: attention.scale.unwrap_or_else(|| 1.0 / (attention.head_dim as f64).sqrt()),
                is_causal: attention.mask.is_causal(),
            },
            hidden: attention.hidden,
            first: end(0)?,
            body: body(device, module, &specs, seed)?,
            last: end(all)?,
            model,
        })
    }

    /// Returns the number of bytes that the layers save for a microbatch.
    pub(super) fn kept_bytes(&mut self, tokens: u32) -> Result<u64> {
        let (batch, length) = self.sequences.packed(tokens);
        let context = self.context(batch, length)?;
        Ok(self.run_body(&context)?.kept_bytes)
    }

    fn context(&self, batch: u32, tokens: u32) -> Result<Arc<MicrobatchContext<D>>> {
        let context = match self.sequences.media(batch, tokens) {
            None => {
                let samples = vec![SampleTokens::text(tokens as usize); batch as usize];
                text_context(&self.device, &self.model.config.llm, &samples)?
            }
            Some(media) => media.context(&self.device, self.model.encoder(self.module)?)?,
        };
        Ok(Arc::new(context))
    }

    fn run_body(&mut self, context: &Arc<MicrobatchContext<D>>) -> Result<PassDurations> {
        let input = self.device.upload(&numbers(context.layers.rows * self.hidden))?;
        time_passes(self.clock, &mut self.body, context, Some(input))
    }

    /// Returns the row width before the parts after the last layer.
    fn last_width(&self) -> Result<usize> {
        let layers = self.model.config.layers(module_kind(self.module));
        Ok(match self.module {
            Module::Llm => self.hidden,
            encoder => self.model.encoder(encoder)?.row_width(layers),
        })
    }

    /// Measures all parts once with about `tokens` tokens; returns measurements, and the time in microseconds
    /// for all parts but separate attention.
    pub(super) fn measure(&mut self, tokens: u32) -> Result<(Vec<Measurement>, f64)> {
        let (batch, length) = self.sequences.packed(tokens);
        let context = self.context(batch, length)?;
        let first = time_passes(self.clock, &mut self.first, &context, None)?;
        let body = self.run_body(&context)?;
        let full = self.attention(&context.layers.segments)?;
        let windows = match &context.layers.windows {
            Some(windows) if self.windowed > 0 => self.attention(windows)?,
            _ => PassDurations::default(),
        };
        let input = self.device.upload(&numbers(context.layers.rows * self.last_width()?))?;
        let last = time_passes(self.clock, &mut self.last, &context, Some(input))?;

        let of = |part, layers: usize, (batch, tokens): (u32, u32), times: [f64; 2]| {
            self.rows(part, layers, (batch, tokens), times)
        };
        let attention = |full: Duration, windows: Duration| {
            // Layers differ only in their segments: complete sequences or windows.
            let full = microseconds(full) * (self.layers - self.windowed) as f64;
            full + microseconds(windows) * self.windowed as f64
        };
        let linear = |all: Duration, attention: f64| {
            let all = microseconds(all);
            // Noise can make separate attention longer than the layers that include it.
            (all - attention).max(LINEAR_SHARE_MIN * all)
        };
        let linear = [
            linear(body.forward, attention(full.forward, windows.forward)),
            linear(body.backward, attention(full.backward, windows.backward)),
        ];
        let shape = (batch, length);
        let mut rows = of(Part::Linear, self.layers, shape, linear);
        rows.extend(of(Part::Attention, 1, shape, both(full)));
        let targets = SampleTokens::text(length as usize).targets() as u32 * batch;
        if self.module == Module::Llm {
            rows.extend(of(Part::OutsideLayers, 0, shape, both(first)));
            if targets > 0 {
                rows.extend(of(Part::Head, 0, (1, targets), both(last)));
            }
        } else {
            let sum = [first.forward + last.forward, first.backward + last.backward];
            rows.extend(of(Part::OutsideLayers, 0, shape, sum.map(microseconds)));
        }
        let total = [first, body, last].iter().flat_map(|passes| both(*passes)).sum();
        Ok((rows, total))
    }

    /// Measures single-layer attention over a single sequence; returns measurements, and the time for both
    /// passes in microseconds.
    pub(super) fn measure_attention(&self, tokens: u32) -> Result<(Vec<Measurement>, f64)> {
        let times = both(self.attention(&Segments::new(&self.device, &[0, tokens])?)?);
        Ok((self.rows(Part::Attention, 1, (1, tokens), times), times.iter().sum()))
    }

    /// Measures an optimizer step over the layers and the parts outside them.
    pub(super) fn measure_optimizer(&mut self) -> Result<Vec<Measurement>> {
        let setting = |part, layers| Setting {
            module: self.module,
            part,
            phase: Phase::Optimizer,
            tp: 1,
            layers,
            batch: 0,
            tokens: 0,
        };
        let [linear, ends] = [setting(Part::Linear, self.layers as u32), setting(Part::OutsideLayers, 0)];
        let row = |setting, time| Measurement { setting, microseconds: time, bytes: None };
        let body = microseconds(time_optimizer(self.clock, &mut self.body)?);
        let mut outside = microseconds(time_optimizer(self.clock, &mut self.first)?);
        outside += microseconds(time_optimizer(self.clock, &mut self.last)?);
        Ok([row(linear, body), row(ends, outside)].into_iter().filter(|row| row.microseconds > 0.0).collect())
    }

    fn attention(&self, segments: &Segments<D>) -> Result<PassDurations> {
        let (device, shape) = (&self.device, &self.shape);
        let rows = segments.host().rows();
        let qkv = device.upload(&numbers(rows * shape.row()))?;
        let d_output = device.upload(&numbers(rows * shape.output()))?;
        let (mut output, mut sums) =
            (device.alloc(rows * shape.output())?, device.alloc_as(Dtype::F32, rows * shape.heads)?);
        let run = || device.attention(shape, segments, &qkv, &mut output, &mut sums);
        let (done, forward) = self.clock.time(device, run)?;
        done?;
        let run = || device.attention_backward(shape, segments, &qkv, (&output, &sums), &d_output);
        let (gradient, backward) = self.clock.time(device, run)?;
        gradient?;
        Ok(PassDurations { forward, backward, kept_bytes: 0 })
    }

    fn rows(
        &self,
        part: Part,
        layers: usize,
        (batch, tokens): (u32, u32),
        [forward, backward]: [f64; 2],
    ) -> Vec<Measurement> {
        let row = |phase, microseconds| {
            let setting =
                Setting { module: self.module, part, phase, tp: 1, layers: layers as u32, batch, tokens };
            Measurement { setting, microseconds, bytes: None }
        };
        let rows = [row(Phase::Forward, forward), row(Phase::Backward, backward)];
        // A module without such a part takes no time, and a profile has no rows of time 0.
        rows.into_iter().filter(|row| row.microseconds > 0.0).collect()
    }
}

/// Builds a stage with only layers, as inside a pipeline.
fn body<D: Device>(device: &D, module: Module, specs: &[LayerSpec], seed: u64) -> Result<BlockStage<D>> {
    let mut parts = StageBlocks::default();
    parts.add(false, |declaration| {
        let layer = |spec| Box::new(Layer::declare(declaration, spec)) as Box<dyn Block<D>>;
        Ok(specs.iter().map(layer).collect())
    })?;
    Ok(BlockStage::new(device.clone(), StageOptions::new(format!("{module} layers")), parts, &Seed(seed))?)
}

fn both(passes: PassDurations) -> [f64; 2] {
    [passes.forward, passes.backward].map(microseconds)
}

pub(super) fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Returns the cost model module for a kind.
pub(super) const fn cost_module(kind: ModuleKind) -> Module {
    match kind {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}

/// Tokens per sequence in linear measurements, if the length is free: a single attention tile, so that
/// attention takes little time.
const SHORT: u32 = 64;
/// Image side in linear measurements, if the size is free, in patches.
const IMAGE_SIDE: u32 = 16;

/// Sequence kind in a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sequences {
    /// Samples with any length.
    Text,
    /// Image tiles with this token count.
    Tiles(u32),
    /// Full audio windows with this token count.
    Windows(u32),
    /// Audio in full chunks with these token and mel frame counts.
    Chunks {
        /// Number of encoder tokens.
        tokens: u32,
        /// Number of mel frames.
        frames: u32,
    },
    /// Images whose sides are multiples of this number of patches.
    Images(u32),
}

impl Sequences {
    /// Returns a module's sequence kind.
    ///
    /// # Errors
    /// [`dflop_models::Error::ModelConfig`] if the model has no such module.
    pub(super) fn of(spec: &ModelSpec, module: Module) -> Result<Self> {
        let rule = match (module, spec.vision.as_ref(), spec.audio.as_ref()) {
            (Module::Llm, _, _) => return Ok(Self::Text),
            (Module::Vision, Some(vision), _) => vision.rule,
            (Module::Audio, _, Some(audio)) => return Self::from_audio_rule(&audio.rule),
            _ => {
                let problem = format!("has no module {module}");
                return Err(super::model_type(problem));
            }
        };
        Ok(match rule {
            VisionRule::AnyRes(rule) => Self::Tiles(u32::from(rule.patches_per_side).pow(2).max(1)),
            VisionRule::ListedGrids(rule) => Self::Tiles(u32::from(rule.patches_per_side).pow(2).max(1)),
            VisionRule::ScaledTiles(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::FittedTiles(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::DynamicTiles(rule) => Self::Tiles(u32::from(rule.tile_patches).max(1)),
            VisionRule::Fixed(rule) => Self::Tiles(rule.tile_patches.max(1)),
            VisionRule::PanAndScan(rule) => Self::Tiles(rule.tile.tile_patches.max(1)),
            VisionRule::Native(rule) => Self::Images(u32::from(rule.merge.get())),
            VisionRule::LongestEdge(rule) => Self::Images(u32::from(rule.merge.get())),
            VisionRule::Table(_) => return Err(counted_tokens()),
        })
    }

    fn from_audio_rule(rule: &AudioRule) -> Result<Self> {
        Ok(match rule {
            AudioRule::Windows(rule) => Self::Windows(rule.window_tokens.max(1)),
            AudioRule::Chunks(rule) => Self::Chunks {
                tokens: u32::try_from(rule.chunk_tokens()).unwrap_or(u32::MAX),
                frames: rule.chunk_frames.max(1),
            },
            AudioRule::Table(_) => return Err(counted_tokens()),
        })
    }

    /// Returns whether sequences differ in length, so that attention is measured by length.
    pub(super) const fn has_free_lengths(self) -> bool {
        matches!(self, Self::Text | Self::Images(_) | Self::Chunks { .. })
    }

    /// Returns the minimum token count to measure.
    pub(super) fn tokens_min(self) -> u32 {
        match self {
            Self::Text => SHORT / 4,
            Self::Tiles(tokens) | Self::Windows(tokens) | Self::Chunks { tokens, .. } => tokens,
            Self::Images(merge) => self.snap_length(4 * merge * merge),
        }
    }

    /// Returns the number and length of sequences, for about `tokens` tokens in total.
    pub(super) fn packed(self, tokens: u32) -> (u32, u32) {
        match self {
            Self::Text if tokens < SHORT => (1, tokens.max(1)),
            Self::Text => (tokens / SHORT, SHORT),
            Self::Tiles(length) | Self::Windows(length) | Self::Chunks { tokens: length, .. } => {
                ((tokens / length).max(1), length)
            }
            Self::Images(merge) => {
                let length = (IMAGE_SIDE / merge * merge).max(merge).pow(2);
                if tokens < length { (1, self.snap_length(tokens)) } else { (tokens / length, length) }
            }
        }
    }

    /// Returns the valid length nearest to `tokens`.
    pub(super) fn snap_length(self, tokens: u32) -> u32 {
        match self {
            // Attention is timed separately, also over more tokens than a chunk has.
            Self::Text | Self::Chunks { .. } => tokens.max(1),
            Self::Tiles(length) | Self::Windows(length) => length,
            Self::Images(merge) => {
                let side = f64::from(tokens).sqrt() / f64::from(merge);
                (side.round().max(1.0) as u32 * merge).pow(2)
            }
        }
    }

    /// Returns the media for `batch` sequences with equal lengths; `None` for text.
    pub(super) fn media(self, batch: u32, tokens: u32) -> Option<Media> {
        match self {
            Self::Text => None,
            Self::Tiles(_) => {
                let tile = TiledMedium::Image { height: 1, width: 1, tiles: 1 };
                Some(Media::Tiles(vec![tile; batch as usize]))
            }
            Self::Windows(_) => Some(Media::Windows(batch as usize)),
            Self::Chunks { frames, .. } => Some(Media::Clips(vec![frames; batch as usize])),
            Self::Images(_) => {
                let side = tokens.isqrt();
                Some(Media::Grids(vec![[1, side, side]; batch as usize]))
            }
        }
    }
}

/// Returns the error for a token table, which belongs to a model without blocks.
fn counted_tokens() -> crate::error::Error {
    super::model_type("has counted tokens and no blocks".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_that_there_can_be() {
        assert_eq!([15, 64, 200].map(|tokens| Sequences::Text.packed(tokens)), [(1, 15), (1, 64), (3, 64)]);
        assert_eq!([1, 3000].map(|tokens| Sequences::Tiles(729).packed(tokens)), [(1, 729), (4, 729)]);
        let images = Sequences::Images(2);
        assert_eq!([7, 100, 600].map(|tokens| images.packed(tokens)), [(1, 4), (1, 100), (2, 256)]);
        assert_eq!(images.snap_length(1000), 1024);
        let grids = Media::Grids(vec![[1, 10, 10]; 3]);
        assert_eq!(images.media(3, 100), Some(grids));
    }
}
