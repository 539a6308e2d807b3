//! Routing for decoders with experts: expert choice and weights, and tensor names.
//!
//! # Source
//! The model classes in transformers 5.24.0 with these `model_type` values.

use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::{ExpertsSpec, LlmSpec};

use crate::error::{Error, Result};
use crate::layers::{ExpertGroups, RouterRule};
use crate::llm::{LlmExpertNames, LlmExperts, MatrixNames};
use dflop_device::ops::clamped_gate::GateBounds;
use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape};

/// Reads the routing for a decoder, if the decoder has experts.
///
/// - `model_type`: decoder type; `None` for a model that is built only from sizes
pub(super) fn read(
    text: &ConfigFields<'_>,
    model_type: Option<&str>,
    spec: &LlmSpec,
) -> Result<Option<LlmExperts>> {
    let Some(sizes) = spec.experts else { return Ok(None) };
    check_losses(text)?;
    let of_field = |is_normalized: bool, scores: [ExpertScores; 2]| scores[usize::from(is_normalized)];
    let softmax = [ExpertScores::Softmax, ExpertScores::SoftmaxOfChosen];
    let simple = |scores: ExpertScores, names: LlmExpertNames| LlmExperts {
        rule: rule(&sizes, scores, 1.0),
        is_input_weighted: false,
        bounds: None,
        names,
    };
    let experts = match model_type.unwrap_or("qwen3_moe") {
        "qwen2_moe" | "qwen3_moe" | "qwen3_omni_moe_text" => {
            let scores = of_field(text.flag("norm_topk_prob", false)?, softmax);
            simple(scores, LlmExpertNames::QWEN)
        }
        "qwen3_vl_moe_text" => simple(
            ExpertScores::SoftmaxOfChosen,
            LlmExpertNames { matrices: MatrixNames::Fused, ..LlmExpertNames::QWEN },
        ),
        "mixtral" => simple(
            ExpertScores::SoftmaxOfChosen,
            LlmExpertNames {
                module: "block_sparse_moe",
                matrices: MatrixNames::Separate(["w1", "w3", "w2"]),
                field: "intermediate_size",
                ..LlmExpertNames::QWEN
            },
        ),
        "deepseek_v3" | "kimi_k2" | "glm4_moe" | "glm4v_moe_text" => LlmExperts {
            rule: grouped(text, &sizes)?,
            is_input_weighted: false,
            bounds: None,
            names: LlmExpertNames {
                correction: Some("gate.e_score_correction_bias"),
                shared: "shared_experts",
                ..LlmExpertNames::QWEN
            },
        },
        "deepseek_v2" => LlmExperts {
            rule: limited(text, &sizes)?,
            ..simple(
                ExpertScores::Softmax,
                LlmExpertNames { shared: "shared_experts", ..LlmExpertNames::QWEN },
            )
        },
        "gpt_oss" => {
            let names = LlmExpertNames {
                router: "router",
                matrices: MatrixNames::Fused,
                field: "intermediate_size",
                ..LlmExpertNames::QWEN
            };
            let (limit, alpha) = (text.number("swiglu_limit", 7.0)?, text.number("swiglu_alpha", 1.702)?);
            let bounds = Some(GateBounds { limit, alpha });
            LlmExperts { bounds, ..simple(ExpertScores::SoftmaxOfChosen, names) }
        }
        "llama4_text" => LlmExperts { is_input_weighted: true, ..simple(ExpertScores::Sigmoid, LLAMA4) },
        other => {
            let problem = format!("= \"{other}\" has a router that is not supported");
            return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
        }
    };
    Ok(Some(experts))
}

/// Llama 4 names.
const LLAMA4: LlmExpertNames = LlmExpertNames {
    module: "feed_forward",
    router: "router",
    matrices: MatrixNames::Fused,
    field: "intermediate_size",
    ..LlmExpertNames::QWEN
};

/// Rejects a loss and noise that training would need.
fn check_losses(text: &ConfigFields<'_>) -> Result<()> {
    if text.flag("output_router_logits", false)? {
        let problem = "= true adds a loss that balances experts, which is not supported";
        return Err(text.invalid("output_router_logits", problem).into());
    }
    if text.value("router_jitter_noise").is_some_and(|noise| noise.as_f64() != Some(0.0)) {
        return Err(text.invalid("router_jitter_noise", "must be 0: noise is not supported").into());
    }
    Ok(())
}

fn rule(sizes: &ExpertsSpec, scores: ExpertScores, scale: f64) -> RouterRule {
    let [experts, chosen] = [sizes.experts, sizes.experts_per_token].map(|count| count as usize);
    RouterRule { weights: ExpertWeightShape { experts, chosen, scores, scale }, groups: None }
}

/// Reads expert probabilities that may be limited to groups.
fn limited(text: &ConfigFields<'_>, sizes: &ExpertsSpec) -> Result<RouterRule> {
    let rule = rule(sizes, ExpertScores::Softmax, text.number("routed_scaling_factor", 1.0)?);
    let groups = match text.text("topk_method")? {
        None | Some("greedy") => return Ok(rule),
        Some("group_limited_greedy") => groups(text, sizes, [8, 3], 1)?,
        Some(other) => {
            return Err(text.invalid("topk_method", format!("= \"{other}\" is not supported")).into());
        }
    };
    Ok(RouterRule { groups: Some(groups), ..rule })
}

/// Reads expert sigmoids in groups.
fn grouped(text: &ConfigFields<'_>, sizes: &ExpertsSpec) -> Result<RouterRule> {
    for (key, expected) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(found) = text.text(key)?.filter(|&found| found != expected) {
            return Err(text.invalid(key, format!("= \"{found}\" is not supported")).into());
        }
    }
    let is_normalized = text.flag("norm_topk_prob", true)?;
    let scores = if is_normalized { ExpertScores::SigmoidOfChosen } else { ExpertScores::Sigmoid };
    let is_deepseek = text.text("model_type")?.is_some_and(|found| found.starts_with("deepseek"));
    let [groups_kept, scale] = if is_deepseek { [[8, 4], [5, 2]] } else { [[1, 1], [2, 2]] };
    let scale = text.number("routed_scaling_factor", f64::from(scale[0]) / f64::from(scale[1]))?;
    let groups = Some(groups(text, sizes, groups_kept, 2)?);
    Ok(RouterRule { groups, ..rule(sizes, scores, scale) })
}

/// Reads expert groups.
///
/// - `defaults`: number of groups, and number of groups kept
/// - `scored`: number of best experts whose scores add up to a group score
fn groups(
    text: &ConfigFields<'_>,
    sizes: &ExpertsSpec,
    defaults: [u32; 2],
    scored: u32,
) -> Result<ExpertGroups> {
    let (groups, kept) = (text.count("n_group", defaults[0])?, text.count("topk_group", defaults[1])?);
    let size = sizes.experts / groups.max(1);
    if groups == 0 || !sizes.experts.is_multiple_of(groups) || size < scored {
        let problem =
            format!("= {groups} must divide {} experts into groups of {scored} or more", sizes.experts);
        return Err(text.invalid("n_group", problem).into());
    }
    if kept > groups {
        let problem = format!("= {kept} is more than `n_group` = {groups}");
        return Err(text.invalid("topk_group", problem).into());
    }
    if kept * size < sizes.experts_per_token {
        let problem = format!(
            "= {kept}: top-k groups ({kept} of {groups}) hold fewer than {} experts",
            sizes.experts_per_token
        );
        return Err(text.invalid("topk_group", problem).into());
    }
    Ok(ExpertGroups { groups: groups as usize, kept: kept as usize, scored: scored as usize })
}
