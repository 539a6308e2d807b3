//! Defines language model sizes: attention, MLPs, mixtures of experts, and sets of layers.

use super::counts::LlmCounts;
use crate::interned::Interned;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Decoder-only language model with grouped-query attention and gated MLPs.
///
/// Layers may differ: layers in [`ExpertsSpec::layers`] have a mixture of experts instead of the MLP, layers
/// in [`WindowedAttention::layers`] attend within windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LlmSpec {
    /// Number of transformer layers.
    pub layers: u32,
    /// Token width (hidden size).
    pub hidden: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Head width: for queries and keys, if values have a different width.
    pub head_dim: u32,
    /// Width between the MLP matrices, in layers without experts.
    pub ffn: u32,
    /// Number of rows in the LM head, padding included.
    pub vocab: u32,
    /// Details that change the number of parameters; none by default.
    #[serde(default)]
    pub details: LlmDetails,
    /// Mixtures of experts; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsSpec>,
    /// Attention within windows; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<WindowedAttention>,
    /// Projections through latent vectors (MLA); none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentAttention>,
    /// Counts that replace the formulas over sizes; `None` if these are exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Interned<LlmCounts>>,
}

impl LlmSpec {
    /// Returns whether a layer has a mixture of experts in place of the MLP.
    #[must_use]
    pub fn has_experts(&self, layer: u32) -> bool {
        self.experts.is_some_and(|experts| experts.layers.contains(layer))
    }

    /// Returns whether a layer attends within windows.
    #[must_use]
    pub fn is_windowed(&self, layer: u32) -> bool {
        self.windows.is_some_and(|windows| windows.layers.contains(layer))
    }
}

/// Mixture of experts: a router selects a few out of many gated MLPs for every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// Layers that have experts instead of the MLP.
    pub layers: LayerSet,
    /// Number of experts per layer.
    pub experts: u32,
    /// Number of experts that a token goes through.
    pub experts_per_token: u32,
    /// Width between an expert's matrices.
    pub ffn: u32,
    /// Total width between the shared experts' matrices, which every token goes through; 0 without shared
    /// experts.
    #[serde(default)]
    pub shared_ffn: u32,
    /// Parameters in addition to the matrices; none by default.
    #[serde(default)]
    pub details: ExpertsDetails,
}

/// Parameters in a mixture of experts in addition to the matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ExpertsDetails {
    /// Whether the router has a bias, as in gpt-oss.
    pub has_router_bias: bool,
    /// Whether the expert matrices have biases, as in gpt-oss.
    pub has_biases: bool,
    /// Whether a matrix with width 1 scales the shared experts' output, as in Qwen2-MoE.
    pub has_shared_gate: bool,
}

impl ExpertsDetails {
    /// No parameters in addition to the matrices.
    pub const NONE: Self = Self { has_router_bias: false, has_biases: false, has_shared_gate: false };
}

/// Attention within windows, in some layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowedAttention {
    /// Layers that attend within windows.
    pub layers: LayerSet,
    /// Window length in tokens.
    pub tokens: u32,
    /// Kind of window.
    pub kind: Window,
}

/// Window kind for causal attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// A token attends to itself and as many earlier tokens as fill the window (Gemma 3, gpt-oss).
    Sliding,
    /// A token attends to the earlier tokens in the same chunk (Llama 4).
    Chunk,
}

/// Multi-head latent attention (MLA): queries, keys and values are projected through narrow latent vectors.
///
/// Every query head has separate keys and values; a query and key head is `plain_dim + rotated_dim` wide, and
/// all heads share the rotated part of the keys.
///
/// # Source
/// DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LatentAttention {
    /// Width of the latent query vector; `None` if queries are projected directly.
    pub query_rank: Option<u32>,
    /// Width of the latent vector for keys and values.
    pub kv_rank: u32,
    /// Width of a head's part without rotation.
    pub plain_dim: u32,
    /// Width of a head's rotated part.
    pub rotated_dim: u32,
    /// Width of a head's values.
    pub value_dim: u32,
}

/// LLM parts that change the parameters but not the FLOPs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "any combination of parts may be present")]
pub struct LlmDetails {
    /// Biases in the attention projections.
    pub attention_bias: AttentionBias,
    /// Whether the three MLP matrices have biases.
    pub has_mlp_bias: bool,
    /// Whether queries and keys are normalized, with a scale as wide as a head each.
    pub has_qk_norm: bool,
    /// Whether queries and keys are normalized over all heads together, with a scale as wide as all heads
    /// (`OLMo 2`).
    pub has_wide_qk_norm: bool,
    /// Whether the LM head shares the weights of the embedding.
    pub has_tied_embeddings: bool,
    /// Whether attention and MLP are each followed by a norm, in addition to the norm before them (Gemma 3).
    pub has_post_norms: bool,
    /// Whether every query head has a learned logit that takes part in the softmax (gpt-oss).
    pub has_sinks: bool,
}

impl LlmDetails {
    /// Nothing in addition to the matrices and two norms, as in Llama.
    pub const NONE: Self = Self {
        attention_bias: AttentionBias::None,
        has_mlp_bias: false,
        has_qk_norm: false,
        has_wide_qk_norm: false,
        has_tied_embeddings: false,
        has_post_norms: false,
        has_sinks: false,
    };
}

/// Attention projections that have a bias.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionBias {
    /// None, as in Llama.
    #[default]
    None,
    /// Queries, keys and values, as in Qwen2.
    Qkv,
    /// Queries, keys, values and output; with latent vectors, the projections into them and the output.
    All,
}

impl WindowedAttention {
    /// Returns twice the query-key pairs in a sequence with `tokens` tokens, where a token counts half the
    /// pair with itself.
    ///
    /// Without windows this is `tokens²`, which is twice the pairs below the diagonal plus half the diagonal.
    /// With a window of `w` it is `tokens² - (tokens - w)²` if windows slide, and the sum of squared chunk
    /// lengths otherwise.
    #[must_use]
    pub fn causal_squares(&self, tokens: u64) -> u64 {
        let window = u64::from(self.tokens.max(1));
        let square = |length: u64| length.saturating_mul(length);
        match self.kind {
            Window::Sliding => square(tokens).saturating_sub(square(tokens.saturating_sub(window))),
            Window::Chunk => {
                (tokens / window).saturating_mul(square(window)).saturating_add(square(tokens % window))
            }
        }
    }

    /// Returns the length of equal windows that give a sequence as many pairs: the sequence has
    /// `tokens / length` windows. 0 without tokens.
    #[must_use]
    pub fn mean_length(&self, tokens: u64) -> f64 {
        if tokens == 0 { 0.0 } else { self.causal_squares(tokens) as f64 / tokens as f64 }
    }
}

/// Number of bits in a set word.
const WORD_BITS: u32 = u64::BITS;
/// Number of words in the set.
const WORDS: usize = 4;

/// Set of layers, counted from 0; written as a list of layer numbers.
///
/// # Examples
/// ```
/// use dflop_costmodel::model::LayerSet;
///
/// // Every sixth layer of 34 has full attention, the others slide.
/// let sliding: LayerSet = (0..34).filter(|layer| (layer + 1) % 6 != 0).collect();
/// assert_eq!((sliding.len(), sliding.contains(4), sliding.contains(5)), (29, true, false));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LayerSet {
    words: [u64; WORDS],
}

impl LayerSet {
    /// Maximum number of layers in a set.
    pub const LAYERS_MAX: u32 = WORD_BITS * WORDS as u32;

    /// Creates the set with the layers `first..end`; layers from [`LAYERS_MAX`](Self::LAYERS_MAX) on are left
    /// out.
    #[must_use]
    pub const fn range(first: u32, end: u32) -> Self {
        let mut words = [0; WORDS];
        let mut layer = first;
        while layer < end && layer < Self::LAYERS_MAX {
            words[(layer / WORD_BITS) as usize] |= 1 << (layer % WORD_BITS);
            layer += 1;
        }
        Self { words }
    }

    /// Adds a layer, if it is below [`LAYERS_MAX`](Self::LAYERS_MAX).
    pub fn insert(&mut self, layer: u32) {
        if let Some(word) = self.words.get_mut((layer / WORD_BITS) as usize) {
            *word |= 1 << (layer % WORD_BITS);
        }
    }

    /// Returns whether a layer is in the set.
    #[must_use]
    pub fn contains(&self, layer: u32) -> bool {
        let word = self.words.get((layer / WORD_BITS) as usize);
        word.is_some_and(|word| word >> (layer % WORD_BITS) & 1 == 1)
    }

    /// Returns the number of layers in the set.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns whether no layer is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of layers in the set for a model with `layers` layers.
    #[must_use]
    pub fn len_below(&self, layers: u32) -> u32 {
        self.iter().take_while(|layer| *layer < layers).fold(0, |count, _| count + 1)
    }

    /// Iterates over the layers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let set = *self;
        (0..Self::LAYERS_MAX).filter(move |layer| set.contains(*layer))
    }
}

impl FromIterator<u32> for LayerSet {
    fn from_iter<T: IntoIterator<Item = u32>>(layers: T) -> Self {
        let mut set = Self::default();
        layers.into_iter().for_each(|layer| set.insert(layer));
        set
    }
}

impl Serialize for LayerSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for LayerSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let layers = Vec::<u32>::deserialize(deserializer)?;
        match layers.iter().find(|layer| **layer >= Self::LAYERS_MAX) {
            Some(layer) => Err(D::Error::custom(format!(
                "layer {layer} is too high, the last possible is {}",
                Self::LAYERS_MAX - 1
            ))),
            None => Ok(layers.into_iter().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::LayerSet;

    /// Counts the pairs between a query and a key that is not after it, individually.
    fn pairs(windows: &WindowedAttention, tokens: u64) -> u64 {
        let window = u64::from(windows.tokens);
        let sees = |query: u64, key: u64| match windows.kind {
            Window::Sliding => key <= query && query - key < window,
            Window::Chunk => key <= query && query / window == key / window,
        };
        (0..tokens).map(|query| (0..tokens).filter(|key| sees(query, *key)).count() as u64).sum()
    }

    /// Twice the pairs, less one for each pair between a token and itself; a sliding window leaves out only
    /// the last half pair among the pairs that it cuts off.
    #[test]
    fn squares_are_twice_the_pairs_but_for_the_diagonal() {
        for kind in [Window::Sliding, Window::Chunk] {
            for window in [1_u32, 2, 5, 8] {
                let windows = WindowedAttention { layers: LayerSet::range(0, 1), tokens: window, kind };
                for tokens in 0..40_u64 {
                    let halves = match kind {
                        Window::Sliding => tokens.min(u64::from(window)),
                        Window::Chunk => tokens,
                    };
                    let expected = 2 * pairs(&windows, tokens) - halves;
                    assert_eq!(windows.causal_squares(tokens), expected, "{kind:?} {window} {tokens}");
                }
            }
        }
    }

    #[test]
    fn a_window_longer_than_the_sequence_is_full_attention() {
        for kind in [Window::Sliding, Window::Chunk] {
            let windows = WindowedAttention { layers: LayerSet::range(0, 1), tokens: 4096, kind };
            assert_eq!(windows.causal_squares(1000), 1_000_000);
            assert!((windows.mean_length(1000) - 1000.0).abs() < 1e-9);
            assert!(windows.mean_length(0).abs() < 1e-9);
        }
    }

    #[test]
    fn a_set_survives_json_and_a_layer_too_high_is_an_error() {
        let set: LayerSet = [0, 63, 64, 255].into_iter().collect();
        let json = serde_json::to_string(&set).unwrap();
        assert_eq!(json, "[0,63,64,255]");
        assert_eq!(serde_json::from_str::<LayerSet>(&json).unwrap(), set);
        assert!(serde_json::from_str::<LayerSet>("[256]").is_err());
    }

    #[test]
    fn layers_are_counted() {
        let set = LayerSet::range(3, 61);
        assert_eq!((set.len(), set.len_below(10), set.len_below(1000)), (58, 7, 58));
        assert!(!set.contains(2) && set.contains(3) && set.contains(60) && !set.contains(61));
        assert!(!set.contains(u32::MAX) && LayerSet::range(300, 400).is_empty());
    }
}
