//! Counts FLOPs for an encoder with projector.

use super::{Gradients, Recomputation, TrainingFlops, flops, product, sum, wide_product};
use crate::interned::Interned;
use crate::model::EncoderSpec;
use crate::model::counts::{EncoderCounts, Polynomial};
use crate::tokens::EncoderWork;

/// FLOPs for an encoder with projector: by its sizes, or [as counted](EncoderCounts).
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, arXiv:2104.04473,
/// appendix, for layers of width `h`: `8h²` per token for the four attention projections, `4hf` for a plain
/// MLP of width `f`, `6hf` for a gated MLP; `4h` per query-key pair, within a window if attention is
/// windowed. Stem: `2h` times its inputs per token. Pooling head (`SiglipMultiheadAttentionPoolingHead` in
/// transformers 4.57.1): `4h² + 4h` per token for keys, values and attention, `4h² + 4hf` per item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EncoderFlops {
    /// Stem FLOPs per encoder token.
    stem_per_token: u64,
    /// Share of `stem_per_token` whose inputs are the medium itself, which has no gradient.
    stem_medium_per_token: u64,
    used: LayerFlops,
    unused: LayerFlops,
    pooling_per_token: u64,
    pooling_per_item: u64,
    per_projected_token: u64,
    /// FLOPs for the projector's first matrix, whose inputs come from the tower.
    first_per_projected_token: u64,
    merged_tokens: u64,
    class_tokens: u64,
    tower_gradients: Gradients,
    projector_gradients: Gradients,
    /// Counts in place of everything above except the gradients, and whether there are layers.
    counts: Option<(Interned<EncoderCounts>, bool)>,
}

/// FLOPs for some layers, per token and per query-key pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct LayerFlops {
    token: u64,
    attention_pair: u64,
    window_pair: u64,
}

/// FLOPs for a pass, by part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EncoderPass {
    /// FLOPs for stem, layers and pooling head.
    pub tower: u128,
    /// FLOPs for the projector.
    pub projector: u128,
}

/// Returns the number of positions from the stem.
const fn stem_tokens(work: &EncoderWork) -> u64 {
    work.encoder_tokens.saturating_add(work.padded_tokens)
}

/// Tokens and pairs inside the layers, class tokens included.
#[derive(Clone, Copy)]
struct LayerWork {
    tokens: u64,
    attention_pairs: u64,
    window_pairs: u64,
}

impl EncoderFlops {
    /// Folds an encoder, for an LLM of width `llm_hidden`, into FLOPs per token and pair.
    #[must_use]
    pub fn new(spec: &EncoderSpec, llm_hidden: u32) -> Self {
        let details = &spec.details;
        let unused_layers = details.unused_layers.min(spec.layers);
        // It is not known which layers are windowed; the unused layers are assumed to have full attention
        // first.
        let windowed = spec.windowed_layers.min(spec.layers);
        let unused_windowed = unused_layers.saturating_sub(spec.layers - windowed);
        let projector = spec.projector;
        let (first_projector, second_projector) = match projector.middle {
            Some(middle) => (product([projector.input, middle]), product([middle, llm_hidden])),
            None => (product([projector.input, llm_hidden]), 0),
        };
        let of_all = |weights: u128| flops(weights.saturating_mul(projector.count().into()));
        let square = product([spec.hidden, spec.hidden]);
        let pooling_per_token = sum([square.saturating_mul(2), product([2, spec.hidden])]);
        let pooling_per_item = sum([square.saturating_mul(2), product([2, spec.hidden, spec.ffn])]);
        let pooling = |weights: u128| if details.has_pooling_head { flops(weights) } else { 0 };
        Self {
            stem_per_token: flops(product([spec.stem_inputs, spec.hidden])),
            stem_medium_per_token: flops(product([details.stem_medium_inputs, spec.hidden])),
            used: LayerFlops::new(spec, spec.layers - unused_layers, windowed - unused_windowed),
            unused: LayerFlops::new(spec, unused_layers, unused_windowed),
            pooling_per_token: pooling(pooling_per_token),
            pooling_per_item: pooling(pooling_per_item),
            per_projected_token: of_all(sum([first_projector, second_projector]))
                .saturating_add(flops(u128::from(projector.further_weights))),
            first_per_projected_token: of_all(first_projector),
            merged_tokens: u64::from(projector.merged_tokens.get()),
            class_tokens: u64::from(details.class_tokens),
            tower_gradients: Gradients::All,
            projector_gradients: Gradients::All,
            counts: spec.counts.map(|counts| (counts, spec.layers > 0)),
        }
    }

    /// Sets the computed gradients.
    ///
    /// A tower computes [`Gradients::All`] or [`Gradients::None`], because only media come before it.
    #[must_use]
    pub const fn gradients(mut self, tower: Gradients, projector: Gradients) -> Self {
        self.tower_gradients = tower;
        self.projector_gradients = projector;
        self
    }

    /// Returns the forward FLOPs for this work, projector included.
    #[must_use]
    pub fn forward(&self, work: &EncoderWork) -> u128 {
        let pass = self.forward_pass(work);
        pass.tower.saturating_add(pass.projector)
    }

    /// Returns the forward FLOPs for this work, by part.
    #[must_use]
    pub fn forward_pass(&self, work: &EncoderWork) -> EncoderPass {
        if let Some((counts, has_layers)) = self.counts {
            return counted_forward(&counts, has_layers, work);
        }
        let inside = self.inside(work);
        let tower = sum([
            wide_product(self.stem_per_token, stem_tokens(work)),
            self.used.forward(inside),
            self.unused.forward(inside),
            wide_product(self.pooling_per_token, work.encoder_tokens),
            wide_product(self.pooling_per_item, work.items),
        ]);
        EncoderPass { tower, projector: self.projector(work) }
    }

    /// Returns the backward FLOPs for this work, by part.
    #[must_use]
    pub fn backward_pass(&self, work: &EncoderWork) -> EncoderPass {
        if let Some((counts, has_layers)) = self.counts {
            return self.counted_backward(&counts, has_layers, work);
        }
        let stem = wide_product(self.stem_per_token, stem_tokens(work)).saturating_mul(2);
        let to_medium = wide_product(self.stem_medium_per_token, stem_tokens(work));
        let layers = self.used.forward(self.inside(work)).saturating_mul(2);
        let tower = match self.tower_gradients {
            Gradients::None => 0,
            _ => stem.saturating_sub(to_medium).saturating_add(layers),
        };
        let once = self.projector(work);
        let projector = match self.projector_gradients {
            Gradients::All => once.saturating_mul(2),
            Gradients::Inputs => once,
            Gradients::Weights => once.saturating_mul(2).saturating_sub(self.first_of_projector(work)),
            Gradients::None => 0,
        };
        EncoderPass { tower, projector }
    }

    /// Returns the training FLOPs for this work, projector included.
    #[must_use]
    pub fn training(&self, work: &EncoderWork, recomputation: Recomputation) -> TrainingFlops {
        let backward = self.backward_pass(work);
        let (layers, attention) = self.recomputable(work);
        // The scores are one of two attention products.
        let scores = attention / 2;
        let recomputed = match recomputation {
            // A tower without a backward pass saves no activations, so it recomputes none.
            _ if self.tower_gradients == Gradients::None => 0,
            Recomputation::None => 0,
            Recomputation::Scores => scores,
            Recomputation::Layers => layers.saturating_add(scores),
        };
        TrainingFlops {
            forward: self.forward(work),
            backward: backward.tower.saturating_add(backward.projector),
            recomputed,
        }
    }

    /// Returns the backward FLOPs for stem and projector, as a share of the FLOPs with everything trained.
    pub(crate) fn outside_layers_backward_share(&self) -> f64 {
        // Both parts are linear in tokens; this many form whole numbers of merged tokens and of chunks.
        let chunk = self.counts.map_or(1, |(counts, _)| u64::from(counts.chunk_tokens.max(1)));
        let tokens = self.merged_tokens.saturating_mul(chunk);
        let work = EncoderWork { encoder_tokens: tokens, ..EncoderWork::default() };
        let ends = |flops: &Self| {
            let counts = flops.counts.map(|(counts, _)| (counts, false));
            let unlayered = Self { used: LayerFlops::default(), counts, ..*flops };
            let pass = unlayered.backward_pass(&work);
            pass.tower.saturating_add(pass.projector)
        };
        let all = ends(&self.gradients(Gradients::All, Gradients::All));
        if all == 0 { 0.0 } else { ends(self) as f64 / all as f64 }
    }

    /// Returns the forward FLOPs in the layers that have a backward pass, and the part for attention.
    fn recomputable(&self, work: &EncoderWork) -> (u128, u128) {
        match self.counts {
            Some((_, false)) => (0, 0),
            Some((counts, true)) => {
                let forward = &counts.trained_layers_forward;
                (forward.encoder_flops(work, counts.chunk_tokens), forward.attention_flops(work))
            }
            None => {
                let inside = self.inside(work);
                (self.used.forward(inside), self.used.attention(inside))
            }
        }
    }

    /// A frozen part computes no weight gradients, which take as many FLOPs as the forward pass. The
    /// connector's first matrix is unknown: behind a frozen tower the connector counts all gradients.
    fn counted_backward(&self, counts: &EncoderCounts, has_layers: bool, work: &EncoderWork) -> EncoderPass {
        let flops = |polynomial: &Polynomial| polynomial.encoder_flops(work, counts.chunk_tokens);
        let layers = if has_layers { flops(&counts.layers.backward) } else { 0 };
        let connectors = flops(&counts.connectors.backward);
        EncoderPass {
            tower: match self.tower_gradients {
                Gradients::None => 0,
                _ => flops(&counts.outside.backward).saturating_add(layers),
            },
            projector: match self.projector_gradients {
                Gradients::All | Gradients::Weights => connectors,
                Gradients::Inputs => connectors.saturating_sub(flops(&counts.connectors.forward)),
                Gradients::None => 0,
            },
        }
    }

    fn projector(&self, work: &EncoderWork) -> u128 {
        wide_product(self.per_projected_token, work.encoder_tokens / self.merged_tokens)
    }

    fn first_of_projector(&self, work: &EncoderWork) -> u128 {
        wide_product(self.first_per_projected_token, work.encoder_tokens / self.merged_tokens)
    }

    /// Adds class tokens to the work.
    ///
    /// Items are sequences if there are class tokens: `c` class tokens and `s` tokens form
    /// `(s + c)² = s² + 2cs + c²` pairs.
    fn inside(&self, work: &EncoderWork) -> LayerWork {
        let class_tokens = self.class_tokens.saturating_mul(work.items);
        let class_pairs = self
            .class_tokens
            .saturating_mul(work.encoder_tokens)
            .saturating_mul(2)
            .saturating_add(class_tokens.saturating_mul(self.class_tokens));
        LayerWork {
            tokens: work.encoder_tokens.saturating_add(class_tokens),
            attention_pairs: work.attention_pairs.saturating_add(class_pairs),
            window_pairs: work.window_pairs.saturating_add(class_pairs),
        }
    }
}

fn counted_forward(counts: &EncoderCounts, has_layers: bool, work: &EncoderWork) -> EncoderPass {
    let flops = |polynomial: &Polynomial| polynomial.encoder_flops(work, counts.chunk_tokens);
    let layers = if has_layers { flops(&counts.layers.forward) } else { 0 };
    EncoderPass {
        tower: flops(&counts.outside.forward).saturating_add(layers),
        projector: flops(&counts.connectors.forward),
    }
}

impl LayerFlops {
    fn new(spec: &EncoderSpec, layers: u32, windowed_layers: u32) -> Self {
        let layer_weights = sum([
            product([4, spec.hidden, spec.hidden]),
            product([spec.mlp.matrices(), spec.hidden, spec.ffn]),
        ]);
        Self {
            token: flops(layer_weights.saturating_mul(u128::from(layers))),
            attention_pair: flops(product([2, layers - windowed_layers, spec.hidden])),
            window_pair: flops(product([2, windowed_layers, spec.hidden])),
        }
    }

    fn forward(&self, work: LayerWork) -> u128 {
        wide_product(self.token, work.tokens).saturating_add(self.attention(work))
    }

    fn attention(&self, work: LayerWork) -> u128 {
        wide_product(self.attention_pair, work.attention_pairs)
            .saturating_add(wide_product(self.window_pair, work.window_pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;
    use crate::tokens::audio::whisper_windows;
    use crate::{AudioLength, ImageSize};

    fn tile(tokens: u64) -> EncoderWork {
        let pairs = tokens * tokens;
        EncoderWork {
            items: 1,
            encoder_tokens: tokens,
            tokens,
            attention_pairs: pairs,
            window_pairs: pairs,
            ..EncoderWork::default()
        }
    }

    /// Layers, stem and projector for a tile. InternViT has a class token, and InternVL's projector sees 256
    /// tokens, each merged from 4.
    #[test]
    fn tile_encoders_follow_the_closed_formula() {
        for (name, tokens, layers, stem, projector) in [
            ("llava-ov-qwen2.5-7b", 729, 665_460_499_968, 987_614_208, 24_747_835_392),
            ("internvl3-8b", 1024, 722_359_910_400, 1_233_125_376, 14_092_861_440),
            ("internvl2.5-qwen2.5-72b", 1024, 11_940_840_000_000, 3_853_516_800, 88_046_829_568),
        ] {
            let spec = ModelSpec::preset(name).unwrap();
            let encoder = EncoderFlops::new(&spec.vision.unwrap().encoder, spec.llm.hidden);
            let work = tile(tokens);
            assert_eq!(encoder.forward(&work), layers + stem + projector, "{name}");
            assert_eq!(
                encoder.backward_pass(&work),
                EncoderPass { tower: 2 * layers + stem, projector: 2 * projector },
                "{name}"
            );
            assert_eq!(encoder.forward(&work.repeat(3)), 3 * (layers + stem + projector), "{name}");
        }
    }

    /// A 640 x 480 image: 1564 patches, 92,560 pairs inside windows, 391 merged tokens.
    #[test]
    fn native_encoders_follow_the_closed_formula_with_and_without_windows() {
        for (name, layers) in [("qwen2-vl-7b", 2_368_735_805_440), ("qwen2.5-vl-7b", 2_033_895_342_080)] {
            let spec = ModelSpec::preset(name).unwrap();
            let vision = spec.vision.unwrap();
            let work = vision.rule.images(&[ImageSize { width: 640, height: 480 }]).unwrap();
            let encoder = EncoderFlops::new(&vision.encoder, spec.llm.hidden);
            let stem_and_projector = 4_708_515_840 + 34_849_423_360;
            assert_eq!(encoder.forward(&work), layers + stem_and_projector, "{name}");
        }
    }

    /// The first convolution, 128 mels to 1280 channels at 3000 places, has no input gradient.
    #[test]
    fn audio_encoder_costs_the_same_however_full_the_window() {
        let spec = ModelSpec::preset("qwen2-audio-7b").unwrap();
        let encoder = EncoderFlops::new(&spec.audio.unwrap().encoder, spec.llm.hidden);
        for (frames, windows) in [(1, 1), (480_000, 1), (480_001, 2)] {
            let work = whisper_windows(AudioLength { frames, sample_rate_hz: 16_000 }).unwrap();
            let (layers, stem, projector) = (2_256_076_800_000, 17_694_720_000, 7_864_320_000);
            assert_eq!(encoder.forward(&work), windows * (layers + stem + projector));
            let first_convolution = 2 * 3 * 128 * 1280 * 3000;
            let tower = windows * (2 * (layers + stem) - first_convolution);
            assert_eq!(encoder.backward_pass(&work).tower, tower);
        }
    }

    #[test]
    fn unused_layers_and_pooling_heads_run_forward_alone() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let used = spec.vision.unwrap().encoder;
        let mut longer = used;
        longer.layers += 2;
        longer.details.unused_layers = 2;
        longer.details.has_pooling_head = true;
        let [used, longer] = [used, longer].map(|encoder| EncoderFlops::new(&encoder, spec.llm.hidden));
        let work = tile(729);
        assert_eq!(used.backward_pass(&work), longer.backward_pass(&work));
        let layers = 2 * (665_460_499_968 / 27);
        let (hidden, ffn) = (1152_u128, 4304_u128);
        let pooling = 729 * 4 * (hidden * hidden + hidden) + 4 * hidden * hidden + 4 * hidden * ffn;
        assert_eq!(longer.forward(&work) - used.forward(&work), layers + pooling);
    }

    #[test]
    fn recomputation_repeats_layers_or_scores() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let encoder = EncoderFlops::new(&spec.vision.unwrap().encoder, spec.llm.hidden);
        let work = tile(729);
        let scores = 27 * 2 * 729 * 729 * 1152;
        for (recomputation, recomputed) in [
            (Recomputation::None, 0),
            (Recomputation::Scores, scores),
            (Recomputation::Layers, scores + 665_460_499_968),
        ] {
            let training = encoder.training(&work, recomputation);
            assert_eq!(training.recomputed, recomputed);
            assert_eq!(training.forward, encoder.forward(&work));
            assert_eq!(training.total(), training.forward + training.backward + recomputed);
        }
    }

    /// SigLIP with a projector with two matrices: the first needs no input gradient if the tower is frozen.
    #[test]
    fn frozen_parts_have_fewer_gradients() {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        let all = EncoderFlops::new(&spec.vision.unwrap().encoder, spec.llm.hidden);
        let work = tile(729);
        let (tower, once) = (all.backward_pass(&work).tower, all.forward_pass(&work).projector);
        let first = 2 * 729 * 1152 * 3584;
        let backward = |tower, projector| {
            let pass = all.gradients(tower, projector).backward_pass(&work);
            [pass.tower, pass.projector]
        };
        assert_eq!(backward(Gradients::All, Gradients::Inputs), [tower, once]);
        assert_eq!(backward(Gradients::None, Gradients::Weights), [0, 2 * once - first]);
        assert_eq!(backward(Gradients::None, Gradients::None), [0, 0]);
        let frozen = all.gradients(Gradients::None, Gradients::Weights);
        assert_eq!(frozen.training(&work, Recomputation::Layers).recomputed, 0);
        assert_eq!(frozen.forward(&work), all.forward(&work));
        let stem = 2 * 729 * 588 * 1152;
        let share = (2 * once - first) as f64 / (2 * once + stem) as f64;
        assert!((frozen.outside_layers_backward_share() - share).abs() < 1e-12);
        assert!((all.outside_layers_backward_share() - 1.0).abs() < 1e-12);
    }
}
