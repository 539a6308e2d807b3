//! Decoder configuration, and the blocks that it declares.
//!
//! Decoder properties other than dimensions.
//!
//! Names and constants for latent attention in a decoder.
//!
//! Routing and names for decoder experts, which are not part of the sizes.

use super::embedding::{AddKept, Vocabulary};
use super::{Embedding, Head, QueryTemperature};
use crate::block::Block;
use crate::error::{Error, Result};
use crate::layers::{
    AttentionMask, AttentionSpec, DimensionFields, ExpertGate, ExpertNames, ExpertsSpec, FeedForwardSpec,
    HeadRotation, LatentNames, LatentQueries, LatentSpec, Layer, LayerSpec, MlpNames, MlpSpec, NormKind,
    QkNormSpec, QkvNames, Rope, RouterRule, SharedExpertsSpec, check_heads, check_size,
};
use crate::parameters::Declaration;
use crate::parameters::weights::Init;
use dflop_costmodel::model::{AttentionBias, ExpertsSpec as ExpertSizes, LayerSet, LlmSpec};
use dflop_device::Device;
use dflop_device::ops::activation::Activation;
use dflop_device::ops::clamped_gate::GateBounds;
use dflop_device::ops::latent_heads::LatentShape;
use std::ops::Range;

/// Decoder dimensions, names and rotation.
#[derive(Debug, Clone, PartialEq)]
pub struct LlmConfig {
    /// Dimensions.
    pub spec: LlmSpec,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Further properties that differ between decoders.
    pub form: DecoderForm,
    /// Norm epsilon.
    pub epsilon: f64,
    /// Initial matrix values without a checkpoint.
    pub init: Init,
    /// Tensor and field names.
    pub names: LlmNames,
    /// Number of first layers after which rows from earlier encoder layers are added; usually 0.
    pub deepstack: usize,
    /// Routing for layers with experts, if any.
    pub experts: Option<LlmExperts>,
    /// Latent attention constants, if the decoder has latent attention.
    pub latent: Option<LlmLatent>,
}

/// Decoder tensor names in checkpoints, and dimension names in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlmNames {
    /// Prefix for `embed_tokens`, `layers` and `norm`.
    pub prefix: &'static str,
    /// LM head weight name.
    pub head: &'static str,
    /// MLP module name in a layer.
    pub mlp: &'static str,
    /// Head and MLP fields, for errors.
    pub fields: &'static DimensionFields,
    /// Vocabulary field, for errors.
    pub vocabulary: &'static str,
}

impl LlmConfig {
    /// Returns the checkpoint tensors that the decoder does not use: the second copy of a tied embedding, and
    /// layers that predict further tokens.
    #[must_use]
    pub fn ignored(&self) -> Vec<String> {
        let mut ignored = Vec::new();
        if self.experts.is_some_and(|experts| experts.names.correction.is_some()) {
            // layers that predict further tokens come last in DeepSeek-V3 and GLM-4.5 checkpoints
            ignored.push(format!("{}layers.{}.", self.names.prefix, self.spec.layers));
        }
        if self.spec.details.has_tied_embeddings {
            ignored.extend([self.names.head.to_owned(), "lm_head.weight".to_owned()]);
        }
        ignored
    }

    /// Returns the number of transformer layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.spec.layers as usize
    }

    /// Returns the row width.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.spec.hidden as usize
    }

    /// Returns the width of an encoder token: a row for the embedding, then a row for each layer that adds
    /// rows.
    #[must_use]
    pub fn input_width(&self) -> usize {
        self.hidden() * (1 + self.deepstack)
    }

    /// Checks that a stage with the first layer has all layers that add encoder rows.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the field.
    pub(crate) fn check_first_stage(&self, layers: &Range<usize>) -> Result<()> {
        if layers.start > 0 || layers.is_empty() || layers.end >= self.deepstack {
            return Ok(());
        }
        let problem = format!(
            "makes the first {} layers of the language model add rows of the encoder, which must be in one \
             pipeline stage, found {} of them in the first: give the language model fewer stages",
            self.deepstack, layers.end
        );
        Err(Error::ModelConfig { field: "deepstack_visual_indexes".to_owned(), problem })
    }

    /// Checks that a tensor-parallel group with this degree can share the decoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the mismatched field.
    pub fn check_tensor_parallel(&self, degree: usize) -> Result<()> {
        let LlmNames { fields, vocabulary, .. } = self.names;
        let layer = self.layer(0);
        check_heads(fields, &layer.attention, degree)?;
        let sparse = |layer: &u32| self.spec.has_experts(*layer);
        if !(0..self.spec.layers).all(|layer| sparse(&layer)) {
            check_size(fields.mlp, self.spec.ffn as usize, degree)?;
        }
        if let Some((experts, sizes)) = self.experts.zip(self.spec.experts) {
            check_size(experts.names.field, sizes.ffn as usize, degree)?;
        }
        check_size(vocabulary, self.spec.vocab as usize, degree)
    }

    /// Declares parameters for a layer range and returns the blocks, with the embedding before the first
    /// layer, and LM head and loss after the last.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there are no such layers, or ranks cannot share them.
    pub fn blocks<D: Device>(
        &self,
        layers: Range<usize>,
        declaration: &mut Declaration,
    ) -> Result<Vec<Box<dyn Block<D>>>> {
        if layers.start > layers.end || layers.end > self.layers() {
            let problem = format!("= {}, but layers {layers:?} were requested", self.layers());
            return Err(Error::ModelConfig { field: "num_hidden_layers".to_owned(), problem });
        }
        self.check_tensor_parallel(declaration.tp_rank().size)?;
        let (vocabulary, hidden) = (self.spec.vocab as usize, self.hidden());
        let embedding = format!("{}embed_tokens.weight", self.names.prefix);
        let mut blocks: Vec<Box<dyn Block<D>>> = Vec::new();
        if layers.start == 0 {
            let block =
                Embedding::declare(declaration, &embedding, [vocabulary, hidden], self.init, self.deepstack);
            if self.spec.details.has_tied_embeddings {
                declaration.tie(block.table());
            }
            blocks.push(Box::new(block));
        }
        for layer in layers.clone() {
            blocks.push(Box::new(Layer::declare(declaration, &self.layer(layer))));
            if layer < self.deepstack {
                blocks.push(Box::new(AddKept { hidden }));
            }
        }
        if layers.end == self.layers() {
            let norm = format!("{}norm", self.names.prefix);
            let (shape, cut) =
                ([vocabulary, hidden], (0, &Vocabulary::parts(vocabulary, declaration.tp_rank())));
            let head = if self.spec.details.has_tied_embeddings {
                declaration.add_shared(&embedding, &shape, self.init, cut)
            } else {
                declaration.add_cut(self.names.head, &shape, self.init, cut)
            };
            blocks.push(Box::new(Head::declare(
                declaration,
                &norm,
                head,
                [vocabulary, hidden],
                (self.form.norm, self.epsilon),
            )));
        }
        Ok(blocks)
    }

    /// Returns the query and key norms of a layer, if the decoder has them.
    fn qk_norm(&self, layer: usize) -> Option<QkNormSpec> {
        let name = |rest: &str| format!("{}layers.{layer}.self_attn.{rest}", self.names.prefix);
        let is_plain = self.form.has_plain_qk_norm && !self.form.unrotated.contains(layer as u32);
        (self.spec.details.has_qk_norm || is_plain).then(|| QkNormSpec {
            names: (!is_plain).then(|| ["q_norm", "k_norm"].map(name)),
            is_relative: self.form.norm == NormKind::RmsRelative,
            epsilon: self.epsilon,
            is_after_rotation: is_plain,
        })
    }

    /// Returns the specification of a layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerSpec {
        let name = |rest: &str| format!("{}layers.{layer}.{rest}", self.names.prefix);
        let (spec, hidden, init) = (&self.spec, self.hidden(), self.init);
        let bias = spec.details.attention_bias;
        let projection = |rest: &str| (name(rest), bias != AttentionBias::None);
        // the second name has a different meaning if there are norms after attention and MLP
        let (norm_names, post_norm_names) = if spec.details.has_post_norms {
            let post = ["post_attention_layernorm", "post_feedforward_layernorm"].map(name);
            (["input_layernorm", "pre_feedforward_layernorm"].map(name), Some(post))
        } else {
            (["input_layernorm", "post_attention_layernorm"].map(name), None)
        };
        let is_windowed = spec.is_windowed(layer as u32);
        let latent = self.latent.and_then(|latent| latent.layer(&name("self_attn."), spec));
        let is_unrotated = self.form.unrotated.contains(layer as u32);
        let (width, is_interleaved) = (self.rope.width(), self.form.is_interleaved);
        LayerSpec {
            norm: self.form.norm,
            epsilon: self.epsilon,
            norm_names,
            post_norm_names,
            attention: AttentionSpec {
                hidden,
                heads: spec.heads as usize,
                kv_heads: spec.kv_heads as usize,
                head_dim: spec.head_dim as usize,
                qkv: match latent {
                    Some(latent) => QkvNames::Latent(Box::new(latent)),
                    None => QkvNames::Separate(
                        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(projection),
                    ),
                },
                output: (name("self_attn.o_proj"), bias == AttentionBias::All),
                qk_norm: self.qk_norm(layer),
                sinks: spec.details.has_sinks.then(|| name("self_attn.sinks")),
                scale: self.latent.map(|latent| latent.scale).or(self.form.score_scale),
                mask: if is_windowed { AttentionMask::CausalWindow } else { AttentionMask::Causal },
                // projections through latent rows rotate a part of each head
                rotation: (self.latent.is_none() && !is_unrotated)
                    .then_some(HeadRotation { width, is_interleaved }),
                has_query_scales: is_unrotated && self.form.temperature.is_some(),
                init,
            },
            mlp: self.feed_forward(layer),
            scales: None,
        }
    }

    /// Returns the MLP or experts of a layer.
    fn feed_forward(&self, layer: usize) -> FeedForwardSpec {
        let (spec, hidden, init) = (&self.spec, self.hidden(), self.init);
        let prefix = format!("{}layers.{layer}.", self.names.prefix);
        if let (Some(experts), Some(sizes), true) =
            (&self.experts, &spec.experts, spec.has_experts(layer as u32))
        {
            return experts.layer(&prefix, hidden, sizes, self.form.activation, init).into();
        }
        let name = |rest: &str| format!("{prefix}{}.{rest}", self.names.mlp);
        let mlp = MlpSpec {
            inputs: hidden,
            middle: spec.ffn as usize,
            outputs: hidden,
            names: MlpNames::Gated(["gate_proj", "up_proj", "down_proj"].map(name), self.form.activation),
            has_bias: spec.details.has_mlp_bias,
            init,
        };
        mlp.into()
    }
}

/// Decoder properties other than dimensions; the default is Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderForm {
    /// Norm kind.
    pub norm: NormKind,
    /// MLP gate activation.
    pub activation: Activation,
    /// Attention score factor; `None` for 1 / square root of the head width.
    pub score_scale: Option<f64>,
    /// Embedding row factor.
    pub embedding_scale: f64,
    /// Rotation for layers with windows; `None` if all layers use the same rotation.
    pub window_rope: Option<Rope>,
    /// Whether neighboring columns are rotated together, instead of columns half a rotated width apart.
    pub is_interleaved: bool,
    /// Layers without rotation.
    pub unrotated: LayerSet,
    /// Query temperature for layers without rotation, if any.
    pub temperature: Option<QueryTemperature>,
    /// Whether rotated queries and keys are normalized, without weights.
    pub has_plain_qk_norm: bool,
    /// Whether consecutive media tokens attend to each other in both directions.
    pub has_media_blocks: bool,
}

impl Default for DecoderForm {
    fn default() -> Self {
        Self {
            norm: NormKind::Rms,
            activation: Activation::Silu,
            score_scale: None,
            embedding_scale: 1.0,
            window_rope: None,
            is_interleaved: false,
            unrotated: LayerSet::default(),
            temperature: None,
            has_plain_qk_norm: false,
            has_media_blocks: false,
        }
    }
}

/// Epsilon for latent row norms, which no configuration changes.
const EPSILON: f64 = 1e-6;

/// Latent attention constants, which are not part of the sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlmLatent {
    /// Whether neighboring columns are rotated together.
    pub is_interleaved: bool,
    /// Score factor.
    pub scale: f64,
}

impl LlmLatent {
    /// Returns the specification for the projections in a layer, if the decoder has latent attention.
    ///
    /// - `prefix`: attention name prefix
    pub(super) fn layer(&self, prefix: &str, spec: &LlmSpec) -> Option<LatentSpec> {
        let sizes = spec.latent?;
        let name = |rest: &str| format!("{prefix}{rest}");
        let queries = match sizes.query_rank {
            None => LatentQueries::Direct(name("q_proj")),
            Some(rank) => {
                let [down, norm, up] = ["q_a_proj", "q_a_layernorm", "q_b_proj"].map(name);
                LatentQueries::Latent(LatentNames { down, norm, up }, rank as usize)
            }
        };
        let [down, norm, up] = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"].map(name);
        Some(LatentSpec {
            shape: LatentShape {
                heads: spec.heads as usize,
                plain: sizes.plain_dim as usize,
                rotated: sizes.rotated_dim as usize,
                value: sizes.value_dim as usize,
                is_interleaved: self.is_interleaved,
            },
            queries,
            keys_values: LatentNames { down, norm, up },
            rank: sizes.kv_rank as usize,
            epsilon: EPSILON,
            has_bias: spec.details.attention_bias != AttentionBias::None,
        })
    }
}

/// Routing and names for decoder experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlmExperts {
    /// Expert choice and weights.
    pub rule: RouterRule,
    /// Whether weights scale expert inputs instead of outputs.
    pub is_input_weighted: bool,
    /// Bounds for interleaved gates and ups; `None` for gates before ups.
    pub bounds: Option<GateBounds>,
    /// Tensor names.
    pub names: LlmExpertNames,
}

/// Tensor names for experts in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LlmExpertNames {
    /// Module that contains the router and the experts.
    pub module: &'static str,
    /// Router name in the module.
    pub router: &'static str,
    /// Name of the choice correction in the module, if any.
    pub correction: Option<&'static str>,
    /// Expert matrices.
    pub matrices: MatrixNames,
    /// Shared experts name in the module.
    pub shared: &'static str,
    /// Gate name for shared experts in the module.
    pub shared_gate: &'static str,
    /// Expert width field, for errors.
    pub field: &'static str,
}

/// Expert matrix names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixNames {
    /// A tensor for each expert, with these gate, up and down names.
    Separate([&'static str; 3]),
    /// `experts.gate_up_proj` and `experts.down_proj` contain all experts.
    Fused,
}

impl LlmExpertNames {
    /// Names in the Qwen families.
    pub const QWEN: Self = Self {
        module: "mlp",
        router: "gate",
        correction: None,
        matrices: MatrixNames::Separate(["gate_proj", "up_proj", "down_proj"]),
        shared: "shared_expert",
        shared_gate: "shared_expert_gate",
        field: "moe_intermediate_size",
    };
}

impl LlmExperts {
    /// Returns the specification for the experts in a layer.
    ///
    /// - `prefix`: layer name prefix
    pub(super) fn layer(
        &self,
        prefix: &str,
        hidden: usize,
        sizes: &ExpertSizes,
        activation: Activation,
        init: Init,
    ) -> ExpertsSpec {
        let module = format!("{prefix}{}", self.names.module);
        let name = |rest: &str| format!("{module}.{rest}");
        let shared = (sizes.shared_ffn > 0).then(|| SharedExpertsSpec {
            mlp: MlpSpec {
                inputs: hidden,
                middle: sizes.shared_ffn as usize,
                outputs: hidden,
                names: MlpNames::Gated(
                    ["gate_proj", "up_proj", "down_proj"]
                        .map(|matrix| name(&format!("{}.{matrix}", self.names.shared))),
                    activation,
                ),
                has_bias: false,
                init,
            },
            gate: sizes.details.has_shared_gate.then(|| name(self.names.shared_gate)),
        });
        ExpertsSpec {
            hidden,
            middle: sizes.ffn as usize,
            rule: self.rule,
            router: name(self.names.router),
            correction: self.names.correction.map(name),
            names: match self.names.matrices {
                MatrixNames::Separate(matrices) => {
                    ExpertNames::Separate { prefix: name("experts."), matrices: matrices.map(str::to_owned) }
                }
                MatrixNames::Fused => ExpertNames::Fused {
                    gate_up: name("experts.gate_up_proj"),
                    down: name("experts.down_proj"),
                    biases: sizes
                        .details
                        .has_biases
                        .then(|| ["experts.gate_up_proj_bias", "experts.down_proj_bias"].map(name)),
                },
            },
            has_router_bias: sizes.details.has_router_bias,
            gate: match self.bounds {
                Some(bounds) => ExpertGate::Clamped(bounds),
                None => ExpertGate::Halves(activation),
            },
            is_input_weighted: self.is_input_weighted,
            shared,
            init,
        }
    }
}
