//! Jobs in all placements, and plans with uneven media.

use dflop_balancer::schedule::ScheduleKind;
use dflop_models::encoder::{EncoderConfig, FrozenEncoder};
use dflop_models::{FrozenModules, LlmConfig, ModelConfig, ModuleKind};
use serde_json::json;
use std::sync::Arc;

use super::super::{Job, MediumPlan, MicrobatchPlan, ModuleParallelism, PipelineStepPlan, Placement};

const LLM_LAYERS: usize = 8;
const ENCODER_LAYERS: usize = 4;

/// Numbers of stages, replicas and tensor-parallel ranks in a module.
pub(super) type Sizes = [usize; 3];

/// Job layout: encoders, then the LLM.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) placement: Placement,
    /// No encoder, vision, or vision and audio.
    pub(super) encoders: Vec<Sizes>,
    pub(super) llm: Sizes,
    pub(super) schedule: ScheduleKind,
    pub(super) is_vision_frozen: bool,
}

fn model(encoders: usize) -> ModelConfig {
    let text = json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": LLM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
        "tie_word_embeddings": true});
    let vision = json!({"model_type": "qwen2_vl", "text_config": text, "vision_config": {"depth": ENCODER_LAYERS,
        "embed_dim": 16, "hidden_act": "quick_gelu", "hidden_size": 16, "in_channels": 3, "mlp_ratio": 2,
        "num_heads": 4, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}});
    let audio = json!({"model_type": "qwen2_audio", "text_config": text, "audio_config": {"model_type":
        "qwen2_audio_encoder", "d_model": 12, "encoder_attention_heads": 4, "encoder_ffn_dim": 20,
        "encoder_layers": ENCODER_LAYERS, "max_source_positions": 20, "num_mel_bins": 8}});
    ModelConfig {
        vision: (encoders > 0).then(|| EncoderConfig::vision(&vision).unwrap().unwrap()),
        audio: (encoders > 1).then(|| EncoderConfig::audio(&audio).unwrap().unwrap()),
        llm: LlmConfig::from_config(&text).unwrap(),
        frozen: Arc::default(),
    }
}

impl Layout {
    /// Returns the job; `None` for a layout that no job has.
    ///
    /// In joint placement the encoder stages come first in the chain; the remaining encoder sizes follow from
    /// the LLM.
    pub(super) fn job(&self) -> Option<Job> {
        let [stages, dp_size, tp_size] = self.llm;
        let stages = stages * self.schedule.chunks();
        let is_joint = self.placement == Placement::Joint;
        let before = if is_joint { self.encoders.iter().map(|encoder| encoder[0]).max()? } else { 0 };
        let kinds = [ModuleKind::Vision, ModuleKind::Audio];
        let encoder = |(kind, &[own, dp_size, tp_size]): (ModuleKind, &Sizes)| {
            let mut module = ModuleParallelism::even(kind, ENCODER_LAYERS, own);
            if is_joint {
                module.stages.resize(before + stages, ENCODER_LAYERS..ENCODER_LAYERS);
                return module;
            }
            module.dp_size(dp_size).tp_size(tp_size)
        };
        let mut modules: Vec<_> = kinds.into_iter().zip(&self.encoders).map(encoder).collect();
        let mut llm = ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages);
        llm.stages.splice(0..0, std::iter::repeat_n(0..0, before));
        modules.push(llm.dp_size(dp_size).tp_size(tp_size));
        let vision = FrozenEncoder { encoder: self.is_vision_frozen, projector: self.is_vision_frozen };
        let frozen = FrozenModules { vision, ..FrozenModules::default() };
        Job::placed(self.placement, model(self.encoders.len()), frozen, modules, self.schedule).ok()
    }
}

/// Plans a step with uneven numbers and sizes of media: some microbatches have no media for an encoder, and
/// some are empty.
pub(super) fn plan(job: &Job, rounds: usize, seed: u32) -> PipelineStepPlan {
    let encoders = &job.modules()[..job.modules().len() - 1];
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut draw = |below: u32| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) % below
    };
    let mut microbatch = || {
        let mut media = Vec::new();
        for encoder in encoders {
            for _ in 0..draw(4) {
                let tokens = draw(5) as usize;
                media.push(MediumPlan { module: encoder.module, tokens, cost_ns: 1 + tokens as u64 });
            }
        }
        let text = if media.is_empty() && draw(3) == 0 { 0 } else { 3 };
        MicrobatchPlan { tokens: text + media.iter().map(|medium| medium.tokens).sum::<usize>(), media }
    };
    let microbatches = (0..rounds * job.llm().dp_size).map(|_| microbatch()).collect();
    PipelineStepPlan::new(job, 0, 9, microbatches).unwrap()
}

/// Lists the layouts of a schedule with every LLM size and several encoder sizes.
pub(super) fn grid(schedule: ScheduleKind) -> Vec<Layout> {
    let sizes = || (1..=4).flat_map(|pp| (1..=4).flat_map(move |dp| (1..=4).map(move |tp| [pp, dp, tp])));
    let ranks = |sizes: &Sizes| sizes.iter().product::<usize>();
    let mut layouts = Vec::new();
    let mut add = |placement, encoders: Vec<Sizes>, llm| {
        layouts.push(Layout { placement, encoders, llm, schedule, is_vision_frozen: false });
    };
    for llm in sizes() {
        add(Placement::Disaggregated, Vec::new(), llm);
    }
    for llm in sizes().filter(|llm| ranks(llm) <= 8) {
        for encoders in [
            vec![[1, 1, 1]],
            vec![[2, llm[1], 1]],
            vec![[1, 3, 2]],
            vec![[2, 2, 1], [1, 3, 1]],
            vec![[1, llm[1], 2], [3, 1, 1]],
        ] {
            add(Placement::Disaggregated, encoders, llm);
        }
        for encoders in
            [vec![[1, 1, 1]], vec![[2, 1, 1]], vec![[1, 1, 1], [2, 1, 1]], vec![[2, 1, 1], [2, 1, 1]]]
        {
            add(Placement::Joint, encoders, llm);
        }
        let same: Vec<Sizes> = sizes().filter(|encoder| ranks(encoder) == ranks(&llm)).collect();
        for (index, &encoder) in same.iter().enumerate() {
            add(Placement::Colocated, vec![encoder], llm);
            add(Placement::Colocated, vec![encoder, same[(index + 1) % same.len()]], llm);
        }
    }
    layouts
}
