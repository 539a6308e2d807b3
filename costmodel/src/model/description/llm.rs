//! Converts a described language model: sizes that give the counted numbers, or counts.

use super::document::{DescribedExperts, DescribedHead, DescribedModule, LayerRun, ModuleRole};
use super::{Reach, invalid, product, whole};
use crate::Module;
use crate::error::Result;
use crate::interned::Interned;
use crate::model::counts::{LayerParameters, LlmCounts, Passes, Polynomial};
use crate::model::{
    AttentionBias, ExpertsDetails, ExpertsSpec, LayerSet, LlmDetails, LlmParameters, LlmSpec, Window,
    WindowedAttention,
};

/// Returns the specification.
///
/// - `beside`: parameters that belong to no other module
pub(super) fn spec(module: &DescribedModule, beside: u64) -> Result<LlmSpec> {
    let ModuleRole::Llm { hidden, embedding, head } = &module.role else {
        return Err(invalid(module.module, "module", "must be llm".to_owned()));
    };
    let llm = DescribedLlm { module, hidden: *hidden, embedding: *embedding, head: *head, beside };
    let base = llm.by_sizes()?;
    match llm.exact(&base) {
        Some(exact) => Ok(exact),
        None => Ok(LlmSpec { counts: Some(llm.counts()?), ..base }),
    }
}

struct DescribedLlm<'a> {
    module: &'a DescribedModule,
    hidden: u32,
    embedding: u64,
    head: Option<DescribedHead>,
    beside: u64,
}

impl DescribedLlm<'_> {
    /// Returns the declared and derived sizes, without details.
    fn by_sizes(&self) -> Result<LlmSpec> {
        let runs = &self.module.runs;
        let sizes = self.module.sizes;
        let heads = sizes.heads.unwrap_or(1);
        let kv_heads = sizes.kv_heads.unwrap_or(heads);
        let head_dim = self.head_dim(heads);
        let attention = attention_weights(self.hidden, head_dim, heads, kv_heads);
        let dense = runs.iter().find(|run| run.experts.is_none());
        let dense_ffn = dense.and_then(|run| self.mlp_width(run, attention));
        let vocabulary = u32::try_from(self.embedding / u64::from(self.hidden)).unwrap_or(u32::MAX);
        Ok(LlmSpec {
            layers: runs.iter().map(|run| run.count).sum(),
            hidden: self.hidden,
            heads,
            kv_heads,
            head_dim,
            ffn: dense_ffn.or(sizes.ffn).unwrap_or(1),
            vocab: self.head.map_or(vocabulary, |head| head.vocabulary),
            details: LlmDetails {
                has_tied_embeddings: self.head.is_none_or(|head| head.is_tied),
                ..LlmDetails::NONE
            },
            experts: self.experts(attention)?,
            windows: self.windows()?,
            latent: None,
            counts: None,
        })
    }

    /// Returns the head width by the FLOPs per query-key pair, two products with all heads.
    fn head_dim(&self, heads: u32) -> u32 {
        let counted = self.module.runs.iter().map(|run| run.flops.forward.per_pair).find(|flops| *flops > 0);
        let counted = counted.and_then(|flops| whole(flops, 4 * u64::from(heads)));
        counted.or(self.module.sizes.head_dim).unwrap_or(self.hidden / heads).max(1)
    }

    /// Returns the MLP width in a layer without experts, rounded up; `None` if attention has all weights.
    fn mlp_width(&self, run: &LayerRun, attention: u64) -> Option<u32> {
        let weights = (run.flops.forward.per_token / 2).saturating_sub(attention);
        let width = weights.div_ceil(product([3, self.hidden]));
        u32::try_from(width).ok().filter(|width| *width > 0)
    }

    /// Returns the experts, equal in all layers that have them.
    fn experts(&self, attention: u64) -> Result<Option<ExpertsSpec>> {
        let mut found: Option<(DescribedExperts, &LayerRun)> = None;
        let (mut layers, mut first) = (LayerSet::default(), 0);
        for run in &self.module.runs {
            let end = first + run.count;
            if let Some(experts) = run.experts {
                if found.is_some_and(|(known, _)| known != experts) {
                    let problem = "differ between layers, which dflop does not plan".to_owned();
                    return Err(invalid(Module::Llm, "layer_runs.experts", problem));
                }
                found = found.or(Some((experts, run)));
                LayerSet::range(first, end).iter().for_each(|layer| layers.insert(layer));
            }
            first = end;
        }
        Ok(found.map(|(experts, run)| {
            let (ffn, has_biases) = expert_width(self.hidden, &experts);
            let routed = product([3, self.hidden, ffn]).saturating_mul(experts.per_token.into());
            let around = (run.flops.forward.per_token / 2)
                .saturating_sub(attention)
                .saturating_sub(product([self.hidden, experts.count]))
                .saturating_sub(routed);
            let shared_ffn = u32::try_from(around / product([3, self.hidden])).unwrap_or(u32::MAX);
            let has_shared_gate = around == product([3, self.hidden, shared_ffn]) + u64::from(self.hidden);
            ExpertsSpec {
                layers,
                experts: experts.count,
                experts_per_token: experts.per_token,
                ffn,
                shared_ffn,
                details: ExpertsDetails { has_biases, has_shared_gate, ..ExpertsDetails::NONE },
            }
        }))
    }

    /// Returns the layers with windows of the one kind and length that a model may have.
    fn windows(&self) -> Result<Option<WindowedAttention>> {
        let mut windows: Option<WindowedAttention> = None;
        let mut first = 0;
        for run in &self.module.runs {
            let end = first + run.count;
            let found = match run.reach {
                Reach::None | Reach::Full | Reach::Causal => None,
                Reach::Sliding(tokens) => Some((tokens, Window::Sliding)),
                Reach::Chunk(tokens) => Some((tokens, Window::Chunk)),
                Reach::Window(_) => {
                    let problem = "= \"window\" is that of patches, not of text".to_owned();
                    return Err(invalid(Module::Llm, "layer_runs.attention.pattern", problem));
                }
            };
            if let Some((tokens, kind)) = found {
                let layers = LayerSet::default();
                let all = windows.get_or_insert(WindowedAttention { layers, tokens, kind });
                if (all.tokens, all.kind) != (tokens, kind) {
                    let problem =
                        "differ between layers: dflop predicts windows of one kind and length".to_owned();
                    return Err(invalid(Module::Llm, "layer_runs.attention", problem));
                }
                LayerSet::range(first, end).iter().for_each(|layer| all.layers.insert(layer));
            }
            first = end;
        }
        Ok(windows)
    }

    /// Returns sizes whose formulas give all counted numbers, if there are any.
    fn exact(&self, base: &LlmSpec) -> Option<LlmSpec> {
        let head = self.head?;
        let words = product([base.vocab, base.hidden]);
        let head_flops = Passes {
            forward: Polynomial { per_token: words.saturating_mul(2), ..Polynomial::default() },
            backward: Polynomial { per_token: words.saturating_mul(4), ..Polynomial::default() },
        };
        let outside = &self.module.outside.flops;
        let is_plain = head.flops == head_flops
            && outside.forward.is_zero()
            && outside.backward.is_zero()
            && self.beside == 0
            && self.embedding == words
            && self.module.runs.iter().all(|run| has_flops_by_sizes(base, run));
        if !is_plain {
            return None;
        }
        details(base).find(|candidate| {
            let parameters = LlmParameters::new(candidate);
            parameters.head == head.parameters
                && parameters.total() == self.module.parameters
                && self.module.runs.iter().all(|run| {
                    run.parameters
                        == match run.experts {
                            Some(_) => parameters.sparse_layer,
                            None => parameters.dense_layer,
                        }
                })
        })
    }

    fn counts(&self) -> Result<Interned<LlmCounts>> {
        let mut layers = Passes::default();
        let (mut runs, mut in_layers) = (Vec::new(), 0_u64);
        for run in &self.module.runs {
            let by_reach = |pass: &Polynomial| {
                let Polynomial { per_pair, .. } = *pass;
                let none = Polynomial { per_pair: 0, ..*pass };
                match run.reach {
                    Reach::None | Reach::Causal => *pass,
                    Reach::Full => Polynomial { per_unmasked_pair: per_pair, ..none },
                    Reach::Sliding(_) | Reach::Chunk(_) | Reach::Window(_) => {
                        Polynomial { per_window_pair: per_pair, ..none }
                    }
                }
            };
            let flops =
                Passes { forward: by_reach(&run.flops.forward), backward: by_reach(&run.flops.backward) };
            layers.add(run.count.into(), &flops);
            in_layers = in_layers.saturating_add(run.parameters.saturating_mul(run.count.into()));
            runs.push(layer_parameters(run));
        }
        // Pairs outside the layers have no mask that is known.
        let mut head = self.head.map_or_else(Passes::default, |head| head.flops);
        head.add(1, &self.module.outside.flops);
        for (pass, layers) in
            [(&mut head.forward, &mut layers.forward), (&mut head.backward, &mut layers.backward)]
        {
            let per_unmasked_pair = std::mem::take(&mut pass.per_pair);
            layers.add(1, &Polynomial { per_unmasked_pair, ..Polynomial::default() });
        }
        let head_parameters = self.head.map_or(0, |head| head.parameters);
        let held = in_layers.saturating_add(self.embedding).saturating_add(head_parameters);
        let counts = LlmCounts {
            layers,
            head,
            runs,
            embedding: self.embedding,
            outside: self.module.parameters.saturating_sub(held).saturating_add(self.beside),
            head_parameters,
        };
        Interned::new(counts).ok_or_else(|| {
            let problem = "is one of too many different models in this process".to_owned();
            invalid(Module::Llm, "layer_runs", problem)
        })
    }
}

fn layer_parameters(run: &LayerRun) -> LayerParameters {
    let (mut experts, mut active_experts) = (0, 0);
    if let Some(found) = run.experts {
        experts = found.parameters_each.saturating_mul(found.count.into());
        active_experts = found.parameters_each.saturating_mul(found.per_token.into());
    }
    LayerParameters {
        layers: run.count,
        all: run.parameters,
        weights: (run.flops.forward.per_token / 2).saturating_sub(active_experts),
        experts,
        active_experts,
    }
}

fn attention_weights(hidden: u32, head_dim: u32, heads: u32, kv_heads: u32) -> u64 {
    product([2, hidden, head_dim]).saturating_mul(u64::from(heads) + u64::from(kv_heads))
}

/// Returns the width of gated experts, and whether their matrices have biases.
fn expert_width(hidden: u32, experts: &DescribedExperts) -> (u32, bool) {
    let each = experts.parameters_each;
    if let Some(ffn) = whole(each, product([3, hidden])) {
        return (ffn.max(1), false);
    }
    // Two biases are as wide as the expert, the last is as wide as the model.
    let with_biases = each.checked_sub(hidden.into());
    match with_biases.and_then(|rest| whole(rest, product([3, hidden]) + 2)) {
        Some(ffn) if ffn > 0 => (ffn, true),
        _ => {
            let ffn = each.div_ceil(product([3, hidden]));
            (u32::try_from(ffn).unwrap_or(u32::MAX).max(1), false)
        }
    }
}

/// Returns whether a layer has the FLOPs that follow from sizes.
fn has_flops_by_sizes(spec: &LlmSpec, run: &LayerRun) -> bool {
    let weights = spec.attention_weights().saturating_add(spec.active_mlp_weights(run.experts.is_some()));
    let forward = &run.flops.forward;
    let is_masked = matches!(run.reach, Reach::Causal | Reach::Sliding(_) | Reach::Chunk(_));
    is_masked
        && run.flops.is_doubled()
        && u128::from(forward.per_token) == weights.saturating_mul(2)
        && forward.per_pair == product([4, spec.heads, spec.head_dim])
}

/// Iterates over all details that add parameters without FLOPs, from few to many.
fn details(base: &LlmSpec) -> impl Iterator<Item = LlmSpec> {
    let base = *base;
    (0..3_usize << 6).map(move |choice| {
        let has = |bit: usize| choice >> bit & 1 == 1;
        let attention_bias = [AttentionBias::None, AttentionBias::Qkv, AttentionBias::All][choice >> 6];
        let details = LlmDetails {
            attention_bias,
            has_qk_norm: has(0),
            has_post_norms: has(1),
            has_wide_qk_norm: has(2),
            has_sinks: has(3),
            has_mlp_bias: has(4),
            ..base.details
        };
        let experts = base.experts.map(|experts| ExpertsSpec {
            details: ExpertsDetails { has_router_bias: has(5), ..experts.details },
            ..experts
        });
        LlmSpec { details, experts, ..base }
    })
}
