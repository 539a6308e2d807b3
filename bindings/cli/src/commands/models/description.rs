//! Explains a description that a model gave of itself: what was counted, with which versions, and how the
//! costs follow.

use dflop_costmodel::config::PartialModelSpec;
use dflop_costmodel::model::description::{
    DescribedModule, Description, LayerRun, ModuleRole, Reach, TokenRule, TokenRuleKind,
};
use dflop_costmodel::{Error, Module};
use serde::Serialize;
use serde_json::Value;

/// Explanation of a description.
#[derive(Debug, Serialize)]
pub(super) struct DescriptionReport {
    pub(super) model_type: String,
    /// Packages that counted the model, with versions.
    pub(super) made_with: String,
    pub(super) modules: Vec<DescribedRow>,
}

/// Explanation of a described module.
#[derive(Debug, Serialize)]
pub(super) struct DescribedRow {
    pub(super) module: Module,
    /// Numbers of layers by attention, in layer order.
    pub(super) layers: String,
    /// Where parameters and FLOPs come from: `sizes` or `counts`.
    pub(super) costs: &'static str,
    /// Token rule of an encoder.
    pub(super) tokens: Option<String>,
}

/// Returns the explanation, if a document is a description.
///
/// # Errors
/// The errors of [`Description::read`] and [`Description::spec`].
pub(super) fn description_report(document: &Value) -> Result<Option<DescriptionReport>, Error> {
    if !Description::is_format(document) {
        return Ok(None);
    }
    let description = Description::read(document)?;
    let spec = description.spec()?;
    let versions = description.made_with.iter().map(|(name, version)| format!("{name} {version}"));
    Ok(Some(DescriptionReport {
        made_with: versions.collect::<Vec<_>>().join(", "),
        modules: description.modules.iter().map(|module| row(module, &spec)).collect(),
        model_type: description.model_type,
    }))
}

fn row(module: &DescribedModule, spec: &PartialModelSpec) -> DescribedRow {
    let has_counts = match module.module {
        Module::Vision => spec.vision.is_some_and(|vision| vision.encoder.counts.is_some()),
        Module::Audio => spec.audio.is_some_and(|audio| audio.encoder.counts.is_some()),
        Module::Llm => spec.llm.is_some_and(|llm| llm.counts.is_some()),
    };
    let tokens = match &module.role {
        ModuleRole::Encoder { token_rule, .. } => Some(tokens(token_rule)),
        ModuleRole::Llm { .. } => None,
    };
    let costs = if has_counts { "counts" } else { "sizes" };
    DescribedRow { module: module.module, layers: layers(&module.runs), costs, tokens }
}

/// Lists runs of layers with equal attention and experts.
fn layers(runs: &[LayerRun]) -> String {
    let mut parts: Vec<(u32, String)> = Vec::new();
    for run in runs {
        let reach = match run.reach {
            Reach::Sliding(tokens) | Reach::Chunk(tokens) => format!("{} {tokens}", run.reach.name()),
            Reach::Window(side) => format!("window {side} x {side}"),
            Reach::None | Reach::Full | Reach::Causal => run.reach.name().to_owned(),
        };
        let experts =
            run.experts.map(|experts| format!(" with {} of {} experts", experts.per_token, experts.count));
        let kind = format!("{reach}{}", experts.unwrap_or_default());
        match parts.last_mut().filter(|(_, last)| *last == kind) {
            Some((count, _)) => *count += run.count,
            None => parts.push((run.count, kind)),
        }
    }
    parts.iter().map(|(count, kind)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

fn tokens(rule: &TokenRule) -> String {
    let markers = match rule.marker_tokens {
        Some(markers) => format!("{markers} marker tokens"),
        None => "marker tokens unknown, counted as 0".to_owned(),
    };
    let checked = rule.checked;
    match &rule.kind {
        TokenRuleKind::Fixed(tokens) => {
            format!("{tokens} for each of {checked} {} sizes; {markers}", rule.medium)
        }
        TokenRuleKind::Vision(..) | TokenRuleKind::Audio(_) => {
            format!("a known rule, equal on {checked} {} sizes; {markers}", rule.medium)
        }
        TokenRuleKind::Measured(rows) => {
            format!("only {} counted {} sizes, by {}; {markers}", rows.len(), rule.medium, rule.source)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn runs_of_equal_layers_are_joined() {
        let flops = json!({"flops_forward": {"per_token": 60, "per_pair": 16},
            "flops_backward": {"per_token": 120, "per_pair": 32}});
        let run = |first: u32, count: u32, attention: Value| {
            let mut run = flops.clone();
            let more = json!({"first": first, "count": count, "parameters": 30, "attention": attention});
            run.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            run
        };
        let causal = json!({"pattern": "causal"});
        let runs = [
            run(0, 2, json!({"pattern": "sliding", "window": 512})),
            run(2, 1, causal.clone()),
            run(3, 1, causal),
        ];
        let nothing = json!({"flops_forward": {}, "flops_backward": {}});
        let document = json!({"format": "dflop model", "version": 1, "name": "kite", "model_type": "kite",
            "config_sha256": "0", "made_with": {"torch": "2.8.0", "transformers": "5.1.0"}, "parameters": 160,
            "parameters_beside_modules": 0, "modules": [{"module": "llm", "path": "model",
            "layers_path": "layers",
            "unit": "tokens", "parameters": 160, "sizes": {}, "layer_runs": runs, "outside_layers": nothing,
            "embedding": {"width": 4, "parameters": 20}, "head": null}]});
        let report = description_report(&document).unwrap().unwrap();
        assert_eq!(report.made_with, "torch 2.8.0, transformers 5.1.0");
        assert_eq!(report.modules[0].layers, "2 sliding 512, 2 causal");
        assert_eq!((report.modules[0].costs, &report.modules[0].tokens), ("counts", &None));
        assert!(description_report(&json!({"model_type": "llama"})).unwrap().is_none());
    }
}
