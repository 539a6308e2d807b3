//! Expands a few sizes to every matrix, vector and extra token of an encoder architecture.
//!
//! One function per architecture, shared by the presets and by the readers of configurations, so that both
//! count the same parameters and FLOPs. Towers come without a projector; the caller adds it.
//!
//! # Source
//! The modules of transformers 4.57.1; parameter counts are compared with them in `costmodel/tests/flops.rs`.

use crate::model::{EncoderDetails, EncoderSpec, Mlp, Projector};

/// Sizes that all towers have.
#[derive(Clone, Copy)]
pub(crate) struct TowerSize {
    pub(crate) layers: u32,
    pub(crate) hidden: u32,
    pub(crate) heads: u32,
    pub(crate) ffn: u32,
}

/// Input of a tower that takes squares of one size.
#[derive(Clone, Copy)]
pub(crate) struct SquareInput {
    /// Multiply-adds per hidden unit and patch: channels * patch².
    pub(crate) patch_inputs: u32,
    /// Patches of a square.
    pub(crate) patches: u32,
}

/// Options in which the towers of InternVL differ.
#[derive(Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the published configuration")]
pub(crate) struct InternVitOptions {
    pub(crate) has_qkv_bias: bool,
    pub(crate) has_qk_norm: bool,
    /// Whether norms have no bias.
    pub(crate) has_rms_norm: bool,
    /// Whether a layer norm follows the layers; it is absent where tokens are averaged.
    pub(crate) has_last_norm: bool,
    pub(crate) has_positions: bool,
    pub(crate) has_mask_token: bool,
}

impl InternVitOptions {
    /// Options of InternViT-300M.
    pub(crate) const SMALL: Self = Self {
        has_qkv_bias: true,
        has_qk_norm: false,
        has_rms_norm: false,
        has_last_norm: false,
        has_positions: true,
        has_mask_token: false,
    };
    /// Options of InternViT-6B.
    pub(crate) const LARGE: Self =
        Self { has_qkv_bias: false, has_qk_norm: true, has_rms_norm: true, ..Self::SMALL };
}

const fn tower(size: TowerSize, mlp: Mlp, stem_inputs: u32, details: EncoderDetails) -> EncoderSpec {
    let TowerSize { layers, hidden, heads, ffn } = size;
    EncoderSpec {
        layers,
        windowed_layers: 0,
        hidden,
        heads,
        ffn,
        mlp,
        stem_inputs,
        projector: Projector::new(1, hidden, None),
        details,
    }
}

const fn product(count: u32, width: u32) -> u64 {
    count as u64 * width as u64
}

/// Builds SigLIP: biases everywhere, positions, a norm after the layers, optionally the pooling head.
pub(crate) const fn siglip(size: TowerSize, square: SquareInput, has_pooling_head: bool) -> EncoderSpec {
    let hidden = size.hidden;
    let stem = product(square.patch_inputs, hidden).saturating_add(product(1, hidden));
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        layer_vectors: 9, // 4 biases of the attention, 2 norms, 1 bias of the MLP
        layer_ffn_vectors: 1,
        outside_parameters: stem
            .saturating_add(product(square.patches, hidden))
            .saturating_add(product(2, hidden)),
    };
    tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Builds CLIP: a class token, no bias of the stem, norms before and after the layers.
pub(crate) const fn clip(size: TowerSize, square: SquareInput) -> EncoderSpec {
    let hidden = size.hidden;
    let details = EncoderDetails {
        class_tokens: 1,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        // Class token, its position, 2 norms.
        outside_parameters: product(square.patch_inputs, hidden)
            .saturating_add(product(square.patches, hidden))
            .saturating_add(product(6, hidden)),
    };
    tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Builds InternViT: a class token, layer scales, and what `options` selects.
pub(crate) const fn intern_vit(
    size: TowerSize,
    square: SquareInput,
    options: InternVitOptions,
) -> EncoderSpec {
    let hidden = size.hidden;
    let norms = if options.has_rms_norm { 2 } else { 4 };
    let qkv_biases = if options.has_qkv_bias { 3 } else { 0 };
    let qk_norms = if options.has_qk_norm { 2 } else { 0 };
    let positions =
        if options.has_positions { product(square.patches, hidden).saturating_add(hidden as u64) } else { 0 };
    // Bias of the stem and class token; mask token; last norm.
    let vectors = 2 + options.has_mask_token as u32 + if options.has_last_norm { 2 } else { 0 };
    let details = EncoderDetails {
        class_tokens: 1,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        // 2 layer scales, biases of the attention's output and of the MLP.
        layer_vectors: 4 + norms + qkv_biases + qk_norms,
        layer_ffn_vectors: 1,
        outside_parameters: product(square.patch_inputs, hidden)
            .saturating_add(product(vectors, hidden))
            .saturating_add(positions),
    };
    tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Builds the tower of Qwen2-VL: rotary positions, no bias of the stem. `patch_inputs` covers the frames of a
/// patch.
pub(crate) const fn qwen2_vl(size: TowerSize, patch_inputs: u32) -> EncoderSpec {
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: patch_inputs,
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        outside_parameters: product(patch_inputs, size.hidden),
    };
    tower(size, Mlp::Plain, patch_inputs, details)
}

/// Builds the tower of Qwen2.5-VL: Qwen2-VL's with norms without bias, gated MLPs and windows.
pub(crate) const fn qwen2_5_vl(size: TowerSize, patch_inputs: u32, windowed_layers: u32) -> EncoderSpec {
    let mut spec = qwen2_vl(size, patch_inputs);
    spec.mlp = Mlp::Gated;
    spec.windowed_layers = windowed_layers;
    spec.details.layer_vectors = 7;
    spec.details.layer_ffn_vectors = 2;
    spec
}

/// Builds the merger of Qwen2-VL and Qwen2.5-VL: a norm of `norm_vectors` vectors of an encoder token, then
/// two matrices with biases over `merged_tokens` tokens side by side.
pub(crate) const fn qwen_merger(
    hidden: u32,
    merged_tokens: u32,
    norm_vectors: u32,
    llm_hidden: u32,
) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let vectors =
        product(norm_vectors, hidden).saturating_add(width as u64).saturating_add(llm_hidden as u64);
    Projector::new(merged_tokens, width, Some(width)).vectors(vectors)
}

/// Builds the encoder of Whisper: two convolutions, fixed positions, keys without bias.
///
/// One encoder token takes two outputs of the first convolution (all mel bins, width 3) and one of the second
/// (all channels, width 3, stride 2).
pub(crate) const fn whisper(size: TowerSize, mels: u32, positions: u32) -> EncoderSpec {
    let hidden = size.hidden;
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: mels.saturating_mul(6),
        layer_vectors: 8,
        layer_ffn_vectors: 1,
        // 2 biases of the stem, 2 vectors of the norm after the layers.
        outside_parameters: product(mels.saturating_mul(3), hidden)
            .saturating_add(product(hidden.saturating_mul(3), hidden))
            .saturating_add(product(positions, hidden))
            .saturating_add(product(4, hidden)),
    };
    let stem_inputs = details.stem_medium_inputs.saturating_add(hidden.saturating_mul(3));
    tower(size, Mlp::Plain, stem_inputs, details)
}

/// Builds the projector of LLaVA: two matrices, as wide as the LLM.
pub(crate) const fn llava_projector(input: u32, llm_hidden: u32, has_bias: bool) -> Projector {
    let biases = if has_bias { product(2, llm_hidden) } else { 0 };
    Projector::new(1, input, Some(llm_hidden)).vectors(biases)
}

/// Builds the projector of InternVL: a norm, then two matrices with biases over `merged_tokens` tokens side
/// by side.
pub(crate) const fn intern_vl_projector(hidden: u32, merged_tokens: u32, llm_hidden: u32) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let vectors = product(2, width).saturating_add(product(2, llm_hidden));
    Projector::new(merged_tokens, width, Some(llm_hidden)).vectors(vectors)
}

/// Builds the projector of Qwen2-Audio: pairs of tokens are averaged, then one matrix with a bias.
pub(crate) const fn qwen2_audio_projector(hidden: u32, llm_hidden: u32) -> Projector {
    Projector::new(2, hidden, None).vectors(llm_hidden as u64)
}
